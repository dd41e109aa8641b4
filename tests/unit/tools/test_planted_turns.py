"""The faults that the walk of turns plants are still faults of the code that there is."""

import importlib
import inspect
import textwrap

import pytest

from tools.turns.planted import PLANTED


@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_fault_has_its_place(name: str) -> None:
    planted = PLANTED[name]
    module, _, path = planted.where.partition(":")
    owner, _, method = path.partition(".")
    text = textwrap.dedent(
        inspect.getsource(inspect.getattr_static(getattr(importlib.import_module(module), owner), method))
    )
    assert text.count(planted.old) == 1
    compile(text.replace(planted.old, planted.new), name, "exec")
