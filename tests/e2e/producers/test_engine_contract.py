"""What every engine promises, on each of them: ``producers.engines.base.Engine``.

What an engine says it lacks is skipped in its words. Tests of one kind share one engine.
"""

import asyncio
import importlib.util
import json
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from producers.engines.base import ABILITIES, Completion, EngineSettings, SleepingEngine
from producers.engines.factory import make_engine
from producers.engines.http.engine import HttpEngine, build_engine
from producers.tokenizer import HfTokenizer
from producers.workflows.base import RolloutContext
from producers.workflows.self_teacher import ask_self
from producers.workflows.single_turn import SingleTurn
from producers.workflows.trajectory_builder import SampledCompletion
from schemas.config import HttpEngineConfig
from schemas.errors import DataError, InfraError
from schemas.messages import FileSource, Sampling, Span, Task
from tests.support.models.tiny_model import EOS, make_tiny_model
from tests.support.producers.engine_contract import MAX_LENGTH, Subject
from tests.support.producers.vllm_checks import EVERY, reference_logprobs
from tests.support.runs.command_line import run_tidemill
from tests.support.runs.programs import sglang_command
from tests.support.servers.reached_server import reached

pytestmark = pytest.mark.timeout(900)  # the first test of a kind waits for its server

PROMPT = [5, 90, 17, 200, 33, 8, 150, 61]
SHARED = [3 + (7 * k) % 250 for k in range(300)]  # longer than two blocks of a prefix cache
LONG = Sampling(max_tokens=450)
SCRIPT = {"tokens": 250, "min_length": 300, "max_length": 420, "token_s": 0.001}

needs_vllm = pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed")
KINDS = [
    pytest.param("scripted", marks=pytest.mark.integration),
    pytest.param("transformers", marks=pytest.mark.integration),
    pytest.param("vllm", marks=needs_vllm),
    pytest.param("http-vllm", marks=[needs_vllm, pytest.mark.matrix("a server of vLLM's; its dialect is a unit test")]),
    pytest.param("http-sglang", marks=pytest.mark.matrix("a server of SGLang's; its dialect is a unit test")),
]


def settings(kind: str, folders: dict[int, Path]) -> EngineSettings:
    args: dict[str, Any] = {}
    http = None
    if kind == "scripted":
        args = SCRIPT
    elif kind.startswith("http-"):
        command = {"command": sglang_command()} if kind == "http-sglang" else {}
        http = HttpEngineConfig.model_validate({"dialect": kind.removeprefix("http-"), **command})
    return EngineSettings(
        str(folders[0]), "float32", MAX_LENGTH, 64, version=3, report_every=EVERY, args=args, http=http
    )


@pytest.fixture(scope="module", params=KINDS)
async def subject(
    request: pytest.FixtureRequest, folders: dict[int, Path], anyio_backend: str
) -> AsyncIterator[Subject]:
    """An engine, in the event loop of its module's tests."""
    kind: str = request.param
    engine = make_engine(kind.partition("-")[0], settings(kind, folders), Path())
    await engine.start()
    yield Subject(kind, engine, folders)
    await engine.close()


def test_an_engine_names_what_it_lacks(subject: Subject) -> None:
    assert set(subject.engine.lacks) <= set(ABILITIES)
    assert all(subject.engine.lacks.values())


async def test_other_users_of_the_machine_cannot_order_a_launched_server(subject: Subject) -> None:
    if not isinstance(subject.engine, HttpEngine):
        pytest.skip(f"{subject.kind} launches no server")
    place = subject.engine._place
    assert place is not None
    assert place.folder.stat().st_mode & 0o077 == 0
    if subject.kind == "http-vllm":
        assert place.socket.is_socket()
        return
    async with httpx.AsyncClient(base_url=subject.engine.client.url) as client:
        for path in ("/update_weights_from_disk", "/generate", "/pause_generation", "/v1/completions"):
            assert (await client.post(path, json={})).status_code == 401


async def test_n_samples_each_with_the_log_probabilities_of_what_was_sampled(subject: Subject) -> None:
    assert subject.engine.version == 3
    completions = await subject.engine.generate(PROMPT, Sampling(max_tokens=12, temperature=0.7), n=4)
    assert len(completions) == 4
    assert len({tuple(completion.tokens) for completion in completions}) > 1
    for completion in completions:
        assert completion.spans == [Span(3, 0, len(completion.tokens))]
        stopped = completion.tokens[-1] == EOS if subject.has_weights else len(completion.tokens) < 12
        assert completion.finish == ("stop" if stopped else "length")
        assert completion.logprobs.dtype == np.float32
        subject.assert_sampled(PROMPT, completion, temperature=0.7)


