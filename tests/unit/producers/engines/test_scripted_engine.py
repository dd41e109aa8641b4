"""What is the scripted engine's own; tests/e2e/producers/test_engine_contract.py has what all engines promise."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from typing import Any

import pytest

from producers.engines.base import EngineSettings
from producers.engines.scripted import ScriptedEngine
from schemas.errors import ConfigError, DataError, InfraError
from schemas.messages import Sampling

LONG = {"min_length": 50, "max_length": 50, "token_s": 0.001}


def engine(seed: int = 0, version: int = 0, **args: Any) -> ScriptedEngine:
    return ScriptedEngine(EngineSettings("none", "float32", 100, 8, version=version, seed=seed, args=args))


async def test_the_same_seed_gives_the_same_completions_whatever_runs_beside_them():
    alone = await engine().generate([1, 2], Sampling(seed=5), n=3)
    crowd = engine()
    among = await asyncio.gather(*(crowd.generate([1, k], Sampling(seed=5), n=3) for k in range(4)))
    assert [c.tokens for c in among[2]] == [c.tokens for c in alone]
    other = await engine(seed=1).generate([1, 2], Sampling(seed=5), n=3)
    assert [c.tokens for c in other] != [c.tokens for c in alone]


async def test_lengths_follow_the_script_and_only_max_tokens_truncates():
    cut, whole = engine(min_length=6, max_length=6), engine(min_length=6, max_length=6)
    (short,) = await cut.generate([1], Sampling(max_tokens=4))
    (full,) = await whole.generate([1], Sampling(max_tokens=6))
    assert (len(short.tokens), short.finish) == (4, "length")
    assert (len(full.tokens), full.finish) == (6, "stop")
    assert full.logprobs.shape == (6,)
    assert (full.logprobs <= 0).all()


async def test_scripted_failures_and_errors_are_typed():
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


def test_it_loads_no_model_library():
    code = (
        "import sys, producers.engines.scripted; print({'torch', 'transformers', 'vllm'} & set(sys.modules) or 'none')"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert found.stdout.strip() == "none"


async def test_growth_shows_running_requests_and_nothing_else():
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


async def test_growing_samples_are_told_of_and_finished_ones_before_slower_ones():
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
