"""Many episodes at once through one generator's agents: wall time, processor time, and the lag of its event loop.

Endpoint, sessions, worker processes and clients are those of a run; the engine answers each call after a fixed time,
and there is no broker. What is above the ideal, the time of calls and tools alone, is what all of that costs.
"""

from __future__ import annotations

import asyncio
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from benchmarks.agents.model import END, write_model
from benchmarks.agents.tool_use import LAST_ANSWER, tool_call
from benchmarks.harness.report import ResultRow, Table
from producers.agents.workflow import AgentWorkflow
from producers.engines.base import Completion, EngineSettings, ProgressCallback, PromptImage
from producers.engines.scripted import ScriptedEngine
from producers.tokenizer import HfTokenizer
from producers.workflows.base import FailedSample, RolloutContext, WorkflowServices, running
from producers.workflows.trajectory_builder import SampledCompletion
from schemas.config import TidemillConfig, parse_config
from schemas.errors import InfraError
from schemas.messages import ChatMessage, Sampling, Span, Task

PLAYERS = {"openai": "with_openai", "raw": "with_httpx"}
"""Function of the agent by the client that it uses."""
MAX_LENGTH = 8192
TICK_S = 0.01


@dataclass(frozen=True)
class EpisodeShape:
    """Episodes of ``calls`` model calls of ``call_s`` seconds each, between which a tool takes ``tool_s``."""

    episodes: int
    calls: int
    tool_s: float
    call_s: float

    @property
    def ideal_s(self) -> float:
        """Seconds that the episodes take without any overhead."""
        return self.calls * self.call_s + (self.calls - 1) * self.tool_s


EPISODES = Table(
    "Episodes of agents at once",
    {
        "client": "{client}",
        "episodes": "{episodes}, {calls} calls in all, {processes} processes",
        "seconds": "{wall_s:.1f}",
        "calls and tools alone": "{ideal_s:.2f}",
        "processor s: generator, agents": "{generator_cpu_s:.2f}, {workers_cpu_s:.2f}",
        "lag ms: p50 / p99 / most": "{lag_p50_ms:.1f} / {lag_p99_ms:.0f} / {lag_max_ms:.0f}",
    },
    part="episodes",
)
"""Results of concurrent episodes. lag: by how much the generator's event loop was late."""


def measure(shape: EpisodeShape, client: str, processes: int) -> ResultRow:
    """Play all episodes at once and return one row, after a short episode in each process that does not count."""
    with tempfile.TemporaryDirectory(prefix="tidemill-bench-") as name:
        folder = Path(name)
        write_model(folder / "model", MAX_LENGTH)
        config = _config(folder, shape, client, processes)
        return asyncio.run(_play(config, shape, client))


