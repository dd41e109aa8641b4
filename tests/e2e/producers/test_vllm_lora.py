"""Adapters in real vLLM: every token is of the version that its span names, and a run with trainer.lora holds together.

One engine serves the whole file, because it takes a quarter of a minute to start.
"""

import asyncio
import importlib.util
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from producers.engines.base import Completion, EngineSettings
from producers.engines.vllm.engine import VllmEngine
from schemas.config import LoraConfig
from schemas.errors import DataError
from schemas.messages import FileSource, Sampling, Span
from tests.support.models.adapters import ALPHA, RANK, compute_logprobs, merge_adapter, write_adapter
from tests.support.models.tiny_model import make_tiny_model
from tests.support.runs.up_runs import UpRun, trained_samples

pytestmark = pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed")

PROMPT = [5, 90, 17, 200, 33, 8, 150, 61]
SHARED = [3 + (7 * k) % 250 for k in range(300)]  # longer than two blocks of the prefix cache
Await = Callable[[Coroutine[Any, Any, Any]], Any]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model"), tied=True)


@pytest.fixture(scope="module")
def files(model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[int, Path | None]:
    """Adapters by seed; 0 is the model without one."""
    folder = tmp_path_factory.mktemp("adapters")
    return {0: None} | {seed: write_adapter(model, folder / f"{seed}.safetensors", seed) for seed in (1, 2)}


@pytest.fixture(scope="module")
def run() -> Iterator[Await]:
    with asyncio.Runner() as runner:
        yield runner.run


@pytest.fixture(scope="module")
def engine(model: Path, run: Await) -> Iterator[VllmEngine]:
    engine = VllmEngine(
        EngineSettings(str(model), "float32", 512, 32, version=3, lora=LoraConfig(rank=RANK, alpha=ALPHA))
    )
    run(engine.start())
    yield engine
    run(engine.close())


@pytest.fixture
def holds(model: Path, files: dict[int, Path | None]) -> Callable[..., None]:
    """Checks log-probabilities within ``spans`` against the model with the adapter of a seed."""

    def check(prompt: list[int], completion: Completion, seeds: dict[int, int], spans: list[Span]) -> None:
        for span in spans:
            whole = merge_adapter(model, files[seeds[span.version]])
            want = compute_logprobs(whole, prompt + completion.tokens)[len(prompt) - 1 :]
            inside = slice(span.start, span.end)
            np.testing.assert_allclose(completion.logprobs[inside], want[inside], atol=1e-3)

    return check


def test_before_the_first_adapter_it_is_the_model_itself_which_nothing_is_left_of_afterwards(
    engine: VllmEngine, files: dict[int, Path | None], run: Await, holds: Callable[..., None]
) -> None:
    assert engine.version == 3

    async def scenario() -> tuple[list[Completion], Completion]:
        running = asyncio.create_task(engine.generate(PROMPT, Sampling(max_tokens=450), n=4))
        await engine.generate(PROMPT[:3], Sampling(max_tokens=3))  # batched with the others: they are under way
        await engine.load(FileSource(files[2]), 4)  # type: ignore[arg-type]
        (fresh,) = await engine.generate(PROMPT, Sampling(max_tokens=8))
        return await running, fresh

    running, fresh = run(scenario())
    assert "abort" in [completion.finish for completion in running]
    for completion in running:
        assert [span.version for span in completion.spans] == [3]
        holds(PROMPT, completion, {3: 0}, completion.spans)
    assert [span.version for span in fresh.spans] == [4]
    holds(PROMPT, fresh, {4: 2}, fresh.spans)


@pytest.mark.parametrize("recompute", [False, True])
def test_requests_in_flight_go_on_under_the_new_adapter_and_their_spans_say_so(
    engine: VllmEngine,
    files: dict[int, Path | None],
    run: Await,
    holds: Callable[..., None],
    monkeypatch: pytest.MonkeyPatch,
    recompute: bool,
) -> None:
    monkeypatch.setattr(engine, "_settings", replace(engine._settings, recompute=recompute))
    old, new = engine.version + 1, engine.version + 2
    seeds = {old: 2, new: 1}

    async def scenario() -> tuple[list[Completion], Completion, Completion]:
        await engine.load(FileSource(files[2]), old)  # type: ignore[arg-type]
        running = asyncio.create_task(engine.generate(PROMPT, Sampling(max_tokens=400), n=16))
        await engine.generate(PROMPT[:3], Sampling(max_tokens=3))
        loading = asyncio.create_task(engine.load(FileSource(files[1]), new))  # type: ignore[arg-type]
        await asyncio.sleep(0)
        (late,) = await engine.generate(PROMPT, Sampling(max_tokens=8))
        await loading
        (fresh,) = await engine.generate(PROMPT, Sampling(max_tokens=8))
        return await running, late, fresh

    running, late, fresh = run(scenario())
    versions = {tuple(span.version for span in completion.spans) for completion in running}
    assert (old, new) in versions
    for completion in running:
        ends = [0, *(span.end for span in completion.spans)]
        assert [span.start for span in completion.spans] == ends[:-1]
        assert ends[-1] == len(completion.tokens)
        # Else later tokens are by keys and values of both.
        holds(PROMPT, completion, seeds, completion.spans if recompute else completion.spans[:1])
    assert [span.version for span in fresh.spans] == [new]
    holds(PROMPT, fresh, seeds, fresh.spans)
    holds(PROMPT, late, seeds, late.spans if recompute else late.spans[:1])


def test_the_probe_is_run_through_the_new_adapter(
    engine: VllmEngine, model: Path, files: dict[int, Path | None], run: Await
) -> None:
    for version, seed in ((20, 1), (21, 2), (22, 1)):
        run(engine.load(FileSource(files[seed]), version))  # type: ignore[arg-type]
        want = compute_logprobs(merge_adapter(model, files[seed]), PROMPT)
        np.testing.assert_allclose(run(engine.logprobs(PROMPT)), want, atol=1e-3)


def test_the_prefix_cache_of_another_version_is_never_used(
    engine: VllmEngine, files: dict[int, Path | None], run: Await, holds: Callable[..., None]
) -> None:
    for version, seed in ((30, 1), (31, 2)):
        run(engine.load(FileSource(files[seed]), version))  # type: ignore[arg-type]
        for _ in range(2):  # the second time from this version's own cache
            (completion,) = run(engine.generate(SHARED, Sampling(max_tokens=4)))
            holds(SHARED, completion, {version: seed}, completion.spans)


def test_one_adapter_is_held_after_many_versions(engine: VllmEngine, files: dict[int, Path | None], run: Await) -> None:
    for version in range(40, 46):
        run(engine.load(FileSource(files[1 + version % 2]), version))  # type: ignore[arg-type]
    assert list(run(engine.llm.list_loras())) == [1]


def test_a_file_that_does_not_fit_is_refused_and_the_old_one_stays(
    engine: VllmEngine, model: Path, files: dict[int, Path | None], run: Await, tmp_path: Path
) -> None:
    run(engine.load(FileSource(files[1]), 50))  # type: ignore[arg-type]
    with pytest.raises(DataError, match="is not an adapter"):
        run(engine.load(FileSource(model / "model.safetensors"), 51))
    with pytest.raises(DataError, match=r"lora_A of .* is \[8, 256\], not \[4, 256\]"):
        run(engine.load(FileSource(write_adapter(model, tmp_path / "other", seed=1, rank=8)), 51))
    assert engine.version == 50
    np.testing.assert_allclose(
        run(engine.logprobs(PROMPT)), compute_logprobs(merge_adapter(model, files[1]), PROMPT), atol=1e-3
    )


REWARD = '''
def even(prompt, completion, prompt_ids, completion_ids, **data):
    """Share of even token ids, which differs between samples, so that there is something to learn from."""
    return sum(token % 2 == 0 for token in completion_ids) / max(len(completion_ids), 1)
'''


@pytest.mark.matrix("LoRA in a whole run; test_published_weights loads and probes an adapter")
@pytest.mark.timeout(400)
def test_a_run_with_lora_trains_and_ends_with_a_merged_model(model: Path, tmp_path: Path) -> None:
    (tmp_path / "rewards.py").write_text(REWARD)
    run = UpRun(
        tmp_path,
        {
            "model": {"path": str(model), "dtype": "float32", "max_length": 32},
            "train": {"name": "arithmetic"},
            "sampling": {"n": 4, "max_tokens": 6},
            "reward": {"terms": [{"name": "rewards.py:even"}]},
            "generator": {"engine": "vllm", "max_samples": 64},
            "trainer": {
                "steps": 6,
                "batch_groups": 8,
                "threads": 1,
                "lora": {"rank": 4},
                "kl": {"coef": 0.01, "reference": "lora_off"},
                "optimizer": {"lr": 3e-3},
                "advantage": {"keep_zero_variance": True},
                "checkpoint": {"every": 3},
            },
        },
    )
    summary = run.finish_whole()
    assert summary["logprob_gap_mean"] < 1e-3
    assert len(run.lines("metrics.jsonl")) == 6
    samples = trained_samples(run)
    assert len(samples) == len(set(samples))
    assert (
        abs(
            compute_logprobs(merge_adapter(run.folder / "model", None), PROMPT)
            - compute_logprobs(merge_adapter(model, None), PROMPT)
        ).max()
        > 1e-3
    )
