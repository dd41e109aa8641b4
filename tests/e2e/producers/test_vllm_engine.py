"""The vllm engine against a Hugging Face forward pass, with real vLLM and a real tiny model.

The tests share one engine, and set its weights through the ``weights`` fixture first.
"""

from __future__ import annotations

import asyncio
import importlib.util
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path

import numpy as np
import pytest

from producers.engines.base import Completion, EngineSettings
from producers.engines.vllm.arguments import read_names
from producers.engines.vllm.boot import engine_arguments
from producers.engines.vllm.engine import VllmEngine
from producers.rendering.tokenizer import HfTokenizer
from schemas.errors import ConfigError, DataError
from schemas.messages import FileSource, Sampling, Span
from tests.support.tiny_model import EOS, make_tiny_model
from tests.support.vllm_checks import EVERY, Run, assert_matches, find_engine_cores, is_alive, reference_logprobs

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed"),
]

PROMPT = [5, 90, 17, 200, 33, 8, 150, 61]
SHARED = [3 + (7 * k) % 250 for k in range(300)]  # longer than two blocks of the prefix cache


def test_engine_arguments_reach_vllm_as_they_are(folders: dict[int, Path]):
    from vllm import AsyncEngineArgs

    parallel = {"tensor_parallel_size": 2, "pipeline_parallel_size": 2, "data_parallel_size": 2}
    settings = EngineSettings(str(folders[0]), "bfloat16", 512, 64, args={**parallel, "gpu_memory_utilization": 0.8})
    found = AsyncEngineArgs(**engine_arguments(folders[0], settings, on_cpu=False, devices=8))
    assert {name: getattr(found, name) for name in parallel} == parallel
    assert (found.gpu_memory_utilization, found.dtype, found.max_model_len, found.max_num_seqs) == (
        0.8,
        "bfloat16",
        512,
        64,
    )
    assert found.logprobs_mode == "processed_logprobs"
    assert not found.enforce_eager, "what only a CPU needs is left out"
    wrong = replace(settings, args={"tensor_paralel_size": 2})
    with pytest.raises(ConfigError, match="did you mean tensor_parallel_size"):
        engine_arguments(folders[0], wrong, on_cpu=False, devices=8)


def test_the_names_of_arguments_that_are_read_from_vllms_source_are_all_there_are():
    import vllm
    from vllm import AsyncEngineArgs

    source = Path(vllm.__path__[0]) / "engine" / "arg_utils.py"
    assert sorted(read_names(source)) == sorted(field.name for field in fields(AsyncEngineArgs))


def test_logprobs_are_those_of_the_model_after_temperature(
    engine: VllmEngine, folders: dict[int, Path], run: Run, weights: Callable[[int, int], None]
):
    assert engine.version == 3
    completions = run(engine.generate(PROMPT, Sampling(max_tokens=12, temperature=0.7), n=4))
    assert len(completions) == 4
    for completion in completions:
        assert [(span.version, span.start, span.end) for span in completion.spans] == [(3, 0, len(completion.tokens))]
        assert completion.finish == ("stop" if completion.tokens[-1] == EOS else "length")
        assert_matches(folders[0], PROMPT, completion, temperature=0.7)
    np.testing.assert_allclose(run(engine.logprobs(PROMPT)), reference_logprobs(folders[0], PROMPT), atol=1e-3)


def test_an_update_in_flight_keeps_requests_and_shows_in_their_spans(
    engine: VllmEngine, folders: dict[int, Path], run: Run
):
    async def scenario() -> tuple[list[Completion], list[Completion]]:
        running = asyncio.create_task(engine.generate(PROMPT, Sampling(max_tokens=450), n=16))
        await engine.generate(PROMPT[:3], Sampling(max_tokens=3))  # batched with the others: they are under way
        await engine.load(FileSource(folders[7] / "model.safetensors"), 7)
        return await running, await engine.generate(PROMPT, Sampling(max_tokens=12), n=2)

    running, fresh = run(scenario())
    assert engine.version == 7
    assert [3, 7] in [[span.version for span in completion.spans] for completion in running]
    for completion in running:
        ends = [0, *(span.end for span in completion.spans)]
        assert [span.start for span in completion.spans] == ends[:-1]
        assert ends[-1] == len(completion.tokens)
        old = completion.spans[0].end if completion.spans[0].version == 3 else 0
        expected = reference_logprobs(folders[0], PROMPT + completion.tokens[:old])[len(PROMPT) - 1 :]
        np.testing.assert_allclose(completion.logprobs[:old], expected, atol=1e-3)
    for completion in fresh:
        assert [span.version for span in completion.spans] == [7]
        assert_matches(folders[7], PROMPT, completion)


def test_the_probe_sees_new_weights_tied_head_included(
    engine: VllmEngine, folders: dict[int, Path], run: Run, weights: Callable[[int, int], None]
):
    for seed, version in ((8, 8), (7, 9), (0, 10)):
        weights(seed, version)
        np.testing.assert_allclose(run(engine.logprobs(PROMPT)), reference_logprobs(folders[seed], PROMPT), atol=1e-3)


