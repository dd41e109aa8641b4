"""``tidemill bench generator``: tokens per second through the generator service, and through its engine alone.

One engine serves both, in turns, with the same prompts and sampling and as many requests at once; so a busy machine
slows both. Ours is everything that a run has: tasks from a real server, workflow, version spans, publication,
leases and heartbeats. Bare is a loop over vLLM's ``AsyncLLM.generate``, or with the engine http a client of the same
server that posts requests and counts the tokens of the answers.
"""

from __future__ import annotations

import asyncio
import importlib.util
import itertools
import math
import shutil
import tempfile
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.harness.processes import describe, serving
from benchmarks.harness.report import ResultRow, Table
from benchmarks.harness.rounds import Advance, Figures, Round, compare, ratio, summarize
from benchmarks.harness.workload import ENDLESS
from broker.client import Broker
from broker.weights.transports import make_transport
from producers.engines.base import EngineSettings
from producers.engines.factory import make_engine
from producers.engines.request_gate import SampleCall
from producers.generator.service import Generator
from schemas.config import parse_config
from schemas.errors import ConfigError, InfraError
from schemas.messages import Sampling, Task
from schemas.system.lifecycle import StopFlag
from schemas.weight_files import read_shapes

if TYPE_CHECKING:
    from broker.flow.trainer_session import TrainerSession

PROMPT = 16
"""Tokens of a prompt."""
DEADLINE_S = 600.0
"""Longest time of a round."""
LOOK_S = 0.05
"""Interval at which the end of a round is polled, at the expense of the service."""


GENERATOR = Table(
    "Generator service beside its engine driven bare",
    {
        "load": "{concurrency} samples at once, groups of {group}, up to {tokens} tokens",
        "model": "{parameters:,} parameters, {dtype}",
        "tokens/s through the service": "{by[ours][tokens_per_s]:,.0f}",
        "tokens/s of the bare engine": "{by[bare][tokens_per_s]:,.0f}, {release}",
        "ratio": "{ratio:.3f}, {rounds} rounds",
        "Python µs a token": "{by[ours][cpu_us_per_token].median:.0f}, bare {by[bare][cpu_us_per_token].median:.0f}",
    },
)
"""The service (``ours``) beside its engine (``bare``). cpu_us_per_token: of this process alone."""


Ask = Callable[[int, str], Awaitable[int]]
"""A call that completes the prompt of an index, under a name, and returns the number of tokens."""


def write_model(folder: Path, max_length: int) -> None:
    """Write a random Qwen2 with a byte tokenizer to ``folder``."""
    from transformers.utils import logging

    from deploy.offline.tiny_model import byte_tokenizer, write_tiny_model

    logging.disable_progress_bar()
    tokenizer = byte_tokenizer(["<pad>", "<eos>"], pad_token="<pad>", eos_token="<eos>")
    write_tiny_model(folder, tokenizer, 0, hidden=128, intermediate=512, layers=4, heads=4, max_length=max_length)


