"""The scripts that try a whole system on Docker or Kubernetes, as far as neither is needed."""

from __future__ import annotations

import ast
import importlib
import re
import subprocess
from pathlib import Path

import pytest

SCRIPTS = sorted((Path(__file__).parents[4] / "deploy").glob("*-test.sh"))
PROGRAM = re.compile(r"<<'PYTHON'\n(.*?)\nPYTHON\n", re.DOTALL)
"""Python that runs in a pod or a container."""


def test_there_are_scripts() -> None:
    assert {script.name for script in SCRIPTS} == {"compose-test.sh", "kubernetes-test.sh"}


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.stem)
def test_bash_reads_it(script: Path) -> None:
    done = subprocess.run(["bash", "-n", script], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.stem)
def test_what_it_imports_is_there(script: Path) -> None:
    programs = PROGRAM.findall(script.read_text())
    assert programs, "what was trained is counted"
    for node in (node for program in programs for node in ast.walk(ast.parse(program))):
        if isinstance(node, ast.ImportFrom):
            module = importlib.import_module(node.module or "")
            assert not [alias.name for alias in node.names if not hasattr(module, alias.name)], node.module
