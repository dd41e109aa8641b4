"""The http engine with a server that fails: what it samples then is never used."""

import asyncio
import base64
import json
import sys
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import psutil
import pytest
from fastapi import Response

from deploy.offline.evaluate import evaluate_model
from producers.engines.base import EngineSettings, SleepingEngine
from producers.engines.factory import check_abilities
from producers.engines.http.dialect import options
from producers.engines.http.engine import HttpEngine, build_engine
from producers.engines.http.server import PrivatePlace
from producers.engines.http.sglang import SglangDialect
from producers.engines.http.streamed_sample import StreamedSample, parse_spans
from producers.engines.http.vllm import VllmDialect
from producers.engines.request_gate import SampleCall
from schemas.config import HttpEngineConfig
from schemas.errors import ConfigError, DataError, InfraError
from schemas.messages import FileSource, Sampling, Span
from tests.support.configurations import minimal_config
from tests.support.models.tiny_model import make_tiny_model
from tests.support.producers.faulty_server import FaultyServer, served

FOUR = Sampling(max_tokens=4)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model"))


def make(model: Path, **http: Any) -> HttpEngine:
    settings = HttpEngineConfig.model_validate({"dialect": "vllm", **http})
    return HttpEngine(EngineSettings(str(model), "float32", 256, 8, version=3, http=settings))


@asynccontextmanager
async def started(model: Path) -> AsyncIterator[tuple[HttpEngine, FaultyServer]]:
    async with served() as server:
        engine = make(model, url=server.url)
        await engine.start()
        try:
            yield engine, server
        finally:
            await engine.close()


async def spoil(model: Path, spoilt: Callable[[FaultyServer], object]) -> None:
    """Sample once from a server with this fault, which ends the engine also when the server is well again."""
    async with started(model) as (engine, server):
        spoilt(server)
        with pytest.raises(InfraError):
            await engine.generate([5], FOUR)
        server.spans, server.change = None, {}
        server.raw.clear()
        with pytest.raises(InfraError, match="can't be used"):
            await engine.generate([5], FOUR)


async def test_a_server_that_is_there_is_given_the_models_weights_first(model: Path) -> None:
    async with started(model) as (engine, server):
        began = server.asked.index("/start_weight_update")
        assert server.asked[began - 1] == "/pause"
        assert server.asked[began:][:2] == ["/start_weight_update", "/update_weights"]
        assert server.version == "3"
        (completion,) = await engine.generate([5, 6], FOUR)
        assert (completion.tokens, completion.spans) == ([5] * 4, [Span(3, 0, 4)])


async def test_requests_after_an_update_share_no_cache_with_those_before(model: Path) -> None:
    async with started(model) as (engine, server):
        await engine.generate([5, 6], FOUR, n=2)
        await engine.load(FileSource(model / "model.safetensors"), 4)
        await engine.generate([5, 6], FOUR)
        assert len(server.salts) == 3
        assert len(set(server.salts)) == 2
        assert server.salts[0] == server.salts[1]


@pytest.mark.parametrize(
    ("path", "answer"),
    [
        ("/pause", (500, {"error": "no"})),
        ("/start_weight_update", (500, {"error": "no"})),
        ("/update_weights", (400, {"error": "Weights were updated, but the cache was not flushed"})),
        ("/finish_weight_update", (503, {})),
        ("/weight_info", (200, {"weight_version": "3"})),
        ("/resume", (500, {"error": "no"})),
    ],
)
async def test_an_update_without_success_ends_the_engine(model: Path, path: str, answer: tuple[int, Any]) -> None:
    async with started(model) as (engine, server):
        server.answers[path] = answer
        with pytest.raises(InfraError):
            await engine.load(FileSource(model / "model.safetensors"), 4)
        server.answers.clear()
        for call in (engine.generate([5], FOUR), engine.logprobs([5, 6]), engine.resume()):
            with pytest.raises(InfraError, match="can't be used"):
                await call