def measure(
    concurrency: int,
    samples: int,
    group: int,
    tokens: int,
    rounds: int,
    advance: Advance,
    url: str | None,
    engine: str,
    command: list[str] | None,
    model: Path | None,
    dtype: str,
) -> ResultRow:
    """Measure one row: ``rounds`` of both in turns, after one round of each that does not count.

    samples: of one round, in groups of ``group``, each of up to ``tokens`` generated tokens. engine: vllm, or the
    dialect of a server that is launched, http-vllm or http-sglang, with ``command`` if that is given. model: a folder
    with a Qwen2, by default a random one of a million parameters.
    """
    if engine == "vllm" and importlib.util.find_spec("vllm") is None:
        raise ConfigError("bench generator --engine vllm measures vLLM, which is not installed")
    dialect = engine.partition("-")[2]
    setting = {"engine": "http", "http": {"dialect": dialect, "command": command}} if dialect else {"engine": engine}
    with tempfile.TemporaryDirectory(prefix="tidemill-bench-") as name, serving(url, "everysec") as server:
        folder = Path(name)
        if model is None:
            write_model(model := folder / "model", max_length=PROMPT + tokens + 1)
        bench = Bench(folder, server, concurrency, group, tokens, setting, model, dtype)
        with asyncio.Runner() as runner:
            done = bench.run(runner, samples // group, rounds, advance)
        return GENERATOR.row(
            concurrency=concurrency,
            samples=samples // group * group,
            group=group,
            tokens=tokens,
            parameters=sum(math.prod(shape) for shape in read_shapes(model).values()),
            dtype=dtype,
            rounds=rounds,
            by=summarize(done),
            ratio=ratio(done, "tokens_per_s", "ours", "bare"),
            server=describe(server),
            engine=engine,
            release=bench.release,
        )


class Bench:
    """A run with a generator and no other service. setting: of ``generator``, which names the engine."""

    def __init__(
        self,
        folder: Path,
        url: str,
        concurrency: int,
        group: int,
        tokens: int,
        setting: dict[str, Any],
        model: Path,
        dtype: str,
    ) -> None:
        self._folder = folder
        self._model = model
        self._dtype = dtype
        self._concurrency = concurrency
        self._group = group
        self._sampling = Sampling(max_tokens=tokens)
        self._config = parse_config(self._settings(url, tokens, setting))
        self._broker = Broker.connect(self._config)
        length, generator = self._config.model.max_length, self._config.generator
        settings = EngineSettings(str(model), dtype, length, concurrency, http=generator.http)
        self._engine: Any = make_engine(generator.engine, settings, folder)
        self.release = ""

    def _settings(self, url: str, tokens: int, setting: dict[str, Any]) -> dict[str, Any]:
        return {
            "run": {"name": f"bench-generator-{time.time_ns()}", "folder": str(self._folder / "run")},
            "model": {"path": str(self._model), "dtype": self._dtype, "max_length": PROMPT + tokens + 1},
            "train": {"name": "arithmetic"},
            "sampling": {"n": self._group, "max_tokens": tokens},
            "reward": {"terms": [{"name": "exact"}]},
            "trainer": {"advantage": {"name": "raw"}},
            "generator": {**setting, "max_samples": self._concurrency},
            "broker": {"url": url},
        }

    def run(self, runner: asyncio.Runner, groups: int, rounds: int, advance: Advance) -> list[Round]:
        """Run both in turns, on the same prompts."""
        firsts = {name: itertools.count(0, groups) for name in ("bare", "ours")}
        stop = StopFlag()
        try:
            self._begin(groups * (rounds + 1))
            service = runner.run(self._start_service(stop))
            try:
                return compare(
                    {
                        "bare": lambda: runner.run(self._bare(next(firsts["bare"]), groups)),
                        "ours": lambda: runner.run(self._ours(service, next(firsts["ours"]), groups)),
                    },
                    rounds,
                    advance=advance,
                )
            finally:
                stop.set()
                runner.run(_end(service))
        finally:
            self._broker.purge()

    async def _start_service(self, stop: StopFlag) -> asyncio.Task[None]:
        service = asyncio.create_task(Generator(self._config, "generator-0", self._broker, self._engine).run(stop))
        await self._until(service, lambda: any(beat.version == 0 for beat in self._broker.heartbeats.list()))
        return service

    def _begin(self, groups: int) -> None:
        """Take over as a trainer with slots for all groups, and publish version 0."""
        from broker.flow.progress import TakeoverRequest

        training: TrainerSession = self._broker.trainer_session()
        leader_term = training.take_over(
            TakeoverRequest(batch=groups, staleness=0, window=1, steps=ENDLESS, max_uncommitted=1)
        ).leader_term
        file = self._folder / "weights.safetensors"
        shutil.copyfile(self._model / "model.safetensors", file)
        self._broker.weight_publication(
            make_transport(self._broker.connection, "file", self._folder / "weights"), keep=2
        ).publish(file, version=0, step=0, leader_term=leader_term, tensors=[], probe=None)

    async def _ours(self, service: asyncio.Task[None], first: int, groups: int) -> Figures:
        ledger = self._broker.ledger
        before = await asyncio.to_thread(ledger.read_state)
        tasks = [
            Task(task_id=i, kind="train", n=self._group, sampling=self._sampling, token_ids=prompt(i))
            for i in range(first, first + groups)
        ]
        started, cpu = time.perf_counter(), time.process_time()
        await asyncio.to_thread(ledger.admit_all, tasks)
        wanted = before.samples_published + groups * self._group
        await self._until(service, lambda: self._published() >= wanted)
        seconds, cpu = time.perf_counter() - started, time.process_time() - cpu
        tokens = (await asyncio.to_thread(ledger.read_state)).tokens_generated - before.tokens_generated
        return {"tokens_per_s": tokens / seconds, "cpu_us_per_token": cpu * 1e6 / tokens}

    def _published(self) -> int:
        connection = self._broker.connection
        found: Any = connection.run("counting samples", lambda client: client.hget(connection.keys.counts, "published"))
        return int(found or 0)

    async def _until(self, service: asyncio.Task[None], condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + DEADLINE_S
        while not await asyncio.to_thread(condition):
            if service.done():
                await service
                raise InfraError("the generator service ended in the middle of the benchmark")
            if time.monotonic() > deadline:
                raise InfraError(f"the generator service did not finish its samples within {DEADLINE_S:.0f} s")
            await asyncio.sleep(LOOK_S)

    async def _bare(self, first: int, groups: int) -> Figures:
        """Run as many workers as concurrent requests; each takes the next request of the list."""
        requests = [(i, f"bare-{i}-{k}.") for i in range(first, first + groups) for k in range(self._group)]
        ask = self._ask_vllm() if self._config.generator.http is None else self._ask_server()
        started, cpu = time.perf_counter(), time.process_time()
        generated = await count_tokens(ask, requests, self._concurrency)
        seconds, cpu = time.perf_counter() - started, time.process_time() - cpu
        return {"tokens_per_s": generated / seconds, "cpu_us_per_token": cpu * 1e6 / generated}

    def _ask_vllm(self) -> Ask:
        import vllm
        from vllm.inputs.engine import tokens_input
        from vllm.sampling_params import RequestOutputKind, SamplingParams

        self.release = f"vLLM {vllm.__version__}"
        params = SamplingParams(
            temperature=1.0,
            max_tokens=self._sampling.max_tokens,
            logprobs=0,
            flat_logprobs=True,
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )

        async def ask(index: int, name: str) -> int:
            generated = 0
            async for output in self._engine.llm.generate(tokens_input(prompt(index)), params, name):
                generated += len(output.outputs[0].token_ids)
            return generated

        return ask

    def _ask_server(self) -> Ask:
        """Send a request, wait for the whole response, and count its tokens."""
        client, dialect = self._engine.client, self._engine.dialect
        self.release = self._engine.release

        async def ask(index: int, name: str) -> int:
            tokens = self._sampling.max_tokens
            call = SampleCall(prompt(index), None, self._sampling, tokens, 1, None)
            body = dialect.request(name, call, 0, tokens, "bare")
            answer = await client.post(dialect.path, {**body, "stream": False}, DEADLINE_S)
            if "meta_info" in answer:
                # SGLang may return only the last part of the ids if its streams send only new ones.
                return int(answer["meta_info"]["completion_tokens"])
            return len(answer["choices"][0]["token_ids"])

        return ask


async def _end(service: asyncio.Task[None]) -> None:
    await service


async def count_tokens(ask: Ask, requests: Sequence[tuple[int, str]], concurrency: int) -> int:
    """Send all requests, a number of them at once, and return the number of tokens."""
    left = iter(requests)

    async def work() -> int:
        # Each worker has its own sum: a shared one would be read before an await, while others add to it.
        return sum([await ask(index, name) for index, name in left])

    return sum(await asyncio.gather(*(work() for _ in range(concurrency))))


def prompt(index: int) -> list[int]:
    """Return tokens, without special ones, that differ between tasks from the first token on."""
    return [2 + (index * 31 + 7 * position * (index % 13 + 1)) % 250 for position in range(PROMPT)]
