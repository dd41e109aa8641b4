"""Real steps of a real model, published as deltas, loaded by a real engine, which passes each version's probe."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
import torch
from torch.optim import AdamW

from broker.client import Broker
from broker.flow.fencing import term_number
from broker.weights.delta_writer import DeltaWriter
from broker.weights.transports import make_transport
from consumers.trainer.model.hf_weights import reference_logprobs
from consumers.trainer.model.policy import Policy, load_model
from producers.engines.base import EngineSettings
from producers.engines.transformers.engine import TransformersEngine
from producers.generator.orders import OrderFollower
from producers.generator.weight_updates import WeightUpdater
from schemas.codec import Array
from schemas.config import TidemillConfig, parse_config
from schemas.messages import Manifest, Probe
from schemas.system.lifecycle import StopFlag
from tests.support.broker.trainer_sessions import take_over
from tests.support.models.tiny_model import make_tiny_model
from tests.support.models.weight_files import write_weights

pytestmark = pytest.mark.integration

PROBE = [5, 9, 40, 41, 80, 7]


class Learner:
    """A policy that takes small steps and publishes each."""

    def __init__(self, broker: Broker, model: Path, folder: Path) -> None:
        self._store, self._folder = broker.weights, folder
        self._leader_term = take_over(broker).leader_term
        transport = make_transport(broker.connection, "redis", folder)
        self._publication = broker.weight_publication(transport, 2, DeltaWriter(folder, max_chain=2))
        self._policy = Policy(load_model(str(model), "float32"))
        self._optimizer = AdamW(self._policy.parameters(), lr=1e-5)
        folder.mkdir()

    def publish(self, version: int) -> Manifest:
        tokens = torch.randint(100, (2, 32), generator=torch.Generator().manual_seed(version))
        scores = self._policy(tokens, tokens[:, 1:], torch.ones(2, 31, dtype=torch.bool))
        self._optimizer.zero_grad()
        (-scores.logprobs.mean()).backward()
        self._optimizer.step()
        file = self._folder / f"part-{version}-t{term_number(self._leader_term)}"
        tensors = write_weights(self._policy, file, "bfloat16")
        self._publication.publish(
            file,
            version=version,
            step=version,
            leader_term=self._leader_term,
            tensors=tensors,
            probe=Probe(tokens=Array.of(PROBE, "i4"), logprobs=Array.of(reference_logprobs(self._policy, PROBE), "f4")),
        )
        newest = self._store.newest()
        assert newest is not None
        return newest


@pytest.fixture
def config(tmp_path: Path) -> TidemillConfig:
    return parse_config(
        {
            "run": {"name": "engine", "folder": str(tmp_path / "run")},
            "model": {"path": str(tmp_path / "model"), "dtype": "bfloat16", "max_length": 64},
            "train": {"name": "arithmetic"},
            "sampling": {"n": 2, "max_tokens": 16},
            "reward": {"terms": [{"name": "exact"}]},
            "trainer": {"publish": {"transport": "redis"}},
        }
    )


async def test_an_engine_follows_a_chain_of_deltas_and_passes_every_probe(
    config: TidemillConfig, broker: Broker, tmp_path: Path
) -> None:
    model = make_tiny_model(tmp_path / "model", hidden=32, layers=1)
    learner, stop = Learner(broker, model, tmp_path / "out"), StopFlag()
    engine = TransformersEngine(EngineSettings(str(model), "bfloat16", max_length=64, max_samples=4))
    pause = OrderFollower(broker, engine)
    updates = WeightUpdater(config, "g", broker, engine, tmp_path / "in", pause)

    await engine.start()
    await pause.follow(None)
    following = asyncio.create_task(updates.run(stop))
    try:
        async with asyncio.timeout(60):
            for version in range(1, 7):
                manifest = await asyncio.to_thread(learner.publish, version)
                assert (manifest.delta is None) == (version == 1)
                assert await updates.wait_ready(version), "checked by its probe"
    finally:
        stop.set()
        await following
        await engine.close()
    assert [m.whole for m in broker.weights.published()][-3:] == [True, False, False]
