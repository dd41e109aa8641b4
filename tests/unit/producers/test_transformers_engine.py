"""The transformers engine against a plain forward pass of a real tiny model."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from producers.engines.base import Completion, EngineSettings
from producers.engines.transformers import batching
from producers.engines.transformers.batching import Draw, draw, truncate
from producers.engines.transformers.engine import TransformersEngine
from producers.engines.transformers.weights import map_tensors
from schemas.errors import ConfigError, DataError, InfraError
from schemas.messages import FileSource, Sampling, Span
from tests.support.tiny_model import make_tiny_model

PROMPTS = [[5, 6, 7], [90, 80, 70, 60, 50, 40, 30, 20], [11], [200, 100, 150, 3, 4]]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Two models of one shape: version 0 and version 7."""
    folder = tmp_path_factory.mktemp("models")
    return make_tiny_model(folder / "0", seed=0), make_tiny_model(folder / "7", seed=7)


def run(folder: Path, scenario: Callable[[TransformersEngine], Awaitable[None]], **settings: Any) -> None:
    async def whole() -> None:
        defaults = {"max_length": 256, "max_samples": 16, **settings}
        engine = TransformersEngine(EngineSettings(str(folder), "float32", **defaults))
        await engine.start()
        try:
            await scenario(engine)
        finally:
            await engine.close()

    asyncio.run(whole())


async def underway(engine: TransformersEngine) -> None:
    """Wait until a request has its first token."""
    async with asyncio.timeout(30):
        while not engine._batch.rows:  # noqa: ASYNC110 - a test's look inside, there is no event for it
            await asyncio.sleep(0.001)