@pytest.mark.parametrize(
    "spans",
    [
        [],
        [{"version": "3", "start": 0, "end": 3}],
        [{"version": "3", "start": 0, "end": 2}, {"version": "4", "start": 3, "end": 4}],
        [{"version": "default", "start": 0, "end": 4}],
        [{"version": "9", "start": 0, "end": 4}],
    ],
    ids=["none", "short", "gap", "not ours", "never loaded"],
)
async def test_a_sample_of_unknown_versions_is_never_given_out(model: Path, spans: list[dict[str, Any]]) -> None:
    await spoil(model, lambda server: setattr(server, "spans", spans))


async def test_a_sample_of_weights_from_before_its_request_is_never_given_out(model: Path) -> None:
    async with started(model) as (engine, server):
        await engine.load(FileSource(model / "model.safetensors"), 4)
        server.spans = [{"version": "3", "start": 0, "end": 4}]
        for _ in range(2):
            with pytest.raises(InfraError, match=r"reports weight versions \[3\] for a sample, but 4 is in use"):
                await engine.generate([5], FOUR)


async def test_weights_that_are_taken_back_under_a_sample_are_no_fault_of_the_server(model: Path) -> None:
    async with started(model) as (engine, server):
        file, held = FileSource(model / "model.safetensors"), asyncio.Event()
        await engine.load(file, 4)
        server.held = held
        running = asyncio.create_task(engine.generate([5], FOUR))
        async with asyncio.timeout(20):
            while len(server.salts) < 1:  # noqa: ASYNC110 - the request is on its way to the server
                await asyncio.sleep(0.01)
        await engine.load(file, 3)
        server.spans = [{"version": "4", "start": 0, "end": 1}, {"version": "3", "start": 1, "end": 4}]
        held.set()
        (completion,) = await running
        assert completion.spans == [Span(4, 0, 1), Span(3, 1, 4)]


@pytest.mark.parametrize(
    "change",
    [
        {"weight_versions": ["3"]},
        {"weight_versions": {"version": "3"}},
        {"weight_versions": 3},
        {"finish_reason": 7},
        {"finish_reason": ["length"]},
        {"token_ids": ["5"], "logprobs": {"content": [{"token_id": "5", "logprob": -1.0}]}},
        {"token_ids": [5.0], "logprobs": {"content": [{"token_id": 5.0, "logprob": -1.0}]}},
        {"logprobs": {"content": [{"token_id": 5, "logprob": None}]}},
        {"logprobs": {"content": [{"token_id": 5, "logprob": "-1"}]}},
        {"logprobs": 5},
        {"token_ids": 5},
    ],
    ids=str,
)
async def test_an_event_of_another_form_ends_the_engine(model: Path, change: dict[str, Any]) -> None:
    await spoil(model, lambda server: server.change.update(change))


@pytest.mark.parametrize(
    ("body", "headers"),
    [
        (b'data: {"choices": "\xff"}\n\n', {}),
        (b"data: " + b"[" * 100_000 + b"\n\n", {}),
        (b"no gzip", {"content-encoding": "gzip"}),
    ],
    ids=["no UTF-8", "deep", "encoding"],
)
async def test_a_stream_that_is_undecodable_ends_the_engine(model: Path, body: bytes, headers: dict[str, str]) -> None:
    await spoil(model, lambda server: server.raw.update({"/inference/v1/generate": Response(body, headers=headers)}))


@pytest.mark.parametrize(
    "meta",
    [
        {"weight_versions": ["3"]},
        {"finish_reason": {"type": "abort", "status_code": "BAD_REQUEST"}},
        {"finish_reason": "length"},
        {"output_token_logprobs": [[None, 7]]},
        {"completion_tokens": "1"},
    ],
    ids=str,
)
def test_an_event_of_another_form_of_sglang_is_an_error_of_the_server(meta: dict[str, Any]) -> None:
    right = {
        "finish_reason": {"type": "length"},
        "completion_tokens": 1,
        "output_token_logprobs": [[-1.0, 7]],
        "weight_versions": [{"version": "3", "start": 0, "end": 1}],
    }
    dialect, sample = SglangDialect(), StreamedSample(3)
    dialect.read(sample, {"output_ids": [7], "meta_info": right})
    assert sample.completion().tokens == [7]
    with pytest.raises(InfraError):
        dialect.read(StreamedSample(3), {"output_ids": [7], "meta_info": right | meta})


