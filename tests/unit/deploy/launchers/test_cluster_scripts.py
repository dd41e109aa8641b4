"""The scripts that try a whole system on Docker or Kubernetes, as far as neither is needed."""

import ast
import importlib
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from schemas.run_folder import TRAINED

SCRIPTS = sorted((Path(__file__).parents[4] / "deploy").glob("*-test.sh"))
DRILLS = Path(__file__).parents[4] / "deploy" / "drills.sh"
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


def test_compose_counts_what_was_trained(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Step 1 was trained again by a second trainer; sample [7, 0] is in two surviving steps."""
    lines = [
        {"step": 0, "leader_term": "1-a", "samples": [[7, 0], [7, 1]]},
        {"step": 1, "leader_term": "1-a", "samples": [[8, 0]]},
        {"resumed": 1, "leader_term": "2-b"},
        {"step": 1, "leader_term": "2-b", "samples": [[8, 0]]},
        {"step": 3, "leader_term": "2-b", "samples": [[9, 0], [7, 0]]},
    ]
    folder = tmp_path / "runs" / "arithmetic"
    folder.mkdir(parents=True)
    (folder / TRAINED).write_text("".join(json.dumps(line) + "\n" for line in lines))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["-", "arithmetic"])
    (program,) = PROGRAM.findall(SCRIPTS[0].read_text())
    exec(compile(program, SCRIPTS[0].name, "exec"), {})
    assert capsys.readouterr().out == "3 steps, 1 missing; 4 samples, 1 trained twice\n"


def drill(tmp_path: Path, command: str, *answers: str) -> subprocess.CompletedProcess[str]:
    """Run shell that uses drills.sh, with a control plane that answers so, one after the other."""
    for number, answer in enumerate(answers):
        (tmp_path / f"{number}.json").write_text(answer)
    ask = 'ask() { local n; n=$(wc -c <"$SCRATCH/asked"); printf x >>"$SCRATCH/asked"; cat "$SCRATCH/$n.json"; }'
    (tmp_path / "asked").touch()
    script = f"set -euo pipefail\nSCRATCH={tmp_path}\n{ask}\n. {DRILLS}\n{command}"
    return subprocess.run(["bash", "-c", script], capture_output=True, text=True, timeout=60, check=False)


def test_a_drill_counts_from_the_first_step_that_is_named_after_it(tmp_path: Path) -> None:
    """A control plane that is lost, too, names none; one that starts knows no step yet."""
    answers = ["", '{"step": null}', '{"step": 40}', '{"step": 48}', '{"step": 49}']
    done = drill(tmp_path, "advances lost", *answers)
    assert done.returncode == 0, done.stderr
    assert "lost: the run advanced from step 40, after" in done.stdout
    assert (tmp_path / "asked").read_text() == "x" * len(answers)


@pytest.mark.parametrize(
    ("balance", "counts", "code"),
    [
        ("True 0", "9 steps, 0 missing; 72 samples, 0 trained twice", 0),
        ("True 1", "9 steps, 0 missing; 72 samples, 0 trained twice", 1),
        ("False 0", "9 steps, 0 missing; 72 samples, 0 trained twice", 1),
        ("True 0", "9 steps, 1 missing; 72 samples, 0 trained twice", 1),
        ("True 0", "9 steps, 0 missing; 72 samples, 10 trained twice", 1),
        ("True 0", "", 1),
    ],
)
def test_what_is_lost_or_trained_twice_fails(tmp_path: Path, balance: str, counts: str, code: int) -> None:
    assert drill(tmp_path, f"judge '{balance}' '{counts}'").returncode == code