async def test_at_temperature_zero_the_likeliest_token_comes_with_its_log_probability_at_one(subject: Subject) -> None:
    subject.needs("weights")
    greedy = Sampling(max_tokens=12, temperature=0)
    (first,), (again,) = [await subject.engine.generate(PROMPT, greedy) for _ in range(2)]
    assert first.tokens == again.tokens
    subject.assert_sampled(PROMPT, first)


async def test_the_probe_is_what_the_model_says_and_sees_each_new_version(subject: Subject) -> None:
    """Also of the vocabulary's last token, which SGLang tells as another."""
    subject.needs("weights")
    last = json.loads((subject.folders[0] / "config.json").read_text())["vocab_size"] - 1
    probe = [*PROMPT, last, 40]
    for seed in (8, 7, 0):
        await subject.load(seed)
        found = await subject.engine.logprobs(probe)
        assert found.dtype == np.float32
        np.testing.assert_allclose(found, reference_logprobs(subject.folders[seed], probe), atol=1e-5)


async def test_a_prefix_is_gone_on_from_and_counts_as_generated(subject: Subject) -> None:
    prefix = [40, 41, 42, 43]
    (rest,) = await subject.engine.generate(PROMPT, Sampling(max_tokens=9), prefix=prefix)
    assert 0 < len(rest.tokens) <= 5
    subject.assert_sampled(PROMPT + prefix, rest)
    (nothing,) = await subject.engine.generate(PROMPT, Sampling(max_tokens=4), prefix=prefix)
    assert (nothing.tokens, nothing.spans, nothing.finish) == ([], [], "length")


async def test_what_does_not_fit_is_refused_and_what_fits_just_so_is_not(subject: Subject) -> None:
    with pytest.raises(DataError, match="no room"):
        await subject.engine.generate([5] * 600, Sampling(max_tokens=4))
    with pytest.raises(DataError, match="no room"):
        await subject.engine.generate([5] * MAX_LENGTH, Sampling(max_tokens=4))
    (last,) = await subject.engine.generate([5] * (MAX_LENGTH - 1), Sampling(max_tokens=4))
    assert len(last.tokens) == 1
    with pytest.raises(DataError, match="a probe of 1 tokens"):
        await subject.engine.logprobs([5])


async def test_an_id_that_the_model_does_not_have_harms_nobody_else(subject: Subject) -> None:
    subject.needs("weights")
    with pytest.raises(DataError, match="vocabulary"):
        await subject.engine.generate([5, 100_000], Sampling(max_tokens=4))
    (fine,) = await subject.engine.generate(PROMPT, Sampling(max_tokens=4))
    subject.assert_sampled(PROMPT, fine)


async def test_progress_tells_of_growing_and_of_finished_samples(subject: Subject) -> None:
    told: list[tuple[int, Completion]] = []
    completions = await subject.engine.generate(PROMPT, LONG, n=4, progress=lambda k, sample: told.append((k, sample)))
    for k, completion in enumerate(completions):
        *growing, last = [heard for index, heard in told if index == k]
        assert (last.tokens, last.finish) == (completion.tokens, completion.finish)
        assert len(growing) >= len(completion.tokens) // (2 * EVERY) - 1
        for heard in growing:
            length = len(heard.tokens)
            assert heard.finish == "abort"
            assert heard.tokens == completion.tokens[:length]
            np.testing.assert_array_equal(heard.logprobs, completion.logprobs[:length])
            assert heard.spans == [Span(subject.engine.version, 0, length)]


async def test_after_an_update_progress_is_never_wrong_about_versions(subject: Subject) -> None:
    told: list[tuple[int, Completion]] = []

    running = asyncio.create_task(
        subject.engine.generate(PROMPT, LONG, n=8, progress=lambda k, sample: told.append((k, sample)))
    )
    await subject.under_way()
    await subject.load(0)
    completions = await running
    for k, completion in enumerate(completions):
        for heard in [heard for index, heard in told if index == k]:
            length = len(heard.tokens)
            assert heard.spans == [
                Span(span.version, span.start, min(span.end, length))
                for span in completion.spans
                if span.start < length
            ]
    subject.needs("growing_versions")
    assert any(len(heard.spans) == 2 and heard.finish == "abort" for _, heard in told)


