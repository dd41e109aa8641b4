"""The folder that runs agents needs nothing but Python: any from 3.9, in an environment that Tidemill does not know."""

import ast
import asyncio
import json
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from producers import runner
from producers.agents.workers.pool import AgentWorkers
from producers.agents.workers.protocol import AgentJob, AgentResult
from producers.agents.workers.start import AgentProgram
from schemas.config import AgentsConfig

AGENT = """
import sys
import helper

class NoLuck(Exception):
    pass

async def run(task, episode):
    if task["raise"]:
        raise NoLuck("none")
    episode.reward(helper.REWARD)
    return {"data": {"python": list(sys.version_info[:2]), "modules": sorted(sys.modules), "path": sys.path}}

def plain(task):
    return 3
"""


FOLDER = Path(runner.__file__).parent


def test_it_imports_only_the_standard_library_and_is_python_3_9():
    names = set()
    for file in FOLDER.glob("*.py"):
        for node in ast.walk(ast.parse(file.read_text(), feature_version=(3, 9))):
            if isinstance(node, ast.Import):
                names |= {alias.name.split(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.level == 0:
                names.add((node.module or "").split(".")[0])
    assert names - set(sys.stdlib_module_names) == {"openai"}


@pytest.mark.parametrize("name", ["this", "python3.9", "python3.10", "python3.12", "python3.13", "python3.14"])
def test_agents_run_in_another_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str):
    python = sys.executable if name == "this" else shutil.which(name)
    if python is None or subprocess.run([python, "-c", ""], capture_output=True, timeout=30).returncode:
        pytest.skip(f"no {name} here")
    (tmp_path / "agent.py").write_text(AGENT)
    (tmp_path / "helper.py").write_text("REWARD = 0.5\n")
    wrapper = tmp_path / "bare-python"
    wrapper.write_text(f'#!/bin/sh\nexec {python} -S -I "$@"\n')
    wrapper.chmod(0o755)
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[4]))

    async def play(run: str) -> list[AgentResult]:
        workers = AgentWorkers(AgentProgram(run, None, {}, tmp_path, AgentsConfig(python=Path("bare-python"))))
        await workers.start()
        try:
            jobs = [AgentJob(str(fail), {"raise": fail}, "http://h/v1", "t", 30.0) for fail in (False, True)]
            return await asyncio.gather(*(workers.run(job) for job in jobs))
        finally:
            await workers.close()

    result, failed = asyncio.run(play("agent.py:run"))
    assert (result.kind, result.reward, result.error) == ("returned", 0.5, "")
    assert not {"msgspec", "schemas", "producers", "site"} & set(result.data["modules"])
    assert str(FOLDER) not in result.data["path"]
    assert (failed.kind, failed.error, failed.error_type) == ("raised", "NoLuck: none (agent.py:10)", "agent.NoLuck")
    assert [result.reward for result in asyncio.run(play("agent:plain"))] == [3.0, 3.0]


def test_it_ends_without_a_traceback_when_its_generator_is_gone_before_it_is_ready(tmp_path: Path):
    (tmp_path / "agent.py").write_text("import time\ntime.sleep(0.3)\n" + AGENT.replace("import helper", ""))
    ours, theirs = socket.socketpair()
    with theirs:
        program = [sys.executable, str(FOLDER), "agents"]
        process = subprocess.Popen(program, stdin=theirs.fileno(), stderr=subprocess.PIPE)
    setup = {"run": "agent.py:plain", "args": {}, "base": str(tmp_path), "search": None, "memory_mb": None}
    ours.sendall(json.dumps(setup).encode() + b"\n")
    ours.close()
    assert process.communicate(timeout=30)[1] == b""
    assert process.returncode == 1
