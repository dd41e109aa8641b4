"""Agents that misbehave in every way, and episodes of them in real worker processes."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from producers.agents.workers.pool import AgentWorkers
from producers.agents.workers.protocol import AgentJob, AgentResult
from producers.agents.workers.start import AgentProgram
from schemas.config import AgentsConfig

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
    if task["do"] == "late":
        while not Path("over").exists():
            time.sleep(0.01)
        try:
            episode.once("n", lambda: 1)
        except Exception as error:
            Path("late").write_text(str(error))
        return 1.0
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
        workers = AgentWorkers(
            AgentProgram(None if command else run, command, args or {}, base, AgentsConfig(**settings)), clock
        )
        await workers.start()
        try:
            return await asyncio.wait_for(work(workers), 60)
        finally:
            await workers.close()

    return asyncio.run(body())