async def test_an_update_goes_under_requests_in_flight_and_shows_in_their_spans(subject: Subject) -> None:
    await subject.load(0)
    old = subject.engine.version

    sampling = asyncio.create_task(subject.engine.generate(PROMPT, LONG, n=8))
    await subject.under_way()
    await subject.load(7)
    running = await sampling
    fresh = await subject.engine.generate(PROMPT, Sampling(max_tokens=12), n=2)
    assert subject.engine.version == old + 1
    assert [old, old + 1] in [[span.version for span in completion.spans] for completion in running]
    for completion in running:
        subject.assert_whole(completion)
        before = completion.spans[0].end if completion.spans[0].version == old else 0
        part = Completion(completion.tokens[:before], completion.logprobs[:before], completion.spans[:1], "abort")
        if before:
            subject.assert_sampled(PROMPT, part, seed=0)
    for completion in fresh:
        assert [span.version for span in completion.spans] == [old + 1]
        subject.assert_sampled(PROMPT, completion)


async def test_twenty_updates_under_load_leave_no_token_without_its_version(subject: Subject) -> None:
    first = subject.engine.version

    completions: list[Completion] = []
    over = asyncio.Event()

    async def client(k: int) -> None:
        while not over.is_set():
            completions.extend(await subject.engine.generate([*PROMPT, 10 + k], Sampling(max_tokens=60), n=2))

    async with asyncio.timeout(200), asyncio.TaskGroup() as group:
        for k in range(4):
            group.create_task(client(k))
        for k in range(20):
            await subject.under_way()
            await subject.load((0, 7)[k % 2])
        over.set()
    assert subject.engine.version == first + 20
    for completion in completions:
        subject.assert_whole(completion)
    seen = {span.version for completion in completions for span in completion.spans}
    assert len(seen) > 15
    assert seen <= set(range(first, first + 21))
    if subject.has_weights:
        found = await subject.engine.logprobs(PROMPT)
        np.testing.assert_allclose(found, reference_logprobs(subject.folders[subject.seed], PROMPT), atol=1e-5)


async def test_the_policy_is_its_own_teacher_with_the_weights_of_its_sample_or_not_at_all(subject: Subject) -> None:
    """For the reward term teacher_self: its own sample, read once more after another prompt."""
    subject.needs("weights")
    await subject.load(7)
    tokenizer = HfTokenizer(str(subject.folders[7]))
    task = Task(task_id=1, kind="train", n=4, sampling=Sampling(max_tokens=12), text="3+4=", data={"answer": "7"})
    rollout = RolloutContext(subject.engine, tokenizer, task, range(task.n))
    prompt, samples = rollout.prompt_ids, [sample async for sample in SingleTurn().run(rollout)]
    other, begun = tokenizer.encode("It is 7. 3+4="), len(prompt)

    def ask(sample: SampledCompletion) -> Any:
        return ask_self(subject.engine, tokenizer, task, prompt, sample, {"template": "It is {answer}. {prompt}"}, 60.0)

    for sample, (found, problem) in zip(samples, await asyncio.gather(*map(ask, samples)), strict=True):
        assert problem == ""
        expected = reference_logprobs(subject.folders[7], [*other, *sample.tokens[begun:]])[len(other) - 1 :]
        np.testing.assert_allclose(found.numpy()[begun:], expected, atol=1e-5)
        assert abs(expected - np.array(sample.logprobs[begun:])).max() > 1e-3, "the prompt makes a difference"
    version = await subject.load(0)
    gone = f"weight version {version - 1} was replaced by {version} before it had judged the sample"
    assert await ask(samples[0]) == (None, gone)


async def test_nothing_of_old_weights_is_in_the_prefix_cache(subject: Subject) -> None:
    for seed in (0, 7):
        await subject.load(seed)
        for _ in range(2):  # the second time from this version's own cache
            (completion,) = await subject.engine.generate(SHARED, Sampling(max_tokens=4))
            subject.assert_sampled(SHARED, completion)


async def test_a_request_that_came_while_weights_changed_uses_nothing_of_the_old_ones(subject: Subject) -> None:
    await subject.load(0)

    await subject.engine.generate(SHARED, Sampling(max_tokens=2))  # its prompt is in the prefix cache
    await subject.engine.pause()
    waiting = asyncio.create_task(subject.engine.generate(SHARED, Sampling(max_tokens=4)))
    await asyncio.sleep(0)
    await subject.load(7)
    await subject.engine.resume()
    (completion,) = await waiting
    assert [span.version for span in completion.spans] == [subject.engine.version]
    subject.assert_sampled(SHARED, completion)


