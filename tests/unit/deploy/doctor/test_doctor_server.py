"""What ``tidemill doctor`` says of the server of the engine http."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from deploy.checks.finding import Finding
from deploy.checks.preflight import check_packages
from deploy.doctor.inference_server import check_inference_server
from schemas.config import TidemillConfig, parse_config
from schemas.errors import ConfigError
from tests.support.producers.faulty_server import FaultyServer, served


@pytest.fixture
def server() -> Iterator[FaultyServer]:
    """A server in a thread of its own, so that what looks at it may wait."""
    ready, over = threading.Event(), threading.Event()
    found: list[FaultyServer] = []

    async def serve() -> None:
        async with served() as faulty:
            found.append(faulty)
            ready.set()
            await asyncio.to_thread(over.wait)

    thread = threading.Thread(target=lambda: asyncio.run(serve()))
    thread.start()
    assert ready.wait(10)
    yield found[0]
    over.set()
    thread.join(10)


def config(**http: Any) -> TidemillConfig:
    return parse_config(
        {
            "model": {"path": "m", "max_length": 2048},
            "train": {"name": "arithmetic"},
            "reward": {"terms": [{"name": "exact"}]},
            "generator": {"engine": "http", "http": {"dialect": "vllm", **http}},
        }
    )


def look(**http: Any) -> Finding:
    (finding,) = check_inference_server(config(**http))
    return finding


def test_a_server_that_is_there_is_named_with_its_release(server: FaultyServer) -> None:
    server.answers["/version"] = (200, {"version": "0.32.0"})
    assert look(url=server.url) == Finding("inference server", "ok", f"vLLM 0.32.0 at {server.url}")
    server.answers["/version"] = (200, {"version": "0.99.0"})
    other = look(url=server.url)
    assert (other.level, other.advice) == (
        "warn",
        "vllm 0.32.0 is the release that Tidemill is tested with: the protocol may differ",
    )
    assert "/update_weights" not in server.asked


def test_what_a_server_lacks_is_told(server: FaultyServer) -> None:
    server.answers["/v1/models"] = (200, {"data": [{"max_model_len": 1024}]})
    short = look(url=server.url)
    assert short.level == "fail"
    assert "must be started with --max-model-len 2048, as model.max_length, or more" in short.text
    nobody = look(url="http://127.0.0.1:9", start_s=30)
    assert nobody.level == "warn"
    assert nobody.advice == "a generator waits 30 s for it (generator.http.start_s)"


def test_how_a_server_is_launched_is_told() -> None:
    assert look(command=["srun", "serve"]).text.startswith("launched with srun serve; vllm 0.32.0 is the release")
    missing = look(dialect="sglang")
    assert (missing.level, missing.text) == ("fail", "sglang is not installed")
    assert "generator.http.command" in missing.advice
    assert check_inference_server(config(dialect="openai", url="http://a")) == []


def test_a_run_is_refused_before_it_starts_where_its_server_can_not_be() -> None:
    for http, said in (
        ({"dialect": "openai", "url": "http://a"}, "generator.http.dialect openai cannot be used for training"),
        ({"command": ["/nowhere/python"]}, "generator.http.command /nowhere/python: program not found"),
        ({"dialect": "sglang"}, r"needs the package sglang: pip install 'tidemill\[sglang\]'"),
    ):
        with pytest.raises(ConfigError, match=said):
            check_packages(config(**http))