class FixedTimeEngine(ScriptedEngine):
    """An engine that answers after ``call_s`` seconds: with tool calls, and finally with text."""

    def __init__(self, tokenizer: HfTokenizer, calls: int, call_s: float) -> None:
        super().__init__(EngineSettings("none", "float32", MAX_LENGTH, 1))
        (self._end,) = tokenizer.encode(END)
        texts = [*(tool_call(turn) for turn in range(calls - 1)), LAST_ANSWER]
        self._answers = [tokenizer.encode(text + END) for text in texts]
        self._call_s = call_s

    async def generate(
        self,
        prompt_ids: Sequence[int],
        sampling: Sampling,
        n: int = 1,
        prefix: Sequence[int] = (),
        progress: ProgressCallback | None = None,
        images: Sequence[PromptImage] = (),
    ) -> list[Completion]:
        """See Engine. The number of turns in the prompt tells which turn it is: tools, user, and two for each call."""
        await asyncio.sleep(self._call_s)
        ids = self._answers[(prompt_ids.count(self._end) - 2) // 2]
        return [Completion(ids, np.full(len(ids), -0.5, np.float32), [Span(self.version, 0, len(ids))], "stop")] * n


def _config(folder: Path, shape: EpisodeShape, client: str, processes: int) -> TidemillConfig:
    return parse_config(
        {
            "run": {"name": "bench-agents", "folder": str(folder / "run")},
            "model": {"path": str(folder / "model"), "dtype": "float32", "max_length": MAX_LENGTH},
            "train": {"name": "arithmetic"},
            "sampling": {"n": 8, "max_tokens": 256},
            "reward": {"terms": []},
            "generator": {
                "engine": "scripted",
                "max_samples": shape.episodes,
                "workflow": {"name": "agent", "args": {"run": f"benchmarks.agents.player:{PLAYERS[client]}"}},
                "agents": {"processes": processes, "episodes": shape.episodes},
            },
        }
    )


async def _play(config: TidemillConfig, shape: EpisodeShape, client: str) -> ResultRow:
    tokenizer = HfTokenizer(str(config.model.path))
    engine = FixedTimeEngine(tokenizer, shape.calls, shape.call_s)
    workflow = AgentWorkflow(**config.generator.workflow.args)
    async with running(workflow, WorkflowServices(engine, tokenizer, config)):

        async def play(episodes: int, tool_s: float) -> list[SampledCompletion]:
            data = {"calls": shape.calls, "tool_s": tool_s}
            messages = [ChatMessage(role="user", content="What is the number that we look for, and where is it?")]
            task = Task(
                task_id=0, kind="train", n=episodes, sampling=Sampling(max_tokens=256), messages=messages, data=data
            )
            rollout = RolloutContext(engine, tokenizer, task, range(episodes))
            return [_checked(sample) async for sample in workflow.run(rollout)]

        await play(config.generator.agents.processes, 0.0)
        async with _loop_lags() as lags:
            began, cpu = time.monotonic(), time.process_time()
            samples = await play(shape.episodes, shape.tool_s)
            wall_s, cpu_s = time.monotonic() - began, time.process_time() - cpu
    p50, p99 = np.quantile(lags, (0.5, 0.99)).tolist()
    return EPISODES.row(
        client=client,
        processes=config.generator.agents.processes,
        episodes=len(samples),
        calls=sum(int(sample.metrics["calls"]) for sample in samples),
        rows=sum(len(sample.segments) or 1 for sample in samples),
        ideal_s=shape.ideal_s,
        wall_s=wall_s,
        generator_cpu_s=cpu_s,
        workers_cpu_s=_workers_cpu_s(samples),
        lag_p50_ms=p50 * 1000,
        lag_p99_ms=p99 * 1000,
        lag_max_ms=max(lags) * 1000,
    )


def _checked(sample: SampledCompletion | FailedSample) -> SampledCompletion:
    if isinstance(sample, FailedSample):
        raise InfraError(f"an episode of the benchmark failed: {sample.reason}")
    return sample


@asynccontextmanager
async def _loop_lags() -> AsyncIterator[list[float]]:
    """Measure by how many seconds the event loop is late, at each tick of the block."""
    lags: list[float] = []

    async def tick() -> None:
        while True:
            due = time.monotonic() + TICK_S
            await asyncio.sleep(TICK_S)
            lags.append(time.monotonic() - due)

    ticking = asyncio.create_task(tick())
    try:
        yield lags
    finally:
        ticking.cancel()


def _workers_cpu_s(samples: Sequence[SampledCompletion]) -> float:
    """Measure the processor time of the agents' processes from the first start to the last end of an episode."""
    begin: dict[float, float] = {}
    end: dict[float, float] = {}
    for metrics in (sample.metrics for sample in samples):
        process = metrics["process"]
        begin[process] = min(metrics["cpu_begin_s"], begin.get(process, metrics["cpu_begin_s"]))
        end[process] = max(metrics["cpu_end_s"], end.get(process, 0.0))
    return sum(end[process] - begin[process] for process in begin)