def test_the_prefix_cache_of_old_weights_is_never_used(
    engine: VllmEngine, folders: dict[int, Path], run: Run, weights: Callable[[int, int], None]
):
    for seed, version in ((0, 20), (7, 21)):
        weights(seed, version)
        for _ in range(2):  # the second time from this version's own cache
            (completion,) = run(engine.generate(SHARED, Sampling(max_tokens=4)))
            assert_matches(folders[seed], SHARED, completion)


def test_a_request_that_came_while_weights_changed_uses_nothing_of_the_old_ones(
    engine: VllmEngine, folders: dict[int, Path], run: Run, weights: Callable[[int, int], None]
):
    weights(0, 22)

    async def scenario() -> Completion:
        await engine.generate(SHARED, Sampling(max_tokens=2))  # its prompt is in the prefix cache
        await engine.pause()
        waiting = asyncio.create_task(engine.generate(SHARED, Sampling(max_tokens=4)))
        await asyncio.sleep(0)
        await engine.load(FileSource(folders[7] / "model.safetensors"), 23)
        await engine.resume()
        (completion,) = await waiting
        return completion

    completion = run(scenario())
    assert [span.version for span in completion.spans] == [23]
    assert_matches(folders[7], SHARED, completion)


def test_samples_are_told_of_as_they_grow_with_their_versions_so_far(
    engine: VllmEngine, folders: dict[int, Path], run: Run, weights: Callable[[int, int], None]
):
    weights(0, 24)
    told: list[tuple[int, Completion]] = []

    async def scenario() -> list[Completion]:
        running = asyncio.create_task(
            engine.generate(PROMPT, Sampling(max_tokens=450), n=8, progress=lambda k, c: told.append((k, c)))
        )
        await engine.generate(PROMPT[:3], Sampling(max_tokens=3))
        await engine.load(FileSource(folders[0] / "model.safetensors"), 25)
        return await running

    completions = run(scenario())
    for k, completion in enumerate(completions):
        *growing, last = [heard for index, heard in told if index == k]
        assert (last.tokens, last.finish) == (completion.tokens, completion.finish)
        assert len(growing) >= len(completion.tokens) // (2 * EVERY)
        for heard in growing:
            length = len(heard.tokens)
            assert heard.tokens == completion.tokens[:length]
            np.testing.assert_array_equal(heard.logprobs, completion.logprobs[:length])
            whole = [Span(s.version, s.start, min(s.end, length)) for s in completion.spans if s.start < length]
            assert heard.spans == whole
    assert any(len(heard.spans) == 2 for _, heard in told)


def test_recompute_makes_tokens_as_if_the_new_weights_had_read_all_before_them(
    engine: VllmEngine,
    folders: dict[int, Path],
    run: Run,
    weights: Callable[[int, int], None],
    monkeypatch: pytest.MonkeyPatch,
):
    weights(0, 26)
    monkeypatch.setattr(engine, "_settings", replace(engine._settings, recompute=True))

    async def scenario() -> tuple[list[Completion], list[Completion]]:
        running = asyncio.create_task(engine.generate(PROMPT, Sampling(max_tokens=400), n=16))
        await engine.generate(PROMPT[:3], Sampling(max_tokens=3))
        loading = asyncio.create_task(engine.load(FileSource(folders[7] / "model.safetensors"), 27))
        await asyncio.sleep(0.05)
        late = asyncio.create_task(engine.generate(PROMPT, Sampling(max_tokens=4)))
        await loading
        return await running, await late

    running, late = run(scenario())
    versions = {tuple(span.version for span in completion.spans) for completion in running}
    assert (26, 27) in versions
    assert [span.version for span in late[0].spans] == [27]
    for completion in [*running, *late]:
        for span in completion.spans:
            expected = reference_logprobs(folders[0 if span.version == 26 else 7], PROMPT + completion.tokens)[
                len(PROMPT) - 1 :
            ]
            inside = slice(span.start, span.end)
            np.testing.assert_allclose(completion.logprobs[inside], expected[inside], atol=1e-3)


def test_weights_that_do_not_fit_are_refused_and_the_old_ones_stay(
    engine: VllmEngine, folders: dict[int, Path], run: Run, weights: Callable[[int, int], None], tmp_path: Path
):
    weights(8, 30)
    other = make_tiny_model(tmp_path / "other", layers=1, tied=True)
    cut = tmp_path / "cut.safetensors"
    cut.write_bytes((folders[0] / "model.safetensors").read_bytes()[:-100])
    for file, reason in ((other / "model.safetensors", "don't fit"), (cut, "cut short")):
        with pytest.raises(DataError, match=reason):
            run(engine.load(FileSource(file), 31))
    assert engine.version == 30
    (completion,) = run(engine.generate(PROMPT, Sampling(max_tokens=6)))
    assert [span.version for span in completion.spans] == [30]
    assert_matches(folders[8], PROMPT, completion)


