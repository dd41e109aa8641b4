"""The scripted and the transformers engine by themselves; tests/e2e/producers/test_engine_contract.py covers both."""

import asyncio
import json
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from producers.engines.base import Completion, EngineSettings
from producers.engines.scripted import ScriptedEngine
from producers.engines.transformers import batching
from producers.engines.transformers.batching import BatchRow, ContinuousBatch, Draw, draw, truncate
from producers.engines.transformers.engine import TransformersEngine
from producers.engines.transformers.weights import map_tensors
from producers.tokenizer import HfTokenizer
from schemas.errors import ConfigError, DataError, InfraError
from schemas.messages import FileSource, Sampling
from tests.support.models.tiny_mixture import choices, make_mixture
from tests.support.models.tiny_model import EOS, make_tiny_model
from tests.support.producers.vllm_checks import reference_logprobs

LONG = {"min_length": 50, "max_length": 50, "token_s": 0.001}
PROMPTS = [[5, 6, 7], [90, 80, 70, 60, 50, 40, 30, 20], [11], [200, 100, 150, 3, 4]]


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


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Two models of one shape: version 0 and version 7."""
    folder = tmp_path_factory.mktemp("models")
    return make_tiny_model(folder / "0", seed=0), make_tiny_model(folder / "7", seed=7)


@asynccontextmanager
async def running_engine(folder: Path, **settings: Any) -> AsyncIterator[TransformersEngine]:
    defaults = {"max_length": 256, "max_samples": 16, **settings}
    engine = TransformersEngine(EngineSettings(str(folder), "float32", **defaults))
    await engine.start()
    try:
        yield engine
    finally:
        await engine.close()


def assert_matches(folder: Path, prompt: list[int], completion: Completion, temperature: float = 1.0) -> None:
    expected = reference_logprobs(folder, prompt + completion.tokens, temperature)[len(prompt) - 1 :]
    np.testing.assert_allclose(completion.logprobs, expected, atol=1e-4)


async def test_logprobs_are_those_of_a_plain_forward_for_requests_that_come_and_go(models: tuple[Path, Path]):
    async with running_engine(models[0]) as engine:

        async def one(index: int, prompt: list[int]) -> list[Completion]:
            await asyncio.sleep(0.005 * index)  # so that they join a batch under way
            return await engine.generate(prompt, Sampling(max_tokens=5 + 7 * index, temperature=0.8), n=3)

        results = await asyncio.gather(*(one(i, p) for i, p in enumerate(PROMPTS)))
        for prompt, completions in zip(PROMPTS, results, strict=True):
            assert len(completions) == 3
            for completion in completions:
                assert completion.finish == ("stop" if completion.tokens[-1] == 2 else "length")
                assert_matches(models[0], prompt, completion, temperature=0.8)


@pytest.mark.parametrize("exact", [False, True])
async def test_the_tokenizers_end_of_sequence_ends_a_sample_that_the_models_files_do_not_end(
    tmp_path: Path, exact: bool
) -> None:
    folder = make_tiny_model(tmp_path / "model")
    for name in ("config.json", "generation_config.json"):
        if (folder / name).is_file():
            config = json.loads((folder / name).read_text())
            (folder / name).write_text(json.dumps({**config, "eos_token_id": None}))
    async with running_engine(folder, exact=exact) as engine:
        completions = await engine.generate(PROMPTS[0], Sampling(max_tokens=200, seed=3), n=16)
    assert any(completion.finish == "stop" for completion in completions)
    for completion in completions:
        assert EOS not in completion.tokens[:-1]
        assert completion.finish == ("stop" if completion.tokens[-1] == EOS else "length")


def test_a_stop_string_of_characters_with_several_bytes_is_found(models: tuple[Path, Path]) -> None:
    tokenizer = HfTokenizer(str(models[0]))
    batch = ContinuousBatch(AutoModelForCausalLM.from_pretrained(models[0]), set(), tokenizer.decode)
    stop = "\u7b54\u6848\u7d50\u675f\u3002\U0001f600"
    ids = tokenizer.encode(f"a{stop}")
    assert len(ids) > len(stop) + 8, "a token is a byte"
    for length in range(1, len(ids) + 1):
        row = BatchRow(Draw(), 100, [stop], tokens=ids[:length])
        assert batch._stopped(row) == (length == len(ids))


async def test_more_samples_than_fit_wait_and_are_all_answered(models: tuple[Path, Path]):
    async with running_engine(models[0], max_samples=4) as engine:
        results = await asyncio.gather(*(engine.generate(p, Sampling(max_tokens=4), n=3) for p in PROMPTS))
        assert [len(group) for group in results] == [3, 3, 3, 3]


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


async def test_tied_embeddings_are_updated_on_both_ends(tmp_path: Path):
    old, new = (make_tiny_model(tmp_path / str(seed), seed=seed, tied=True) for seed in (0, 7))

    async with running_engine(old) as engine:
        await engine.load(FileSource(new / "model.safetensors"), 1)
        np.testing.assert_allclose(await engine.logprobs(PROMPTS[1]), reference_logprobs(new, PROMPTS[1]), atol=1e-4)


def test_truncation_renormalises_over_what_is_left():
    logprobs = torch.log(torch.tensor([[0.5, 0.3, 0.15, 0.05]] * 3))
    kept = truncate(logprobs, [Draw(top_k=2), Draw(top_p=0.6), Draw()]).exp()
    torch.testing.assert_close(kept[0], torch.tensor([0.625, 0.375, 0.0, 0.0]))
    torch.testing.assert_close(kept[1], torch.tensor([0.625, 0.375, 0.0, 0.0]))
    torch.testing.assert_close(kept[2], logprobs[2].exp())
    tokens, chosen = draw(logprobs[:1], [Draw(temperature=0)])
    assert tokens == [0]
    assert chosen[0] == pytest.approx(float(np.log(0.5)), abs=1e-6)


async def test_a_closed_engine_and_a_wrong_folder_say_so(models: tuple[Path, Path], tmp_path: Path):
    async with running_engine(models[0]) as engine:
        await engine.close()
        with pytest.raises(InfraError, match="closed"):
            await engine.generate(PROMPTS[0], Sampling())
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ConfigError, match="can't load"):
        async with running_engine(tmp_path):
            pass


async def test_requests_that_come_together_are_prefilled_together(models: tuple[Path, Path]):
    async with running_engine(models[0]) as engine:
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


async def test_many_prompts_go_through_several_passes(models: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(batching, "PREFILL", 8)

    async with running_engine(models[0]) as engine:
        results = await asyncio.gather(*(engine.generate(p, Sampling(max_tokens=4)) for p in PROMPTS))
        for prompt, (completion,) in zip(PROMPTS, results, strict=True):
            assert_matches(models[0], prompt, completion)
    waves = batching._waves([([0] * length, []) for length in (1, 2, 3, 9, 9)])
    assert [[len(prompt) for prompt, _ in wave] for wave in waves] == [[1, 2], [3], [9], [9]]


async def test_a_mixtures_experts_are_told_of_every_token_that_was_read(tmp_path: Path):
    folder = make_mixture(tmp_path / "mixture")
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)

    async with running_engine(folder, routed_experts=True) as engine:

        async def one(index: int, prompt: list[int]) -> list[Completion]:
            await asyncio.sleep(0.005 * index)
            return await engine.generate(prompt, Sampling(max_tokens=4 + 3 * index), n=2)

        results = await asyncio.gather(*(one(i, p) for i, p in enumerate(PROMPTS)))
        for prompt, completions in zip(PROMPTS, results, strict=True):
            for completion in completions:
                assert completion.routed_experts is not None
                expected = choices(model, [*prompt, *completion.tokens[:-1]])
                assert np.array_equal(np.sort(completion.routed_experts, -1), expected)


async def test_nobody_notes_experts_unasked_and_a_model_needs_some(tmp_path: Path, models: tuple[Path, Path]):
    async with running_engine(make_mixture(tmp_path / "mixture")) as engine:
        (completion,) = await engine.generate(PROMPTS[0], Sampling(max_tokens=3))
        assert completion.routed_experts is None
    with pytest.raises(ConfigError, match=r"trainer\.router_replay: Qwen2ForCausalLM has no experts"):
        async with running_engine(models[0], routed_experts=True):
            pass
