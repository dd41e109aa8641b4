"""Worker processes of agents: what an agent does ends in time, with its own reason, and costs no neighbour anything."""

import asyncio
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from producers.agents.workers import process
from producers.agents.workers.pool import AgentWorkers
from producers.agents.workers.protocol import AgentJob, AgentResult
from schemas.errors import InfraError
from tests.support.producers.agent_workers import AGENT, job, play, with_workers


@pytest.fixture
def base(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "agent.py").write_text(AGENT)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


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
        async with asyncio.timeout(0.5 + 2 + 1):
            result = await workers.run(bad)
        (base / "over").touch()
        return result, await neighbour

    result, neighbour = with_workers(work, base, memory_mb=1024)
    assert (result.kind, result.error.partition(" (agent.py:")[0]) == (kind, reason)
    assert (neighbour.kind, neighbour.reward) == ("returned", 1.0)


@pytest.mark.parametrize(
    ("do", "kind", "reason"),
    [
        ("blocks", "deadline", "it blocked the event loop of its process for"),
        ("stops_its_process", "deadline", "it did not end within 1.5 s, its process stood still"),
        ("exits", "died", "its process ended: exit code 7, os._exit(7)"),
    ],
)
def test_an_agent_whose_process_must_end_costs_its_neighbour_a_restart(base: Path, do: str, kind: str, reason: str):
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


def test_a_cancelled_episode_ends_before_its_call_does(base: Path):
    async def work(workers: AgentWorkers) -> AgentResult:
        running = asyncio.create_task(workers.run(job("wait", seconds=3600)))
        await asyncio.sleep(0.1)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        return await workers.run(job("wait", seconds=0.0))

    assert with_workers(work, base).kind == "returned"


@pytest.mark.parametrize("then", ["hang", "exit"])
def test_a_daemon_that_an_agent_started_ends_with_its_process(base: Path, then: str):
    (result,) = play(base, job("daemonizes", deadline_s=1.0, then=then))
    assert result.kind == ("deadline" if then == "hang" else "died")
    assert not runs(int((base / "daemon").read_text()))


PARENT = """
import asyncio, pathlib
from producers.agents.workers import process
from producers.agents.workers.pool import AgentWorkers
from producers.agents.workers.protocol import AgentJob
from producers.agents.workers.start import AgentProgram
from schemas.config import AgentsConfig
async def main():
    workers = AgentWorkers(AgentProgram("agent.py:run", None, {}, pathlib.Path("."), AgentsConfig()))
    await workers.start()
    await workers.run(AgentJob("a", {"do": "daemonizes", "then": "hang"}, "http://x/v1", "t", 600.0))
asyncio.run(main())
"""


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux can tie a hanging process to its parent")
def test_no_process_is_left_when_the_generator_is_killed(base: Path):
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[4])}
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
    """It is unknown which of them it was: they restart with fewer others, the last of them alone."""
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

    async def work(workers: AgentWorkers) -> tuple[AgentResult, float]:
        nonlocal began
        began = time.monotonic()
        return await workers.run(job("wait", seconds=30, deadline_s=0.3)), time.monotonic() - began

    result, took_s = with_workers(work, base, clock=clock, command=command)
    assert result.kind == "deadline"
    assert took_s > 1.25


def test_a_process_that_is_stopped_is_noticed_long_before_a_deadline(base: Path, monkeypatch: pytest.MonkeyPatch):
    """``play`` waits for a minute, a tenth of the deadline."""
    monkeypatch.setattr(process, "PING_S", 0.1)
    monkeypatch.setattr(process, "SILENT_S", 1.5)
    (result,) = play(base, job("stops_its_process", deadline_s=600))
    assert (result.kind, result.error) == ("died", "its process ended: it did not answer for 1.5 s")


def test_a_process_that_computes_for_long_gives_signs_of_life(base: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(process, "PING_S", 0.1)
    monkeypatch.setattr(process, "SILENT_S", 1.5)
    (result,) = play(base, job("sleep", value=4, seconds=2.5), run="agent.py:plain")
    assert (result.kind, result.reward) == ("returned", 4.0)


def test_what_an_ended_episode_leaves_costs_its_process_when_that_is_empty(base: Path, monkeypatch: pytest.MonkeyPatch):
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


def test_a_plain_function_that_keeps_a_result_after_its_episode_is_not_left_waiting(base: Path):
    async def work(workers: AgentWorkers) -> list[AgentResult]:
        before = await workers.run(job("pid"))
        late = await workers.run(job("late", deadline_s=0.3))
        (base / "over").touch()
        await asyncio.to_thread(wait_until, (base / "late").exists, "it waits for an answer")
        return [before, late, await workers.run(job("pid"))]

    before, late, after = with_workers(work, base, run="agent.py:plain")
    assert late.kind == "deadline"
    assert (base / "late").read_text() == "the episode is over"
    assert after.data == before.data


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