async def test_a_stream_that_breaks_off_or_lacks_log_probabilities_ends_the_engine(model: Path) -> None:
    async with started(model) as (engine, server):
        server.breaks_after = 2
        for _ in range(2):
            with pytest.raises(InfraError, match="can't be used: the server ended a sample without a finish reason"):
                await engine.generate([5], FOUR)
    async with started(model) as (engine, server):
        server.logprobs_short = 1
        with pytest.raises(InfraError, match="log-probabilities"):
            await engine.generate([5], FOUR)


async def test_a_caller_who_leaves_at_once_leaves_no_request_behind(model: Path) -> None:
    async with started(model) as (engine, server):
        server.token_s = 0.01
        leaving = asyncio.create_task(engine.generate([5], Sampling(max_tokens=200), n=2))
        await asyncio.sleep(0)
        leaving.cancel()
        await asyncio.wait({leaving})
        assert engine.growth() is None


async def test_a_request_that_the_server_refuses_is_an_error_of_the_data(model: Path) -> None:
    async with started(model) as (engine, server):
        server.answers["/inference/v1/generate"] = (400, {"error": {"message": "too odd"}})
        with pytest.raises(DataError, match="too odd"):
            await engine.generate([5], FOUR)
        server.answers.clear()
        assert len(await engine.generate([5], FOUR, n=2)) == 2


async def test_a_server_that_is_not_well_is_noticed_though_nothing_runs(model: Path) -> None:
    async with started(model) as (engine, server):
        server.healthy = False
        async with asyncio.timeout(20):
            await asyncio.shield(engine._failure)
        with pytest.raises(InfraError, match="unhealthy"):
            await engine.generate([5], FOUR)


async def test_a_plain_openai_server_is_refused_in_a_line(model: Path) -> None:
    async def scenario(path: str, answer: tuple[int, Any]) -> str:
        async with served() as server:
            server.answers[path] = answer
            engine = make(model, url=server.url)
            with pytest.raises(ConfigError) as caught:
                await engine.start()
            return str(caught.value)

    missing = (404, {"detail": "Not Found"})
    for path, said in (
        ("/version", "is not a vLLM server"),
        ("/weight_info", "VLLM_SERVER_DEV_MODE=1; as it is, it serves tidemill eval"),
        ("/inference/v1/generate", "--enable-scale-out; as it is, it serves tidemill eval"),
    ):
        text = await scenario(path, missing)
        assert said in text
        assert "\n" not in text
    assert "reports its settings in an unknown form" in await scenario("/server_info", (200, {}))


async def test_a_plain_openai_server_answers_evaluations_and_is_not_trained_with(model: Path) -> None:
    http = HttpEngineConfig.model_validate({"dialect": "openai", "url": "http://nowhere"})

    async with served() as server:
        server.answers["/v1/models"] = (200, {"data": [{"id": "small"}]})
        server.answers["/v1/completions"] = (200, {"choices": [{"text": "42", "finish_reason": "stop"}]})
        settings = EngineSettings(str(model), "float32", 256, 8, http=http.model_copy(update={"url": server.url}))
        engine = build_engine(settings)
        with pytest.raises(ConfigError, match="the engine does not support it: OpenAI's protocol"):
            check_abilities(engine, {"training": "generator.engine http"})
        await engine.start()
        completions = await engine.generate([5, 6], FOUR, n=2)
        assert [len(completion.tokens) for completion in completions] == [2, 2]
        with pytest.raises(ConfigError, match="serves evaluations and judges"):
            await engine.load(FileSource(model / "model.safetensors"), 4)
        await engine.close()


