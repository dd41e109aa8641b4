"""Agents that are programs: what they find, what their end means, and that nothing of them is left."""

import asyncio
import contextlib
import json
import os
import socket
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from broker.connection.embedded import EmbeddedServer
from producers.agents.workers.pool import AgentWorkers
from producers.agents.workers.protocol import AgentJob, AgentResult
from producers.agents.workers.start import AgentProgram, check_agent
from schemas.config import AgentsConfig
from schemas.errors import ConfigError
from tests.support.servers.scripted_server import serving
from tests.support.user_code.sandboxes import sandbox

SHELL = ["sh", "-c"]
TASK = {"messages": [{"role": "user", "content": "37*84=?"}], "data": {"answer": "3108"}}


def play(
    base: Path,
    command: list[str],
    run_folder: Path | None = None,
    deadline_s: float = 30.0,
    base_url: str = "http://127.0.0.1:9/s/token/v1",
    **settings: Any,
) -> AgentResult:
    async def body() -> AgentResult:
        workers = AgentWorkers(AgentProgram(None, command, {}, base, AgentsConfig(**settings)), run_folder=run_folder)
        await workers.start()
        try:
            job = AgentJob("t-1", TASK, base_url, "token", deadline_s, 1)
            return await asyncio.wait_for(workers.run(job), 60)
        finally:
            await workers.close()

    return asyncio.run(body())


def test_a_program_finds_its_task_the_endpoint_and_its_deadline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("REDIS_URL", "redis://:secret@host")
    monkeypatch.setenv("SEARCH_KEY", "x")
    result = play(tmp_path, [*SHELL, 'env > env; cat "$TIDEMILL_TASK" > task; pwd > folder'], env=["SEARCH_KEY"])
    assert (result.kind, result.reward, result.error) == ("returned", None, "")
    assert json.loads((tmp_path / "task").read_text()) == TASK
    assert (tmp_path / "folder").read_text().strip() == str(tmp_path)
    found = dict(line.split("=", 1) for line in (tmp_path / "env").read_text().splitlines())
    expected = {
        "OPENAI_BASE_URL": "http://127.0.0.1:9/s/token/v1",
        "OPENAI_API_KEY": "token",
        "ANTHROPIC_BASE_URL": "http://127.0.0.1:9/s/token",
        "ANTHROPIC_API_KEY": "token",
        "TIDEMILL_URL": "http://127.0.0.1:9/s/token/tidemill/v1",
        "TIDEMILL_EPISODE": "t-1",
        "TIDEMILL_ATTEMPT": "1",
        "SEARCH_KEY": "x",
    }
    assert {name: found.get(name) for name in expected} == expected
    assert 20 < float(found["TIDEMILL_DEADLINE"]) - time.time() <= 30
    assert "REDIS_URL" not in found
    assert not Path(found["TIDEMILL_TASK"]).exists()


def test_what_a_program_writes_without_an_end_does_not_fill_the_log(tmp_path: Path, capfd: pytest.CaptureFixture[str]):
    """A log of 512 MB would end every later agent in the sandbox that prints a word."""
    out, err = ("head -c 20000000 /dev/zero | tr '\\0' " + letter for letter in ("x", "y >&2"))
    script = f"{out}; {err}; echo >&2; echo why >&2; exit 3"
    result = play(tmp_path, [*SHELL, script])
    assert (result.kind, result.error) == ("raised", "exit code 3: why"), "its last line counts, however far it is"
    written = capfd.readouterr()
    assert 2 << 20 <= len(written.err) < 3 << 20
    assert written.err.count("which is left out") == 2
    assert not written.out


@pytest.mark.parametrize(
    ("script", "kind", "error"),
    [
        ("exit 0", "returned", ""),
        ("echo 0.5", "returned", ""),
        ("echo 0.5 > $TIDEMILL_RESULT", "returned", ""),
        ("echo ran out of luck >&2; echo >&2; exit 3", "raised", "exit code 3: ran out of luck"),
        ("exit 4", "raised", "exit code 4"),
        ("kill -SEGV $$", "died", "it ended with SIGSEGV"),
        ("echo much > $TIDEMILL_RESULT", "raised", "TIDEMILL_RESULT is not JSON: Expecting value: line 1 column 1"),
        ("echo '{\"score\": 1}' > $TIDEMILL_RESULT", "raised", "TIDEMILL_RESULT: run returned 'score': a dict may"),
        ("exec nothing-of-that-name", "raised", "exit code 127: "),
        ("mkfifo $TIDEMILL_RESULT", "raised", "TIDEMILL_RESULT is not a regular file"),
        ("mkdir $TIDEMILL_RESULT", "raised", "TIDEMILL_RESULT "),
        ("ln -s /etc/passwd $TIDEMILL_RESULT", "raised", "TIDEMILL_RESULT is not a regular file"),
        ("truncate -s 5M $TIDEMILL_RESULT", "raised", "TIDEMILL_RESULT has 5242880 bytes, at most 4194304 are read"),
    ],
)
def test_how_a_program_ends_says_what_became_of_the_episode(tmp_path: Path, script: str, kind: str, error: str):
    result = play(tmp_path, [*SHELL, script])
    assert result.kind == kind
    assert result.error.startswith(error) if error else not result.error
    assert result.reward == (0.5 if "0.5 >" in script else None)
    assert result.error_type == (error.split(":")[0] if error.startswith("exit code") else result.error_type)


