"""Functions of a notebook become files that other processes import, or a line says why not."""

import functools
import linecache
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from consumers.reward.rewards.functions import exact
from deploy.python.source import import_name
from schemas.errors import ConfigError
from schemas.plugins import load

CELL = '''
import json
import math as maths
import re
from pathlib import PurePath as Place

LIMIT = 3
WORDS = {"yes": 1.0, "no": 0.0}
NUMBER = re.compile(r"[0-9]+", re.ASCII)
OPEN = open

def half(value: float) -> float:
    return value / 2 if value > LIMIT else even(value)

def even(value):
    return half(value + 4) if value % 2 else maths.floor(value)

other = half

def marked(function):
    function.marked = True
    return function

@marked
def score(completion, answer, *, places=[Place("a"), LIMIT][1:]):
    json = completion  # A variable of its own that is named like a module.
    found = [half(float(number)) for number in NUMBER.findall(json)]
    return sum(found, start=WORDS.get(answer, 0.5)) + other(LIMIT) + len(places)

score.concurrency = 4

def closed():
    factor, handle = 2.5, OPEN("/dev/null")
    def times(completion):
        """Multiply."""
        return factor * len(completion)
    def reads(completion):
        return handle.read()
    handle.close()
    return times, reads

times, reads = closed()
'''


@pytest.fixture
def cell() -> dict[str, Any]:
    """The names that a notebook's cell has defined."""
    file = "/tmp/ipykernel/cell-1.py"
    linecache.cache[file] = (len(CELL), None, CELL.splitlines(keepends=True), file)
    names: dict[str, Any] = {"__name__": "__main__"}
    exec(compile(CELL, file, "exec"), names)
    return names


def carried(function: Any, folder: Path) -> Callable[..., Any]:
    name = import_name(function, "reward.terms.0.name", folder)
    found: Callable[..., Any] = load(name, "reward")
    assert found is not function
    return found


def test_a_function_of_a_notebook_takes_along_what_it_uses(cell: dict[str, Any], tmp_path: Path) -> None:
    there = carried(cell["score"], tmp_path)
    for completion, answer in (("12 and 5", "yes"), ("none", "?"), ("7", "no")):
        assert there(completion, answer) == cell["score"](completion, answer)
    assert (there.concurrency, there.marked) == (4, True)  # type: ignore[attr-defined]
    text = next(tmp_path.glob("score-*.py")).read_text()
    assert "import json" not in text


def test_variables_of_the_function_around_it_come_along(cell: dict[str, Any], tmp_path: Path) -> None:
    assert carried(cell["times"], tmp_path)("four") == 10.0


def test_the_same_source_is_the_same_file(cell: dict[str, Any], tmp_path: Path) -> None:
    names = {import_name(cell["half"], "x", tmp_path) for _ in range(2)}
    assert len(names) == len([*tmp_path.iterdir()]) == 1


def test_what_a_module_has_is_imported_from_it(tmp_path: Path) -> None:
    assert import_name(exact, "x", tmp_path) == "consumers.reward.rewards.functions:exact"
    (tmp_path / "mine.py").write_text("def f(completion):\n    return 1.0\n")
    mine = load(f"{tmp_path}/mine.py:f", "reward")
    assert import_name(mine, "x", tmp_path) == f"{tmp_path}/mine.py:f"
    assert not [*tmp_path.glob("f-*.py")]


@pytest.mark.parametrize(
    ("make", "problem"),
    [
        (lambda cell: lambda completion: 1.0, "a lambda cannot be imported by other processes: define a function"),
        (lambda cell: functools.partial(cell["half"], 1), "an object of the class partial cannot be imported"),
        (lambda cell: cell["reads"], "it uses handle, an object of the class TextIOWrapper, which other processes"),
        (lambda cell: eval("[f := type('F', (), {'__module__': '__main__'})]", {})[0], "the source of F can't be read"),
    ],
)
def test_what_cannot_be_carried_is_refused_in_one_line(
    cell: dict[str, Any], tmp_path: Path, make: Callable[[dict[str, Any]], Any], problem: str
) -> None:
    with pytest.raises(ConfigError, match=r"^reward\.terms\.0\.name: ") as refused:
        import_name(make(cell), "reward.terms.0.name", tmp_path)
    assert problem in str(refused.value)
    assert "\n" not in str(refused.value)
    assert not [*tmp_path.iterdir()]
