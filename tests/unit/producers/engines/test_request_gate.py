"""When a request gets through vLLM's gate."""

import asyncio
import threading
from types import SimpleNamespace
from typing import Any

import pytest

from producers.engines.base import Completion, EngineSettings, PromptImage
from producers.engines.request_gate import RequestGate, SampleCall, nothing
from producers.engines.vllm import engine as vllm_module
from producers.engines.vllm.engine import VllmEngine
from schemas.messages import Sampling


async def settle() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


async def test_the_gate_stays_closed_until_its_last_holder_is_done_and_can_reject_what_waits():
    gate = RequestGate()
    assert await gate.wait_open()
    async with gate.held_closed():
        async with gate.held_closed():
            pass
        waiting = asyncio.create_task(gate.wait_open())
        await settle()
        assert not waiting.done()
        await gate.reject_waiting()
        async with asyncio.timeout(5):
            assert not await waiting
        later = asyncio.create_task(gate.wait_open())
        await settle()
        assert not later.done()
    async with asyncio.timeout(5):
        assert await later


@pytest.mark.parametrize("then", ["weights change", "all is aborted"])
async def test_images_are_cut_before_the_gate_so_that_no_request_is_prepared_for_weights_that_go(
    monkeypatch: pytest.MonkeyPatch, then: str
) -> None:
    cutting, go_on, salts = threading.Event(), threading.Event(), list[str]()

    def cut_images(*_: Any) -> str:
        cutting.set()
        assert go_on.wait(20)
        return "cut"

    def prompt_input(ids: list[int], cut: Any, salt: str) -> list[int]:
        salts.append(salt)
        return ids

    async def sample(call: SampleCall[Any], index: int) -> Completion:
        engine._prompt(call.ids, call.images)
        return nothing("length")

    monkeypatch.setattr(vllm_module, "cut_images", cut_images)
    monkeypatch.setattr(vllm_module, "prompt_input", prompt_input)
    engine: Any = VllmEngine(EngineSettings("none", "float32", 64, 8))
    engine._core = SimpleNamespace(vllm_config=SimpleNamespace(cache_config=SimpleNamespace(block_size=16)))
    engine._sample = sample

    async def scenario() -> list[Any]:
        engine._failure = asyncio.get_running_loop().create_future()
        image = PromptImage("red", 1, 5, b"")
        asked = asyncio.create_task(engine.generate([3, 6, 6, 6, 6, 4], Sampling(max_tokens=4), images=[image]))
        assert await asyncio.to_thread(cutting.wait, 20)
        if then == "all is aborted":
            await engine.abort_all()
        async with engine._gate.held_closed():
            go_on.set()
            await settle()
            assert not salts
            engine._loads = 1
        async with asyncio.timeout(20):
            return list(await asked)

    found = await scenario()
    if then == "weights change":
        assert ([one.finish for one in found], salts) == (["length"], ["-1"])
    else:
        assert ([one.finish for one in found], salts) == (["abort"], [])