def test_pause_keeps_requests_and_abort_returns_parts_to_go_on_from(
    engine: VllmEngine, folders: dict[int, Path], run: Run, weights: Callable[[int, int], None]
):
    weights(0, 40)

    async def scenario() -> tuple[list[Completion], Completion, list[Completion]]:
        running = asyncio.create_task(engine.generate(PROMPT, Sampling(max_tokens=450), n=8))
        await engine.generate(PROMPT[:3], Sampling(max_tokens=3))
        await engine.pause()
        await engine.load(FileSource(folders[0] / "model.safetensors"), 41)  # while paused: stays paused
        waiting = asyncio.create_task(engine.generate(PROMPT, Sampling(max_tokens=4)))
        done, _ = await asyncio.wait({running, waiting}, timeout=0.3)
        assert not done
        await engine.abort_all()
        parts, untouched = await running, await waiting
        await engine.resume()
        part = next(part for part in parts if part.finish == "abort")
        limit = len(part.tokens) + 5
        (rest,) = await engine.generate(PROMPT, Sampling(max_tokens=limit), prefix=part.tokens)
        assert len(rest.tokens) <= 5
        assert_matches(folders[0], PROMPT + part.tokens, rest)
        return parts, part, untouched

    parts, part, untouched = run(scenario())
    assert [completion.finish for completion in untouched] == ["abort"]
    assert untouched[0].tokens == []
    assert part.tokens
    for completion in parts:
        assert {span.version for span in completion.spans} == {40}
        assert_matches(folders[0], PROMPT, completion)


def test_growth_shows_running_requests_and_nothing_else(engine: VllmEngine, run: Run):
    async def scenario() -> None:
        assert engine.growth() is None
        running = asyncio.create_task(engine.generate(PROMPT, Sampling(max_tokens=450)))
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

    run(scenario())


def test_a_stop_string_ends_a_completion_and_its_tokens_stay_aligned(
    engine: VllmEngine, folders: dict[int, Path], run: Run, weights: Callable[[int, int], None]
):
    weights(0, 50)
    letters = list("abcdefghijklmnopqrstuvwxyz")
    completions = run(engine.generate(PROMPT, Sampling(max_tokens=200, stop=letters), n=8))
    tokenizer = HfTokenizer(str(folders[0]))
    ends = [tokenizer.decode(completion.tokens[-1:]) for completion in completions if completion.finish == "stop"]
    assert any(end in letters for end in ends)
    for completion in completions:
        assert not any(tokenizer.decode([token]) in letters for token in completion.tokens[:-1])
        assert completion.spans[-1].end == len(completion.tokens)
        assert_matches(folders[0], PROMPT, completion)


def test_impossible_requests_are_data_errors(engine: VllmEngine, run: Run):
    with pytest.raises(DataError, match="no room"):
        run(engine.generate([5] * 600, Sampling(max_tokens=4)))
    with pytest.raises(DataError, match="vllm refuses"):
        run(engine.generate([5, 100_000], Sampling(max_tokens=4)))


BROKEN_UPDATE = """
import asyncio, sys
from pathlib import Path
from producers.engines.base import EngineSettings
from producers.engines.vllm.engine import VllmEngine
from schemas.errors import InfraError
from schemas.messages import Sampling, Span

async def main():
    engine = VllmEngine(EngineSettings(sys.argv[1], "float32", 512, 32))
    await engine.start()
    running = asyncio.create_task(engine.generate([5, 6, 7], Sampling(max_tokens=500), n=8))
    await engine.generate([5, 6], Sampling(max_tokens=3))
    for work in (engine._swap(engine._llm, Path("gone.safetensors"), 1), running, engine.generate([5], Sampling())):
        try:
            print("no error:", await work, flush=True)
        except InfraError as error:
            print("InfraError:", error, flush=True)
    print("ready", flush=True)
    await asyncio.sleep(300)

if __name__ == "__main__":
    asyncio.run(main())
"""


def test_a_half_loaded_engine_never_samples_again_and_dies_with_its_owner(folders: dict[int, Path], tmp_path: Path):
    script = tmp_path / "owner.py"
    script.write_text(BROKEN_UPDATE)
    owner = subprocess.Popen([sys.executable, str(script), str(folders[0])], stdout=subprocess.PIPE, text=True)
    try:
        assert owner.stdout is not None
        lines = []
        for line in owner.stdout:
            if line.startswith("ready"):
                break
            lines.append(line)
        assert [line.partition(":")[0] for line in lines] == ["InfraError"] * 3
        assert "weights are undefined" in lines[1]
        cores = find_engine_cores(owner.pid)
        assert cores
    finally:
        owner.kill()
        owner.wait(timeout=30)
    deadline = time.monotonic() + 30
    while any(is_alive(pid) for pid in cores):
        assert time.monotonic() < deadline, f"engine core {cores} outlived its owner"
        time.sleep(0.1)