async def test_tidemill_eval_takes_answers_without_log_probabilities(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    async with served() as server:
        server.answers["/v1/models"] = (200, {"data": [{"id": "small"}]})
        server.answers["/v1/completions"] = (200, {"choices": [{"text": "42", "finish_reason": "stop"}]})
        config = minimal_config(
            run={"folder": str(tmp_path)},
            model={"path": str(model), "dtype": "float32", "max_length": 64},
            sampling={"max_tokens": 4},
            eval={"dataset": {"name": "arithmetic", "limit": 3}, "sampling": {"n": 1, "max_tokens": 4}},
            generator={"engine": "http", "http": {"dialect": "openai", "url": server.url}},
        )
        assert config.eval is not None
        await asyncio.to_thread(evaluate_model, config, config.eval, None, model)
    told = capsys.readouterr().out
    assert "on 3 samples, 0 failed" in told
    assert f"against {model}, by prompts: 0 won, 3 tied, 0 lost: Elo +0 (" in told


async def test_a_launched_server_that_ends_says_why_and_one_that_hangs_leaves_nothing(model: Path) -> None:
    before = set(psutil.Process().children(recursive=True))
    fails = make(model, command=[sys.executable, "-c", "raise SystemExit('Error: no such device')"])
    with pytest.raises(InfraError, match="exit code 1: Error: no such device"):
        await fails.start()
    code = "import subprocess, time; subprocess.Popen(['sleep', '300']); time.sleep(300)"
    hangs = make(model, command=[sys.executable, "-c", code], start_s=1.0)
    with pytest.raises(InfraError, match=r"not healthy after generator.http.start_s 1 s"):
        await hangs.start()
    deadline = time.monotonic() + 20
    while set(psutil.Process().children(recursive=True)) - before:
        assert time.monotonic() < deadline
        await asyncio.sleep(0.05)


def test_arguments_become_options_and_those_that_are_ours_are_refused() -> None:
    args = {"tensor_parallel_size": 2, "enforce_eager": True, "prefix_caching": False, "list": [1, 2], "map": {"a": 1}}
    assert options(args, {}, negative=True) == [
        *("--tensor-parallel-size", "2", "--enforce-eager", "--no-prefix-caching"),
        *("--list", "1", "2", "--map", '{"a": 1}'),
    ]
    assert options({"x": False, "y": None}, {}, negative=False) == []
    settings = EngineSettings("m", "float32", 256, 8, args={"max-model-len": 4}, http=None)
    with pytest.raises(ConfigError, match=r"generator.args.max-model-len can't be set: it is model.max_length"):
        VllmDialect().command(settings, Path("m"), PrivatePlace())


def test_other_users_cannot_reach_a_launched_server_or_read_its_key(model: Path) -> None:
    settings = EngineSettings(str(model), "float32", 64, 4)
    place = PrivatePlace()
    command = VllmDialect().command(settings, model, place)
    assert command[command.index("--uds") + 1] == str(place.socket)
    assert not {"--host", "--port"} & set(command)
    command = SglangDialect().command(settings, model, place)
    secret = Path(command[command.index("--config") + 1])
    assert secret.read_text() == f"api-key: {place.key}\n"
    assert not any(place.key in word for word in command), "every user can read command lines"
    assert [path.stat().st_mode & 0o077 for path in (secret, place.folder)] == [0, 0]
    place.close()
    assert not place.folder.exists()


def test_spans_without_tokens_are_left_out() -> None:
    empty, one = {"version": "3", "start": 0, "end": 0}, {"version": "4", "start": 0, "end": 2}
    assert parse_spans([empty, one], 2) == [Span(4, 0, 2)]
    assert parse_spans([empty], 0) == []


def test_a_setting_that_needs_what_the_engine_lacks_is_refused(model: Path) -> None:
    engine = make(model)
    check_abilities(engine, {"stop": "sampling.stop"})
    with pytest.raises(ConfigError, match="the engine does not support it: the server loads whole models"):
        check_abilities(engine, {"lora": "trainer.lora"})


async def test_sglang_tells_the_last_id_of_a_probe_as_0_and_every_other_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"vocab_size": 14}))
    dialect, told = SglangDialect(), [[None, 5], [-1.0, 0], [-2.0, 7]]

    async def get(_: str) -> Any:
        return {"version": "0.5.23", "context_length": 64}

    async def post(*_: Any, **__: Any) -> Any:
        return {"meta_info": {"input_token_logprobs": told}}

    client: Any = SimpleNamespace(get=get, post=post, shown="url")
    await dialect.check(client, EngineSettings(str(tmp_path), "float32", 64, 4), tmp_path)
    assert await dialect.logprobs(client, [5, 13, 7], "s") == [-1.0, -2.0]
    with pytest.raises(InfraError, match="of other tokens than those of the probe"):
        await dialect.logprobs(client, [5, 12, 7], "s")