def test_half_characters_in_a_result_are_escaped_as_those_of_functions_are(tmp_path: Path) -> None:
    told = {"reward": 1, "metrics": {"\ud83d": 2}, "data": {"said": "a \ud83d b \U0001f600"}}
    (tmp_path / "told").write_text(json.dumps(told), encoding="utf-8")
    result = play(tmp_path, [*SHELL, "cp told $TIDEMILL_RESULT"])
    assert (result.kind, result.reward) == ("returned", 1.0)
    assert (result.metrics, result.data) == ({r"\ud83d": 2.0}, {"said": "a \\ud83d b \U0001f600"})


def test_a_deep_folder_that_a_program_leaves_behind_is_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    deep = "import os; [(os.mkdir('d'), os.chdir('d')) for _ in range(3000)]"
    result = play(tmp_path, [*SHELL, f'cd $(dirname $TIDEMILL_RESULT); {sys.executable} -c "{deep}"'])
    assert (result.kind, result.error) == ("returned", "")
    assert list(tmp_path.glob("tidemill-agent-*")) == []


def test_a_program_that_does_not_exist_is_said(tmp_path: Path):
    result = play(tmp_path, ["./nothing", "--fast"])
    assert (result.kind, result.error) == ("raised", "exit code 127: cannot start ./nothing: No such file or directory")


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux shows what a process started")
@pytest.mark.parametrize("trap", ["", "trap '' TERM; "])
def test_a_program_past_its_deadline_ends_with_all_that_it_started(tmp_path: Path, trap: str):
    script = f"{trap}(setsid sleep 3601 & echo $! > daemon) ; echo 0.25 > $TIDEMILL_RESULT; sleep 3602; sleep 3603"
    result = play(tmp_path, [*SHELL, script], deadline_s=5)
    assert (result.kind, result.error, result.reward) == ("deadline", "it did not end within 5 s", 0.25)
    assert not Path(f"/proc/{int((tmp_path / 'daemon').read_text())}").exists()


async def test_a_cancelled_program_is_gone_when_its_call_ends(tmp_path: Path):
    command = [*SHELL, "echo $$ > pid; exec sleep 3600"]
    workers = AgentWorkers(AgentProgram(None, command, {}, tmp_path, AgentsConfig()))
    job = AgentJob("t-1", TASK, "http://127.0.0.1:9/s/token/v1", "token", 60.0)
    async with asyncio.timeout(60):
        running = asyncio.create_task(workers.run(job))
        await asyncio.to_thread(wait_until_written, tmp_path / "pid")
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
    assert not Path(f"/proc/{int((tmp_path / 'pid').read_text())}").exists()


def wait_until_written(file: Path) -> None:
    deadline = time.monotonic() + 30
    while not file.exists() or not file.read_text():
        assert time.monotonic() < deadline, f"nothing in {file}"
        time.sleep(0.01)


ASKING = """
import json, os, socket, urllib.request
task = json.load(open(os.environ["TIDEMILL_TASK"]))
request = urllib.request.Request(os.environ["OPENAI_BASE_URL"], json.dumps(task).encode())
said = json.load(urllib.request.urlopen(request, timeout=20))

def reached(host, port):
    try:
        socket.create_connection((host, port), timeout=2).close()
        return 1.0
    except OSError:
        return 0.0

found = {
    "elsewhere": reached("127.0.0.1", int(os.environ["OTHER_PORT"])),
    "secret": float(os.path.exists(os.environ["SECRET"])),
    "service": float(os.path.exists("/proc/%s" % os.environ["SERVICE"])),
    "folder": float(os.path.exists("agent.py")),
}
json.dump({"reward": said["reward"], "metrics": found}, open(os.environ["TIDEMILL_RESULT"], "w"))
"""


