"""Worker processes of agents: what an agent does ends in time, with its own reason, and costs no neighbour anything."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from producers.agents.workers import check, process
from producers.agents.workers.check import check_agent
from producers.agents.workers.notes import Notes
from producers.agents.workers.pool import AgentWorkers
from producers.agents.workers.protocol import AgentJob, AgentResult
from schemas.config import AgentsConfig
from schemas.errors import ConfigError, InfraError

AGENT = """
import asyncio, os, signal, threading, time
from pathlib import Path

async def run(task, episode):
    return await globals()[task["do"]](task, episode)

async def wait(task, episode):
    await asyncio.sleep(task["seconds"])
    return 1.0

async def waits_for_its_neighbour(task, episode):
    while not Path("over").exists():
        await asyncio.sleep(0.01)
    return 1.0

async def blocks(task, episode):
    time.sleep(3600)

async def ignores_the_end(task, episode):
    while True:
        try:
            await asyncio.sleep(3600)
        except asyncio.CancelledError:
            pass

async def exits(task, episode):
    os._exit(7)

async def crashes(task, episode):
    await asyncio.sleep(task.get("after", 0))
    os.kill(os.getpid(), signal.SIGSEGV)

async def stops_its_process(task, episode):
    os.kill(os.getpid(), signal.SIGSTOP)

async def forks(task, episode):
    os.fork()
    await asyncio.sleep(0)
    return 2.0

async def forks_and_returns(task, episode):
    os.fork()
    return 2.0

async def allocates(task, episode):
    return len(bytearray(2 << 30))

async def exits_in_a_task(task, episode):
    async def leave():
        raise SystemExit(5)
    waiting = asyncio.ensure_future(leave())
    await asyncio.sleep(0.05)
    return 3.0

async def daemonizes(task, episode):
    if os.fork() == 0:
        os.setsid()
        Path("daemon").write_text(str(os.getpid()))
        time.sleep(3600)
    while not Path("daemon").exists() or not Path("daemon").read_text():
        await asyncio.sleep(0.01)
    if task["then"] == "hang":
        time.sleep(3600)
    os._exit(1)

async def raises(task, episode):
    raise {"exit": SystemExit, "value": ValueError, "interrupt": KeyboardInterrupt}[task["what"]]("no\\nluck")

async def cancels_all_tasks(task, episode):
    mine = [asyncio.ensure_future(asyncio.sleep(3600)), asyncio.current_task()]
    await asyncio.sleep(0.1)
    for other in asyncio.all_tasks() - {mine[1]}:
        other.cancel()
    await asyncio.wait(mine[:1])
    return 4.0

async def returns(task, episode):
    return eval(task["what"])

async def says(task, episode):
    episode.reward(0.25)
    episode.reward(1, "chatcmpl-1")
    episode.metrics(steps=3)
    if task.get("then") == "hang":
        await asyncio.sleep(3600)
    return {"metrics": {"tools": 2}, "data": {"log": ["a"]}, "turns": {"chatcmpl-2": 0.5}}

async def seen(task, episode):
    return {"data": {"id": episode.id, "attempt": episode.attempt, "left": episode.deadline - time.time(),
                     "task": task, "env": sorted(os.environ), "cwd": os.getcwd()}}

async def buys(task, episode):
    async def buy():
        with open("bought", "a") as file:
            file.write("x")
        return {"ticket": 7}
    first, second = await asyncio.gather(episode.once("ticket", buy), episode.once("ticket", buy))
    assert first == second
    if episode.attempt == 0:
        os._exit(1)
    return {"data": first}

async def hoards(task, episode):
    await episode.once("small", lambda: "a")
    await episode.once("large", lambda: "x" * (1 << 20))

async def prints(task, episode):
    print("printed", flush=True)
    os.system("echo spoken")

def plain(task, episode):
    if task["do"] == "hang":
        time.sleep(3600)
    if task["do"] == "stop":
        raise StopIteration
    if task["do"] == "pid":
        return {"data": {"pid": os.getpid()}}
    time.sleep(task.get("seconds", 0))
    episode.metrics(pid=os.getpid())
    return episode.once("n", lambda: threading.active_count() > 0) and task["value"]

class Built:
    def __init__(self, factor):
        self.factor, self.calls = factor, 0

    async def run(self, task):
        self.calls += 1
        return {"reward": task["value"] * self.factor, "metrics": {"calls": self.calls}}
