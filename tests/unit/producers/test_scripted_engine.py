"""The scripted engine keeps the engine contract, without a model."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from producers.engines.base import EngineSettings
from producers.engines.scripted import ScriptedEngine
from schemas.errors import ConfigError, DataError, InfraError
from schemas.messages import FileSource, Sampling, Span

LONG = {"min_length": 50, "max_length": 50, "token_s": 0.001}


def engine(seed: int = 0, version: int = 0, **args: Any) -> ScriptedEngine:
    return ScriptedEngine(EngineSettings("none", "float32", 100, 8, version=version, seed=seed, args=args))


def test_the_same_seed_gives_the_same_completions_whatever_runs_beside_them():
    async def run() -> None:
        alone = await engine().generate([1, 2], Sampling(seed=5), n=3)
        crowd = engine()
        among = await asyncio.gather(*(crowd.generate([1, k], Sampling(seed=5), n=3) for k in range(4)))
        assert [c.tokens for c in among[2]] == [c.tokens for c in alone]
        other = await engine(seed=1).generate([1, 2], Sampling(seed=5), n=3)
        assert [c.tokens for c in other] != [c.tokens for c in alone]

    asyncio.run(run())


def test_lengths_follow_the_script_and_only_max_tokens_truncates():
    async def run() -> None:
        cut, whole = engine(min_length=6, max_length=6), engine(min_length=6, max_length=6)
        (short,) = await cut.generate([1], Sampling(max_tokens=4))
        (full,) = await whole.generate([1], Sampling(max_tokens=6))
        assert (len(short.tokens), short.finish) == (4, "length")
        assert (len(full.tokens), full.finish) == (6, "stop")
        assert full.logprobs.shape == (6,)
        assert (full.logprobs <= 0).all()

    asyncio.run(run())


def test_a_new_version_shows_in_the_spans_of_running_requests():
    async def run() -> None:
        subject = engine(version=3, **LONG)
        task = asyncio.create_task(subject.generate([1], Sampling(max_tokens=60)))
        await asyncio.sleep(0.02)
        await subject.load(FileSource(Path("nowhere")), 7)
        (completion,) = await task
        assert [span.version for span in completion.spans] == [3, 7]
        assert completion.spans[0].start == 0
        assert completion.spans[0].end == completion.spans[1].start
        assert completion.spans[1].end == len(completion.tokens)

    asyncio.run(run())


def test_pause_keeps_requests_and_abort_returns_what_there_is():
    async def run() -> None:
        subject = engine(**LONG)
        task = asyncio.create_task(subject.generate([1], Sampling(max_tokens=60), n=2))
        await asyncio.sleep(0.01)
        await subject.pause()
        done, _ = await asyncio.wait({task}, timeout=0.1)
        assert not done
        await subject.abort_all()
        for completion in await task:
            assert completion.finish == "abort"
            assert len(completion.tokens) == len(completion.logprobs) < 50
            assert completion.spans == ([Span(0, 0, len(completion.tokens))] if completion.tokens else [])
        await subject.resume()
        (later,) = await subject.generate([1], Sampling(max_tokens=60))
        assert later.finish == "stop"

    asyncio.run(run())


def test_a_prefix_counts_as_generated():
    async def run() -> None:
        subject = engine(min_length=8, max_length=8)
        (rest,) = await subject.generate([1], Sampling(max_tokens=5), prefix=[4, 4, 4])
        assert (len(rest.tokens), rest.finish) == (2, "length")
        (nothing,) = await subject.generate([1], Sampling(max_tokens=3), prefix=[4, 4, 4])
        assert (nothing.tokens, nothing.finish) == ([], "length")

    asyncio.run(run())


def test_scripted_failures_and_errors_are_typed():
    async def run() -> None:
        subject = engine(fail_every=2)
        await subject.generate([1], Sampling())
        with pytest.raises(InfraError, match="scripted failure"):
            await subject.generate([1], Sampling())
        with pytest.raises(DataError, match="no room"):
            await subject.generate([1] * 100, Sampling())
        await subject.close()
        with pytest.raises(InfraError, match="closed"):
            await subject.generate([1], Sampling())
        with pytest.raises(ConfigError, match="min_lenght"):
            engine(min_lenght=3)

    asyncio.run(run())


def test_it_loads_no_model_library():
    code = (
        "import sys, producers.engines.scripted; print({'torch', 'transformers', 'vllm'} & set(sys.modules) or 'none')"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert found.stdout.strip() == "none"


def test_growth_shows_running_requests_and_nothing_else():
    async def scenario() -> None:
        subject = engine(**LONG)
        assert subject.growth() is None
        running = asyncio.create_task(subject.generate([1], Sampling(max_tokens=60)))
        seen: set[int | None] = set()
        async with asyncio.timeout(60):
            while len(seen - {None}) < 3:
                seen.add(subject.growth())
                await asyncio.sleep(0.001)
        await subject.pause()
        assert not running.done()
        assert subject.growth() is None
        await subject.resume()
        await subject.abort_all()
        await running
        assert subject.growth() is None

    asyncio.run(scenario())


def test_growing_samples_are_told_of_and_finished_ones_before_slower_ones():
    async def run() -> None:
        told: list[tuple[int, int, str]] = []
        subject = ScriptedEngine(EngineSettings("none", "float32", 100, 8, report_every=4, args={"max_length": 30}))
        completions = await subject.generate(
            [1], Sampling(max_tokens=60), n=5, progress=lambda k, c: told.append((k, len(c.tokens), c.finish))
        )
        for k, completion in enumerate(completions):
            length = len(completion.tokens)
            heard = [(count, finish) for index, count, finish in told if index == k]
            assert heard == [(count, "abort") for count in range(4, length, 4)] + [(length, "stop")]
        finished = [k for k, _, finish in told if finish == "stop"]
        assert finished == sorted(range(5), key=lambda k: len(completions[k].tokens))

    asyncio.run(run())