def test_a_program_in_the_sandbox_reaches_only_the_endpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sandbox()
    base = tmp_path / "base"
    base.mkdir()
    (base / "agent.py").write_text(ASKING)
    (tmp_path / "secret").write_text("secret")

    with serving((200, {"reward": 0.25})) as server, socket.create_server(("", 0)) as other:
        told = {"OTHER_PORT": other.getsockname()[1], "SECRET": tmp_path / "secret", "SERVICE": os.getpid()}
        for name, value in told.items():
            monkeypatch.setenv(name, str(value))
        url = f"{server.url}/s/token/v1"
        result = play(
            base, [sys.executable, "agent.py"], base_url=url, sandbox="bwrap", python=sys.executable, env=[*told]
        )
    assert (result.kind, result.error, result.reward) == ("returned", "", 0.25)
    assert [(request.path, request.body) for request in server.asked] == [("/s/token/v1", TASK)]
    assert result.metrics == {"elsewhere": 0.0, "secret": 0.0, "service": 0.0, "folder": 1.0}


@pytest.mark.parametrize(
    ("script", "kind", "error"),
    [
        ("echo 0.5 > $TIDEMILL_RESULT", "returned", ""),
        ("echo no luck >&2; exit 3", "raised", "exit code 3: no luck"),
        ("exit 255", "raised", "exit code 255"),
        ("kill -SEGV $$", "died", "it ended with SIGSEGV"),
        ("setsid sleep 1000 & sleep 1000", "deadline", "it did not end within 1 s"),
        ("true", "returned", ""),
        *(
            (f"cd {folder}; touch mine", "raised", "exit code 1: touch: cannot touch 'mine': Read-only file system")
            for folder in (".", "$(dirname $TIDEMILL_RESULT)")
        ),
    ],
)
def test_the_end_of_a_program_in_the_sandbox(tmp_path: Path, script: str, kind: str, error: str) -> None:
    sandbox()
    tmp_path.chmod(0o755)
    result = play(tmp_path, [*SHELL, script], deadline_s=1.0 if kind == "deadline" else 30.0, sandbox="bwrap")
    assert (result.kind, result.error) == (kind, error)
    assert result.reward == (0.5 if "0.5" in script else None)


def test_a_sandbox_is_refused_for_agents_that_are_functions(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"generator\.agents\.sandbox holds for agents that are programs"):
        check_agent(AgentProgram("agent.py:run", None, {}, tmp_path, AgentsConfig(sandbox="bwrap")))
    with pytest.raises(ConfigError, match=r"generator\.agents\.sandbox holds for agents that are programs"):
        AgentWorkers(AgentProgram("agent.py:run", None, {}, tmp_path, AgentsConfig(sandbox="bwrap")))


CONNECTING = """
import glob, json, os, socket
found = {}
for name in ("runs/one/broker/broker.sock", "mine/broker/broker.sock"):
    try:
        socket.socket(socket.AF_UNIX).connect(name)
        found[name[0]] = 1.0
    except OSError:
        found[name[0]] = 0.0
others = [*glob.glob("other/broker/*"), *glob.glob("other/broker/*/*"), "other/broker/broker.sock"]
found["others"] = float(sum(not socket.socket(socket.AF_UNIX).connect_ex(name) for name in others))
found["config"] = float(os.path.exists("config.yaml"))
found["files"] = float(len(os.listdir("runs")) + len(os.listdir("mine")))
json.dump({"reward": 1, "metrics": found}, open(os.environ["TIDEMILL_RESULT"], "w"))
"""


@pytest.mark.parametrize("hidden", [True, False])
def test_a_sandboxed_program_sees_nothing_of_us(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hidden: bool) -> None:
    """The broker's socket in the configuration's folder would make it an administrator of the run."""
    sandbox()
    tmp_path.chmod(0o755)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "agent.py").write_text(CONNECTING)
    (tmp_path / "config.yaml").write_text("")
    with contextlib.ExitStack() as servers:
        for folder in ("runs/one/broker", "mine/broker"):
            Path(folder).mkdir(parents=True)
            server = servers.enter_context(socket.socket(socket.AF_UNIX))
            server.bind(f"{folder}/broker.sock")
            server.listen()
            Path(folder, "broker.sock").chmod(0o777)
        other = servers.enter_context(EmbeddedServer(tmp_path / "other" / "broker"))
        for path in (other.folder, other.socket.parent, other.socket):
            path.chmod(0o777)
        run = tmp_path / "mine" if hidden else None
        result = play(tmp_path, [sys.executable, "agent.py"], run, sandbox="bwrap", python=sys.executable)
    assert (result.kind, result.error) == ("returned", "")
    assert result.metrics == {
        "r": 0.0,
        "m": float(not hidden),
        "others": 0.0,
        "config": 1.0,
        "files": float(not hidden),
    }