async def test_a_request_that_the_engine_has_not_begun_uses_nothing_of_the_old_weights(subject: Subject) -> None:
    """More samples of a prompt than the engine computes at once; its keys and values are cached when the others begin.

    An update ends no sample that has no token yet: no caller has to continue it.
    """
    await subject.load(0)
    old = subject.engine.version
    sampling = asyncio.create_task(subject.engine.generate(SHARED, Sampling(max_tokens=150), n=96))
    await subject.under_way()
    await subject.load(7)
    completions = await sampling
    assert {completion.finish for completion in completions} <= {"length", "stop"}
    late = [completion for completion in completions if completion.spans[0].version == old + 1]
    # Some of the first may end before the update, and others begin in their places.
    assert late or subject.kind in ("scripted", "transformers"), "these begin all of them at once"
    for completion in late:
        subject.assert_sampled(SHARED, completion)


async def test_after_recompute_tokens_are_as_if_the_new_weights_had_read_all_before_them(
    subject: Subject, monkeypatch: pytest.MonkeyPatch
) -> None:
    subject.needs("recompute")
    await subject.load(0)
    old = subject.engine.version
    recomputing = replace(subject.engine._settings, recompute=True)  # type: ignore[attr-defined]
    monkeypatch.setattr(subject.engine, "_settings", recomputing)

    sampling = asyncio.create_task(subject.engine.generate(PROMPT, Sampling(max_tokens=400), n=8))
    await subject.under_way()
    loading = asyncio.create_task(subject.load(7))
    await subject.changing(old)
    waiting = asyncio.create_task(subject.engine.generate(PROMPT, Sampling(max_tokens=4)))
    await loading
    running, (late,) = await sampling, await waiting
    assert (old, old + 1) in {tuple(span.version for span in completion.spans) for completion in running}
    assert [span.version for span in late.spans] == [old + 1]
    for completion in [*running, late]:
        subject.assert_whole(completion)
        for span in completion.spans:
            folder = subject.folders[0 if span.version == old else 7]
            expected = reference_logprobs(folder, PROMPT + completion.tokens)[len(PROMPT) - 1 :]
            inside = slice(span.start, span.end)
            np.testing.assert_allclose(completion.logprobs[inside], expected[inside], atol=1e-5)


async def test_weights_that_do_not_fit_are_refused_and_the_old_ones_stay(subject: Subject, tmp_path: Path) -> None:
    subject.needs("weights")
    version = await subject.load(8)
    other = make_tiny_model(tmp_path / "other", layers=1, tied=True)
    cut = tmp_path / "cut.safetensors"
    cut.write_bytes((subject.folders[0] / "model.safetensors").read_bytes()[:-100])
    for file, reason in ((other / "model.safetensors", "don't fit"), (cut, "cut short")):
        with pytest.raises(DataError, match=reason):
            await subject.engine.load(FileSource(file), version + 1)
    assert subject.engine.version == version
    (completion,) = await subject.engine.generate(PROMPT, Sampling(max_tokens=6))
    assert [span.version for span in completion.spans] == [version]
    subject.assert_sampled(PROMPT, completion)


async def test_a_pause_lets_no_token_out_and_an_update_in_it_leaves_it_paused(subject: Subject) -> None:
    await subject.load(0)
    old = subject.engine.version
    told: dict[int, int] = {}

    running = asyncio.create_task(
        subject.engine.generate(PROMPT, LONG, n=4, progress=lambda k, heard: told.update({k: len(heard.tokens)}))
    )
    await subject.under_way()
    await subject.engine.pause()
    known = dict(told)
    waiting = asyncio.create_task(subject.engine.generate(PROMPT, Sampling(max_tokens=4)))
    done, _ = await asyncio.wait({running, waiting}, timeout=0.5)
    assert not done
    assert subject.engine.growth() is None
    await subject.load(0)
    done, _ = await asyncio.wait({running, waiting}, timeout=0.2)
    assert not done
    await subject.engine.resume()
    completions = await running
    (fresh,) = await waiting
    assert [span.version for span in fresh.spans] == [old + 1]
    for k, completion in enumerate(completions):
        sampled = sum(span.end - span.start for span in completion.spans if span.version == old)
        assert sampled <= known.get(k, 0) + 3 * EVERY, "tokens that were sampled in the pause"
    assert any(len(completion.spans) == 2 for completion in completions)
    for completion in completions:
        subject.assert_whole(completion)