def reference(folder: Path, tokens: Sequence[int], temperature: float = 1.0) -> np.ndarray:
    """Log-probability of each token after the first, float32 [T-1]."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        logprobs = torch.log_softmax(model(torch.tensor([list(tokens)])).logits[0] / temperature, dim=-1)
    return logprobs[:-1].gather(1, torch.tensor(list(tokens))[1:, None])[:, 0].numpy()


def assert_matches(folder: Path, prompt: list[int], completion: Completion, temperature: float = 1.0) -> None:
    expected = reference(folder, prompt + completion.tokens, temperature)[len(prompt) - 1 :]
    np.testing.assert_allclose(completion.logprobs, expected, atol=1e-4)


def test_logprobs_are_those_of_a_plain_forward_for_requests_that_come_and_go(models: tuple[Path, Path]):
    async def scenario(engine: TransformersEngine) -> None:
        async def one(index: int, prompt: list[int]) -> list[Completion]:
            await asyncio.sleep(0.005 * index)  # so that they join a batch under way
            return await engine.generate(prompt, Sampling(max_tokens=5 + 7 * index, temperature=0.8), n=3)

        results = await asyncio.gather(*(one(i, p) for i, p in enumerate(PROMPTS)))
        for prompt, completions in zip(PROMPTS, results, strict=True):
            assert len(completions) == 3
            for completion in completions:
                assert completion.finish == ("stop" if completion.tokens[-1] == 2 else "length")
                assert_matches(models[0], prompt, completion, temperature=0.8)

    run(models[0], scenario)


def test_more_samples_than_fit_wait_and_are_all_answered(models: tuple[Path, Path]):
    async def scenario(engine: TransformersEngine) -> None:
        results = await asyncio.gather(*(engine.generate(p, Sampling(max_tokens=4), n=3) for p in PROMPTS))
        assert [len(group) for group in results] == [3, 3, 3, 3]

    run(models[0], scenario, max_samples=4)


def test_an_update_in_flight_shows_in_the_spans_and_new_requests_use_it(models: tuple[Path, Path]):
    async def scenario(engine: TransformersEngine) -> None:
        await engine.pause()
        running = asyncio.create_task(engine.generate(PROMPTS[0], Sampling(max_tokens=200), n=8))
        await engine.resume()
        await underway(engine)
        await engine.load(FileSource(models[1] / "model.safetensors"), 7)
        assert engine.version == 7
        (fresh,) = await engine.generate(PROMPTS[1], Sampling(max_tokens=8))
        assert [span.version for span in fresh.spans] == [7]
        assert_matches(models[1], PROMPTS[1], fresh)
        np.testing.assert_allclose(await engine.logprobs(PROMPTS[1]), reference(models[1], PROMPTS[1]), atol=1e-4)
        completions = await running
        assert [0, 7] in [[span.version for span in c.spans] for c in completions]
        for completion in completions:
            assert completion.spans[0].start == 0
            assert completion.spans[-1].end == len(completion.tokens)

    run(models[0], scenario)


def test_weights_that_do_not_fit_are_refused_and_the_old_ones_stay(models: tuple[Path, Path], tmp_path: Path):
    other = make_tiny_model(tmp_path, hidden=32)

    async def scenario(engine: TransformersEngine) -> None:
        with pytest.raises(DataError, match="don't fit"):
            await engine.load(FileSource(other / "model.safetensors"), 7)
        assert engine.version == 0
        np.testing.assert_allclose(await engine.logprobs(PROMPTS[1]), reference(models[0], PROMPTS[1]), atol=1e-4)

    run(models[0], scenario)


def test_mapped_weights_outlive_their_file(models: tuple[Path, Path], tmp_path: Path):
    """A version may be freed while requests in flight are still waited for."""
    wanted = load_file(models[0] / "model.safetensors")
    copy = tmp_path / "v"
    copy.write_bytes((models[0] / "model.safetensors").read_bytes())
    mapped = map_tensors(copy, wanted)
    copy.unlink()
    assert mapped.keys() == wanted.keys()
    assert all(torch.equal(mapped[name], wanted[name]) for name in wanted)
    with pytest.raises(FileNotFoundError):
        map_tensors(copy, wanted)


def test_tied_embeddings_are_updated_on_both_ends(tmp_path: Path):
    old, new = (make_tiny_model(tmp_path / str(seed), seed=seed, tied=True) for seed in (0, 7))

    async def scenario(engine: TransformersEngine) -> None:
        await engine.load(FileSource(new / "model.safetensors"), 1)
        np.testing.assert_allclose(await engine.logprobs(PROMPTS[1]), reference(new, PROMPTS[1]), atol=1e-4)

    run(old, scenario)


def test_pause_keeps_requests_and_abort_returns_what_there_is(models: tuple[Path, Path]):
    async def scenario(engine: TransformersEngine) -> None:
        running = asyncio.create_task(engine.generate(PROMPTS[0], Sampling(max_tokens=200), n=4))
        await underway(engine)
        await engine.pause()
        before = [len(row.tokens) for row in engine._batch.rows]
        await engine.logprobs(PROMPTS[0])  # answered while paused
        assert [len(row.tokens) for row in engine._batch.rows] == before
        await engine.abort_all()
        completions = await running
        assert "abort" in [completion.finish for completion in completions]
        for completion in completions:
            assert_matches(models[0], PROMPTS[0], completion)
            (resumed,) = await _resume(engine, completion)
            assert_matches(models[0], PROMPTS[0] + completion.tokens, resumed)

    async def _resume(engine: TransformersEngine, part: Completion) -> list[Completion]:
        await engine.resume()
        limit = len(part.tokens) + 3
        return await engine.generate(PROMPTS[0], Sampling(max_tokens=limit), prefix=part.tokens)

    run(models[0], scenario)


def test_growth_shows_running_requests_and_nothing_else(models: tuple[Path, Path]):
    async def scenario(engine: TransformersEngine) -> None:
        assert engine.growth() is None
        running = asyncio.create_task(engine.generate(PROMPTS[0], Sampling(max_tokens=100)))
        seen: set[int | None] = set()
        async with asyncio.timeout(60):
            while len(seen - {None}) < 3:
                seen.add(engine.growth())
                await asyncio.sleep(0.001)
        await engine.pause()
        assert not running.done()
        assert engine.growth() is None
        await engine.resume()
        await engine.abort_all()
        await running
        assert engine.growth() is None

    run(models[0], scenario)


def test_a_seed_makes_samples_repeat_whatever_runs_beside_them(models: tuple[Path, Path]):
    async def scenario(engine: TransformersEngine) -> None:
        sampling = Sampling(max_tokens=6, seed=3)
        first = await engine.generate(PROMPTS[0], sampling, n=2)
        others = (engine.generate(p, Sampling(max_tokens=9)) for p in PROMPTS)
        again, *_ = await asyncio.gather(engine.generate(PROMPTS[0], sampling, n=2), *others)
        assert [c.tokens for c in again] == [c.tokens for c in first]
        assert first[0].tokens != first[1].tokens

    run(models[0], scenario)


def test_greedy_takes_the_likeliest_token_and_a_stop_string_ends_it(models: tuple[Path, Path]):
    async def scenario(engine: TransformersEngine) -> None:
        (greedy,) = await engine.generate(PROMPTS[0], Sampling(max_tokens=12, temperature=0))
        assert_matches(models[0], PROMPTS[0], greedy)
        stop = engine._batch._decode(greedy.tokens[3:5])
        (stopped,) = await engine.generate(PROMPTS[0], Sampling(max_tokens=12, temperature=0, stop=[stop]))
        assert stopped.finish == "stop"
        assert stopped.tokens == greedy.tokens[: len(stopped.tokens)]
        assert engine._batch._decode(stopped.tokens).endswith(stop)

    run(models[0], scenario)


def test_truncation_renormalises_over_what_is_left():
    logprobs = torch.log(torch.tensor([[0.5, 0.3, 0.15, 0.05]] * 3))
    kept = truncate(logprobs, [Draw(top_k=2), Draw(top_p=0.6), Draw()]).exp()
    torch.testing.assert_close(kept[0], torch.tensor([0.625, 0.375, 0.0, 0.0]))
    torch.testing.assert_close(kept[1], torch.tensor([0.625, 0.375, 0.0, 0.0]))
    torch.testing.assert_close(kept[2], logprobs[2].exp())
    tokens, chosen = draw(logprobs[:1], [Draw(temperature=0)])
    assert tokens == [0]
    assert chosen[0] == pytest.approx(float(np.log(0.5)), abs=1e-6)


def test_a_closed_engine_and_a_wrong_folder_say_so(models: tuple[Path, Path], tmp_path: Path):
    async def scenario(engine: TransformersEngine) -> None:
        await engine.close()
        with pytest.raises(InfraError, match="closed"):
            await engine.generate(PROMPTS[0], Sampling())

    run(models[0], scenario)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ConfigError, match="can't load"):
        run(tmp_path, scenario)


async def update_under_way(engine: TransformersEngine, new: Path) -> tuple[list[Completion], list[Completion]]:
    """Completions that were in flight when version 7 was loaded."""
    running = asyncio.create_task(engine.generate(PROMPTS[0], Sampling(max_tokens=120), n=6))
    other = asyncio.create_task(engine.generate(PROMPTS[1], Sampling(max_tokens=100)))  # of another length
    await underway(engine)
    await engine.load(FileSource(new / "model.safetensors"), 7)
    return [*await running, *await other]


def test_after_recompute_tokens_are_as_if_the_new_weights_had_read_all_before_them(models: tuple[Path, Path]):
    async def scenario(engine: TransformersEngine) -> None:
        running = await update_under_way(engine, models[1])
        assert {span.version for completion in running for span in completion.spans} == {0, 7}
        for prompt, completion in zip([PROMPTS[0]] * 6 + [PROMPTS[1]], running, strict=True):
            for span in completion.spans:
                expected = reference(models[span.version != 0], prompt + completion.tokens)[len(prompt) - 1 :]
                inside = slice(span.start, span.end)
                np.testing.assert_allclose(completion.logprobs[inside], expected[inside], atol=1e-4)

    run(models[0], scenario, recompute=True)


def test_growing_and_finished_samples_are_told_of_in_order(models: tuple[Path, Path]):
    async def scenario(engine: TransformersEngine) -> None:
        told: list[tuple[int, Completion]] = []
        completions = await engine.generate(
            PROMPTS[0], Sampling(max_tokens=40), n=4, progress=lambda k, c: told.append((k, c))
        )
        for k, completion in enumerate(completions):
            *growing, last = [heard for index, heard in told if index == k]
            assert last.tokens == completion.tokens
            assert last.finish == completion.finish
            assert len(growing) == (len(completion.tokens) - 1) // 6
            for heard in growing:
                assert heard.finish == "abort"
                assert heard.tokens == completion.tokens[: len(heard.tokens)]
                assert heard.spans == [Span(0, 0, len(heard.tokens))]
                assert len(heard.logprobs) == len(heard.tokens)

    run(models[0], scenario, report_every=6)


def test_requests_that_come_together_are_prefilled_together(models: tuple[Path, Path]):
    async def scenario(engine: TransformersEngine) -> None:
        passes: list[tuple[int, ...]] = []
        forward = engine._batch._forward

        def counted(ids: torch.Tensor, *others: Any) -> Any:
            passes.append(tuple(ids.shape))
            return forward(ids, *others)

        engine._batch._forward = counted  # type: ignore[method-assign]
        await engine.pause()
        running = [asyncio.create_task(engine.generate(p, Sampling(max_tokens=3), n=2)) for p in PROMPTS]
        await asyncio.sleep(0)  # each has put its request
        await engine.resume()
        for prompt, completions in zip(PROMPTS, await asyncio.gather(*running), strict=True):
            for completion in completions:
                assert_matches(models[0], prompt, completion)
        assert passes[0] == (len(PROMPTS), max(map(len, PROMPTS)))
        assert len(passes) == 3  # one pass a token of all samples

    run(models[0], scenario)


def test_prompts_that_are_too_many_for_one_pass_go_through_several(
    models: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(batching, "PREFILL", 8)

    async def scenario(engine: TransformersEngine) -> None:
        results = await asyncio.gather(*(engine.generate(p, Sampling(max_tokens=4)) for p in PROMPTS))
        for prompt, (completion,) in zip(PROMPTS, results, strict=True):
            assert_matches(models[0], prompt, completion)

    run(models[0], scenario)
    waves = batching._waves([([0] * length, []) for length in (1, 2, 3, 9, 9)])
    assert [[len(prompt) for prompt, _ in wave] for wave in waves] == [[1, 2], [3], [9], [9]]
