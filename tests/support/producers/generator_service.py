"""One generator service in this process, on a real server, while a scene is played to it."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from broker.client import Broker
from broker.flow.trainer_session import TrainerSession
from broker.queues.bodies import read_bodies
from broker.weights.transports import make_transport
from producers.engines.base import Engine as AnyEngine
from producers.engines.base import EngineSettings
from producers.engines.scripted import ScriptedEngine
from producers.generator.service import Generator
from schemas.codec import Array, decode
from schemas.config import TidemillConfig, parse_config
from schemas.errors import DataError
from schemas.messages import Probe, Sampling, Task, Trajectory, WeightSource
from schemas.system.lifecycle import StopFlag
from tests.support.broker.trainer_sessions import take_over

END_S = 30.0


class Engine(ScriptedEngine):
    """A scripted engine whose probe can fail, and that remembers what it loaded."""

    def __init__(self, settings: EngineSettings) -> None:
        super().__init__(settings)
        self.loaded: list[int] = []
        self.spoilt: set[int] = set()
        self.misfits: set[int] = set()
        self.generating = asyncio.Event()

    def hurry(self) -> None:
        """Take no time for tokens any more."""
        self._script = replace(self._script, token_s=0.0)

    async def load(self, source: WeightSource, version: int) -> None:
        if version in self.misfits:
            raise DataError("the file lacks a tensor")
        await super().load(source, version)
        self.loaded.append(version)

    async def logprobs(self, token_ids: Sequence[int]) -> Any:
        return await super().logprobs(token_ids) + (1.0 if self.version in self.spoilt else 0.0)

    def _step(self, samples: Any, progress: Any) -> None:
        super()._step(samples, progress)
        self.generating.set()


def make_config(model: Path, folder: Path, n: int = 2, **generator: Any) -> TidemillConfig:
    return parse_config(
        {
            "run": {"name": "g", "folder": str(folder / "run")},
            "model": {"path": str(model), "dtype": "float32", "max_length": 2000},
            "train": {"name": "arithmetic"},
            "sampling": {"n": n, "max_tokens": 1000},
            "reward": {"terms": [{"name": "exact"}]},
            "trainer": {"advantage": {"name": "raw"}} if n == 1 else {},
            "generator": {"engine": "scripted", "max_samples": 8, **generator},
            # No supervisor watches it: agents may have any time that a test gives them.
            "supervisor": {"grace_s": 600},
        }
    )


def make_engine(config: TidemillConfig, **script: Any) -> Engine:
    every = config.generator.flush_every
    return Engine(
        EngineSettings("none", "float32", 2000, 8, report_every=every and every // 2, args={"token_s": 0.001, **script})
    )


def publish_version(
    broker: Broker,
    training: TrainerSession,
    folder: Path,
    version: int,
    content: bytes = b"weights" * 10,
    probe: tuple[Sequence[int], Any] = ((1, 2, 3), (0.0, 0.0)),
) -> None:
    """A version with its probe, tokens and log-probabilities; by default one that the scripted engine passes."""
    file = folder / f"new-{version}"
    file.write_bytes(content)
    broker.weight_publication(make_transport(broker.connection, "redis", folder), keep=3).publish(
        file,
        version=version,
        step=version,
        leader_term=training.leader_term,
        tensors=[],
        probe=Probe(tokens=Array.of(probe[0], "i4"), logprobs=Array.of(probe[1], "f4")),
    )


def make_task(task_id: int, n: int = 2, max_tokens: int = 1000) -> Task:
    return Task(task_id=task_id, kind="train", n=n, sampling=Sampling(max_tokens=max_tokens), text=f"{task_id}+1=")


def begin_run(broker: Broker, folder: Path, *tasks: Task, **known: Any) -> TrainerSession:
    """A trainer takes over, publishes its first weights, and these tasks are admitted. known: as in ``take_over``."""
    training = take_over(broker, **known)
    publish_version(broker, training, folder, 1)
    for task in tasks:
        broker.ledger.admit(task)
    return training


Scenario = Callable[[], Awaitable[None]]


@asynccontextmanager
async def running_generator(
    config: TidemillConfig, broker: Broker, engine: AnyEngine, name: str = "g"
) -> AsyncIterator[None]:
    """Run the service beside the body, then ask it to end, which it must within END_S.

    If the service ends first, the body ends there, and an error of the service is raised.
    """
    stop, body = StopFlag(), asyncio.current_task()
    service = asyncio.create_task(Generator(config, name, broker, engine).run(stop))
    ended = False

    def end_body(_: object) -> None:
        nonlocal ended
        assert body is not None
        ended = body.cancel()

    service.add_done_callback(end_body)
    try:
        async with asyncio.timeout(60):
            yield
    except asyncio.CancelledError:
        if not ended or body is None or body.uncancel():
            raise
    finally:
        service.remove_done_callback(end_body)
        stop.set()
        async with asyncio.timeout(END_S):
            await service


async def run_generator_while(
    config: TidemillConfig, broker: Broker, engine: AnyEngine, scenario: Scenario, name: str = "g"
) -> None:
    """Run the service as ``running_generator`` does, until ``scenario`` is played."""
    async with running_generator(config, broker, engine, name):
        await scenario()


async def read_published(broker: Broker, count: int) -> list[Trajectory]:
    """The first ``count`` trajectories, when they are there."""
    client, key = broker.connection.client, broker.connection.keys.trajectories
    position: Any = "0"
    found: list[Trajectory] = []
    async with asyncio.timeout(120):
        while len(found) < count:
            for _, entries in await asyncio.to_thread(client.xread, {key: position}, count, 1000) or []:
                position = entries[-1][0]
                names = [fields[b"b"] for _, fields in entries]
                bodies = await asyncio.to_thread(read_bodies, broker.connection, names)
                found += [decode(body, Trajectory) for body in bodies if body]
    return found


async def wait_until(condition: Callable[[], object], deadline_s: float = 30) -> None:
    async with asyncio.timeout(deadline_s):
        while not await asyncio.to_thread(condition):  # noqa: ASYNC110 - what the server holds has no event
            await asyncio.sleep(0.01)


def order_freeze(broker: Broker) -> Callable[[], bool]:
    """Order a freeze; what is returned says whether generator ``g`` says that it obeys."""
    assert broker.run_control.pause("freeze", "test")
    orders = broker.run_control.read()
    assert orders is not None
    number = orders.pause_id
    return lambda: any(b.service == "g" and b.acknowledged.get("pause") == number for b in broker.heartbeats.list())


def versions_in(trajectories: Sequence[Trajectory]) -> set[int]:
    return {span.version for item in trajectories for span in item.spans}
