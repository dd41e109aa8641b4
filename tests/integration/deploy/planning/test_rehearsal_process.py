"""The process that rehearses: one for all questions, started again when it is gone, and never left behind."""

import json
import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from deploy.planning.rehearsal_process import RehearsalProcess
from schemas.config import dump_config
from schemas.errors import TidemillError
from tests.support.models.tiny_model import make_tiny_model
from tests.support.trainer.sized_steps import configuration

LIMIT_S = 200.0


@pytest.fixture(scope="module")
def question(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    model = make_tiny_model(tmp_path_factory.mktemp("model"), hidden=32, layers=1)
    return {"config": dump_config(configuration(model)), "ranks": 1, "on_gpu": False}


@pytest.fixture(scope="module")
def process() -> RehearsalProcess:
    return RehearsalProcess()


def servers() -> list[psutil.Process]:
    """The rehearsing processes of this one, among whose children may be some that have ended."""
    found = []
    for child in psutil.Process().children():
        with suppress(psutil.NoSuchProcess):
            found += [child] if "deploy.planning.rehearsal_process" in child.cmdline() else []
    return found


def test_questions_at_the_same_time_have_one_process(process: RehearsalProcess, question: dict[str, Any]) -> None:
    before = servers()
    with ThreadPoolExecutor(2) as threads:
        alone, shared = threads.map(lambda ranks: process.ask({**question, "ranks": ranks}, LIMIT_S), (1, 2))
    assert shared["parameters"] < alone["parameters"]
    assert len(servers()) == len(before) + 1


def test_a_fault_has_its_reason_and_ends_nothing(process: RehearsalProcess, question: dict[str, Any]) -> None:
    with pytest.raises(TidemillError, match="KeyError: 'ranks'"):
        process.ask({"config": question["config"]}, LIMIT_S)
    assert "model: required" in process.ask({**question, "config": {}}, LIMIT_S)["error"]
    with pytest.raises(TimeoutError):
        process.ask(question, 0.001)
    assert process.ask(question, LIMIT_S)["parameters"] > 0


def test_a_question_whose_process_is_killed_fails_in_a_line_and_the_next_has_another(
    process: RehearsalProcess, question: dict[str, Any]
) -> None:
    process.ask(question, LIMIT_S)
    assert process._process is not None
    server = psutil.Process(process._process.pid)
    with ThreadPoolExecutor(1) as threads:
        asked = threads.submit(process.ask, question, LIMIT_S)
        end = time.monotonic() + LIMIT_S
        while not (forks := server.children()):
            assert time.monotonic() < end, "no fork for the question"
        for one in (server, *forks):
            one.kill()
        with pytest.raises(TidemillError, match="was killed"):
            asked.result(LIMIT_S)
    process._process.wait(LIMIT_S)
    assert process.ask(question, LIMIT_S)["parameters"] > 0
    assert process._process.pid != server.pid


def test_it_ends_with_the_process_that_asked_and_leaves_nothing(question: dict[str, Any], tmp_path: Path) -> None:
    program = """import json, os, sys
from deploy.planning.rehearsal_process import RehearsalProcess
process = RehearsalProcess()
process.ask(json.loads(sys.argv[1]), float(sys.argv[2]))
print(process._process.pid, flush=True)
os.kill(os.getpid(), 9)
"""
    command = [sys.executable, "-c", program, json.dumps(question), str(LIMIT_S)]
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=LIMIT_S, check=False, env=environment)
    assert done.returncode == -signal.SIGKILL
    with suppress(psutil.NoSuchProcess):
        psutil.Process(int(done.stdout)).wait(60)
    assert list(tmp_path.iterdir()) == []
