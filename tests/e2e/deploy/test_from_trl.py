"""The example "a TRL script on four machines" of docs/migrate.md, block by block, with a tiny model."""

import json
import os
import re
import shutil
import signal
import subprocess
from pathlib import Path

import pytest
import yaml

from broker.connection.embedded import EmbeddedServer
from deploy.services.main import command
from tests.support.models.tiny_model import make_tiny_model
from tests.support.runs.command_line import run_tidemill

pytestmark = pytest.mark.matrix("a page's commands on four machines; test_up runs the same services")

PAGE = Path(__file__).parents[3] / "docs" / "migrate.md"
STEPS, DEADLINE_S = 2, 240
TINY = {
    "TIDEMILL_MODEL__DTYPE": "float32",
    "TIDEMILL_MODEL__MAX_LENGTH": "64",
    "TIDEMILL_SAMPLING__N": "2",
    "TIDEMILL_SAMPLING__MAX_TOKENS": "4",
    "TIDEMILL_GENERATOR__ENGINE": "scripted",
    "TIDEMILL_GENERATOR__PROBE_TOLERANCE": "1000",
    "TIDEMILL_TRAINER__STEPS": str(STEPS),
    "TIDEMILL_TRAINER__BATCH_GROUPS": "2",
    "TIDEMILL_TRAINER__ADVANTAGE__KEEP_ZERO_VARIANCE": "true",
    "TIDEMILL_TRAINER__PUBLISH__TRANSPORT": "redis",
    "TIDEMILL_TRAINER__THREADS": "1",
}


def commands(heading: str) -> list[list[str]]:
    """The commands that stand below a heading of the page."""
    section = PAGE.read_text(encoding="utf-8").partition(f"### {heading}\n")[2].partition("\n##")[0]
    return [found[1].split() for found in re.finditer(r"^    (?:[A-Z_]+=\S+ )?tidemill (.+)$", section, re.MULTILINE)]


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """The page's files, and the configuration that its first command makes of them."""
    folder = tmp_path / "project"
    folder.mkdir()
    for name in ("train_grpo.py", "rewards.py"):
        found = re.search(rf'```python title="{name}"\n(.*?)```', PAGE.read_text(encoding="utf-8"), re.DOTALL)
        assert found is not None
        (folder / name).write_text(found[1])
    lines = [{"prompt": f"{n}+1=", "answer": str(n + 1)} for n in range(8)]
    (folder / "sums.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    done = run_tidemill(*commands("One machine")[0], cwd=folder)
    assert done.returncode == 0, done.stderr
    return folder


def test_the_converted_script_is_a_whole_configuration(project: Path) -> None:
    found = yaml.safe_load((project / "run.yaml").read_text())
    assert found["train"] == {"name": "jsonl", "args": {"path": "sums.jsonl", "answer": None}}
    assert found["reward"]["terms"] == [{"name": "rewards.py:exact"}]
    assert (found["sampling"]["n"], found["trainer"]["batch_groups"]) == (8, 4)
    assert "data_files" not in (project / "run.yaml").read_text(), "what is carried over is not named as left out"


def test_the_services_of_four_machines_train_together(project: Path, tmp_path: Path, server: EmbeddedServer) -> None:
    model = make_tiny_model(tmp_path / "model", hidden=32, layers=1)
    environment = {**os.environ, **TINY, "REDIS_URL": server.url, "TIDEMILL_MODEL__PATH": str(model)}
    every = commands("Four machines")
    named = [one[0] for one in every]
    assert named == ["broker", "feeder", "reward", "trainer", "control", "generator", "generator", "generator"]
    services = [one for one in every if one[0] in ("feeder", "reward", "trainer", "generator")]
    running: dict[str, subprocess.Popen[bytes]] = {}
    try:
        for number, arguments in enumerate(services):
            # Generators have machines of their own, with nothing but the project's files.
            machine = tmp_path / (f"machine-{number}" if arguments[0] == "generator" else "trainer-1")
            if not machine.exists():
                shutil.copytree(project, machine)
            with (machine / f"{number}.log").open("wb") as log:
                running[f"{number} {arguments[0]}"] = subprocess.Popen(
                    command(*arguments), cwd=machine, env=environment, stdout=log, stderr=subprocess.STDOUT
                )
        trainer = next(process for name, process in running.items() if name.endswith("trainer"))
        logs = {str(file): file for file in tmp_path.glob("*/*.log")}
        code = trainer.wait(DEADLINE_S)
        assert code == 0, {name: file.read_text()[-1500:] for name, file in logs.items()}
        (metrics,) = (tmp_path / "trainer-1").glob("runs/*/metrics.jsonl")
        assert [json.loads(line)["step"] for line in metrics.read_text().splitlines()] == [1, 2]
    finally:
        for process in running.values():
            process.send_signal(signal.SIGTERM)
        for process in running.values():
            process.wait(60)
