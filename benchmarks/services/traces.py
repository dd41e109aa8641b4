"""What traces of episodes cost: processor time of a trajectory with them and without, in turns, beside transport's::

    python -m benchmarks.services.traces --steps 200

A trajectory goes, in this process, through the parts of its way at which its trace costs anything: the generator notes
its moments and writes the message, the reward service reads it, scores it by a term of this process and writes the
score, the trainer reads both, joins them and notes the step. A share of 1 % is sent to a receiver in another process:
what that takes for many steps at once is measured apart, as ``sending``, and added.
Transport is the pipeline of ``tidemill bench transport`` in the same run: three processes and a server, without traces.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import multiprocessing
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from http.server import BaseHTTPRequestHandler, HTTPServer
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median

from benchmarks.harness.processes import serving
from benchmarks.harness.rounds import Spread, compare, summarize
from benchmarks.harness.workload import PipelineShape, TrajectoryPool
from benchmarks.services.transport import PipelineBench
from consumers.reward.scorer import Scorer
from consumers.trainer.records import traces
from consumers.trainer.records.traces import TraceLog
from producers.workflows.base import RolloutContext
from schemas.codec import decode, encode
from schemas.config import RewardConfig, TraceConfig
from schemas.messages import Score, Task, Trajectory
from schemas.messages.moments import Noted, pack_noted

EPISODES = 120
"""Episodes of one call whose spans are sent at once: some more, and the trainer would not wait for more."""
SAMPLES = 8
"""Samples of a prompt: those without calls of their own share the trace that their generator writes."""


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--steps", type=int, default=200, help="Steps of 256 trajectories with and without traces.")
    parser.add_argument("--rounds", type=int, default=5, help="Of transport.")
    parser.add_argument("--calls", type=int, nargs="*", default=(0, 8), help="Model calls, and as many tools.")
    given = parser.parse_args()
    traces.OFTEN_S = math.inf  # on a busy machine nothing is sent before it is measured
    flow = PipelineShape()
    with serving(None, "everysec") as url, PipelineBench(url, given.tokens, flow) as bench:
        transport = summarize(compare({"ours": partial(bench.round, "ours", 5120)}, given.rounds))["ours"]
    client, server = transport["cpu_us_per_trajectory"], transport["server_cpu_us_per_trajectory"]
    shown = {"tokens": given.tokens, "transport_us": f"{client:.0f}", "server_us": f"{server:.0f}"}
    print(json.dumps(shown), flush=True)
    for calls in given.calls:
        with receiving() as url:
            found = asyncio.run(costs(TrajectoryPool(given.tokens), flow.per_step, calls, given.steps, url))
        share = (found["on"].median + found["sending"].median) / (client.median + server.median)
        figures = {f"{name}_us": f"{spread:.2f}" for name, spread in found.items()}
        print(json.dumps({"calls": calls, **figures, "share_of_transport": f"{share:.2%}"}), flush=True)


@contextmanager
def receiving() -> Iterator[str]:
    """The address of a receiver of spans, in a process of its own."""
    here, there = multiprocessing.Pipe()
    receiver = multiprocessing.get_context("spawn").Process(target=receive, args=(there,), daemon=True)
    receiver.start()
    try:
        yield f"http://127.0.0.1:{here.recv()}"
    finally:
        receiver.terminate()
        receiver.join()


def receive(told: Connection) -> None:
    """Answer every request, and tell the port first."""
    server = HTTPServer(("127.0.0.1", 0), Receiver)
    told.send(server.server_port)
    server.serve_forever()


class Receiver(BaseHTTPRequestHandler):
    """Takes spans and forgets them."""

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        self.send_response(200)
        self.end_headers()

    def log_message(self, *args: object) -> None:
        pass


async def costs(pool: TrajectoryPool, per_step: int, calls: int, steps: int, url: str) -> dict[str, Spread]:
    """Return microseconds of processor time of a trajectory: ``off``, what ``on`` and ``again`` take more, ``sending``.

    url: of a receiver of spans.
    ``again`` is off too: what it takes more or less is the machine's. The ways take turns task by task, because the
    machine's speed changes within a step. Quartiles of the tasks stand for the range.
    """
    reward = RewardConfig.model_validate({"terms": [{"name": "exact"}], "workers": 1, "timeout_s": 10})
    tasks: list[dict[str, float]] = []
    ends: list[dict[str, float]] = []
    async with AsyncExitStack() as stack:
        ways: dict[str, Way] = {}
        for name in ("off", "on", "again"):
            scorer = Scorer(reward, Path(), traced=name == "on")
            log = TraceLog(TraceConfig(url=url) if name == "on" else None, "bench", "policy")
            stack.callback(log.close)
            ways[name] = Way(pool, await stack.enter_async_context(scorer), log, calls, name == "on")
        for step in range(steps):
            for task_id in range(step * per_step, (step + 1) * per_step, SAMPLES):
                tasks.append({name: await ways[name].task(task_id) / SAMPLES for name in _order(ways, len(tasks))})
            ends.append({name: ways[name].end(step) / per_step for name in _order(ways, step)})
        logs = [TraceLog(TraceConfig(url=url), "bench", "policy") for _ in range(5)]
        sent = [await sending(replace(ways["on"], log=log), per_step) for log in logs]
    return {name: _more(name, tasks, ends) for name in ways} | {"sending": Spread.of(sent)}


def _order(ways: Iterable[str], turn: int) -> list[str]:
    """Return the ways in an order in which each is first as often as last."""
    names = [*ways]
    return sorted(names, key=lambda name: (turn + names.index(name)) % len(names))


def _more(name: str, tasks: Sequence[Mapping[str, float]], ends: Sequence[Mapping[str, float]]) -> Spread:
    """Return what a way takes, or takes more than ``off``: the quartiles of its tasks, and the median of its steps."""
    more, end = (sorted(one[name] - one["off"] * (name != "off") for one in each) for each in (tasks, ends))
    quarters = (more[len(more) * quarter // 4] + median(end) for quarter in (2, 1, 3))
    return Spread(*quarters)


async def sending(way: Way, per_step: int) -> float:
    """Return microseconds of processor time of a trajectory for the spans of several steps, which are sent at once."""
    steps = EPISODES * 100 // per_step // (1 + way.calls // 2)
    for step in range(steps):
        for task_id in range(step * per_step, (step + 1) * per_step, SAMPLES):
            await way.task(task_id)
        way.end(step)
    began = time.process_time()
    way.log.close()
    return (time.process_time() - began) / per_step / steps * 1e6


@dataclass(frozen=True)
class Way:
    """The way of trajectories with traces, or without them."""

    pool: TrajectoryPool
    scorer: Scorer
    log: TraceLog
    calls: int
    traced: bool
    trained: list[tuple[Trajectory, float]] = field(default_factory=list)
    """Trajectories and rewards of the step that has not ended."""

    async def task(self, task_id: int) -> float:
        """Take the trajectories of a task their way to the trainer; return microseconds of processor time of all."""
        began = time.process_time()
        for message in self.generate(self.pool.task(task_id, SAMPLES)):
            score = encode(await self.scorer.score(decode(message, Trajectory)))
            read, found = decode(message, Trajectory), decode(score, Score)
            read.trace += found.trace
            self.trained.append((read, found.reward))
        return (time.process_time() - began) * 1e6

    def end(self, step: int) -> float:
        """Note the step in all trajectories since the last; return microseconds of processor time."""
        began = time.process_time()
        self.log.trained(step, 1.0, self.trained)
        took = time.process_time() - began
        self.trained.clear()
        return took * 1e6

    def generate(self, task: Task) -> Iterator[bytes]:
        """Return the messages of a task's samples, with what their generator notes of them."""
        context = RolloutContext(None, None, task, range(SAMPLES), moments={} if self.traced else None)  # type: ignore[arg-type]
        admitted = Noted("admitted", "", time.time_ns(), 0.0)
        uncalled = pack_noted([admitted, _attempt()]) if self.traced else b""
        for sample in range(SAMPLES):
            body = self.pool.trajectory(task, sample, 0)
            for _ in range(self.calls):
                context.note(sample, "chat", "", time.monotonic(), 32)
                context.note(sample, "tool", "search", time.monotonic())
            own = context.moments.get(sample) if context.moments else None
            body.trace = pack_noted([admitted, _attempt(), *own]) if own else uncalled
            yield encode(body)


def _attempt() -> Noted:
    return Noted("attempt", "generator-0", time.time_ns(), 0.0)


if __name__ == "__main__":
    main()