async def test_a_launched_sglang_frees_its_memory_once_and_wakes_once(model: Path) -> None:
    engine: Any = build_engine(
        EngineSettings(str(model), "float32", 256, 8, http=HttpEngineConfig.model_validate({"dialect": "sglang"}))
    )
    asked: list[str] = []

    async def post(route: str, *_: Any) -> None:
        asked.append(route)

    engine._failure = asyncio.get_running_loop().create_future()
    engine._core = SimpleNamespace(post=post)
    for _ in range(2):
        await engine.sleep()
    assert asked == ["/release_memory_occupation"]
    for _ in range(2):
        await engine.wake()
    assert asked[1:] == ["/resume_memory_occupation", "/continue_generation"]
    assert not isinstance(make(model), SleepingEngine)


async def test_sglang_tells_experts_at_the_end_of_a_sample(tmp_path: Path) -> None:
    """As its server answers; int32 in base64, of every token but the last."""
    config = {"num_hidden_layers": 3, "num_experts": 300, "num_experts_per_tok": 2}
    (tmp_path / "config.json").write_text(json.dumps(config))
    dialect = SglangDialect()
    settings = EngineSettings(str(tmp_path), "float32", 64, 4, routed_experts=True)
    assert "--enable-return-routed-experts" in dialect.command(settings, tmp_path, PrivatePlace())

    async def get(_: str) -> Any:
        return {"version": "0.5.23", "context_length": 64, "enable_return_routed_experts": started_with}

    client: Any = SimpleNamespace(get=get, shown="url")
    started_with = False
    with pytest.raises(ConfigError, match="must be started with --enable-return-routed-experts"):
        await dialect.check(client, settings, tmp_path)
    started_with = True
    await dialect.check(client, settings, tmp_path)
    assert dialect.request("x.", SampleCall([1], None, FOUR, 4, 1, None), 0, 4, "s")["return_routed_experts"] is True
    chosen = np.arange(4 * 3 * 2, dtype="<i4") + 270
    event = {
        "output_ids": [7, 8],
        "meta_info": {
            "finish_reason": {"type": "length"},
            "completion_tokens": 2,
            "output_token_logprobs": [[-1.0, 7], [-2.0, 8]],
            "weight_versions": [{"version": "3", "start": 0, "end": 2}],
            "routed_experts": base64.b64encode(chosen.tobytes()).decode(),
        },
    }
    sample = StreamedSample(3)
    dialect.read(sample, event)
    found = sample.completion().routed_experts
    assert found is not None
    assert found.dtype == np.uint16
    assert np.array_equal(found, chosen.reshape(4, 3, 2))
    event["meta_info"]["routed_experts"] = "AAAA"  # type: ignore[index]
    with pytest.raises(InfraError, match="routed experts that can't be read"):
        dialect.read(StreamedSample(3), event)