@pytest.mark.parametrize("loads", [False, True])
async def test_sleep_hands_requests_back_and_nothing_is_sampled_before_a_check(subject: Subject, loads: bool) -> None:
    engine = subject.engine
    if not isinstance(engine, SleepingEngine):
        pytest.skip(f"{subject.kind} keeps its device")
    await subject.load(0)
    running = asyncio.create_task(engine.generate(PROMPT, LONG, n=4))
    await subject.under_way()
    await engine.pause()
    for _ in range(2):
        await engine.sleep()
    parts = await running
    assert any(part.finish == "abort" and part.tokens for part in parts)
    for part in parts:
        subject.assert_sampled(PROMPT, part)
    waiting = asyncio.create_task(engine.generate(PROMPT, Sampling(max_tokens=4)))
    await asyncio.sleep(0.1)
    await engine.wake()
    version = await subject.load(7) if loads else engine.version
    scores = await engine.logprobs(SHARED[:50])
    if subject.has_weights:
        assert abs(scores - reference_logprobs(subject.folders[subject.seed], SHARED[:50])).max() < 1e-5
    done, _ = await asyncio.wait({waiting}, timeout=0.2)
    assert not done
    assert engine.growth() is None
    await engine.resume()
    (fresh,) = await waiting
    assert [span.version for span in fresh.spans] == [version]
    subject.assert_sampled(PROMPT, fresh)


@pytest.mark.parametrize("paused", [False, True])
async def test_an_abort_returns_what_there_is_to_go_on_from(subject: Subject, paused: bool) -> None:
    await subject.load(0)
    version = subject.engine.version

    running = asyncio.create_task(subject.engine.generate(PROMPT, LONG, n=8))
    await subject.under_way()
    waiting = None
    if paused:
        await subject.engine.pause()
        waiting = asyncio.create_task(subject.engine.generate(PROMPT, Sampling(max_tokens=4)))
        await asyncio.sleep(0)
    await subject.engine.abort_all()
    async with asyncio.timeout(30):
        parts = await running
        untouched = [] if waiting is None else await waiting
    if paused:
        await subject.engine.resume()
    part = next(part for part in parts if part.finish == "abort")
    limit = len(part.tokens) + 5
    (rest,) = await subject.engine.generate(PROMPT, Sampling(max_tokens=limit), prefix=part.tokens)
    assert [(one.tokens, one.finish) for one in untouched] == [([], "abort")] * paused
    assert part.tokens
    assert len(rest.tokens) <= 5
    subject.assert_sampled(PROMPT + part.tokens, rest)
    for completion in parts:
        assert {span.version for span in completion.spans} <= {version}
        subject.assert_sampled(PROMPT, completion)


async def test_a_caller_who_goes_away_leaves_nothing_running(subject: Subject) -> None:
    running = asyncio.create_task(subject.engine.generate(PROMPT, LONG, n=4))
    await subject.under_way()
    running.cancel()
    await asyncio.wait({running})
    assert running.cancelled()
    async with asyncio.timeout(30):
        while subject.engine.growth() is not None:  # noqa: ASYNC110 - there is no event for it
            await asyncio.sleep(0.01)


async def test_growth_shows_running_requests_and_nothing_else(subject: Subject) -> None:
    assert subject.engine.growth() is None
    running = asyncio.create_task(subject.engine.generate(PROMPT, LONG, n=4))
    await subject.under_way()
    await subject.engine.pause()
    assert not running.done()
    assert subject.engine.growth() is None
    await subject.engine.resume()
    await subject.engine.abort_all()
    await running
    assert subject.engine.growth() is None


async def test_a_stop_string_ends_a_completion_and_is_in_its_ids(subject: Subject) -> None:
    subject.needs("stop")
    letters = list("abcdefghijklmnopqrstuvwxyz")
    completions = await subject.engine.generate(PROMPT, Sampling(max_tokens=200, stop=letters), n=8)
    tokenizer = HfTokenizer(str(subject.folders[0]))
    ends = [tokenizer.decode(completion.tokens[-1:]) for completion in completions if completion.finish == "stop"]
    assert any(end in letters for end in ends)
    for completion in completions:
        assert not any(tokenizer.decode([token]) in letters for token in completion.tokens[:-1])
        subject.assert_sampled(PROMPT, completion)