"""


@pytest.fixture
def base(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "agent.py").write_text(AGENT)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def job(do: str, deadline_s: float = 30.0, name: str = "", attempt: int = 0, **task: Any) -> AgentJob:
    return AgentJob(name or do, {"do": do, **task}, "http://127.0.0.1:9/s/t/v1", "t", deadline_s, attempt)


def play(
    base: Path, *jobs: AgentJob, run: str = "agent.py:run", args: dict[str, Any] | None = None, **settings: Any
) -> list[AgentResult]:
    """Run these episodes at once."""

    async def work(workers: AgentWorkers) -> list[AgentResult]:
        return await asyncio.gather(*(workers.run(one) for one in jobs))

    return with_workers(work, base, run, args, **settings)


def with_workers(
    work: Callable[[AgentWorkers], Awaitable[Any]],
    base: Path,
    run: str = "agent.py:run",
    args: dict[str, Any] | None = None,
    clock: Callable[[], float] = time.monotonic,
    command: list[str] | None = None,
    **settings: Any,
) -> Any:
    async def body() -> Any:
        workers = AgentWorkers(None if command else run, command, args or {}, base, AgentsConfig(**settings), clock)
        await workers.start()
        try:
            return await asyncio.wait_for(work(workers), 60)
        finally:
            await workers.close()

    return asyncio.run(body())


def runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def test_a_function_a_plain_one_and_a_class_run_as_episodes(base: Path):
    jobs = [job("wait", name=str(k), seconds=0.0) for k in range(8)]
    assert {(result.kind, result.reward) for result in play(base, *jobs, processes=2)} == {("returned", 1.0)}
    (plain,) = play(base, job("value", value=2), run="agent.py:plain")
    assert (plain.kind, plain.reward) == ("returned", 2.0)
    built = play(base, *(job("x", name=str(k), value=k) for k in range(3)), run="agent:Built", args={"factor": 10})
    assert sorted((result.reward, result.metrics["calls"]) for result in built) == [(0, 1), (10, 2), (20, 3)]


@pytest.mark.parametrize(
    ("do", "kind", "reason"),
    [
        ("wait", "deadline", "it did not end within 0.5 s"),
        ("ignores_the_end", "deadline", "it did not end within 0.5 s"),
        ("raises", "raised", "ValueError: no luck"),
        ("allocates", "raised", "MemoryError"),
        ("forks", "returned", ""),
        ("forks_and_returns", "returned", ""),
        ("exits_in_a_task", "returned", ""),
        ("cancels_all_tasks", "returned", ""),
    ],
)
def test_an_agent_that_misbehaves_ends_in_time_and_its_neighbour_goes_on(base: Path, do: str, kind: str, reason: str):
    bad = job(do, deadline_s=0.5 if kind == "deadline" else 30, seconds=3600, what="value")

    async def work(workers: AgentWorkers) -> tuple[AgentResult, AgentResult]:
        neighbour = asyncio.create_task(workers.run(job("waits_for_its_neighbour")))
        result = await workers.run(bad)
        (base / "over").touch()
        return result, await neighbour

    result, neighbour = with_workers(work, base, memory_mb=1024)
    assert (result.kind, result.error) == (kind, reason)
    assert result.seconds < 0.5 + 2 + 1
    assert (neighbour.kind, neighbour.reward) == ("returned", 1.0)


@pytest.mark.parametrize(
    ("do", "kind", "reason"),
    [
        ("blocks", "deadline", "it blocked the event loop of its process for"),
        ("stops_its_process", "deadline", "it did not end within 1.5 s, its process stood still"),
        ("exits", "died", "its process ended: exit code 7, os._exit(7)"),
    ],
)
def test_an_agent_whose_process_must_end_costs_its_neighbour_only_a_new_beginning(
    base: Path, do: str, kind: str, reason: str
):
    async def work(workers: AgentWorkers) -> tuple[AgentResult, AgentResult, AgentResult]:
        neighbour = job("wait", name="neighbour", seconds=60.0, deadline_s=60)
        result, ended = await asyncio.gather(workers.run(job(do, deadline_s=1.5)), workers.run(neighbour))
        return result, ended, await workers.run(job("wait", seconds=0.0))

    result, neighbour, after = with_workers(work, base)
    assert result.kind == kind
    assert result.error.startswith(reason)
    assert do != "blocks" or "in blocks (" in result.error
    assert neighbour.kind == "neighbour"
    assert after.kind == "returned"


@pytest.mark.parametrize(
    ("what", "reward"),
    [("None", None), ("0.5", 0.5), ("True", 1.0), ("{'reward': 2}", 2.0), ("{}", None), ("{'turns': {'a': 1}}", None)],
)
def test_an_agent_returns_none_a_number_or_a_mapping(base: Path, what: str, reward: float | None):
    (result,) = play(base, job("returns", what=what))
    assert (result.kind, result.reward) == ("returned", reward)


@pytest.mark.parametrize(
    ("what", "reason"),
    [
        ("'1'", "the result of run, if it is no dict and not None, must be a number, is str"),
        ("float('nan')", "the result of run, if it is no dict and not None, must be finite, is nan"),
        ("{'score': 1}", "run returned 'score': a dict may have reward, turns, metrics and data"),
        ("{'metrics': {'a': 'b'}}", "metrics['a'] must be a number, is str"),
        ("{'data': {'a': {1}}}", "data must be JSON: TypeError: Object of type set is not JSON serializable"),
        ("{'data': [1]}", "data must be a dict, is list"),
    ],
)
def test_any_other_result_is_an_error_of_one_line(base: Path, what: str, reason: str):
    (result,) = play(base, job("returns", what=what))
    assert (result.kind, result.error) == ("raised", reason)


@pytest.mark.parametrize(
    ("what", "found"),
    [
        ("{'data': {'a': chr(0xd800)}}", {"a": "\\ud800"}),
        ("{'metrics': {chr(0xd800): 1}}", {}),
        ("{'data': {'a': 'x' * (65 << 20)}}", "what an agent says may have 62914560 bytes as JSON, this has 6815749"),
        ("{'x' * (65 << 20): 1}", "run returned 'xxxx"),
    ],
    ids=["half a character", "half a character in a name", "too much", "a long name"],
)
def test_an_agent_that_says_what_cannot_be_told_costs_its_neighbour_nothing(base: Path, what: str, found: object):
    async def work(workers: AgentWorkers) -> tuple[AgentResult, AgentResult]:
        neighbour = asyncio.create_task(workers.run(job("waits_for_its_neighbour")))
        result = await workers.run(job("returns", what=what))
        (base / "over").touch()
        return result, await neighbour

    result, neighbour = with_workers(work, base)
    assert neighbour.kind == "returned"
    assert (result.kind, result.data) == ("returned", found) if isinstance(found, dict) else result.kind == "raised"
    assert isinstance(found, dict) or result.error.startswith(found)


def test_what_an_agent_says_is_kept_even_when_it_does_not_end(base: Path):
    ended, late = play(base, job("says"), job("says", name="late", deadline_s=0.5, then="hang"))
    assert (ended.kind, ended.reward, ended.data) == ("returned", 0.25, {"log": ["a"]})
    assert ended.turn_rewards == {"chatcmpl-1": 1.0, "chatcmpl-2": 0.5}
    assert ended.metrics == {"steps": 3.0, "tools": 2.0}
    assert (late.kind, late.reward, late.turn_rewards) == ("deadline", 0.25, {"chatcmpl-1": 1.0})


def test_a_side_effect_happens_once_in_all_attempts(base: Path):
    notes = Notes()

    async def work(workers: AgentWorkers) -> list[AgentResult]:
        return [await workers.run(job("buys", attempt=attempt), notes) for attempt in range(2)]

    died, bought = with_workers(work, base)
    assert (died.kind, bought.kind, bought.data) == ("died", "returned", {"ticket": 7})
    assert notes == {"ticket": '{"ticket": 7}'}
    assert (base / "bought").read_text() == "x"


def test_results_of_side_effects_that_are_too_large_are_refused(base: Path):
    notes = Notes()
    result = with_workers(lambda workers: workers.run(job("hoards"), notes), base)
    assert (result.kind, list(notes)) == ("raised", ["small"])
    assert "once of one episode would have 1048591 bytes as JSON, the most is 1048576" in result.error


def test_an_agent_sees_its_episode_and_no_secret_of_the_service(base: Path, monkeypatch: pytest.MonkeyPatch):
    hidden = {"REDIS_URL", "REDIS_URL_FILE", "TIDEMILL_CONTROL_TOKEN", "TIDEMILL_BROKER__URL", "HF_TOKEN"}
    for name in (*hidden, "SEARCH_KEY"):
        monkeypatch.setenv(name, "x")
    (result,) = play(base, job("seen", name="t-1", attempt=2, deadline_s=20), env=["SEARCH_KEY"])
    assert (result.data["id"], result.data["attempt"], result.data["task"]) == ("t-1", 2, {"do": "seen"})
    assert 15 < result.data["left"] <= 20
    assert not hidden & set(result.data["env"])
    assert {"SEARCH_KEY", "PATH"} <= set(result.data["env"])


def test_what_an_agent_prints_is_log_and_no_message(base: Path, capfd: pytest.CaptureFixture[str]):
    (result,) = play(base, job("prints"))
    assert result.kind == "returned"
    out, err = capfd.readouterr()
    assert "printed" not in out
    assert "printed\n" in err
    assert "spoken\n" in err


def test_a_cancelled_episode_ends_before_its_call_does(base: Path):
    async def work(workers: AgentWorkers) -> tuple[AgentResult, AgentResult]:
        first = asyncio.create_task(workers.run(job("wait", name="a", seconds=3600)))
        second = asyncio.create_task(workers.run(job("wait", name="b", seconds=3600)))
        await asyncio.sleep(0.1)
        await workers.cancel("a")
        second.cancel()
        with pytest.raises(asyncio.CancelledError):
            await second
        return await first, await workers.run(job("wait", seconds=0.0))

    cancelled, after = with_workers(work, base)
    assert (cancelled.kind, cancelled.error) == ("cancelled", "it was cancelled")
    assert after.kind == "returned"


@pytest.mark.parametrize("then", ["hang", "exit"])
def test_a_daemon_that_an_agent_started_ends_with_its_process(base: Path, then: str):
    (result,) = play(base, job("daemonizes", deadline_s=1.0, then=then))
    assert result.kind == ("deadline" if then == "hang" else "died")
    assert not runs(int((base / "daemon").read_text()))


@pytest.mark.parametrize(
    ("run", "args", "reason"),
    [
        ("missing.py:run", {}, "missing.py:run cannot be imported: no file"),
        ("agent.py:missing", {}, "agent.py:missing: agent.py has no 'missing'"),
        ("broken.py:run", {}, "broken.py:run cannot be imported: ZeroDivisionError: division by zero"),
        ("nowhere.agents:run", {}, "nowhere.agents:run cannot be imported: ModuleNotFoundError"),
        ("agent.py:Built", {}, "agent.py:Built cannot be built with args {}: missing a required argument: 'factor'"),
        ("wrong.py:other", {}, "wrong.py:other: parameter prompt is none of task, client, base_url, api_key, episode"),
        ("wrong.py:stream", {}, "wrong.py:stream: run must return its result, it yields"),
        ("wrong.py:fine", {"depth": 1}, "wrong.py:fine takes no args 'depth'"),
        ("wrong.py:Fails", {}, "wrong.py:Fails cannot be built: OSError: no tools"),
        ("wrong.py:NUMBER", {}, "wrong.py:NUMBER must be a function or a class, is int"),
    ],
)
def test_an_agent_that_cannot_be_loaded_is_one_line_at_the_start(
    base: Path, run: str, args: dict[str, Any], reason: str
):
    (base / "broken.py").write_text("1 / 0\n")
    (base / "wrong.py").write_text(
        "NUMBER = 1\ndef other(task, prompt): ...\nasync def stream(task):\n    yield 1\ndef fine(task): ...\n"
        "class Fails:\n    def __init__(self): raise OSError('no tools')\n    def run(self, task): ...\n"
    )
    with pytest.raises(ConfigError) as caught:
        play(base, run=run, args=args)
    assert str(caught.value).startswith(f"generator.workflow.args.run: {reason}")
    assert "\n" not in str(caught.value)


PARENT = """
import asyncio, pathlib
from producers.agents.workers import check, process
from producers.agents.workers.check import check_agent
from producers.agents.workers.pool import AgentWorkers
from producers.agents.workers.protocol import AgentJob
from schemas.config import AgentsConfig
async def main():
    workers = AgentWorkers("agent.py:run", None, {}, pathlib.Path("."), AgentsConfig())
    await workers.start()
    await workers.run(AgentJob("a", {"do": "daemonizes", "then": "hang"}, "http://x/v1", "t", 600.0))
