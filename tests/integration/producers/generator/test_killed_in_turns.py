"""A generator's process that is stopped and then killed in each state of its turns: the trainer has the GPU at once.

While it is stopped it has its memory, and the trainer waits, unless it had given its GPU.
"""

import asyncio
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from broker.client import Broker
from broker.connection.embedded import EmbeddedServer
from schemas.system.device_lock import VARIABLE, SharedGpus, generator_lock, trainer_lock
from tests.support.producers.generator_service import (
    begin_run,
    make_config,
    make_engine,
    make_task,
    read_published,
    running_generator,
    wait_until,
)
from tests.support.runs.light_service import start_service

SLOW = """
import asyncio, os
from producers.engines.scripted import ScriptedEngine

class Slow(ScriptedEngine):
    '''Takes long for what STATE names, and says when it is there.'''

    async def _reach(self, state):
        if os.environ["STATE"] == state:
            open(os.environ["REACHED"], "w").close()
            await asyncio.sleep(600)

    async def start(self):
        await self._reach("loading")

    async def sleep(self):
        await super().sleep()
        await self._reach("sleeping")

    async def wake(self):
        await self._reach("waking")
        await super().wake()

    async def logprobs(self, token_ids, images=()):
        await self._reach("probing")
        return await super().logprobs(token_ids)

    def _step(self, samples, progress):
        super()._step(samples, progress)
        open(os.environ["REACHED"] + ".generates", "w").close()
"""


@pytest.mark.parametrize("state", ["loading", "probing", "awake", "sleeping", "asleep", "waking"])
async def test_a_generator_that_is_killed_leaves_the_gpu_and_its_samples_to_others(
    model: Path,
    make_broker: Callable[..., Broker],
    server: EmbeddedServer,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    state: str,
) -> None:
    broker = make_broker(f"turns-{state}")
    begin_run(broker, tmp_path, make_task(0, n=3))
    (tmp_path / "slow.py").write_text(SLOW)
    args = {"token_s": 0.01, "min_length": 300, "max_length": 300}
    config = make_config(model, tmp_path, lease_s=1, engine="slow.py:Slow", args=args)
    config.run.name = f"turns-{state}"
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(config.model_dump(mode="json", exclude_none=True)))
    shared, reached = SharedGpus(str(tmp_path / "devices"), ["generator-0"]), tmp_path / "reached"
    wanted, gpu = trainer_lock(shared.folder), generator_lock(shared.folder, "generator-0")
    variables = {VARIABLE: shared.to_environment(), "STATE": state, "REACHED": str(reached)}
    process = start_service("generator", tmp_path / "config.yaml", "generator-0", server.url, **variables)
    try:
        generates = reached.with_suffix(".generates")
        if state in ("loading", "probing"):
            await wait_until(reached.exists, 60)
        else:
            await wait_until(generates.exists, 60)
        if state in ("sleeping", "asleep", "waking"):
            assert wanted.try_hold()
            await wait_until(reached.exists if state == "sleeping" else gpu.is_free)
        if state == "waking":
            wanted.release()
            await wait_until(reached.exists)
        process.send_signal(signal.SIGSTOP)
        assert wanted.try_hold()
        assert gpu.try_hold(shared=True) is (state == "asleep"), "a stopped process still has its GPU"
    finally:
        process.kill()
        process.wait(10)
    async with asyncio.timeout(2):
        while not gpu.try_hold(shared=True):  # noqa: ASYNC110 - the kernel does not say
            await asyncio.sleep(0.01)
    gpu.release()
    wanted.release()

    monkeypatch.setenv(VARIABLE, shared.to_environment())
    async with running_generator(config, broker, make_engine(config, min_length=5, max_length=5), name="generator-0"):
        assert len({item.sample for item in await read_published(broker, 3)}) == 3