async def test_a_seed_makes_samples_repeat_whatever_runs_beside_them(subject: Subject) -> None:
    subject.needs("seeds")

    sampling = Sampling(max_tokens=6, seed=3)
    first = await subject.engine.generate(PROMPT, sampling, n=2)
    others = (subject.engine.generate(PROMPT[:k], Sampling(max_tokens=9)) for k in (2, 3, 4))
    again, *_ = await asyncio.gather(subject.engine.generate(PROMPT, sampling, n=2), *others)
    assert [completion.tokens for completion in again] == [completion.tokens for completion in first]
    assert first[0].tokens != first[1].tokens


async def test_the_fill_of_the_cache_is_told_or_it_is_said_that_it_is_not(subject: Subject) -> None:
    assert (subject.engine.cache_usage() is None) == ("cache_usage" in subject.engine.lacks)
    subject.needs("cache_usage")
    running = asyncio.create_task(subject.engine.generate(PROMPT, LONG, n=4))
    await subject.under_way()
    usage = subject.engine.cache_usage()
    assert usage is not None
    assert 0 < usage.used < usage.tokens
    await subject.engine.abort_all()
    await running


async def test_the_openai_protocol_of_the_same_server_answers_evaluations(subject: Subject) -> None:
    if not isinstance(subject.engine, HttpEngine):
        pytest.skip("there is no server")
    greedy = Sampling(max_tokens=8, temperature=0)
    tokenizer = HfTokenizer(str(subject.folders[0]))
    with reached(subject.engine) as address:
        http = HttpEngineConfig.model_validate({"dialect": "openai", **address})
        plain = build_engine(EngineSettings(str(subject.folders[0]), "float32", MAX_LENGTH, 8, http=http))
        await plain.start()
        (found,), (ours,) = await plain.generate(PROMPT, greedy), await subject.engine.generate(PROMPT, greedy)
        await plain.close()
    # Of ids at random some make no character, and servers differ in what they write for these.
    texts = [tokenizer.decode(completion.tokens).replace("\ufffd", "") for completion in (found, ours)]
    assert texts[0] == texts[1] != ""
    assert found.finish == ours.finish


def test_tidemill_eval_asks_the_same_server_over_the_openai_protocol(subject: Subject, tmp_path: Path) -> None:
    if not isinstance(subject.engine, HttpEngine):
        pytest.skip("there is no server")
    (tmp_path / "rewards.py").write_text(
        "def answered(prompt, completion, prompt_ids, completion_ids, **data):\n    return float(bool(completion))\n"
    )
    with reached(subject.engine) as address:
        (tmp_path / "config.yaml").write_text(
            f"""
model: {{path: {subject.folders[0]}, dtype: float32, max_length: 64}}
train: {{name: arithmetic}}
eval:
  dataset: {{name: arithmetic, limit: 6}}
  sampling: {{n: 1, temperature: 0.0, max_tokens: 5}}
sampling: {{n: 2, max_tokens: 5}}
reward:
  terms: [{{name: "rewards.py:answered"}}]
generator: {{engine: http, http: {json.dumps({"dialect": "openai", **address})}, max_samples: 8}}
"""
        )
        done = run_tidemill("eval", "config.yaml", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "held-out reward 1.0000 on 6 samples, 0 failed (http" in done.stdout


async def test_a_server_that_is_there_is_trained_with_and_who_had_it_before_trusts_it_no_more(subject: Subject) -> None:
    if not isinstance(subject.engine, HttpEngine):
        pytest.skip("there is no server")
    found = settings(subject.kind, subject.folders)
    await subject.load(7)
    with reached(subject.engine) as address:
        http = HttpEngineConfig.model_validate({"dialect": subject.kind.removeprefix("http-"), **address})
        engine = HttpEngine(replace(found, version=1000, http=http))
        there = Subject(subject.kind, engine, subject.folders)
        await engine.start()
        (first,) = await engine.generate(PROMPT, Sampling(max_tokens=6))
        there.assert_sampled(PROMPT, first)
        assert await there.load(8) == 1001
        (second,) = await engine.generate(PROMPT, Sampling(max_tokens=6))
        there.assert_sampled(PROMPT, second)
        assert [[span.version for span in one.spans] for one in (first, second)] == [[1000], [1001]]
        await engine.close()
    with pytest.raises(InfraError, match=r"reports weight versions \[1001\] for a sample"):
        await subject.engine.generate(PROMPT, Sampling(max_tokens=6))


async def test_a_closed_engine_says_so(subject: Subject) -> None:
    """Last of those that share the engine."""
    await subject.engine.close()
    with pytest.raises(InfraError, match="closed"):
        await subject.engine.generate(PROMPT, Sampling())