asyncio.run(main())
"""


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux can tie a hanging process to its parent")
def test_no_process_is_left_when_the_generator_is_killed(base: Path):
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[3])}
    parent = subprocess.Popen([sys.executable, "-c", PARENT], cwd=base, env=environment)
    daemon = base / "daemon"
    wait_until(lambda: daemon.exists() and daemon.read_text() != "", "no daemon was started")
    parent.kill()
    parent.wait(30)
    pid = int(daemon.read_text())
    wait_until(lambda: not runs(pid), "the daemon outlives the generator")


def wait_until(true: Callable[[], bool], otherwise: str) -> None:
    deadline = time.monotonic() + 30
    while not true():
        assert time.monotonic() < deadline, otherwise
        time.sleep(0.02)


def test_one_episode_that_crashes_its_process_is_found_and_no_other_pays_for_it(base: Path):
    """Nobody knows which of them it was: they begin anew with fewer others, the last of them alone."""
    died: list[str] = []

    async def play_on(workers: AgentWorkers, first: AgentJob) -> tuple[str, int]:
        for beginnings in range(1, 10):
            result = await workers.run(first)
            if result.kind != "neighbour":
                died.extend([first.episode_id] if result.kind == "died" else [])
                return result.kind, beginnings
        raise AssertionError(f"{first.episode_id} was begun again and again")

    async def work(workers: AgentWorkers) -> list[tuple[str, int]]:
        good = [job("wait", name=f"good-{k}", seconds=0.6) for k in range(11)]
        return await asyncio.gather(*(play_on(workers, one) for one in (job("crashes", after=0.3), *good)))

    ends = with_workers(work, base, processes=2)
    assert died == ["crashes"]
    assert ends[0][0] == "died"
    assert {kind for kind, _ in ends[1:]} == {"returned"}


@pytest.mark.parametrize(
    ("run", "args", "reason"),
    [
        ("agent.py:run", {}, ""),
        ("agent.py:Built", {"factor": 1}, ""),
        ("agent.py:Exits", {}, ""),
        (
            "agent.py:Built",
            {"factors": 1},
            "agent.py:Built cannot be built with args {'factors': 1}: missing a required",
        ),
        ("other.py:run", {}, "other.py:run cannot be imported: no file"),
        ("ends.py:run", {}, "ends.py:run cannot be checked: its process ended with exit code 3"),
        ("hangs.py:run", {}, "hangs.py:run cannot be checked: it is not loaded after 1 s"),
    ],
)
@pytest.mark.parametrize("python", [None, sys.executable])
def test_an_agent_is_checked_and_not_run_before_anything_else_begins(
    base: Path, monkeypatch: pytest.MonkeyPatch, run: str, args: dict[str, Any], reason: str, python: str | None
):
    (base / "agent.py").write_text(
        AGENT + "class Exits:\n    def __init__(self): os._exit(1)\n    def run(self): ...\n"
    )
    (base / "ends.py").write_text("import os\nos._exit(3)\n")
    (base / "hangs.py").write_text("import time\ntime.sleep(3600)\n")
    monkeypatch.setattr(check, "CHECK_TIMEOUT_S", 1.0 if run == "hangs.py:run" else 20.0)
    settings = AgentsConfig(python=None if python is None else Path(python))
    if not reason:
        check_agent(run, None, args, base, settings)
        return
    with pytest.raises(ConfigError) as caught:
        check_agent(run, None, args, base, settings)
    assert str(caught.value).startswith(f"generator.workflow.args.run: {reason}")


def test_a_program_or_an_interpreter_that_is_not_there_is_told_before_anything_else_begins(base: Path):
    (base / "mine").write_text("#!/bin/sh\n")
    check_agent(None, ["sh", "-c", "exit 1"], {}, base, AgentsConfig())
    with pytest.raises(ConfigError, match=r"args\.command: there is no program '\./mine' that can be run"):
        check_agent(None, ["./mine"], {}, base, AgentsConfig())
    (base / "mine").chmod(0o755)
    check_agent(None, ["./mine"], {}, base, AgentsConfig())
    with pytest.raises(ConfigError, match=r"agents\.python: there is no program .*/env/python that can be run"):
        check_agent("agent.py:run", None, {}, base, AgentsConfig(python=Path("env/python")))


def test_an_episode_that_meets_its_deadline_while_another_blocks_their_process_is_not_late(base: Path):
    blocked = job("wait", seconds=1.5, deadline_s=2.5)
    blocking = job("blocks", deadline_s=60)
    late, culprit = play(base, blocked, blocking)
    assert (late.kind, late.error) == ("neighbour", "another episode blocked their process, which was killed")
    assert culprit.kind == "died"
    assert culprit.error.startswith("it blocked the event loop of its process for")
    assert "in blocks (" in culprit.error


@pytest.mark.parametrize("command", [None, ["sleep", "30"]], ids=["function", "program"])
def test_a_pause_uses_up_no_time_of_an_episode(base: Path, command: list[str] | None):
    """It had 0.3 s when the clock stood still for 1 s."""
    began = time.monotonic()

    def clock() -> float:
        passed = time.monotonic() - began
        return min(passed, 0.1) + max(0.0, passed - 1.1)

    async def work(workers: AgentWorkers) -> AgentResult:
        nonlocal began
        began = time.monotonic()
        return await workers.run(job("wait", seconds=30, deadline_s=0.3))

    result = with_workers(work, base, clock=clock, command=command)
    assert result.kind == "deadline"
    assert result.seconds > 1.25


def test_a_process_that_is_stopped_is_noticed_long_before_a_deadline(base: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(process, "PING_S", 0.1)
    monkeypatch.setattr(process, "SILENT_S", 1.5)
    began = time.monotonic()
    (result,) = play(base, job("stops_its_process", deadline_s=600))
    assert (result.kind, result.error) == ("died", "its process ended: it gave no sign of life for 1.5 s")
    assert time.monotonic() - began < 120


def test_a_process_that_computes_for_long_gives_signs_of_life(base: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(process, "PING_S", 0.1)
    monkeypatch.setattr(process, "SILENT_S", 1.5)
    (result,) = play(base, job("sleep", value=4, seconds=2.5), run="agent.py:plain")
    assert (result.kind, result.reward) == ("returned", 4.0)


def test_what_is_left_of_an_ended_episode_costs_its_process_only_when_that_is_empty(
    base: Path, monkeypatch: pytest.MonkeyPatch
):
    """A plain function can't be ended; its process takes nothing new, and is ended after its last episode."""
    monkeypatch.setattr(process, "LINGER_S", 0.1)

    async def work(workers: AgentWorkers) -> list[AgentResult]:
        going_on = asyncio.create_task(workers.run(job("sleep", value=4, seconds=3.0)))
        late = await workers.run(job("hang", deadline_s=0.3))
        await asyncio.sleep(0.2)
        new = await workers.run(job("pid"))
        return [late, new, await workers.run(job("pid")), await going_on]

    late, new, again, going_on = with_workers(work, base, run="agent.py:plain")
    assert (late.kind, late.error) == ("deadline", "it did not end within 0.3 s")
    assert (going_on.kind, going_on.reward) == ("returned", 4.0)
    assert new.data["pid"] == again.data["pid"] != going_on.metrics["pid"]


@pytest.mark.parametrize("killed", [1, 3], ids=["once", "again and again"])
def test_a_process_that_is_killed_before_it_is_ready_is_started_again(base: Path, killed: int):
    (base / "killed.py").write_text(
        f"""
import os, signal
from pathlib import Path

with Path("starts").open("a") as file:
    file.write("x")
if 1 < len(Path("starts").read_text()) <= 1 + {killed}:
    os.kill(os.getpid(), signal.SIGKILL)

async def run(task):
    if task["do"] == "exit":
        os._exit(1)
    return 1.0
"""
    )

    async def work(workers: AgentWorkers) -> list[AgentResult]:
        return [await workers.run(job("exit")), await workers.run(job("return"))]

    if killed == 3:
        with pytest.raises(InfraError, match="did not start: SIGKILL"):
            with_workers(work, base, "killed.py:run")
        return
    died, returned = with_workers(work, base, "killed.py:run")
    assert (died.kind, returned.kind, returned.reward) == ("died", "returned", 1.0)
    assert (base / "starts").read_text() == "xxx"
