"""Images that are not what they were: bytes changed in the broker, and a generator whose vision tower is another."""

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

from broker.client import Broker
from broker.weights.transports import make_transport
from consumers.trainer.data.patches import ImageFiles
from consumers.trainer.model.lora import load_policy
from consumers.trainer.model.policy import Policy
from consumers.trainer.model.probe import reference_logprobs
from deploy.offline.tiny_vision_model import write_tiny_vision_model
from producers.engines.base import EngineSettings, PromptImage
from producers.engines.scripted import ScriptedEngine
from producers.generator import weight_updates as updates_module
from schemas.codec import Array
from schemas.config import TidemillConfig
from schemas.errors import InfraError
from schemas.images import prepare_image, read_image_settings
from schemas.messages import ChatMessage, ContentPart, PlacedImage, Probe, Sampling, Task, WeightSource
from tests.support.broker.trainer_sessions import take_over
from tests.support.configurations import minimal_config
from tests.support.producers.generator_service import read_published, run_generator_while, running_generator, wait_until
from tests.support.trainer.vision_steps import make_group


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("vision")
    write_tiny_vision_model(folder)
    return folder


@pytest.fixture
def config(model: Path, tmp_path: Path) -> TidemillConfig:
    return minimal_config(
        run={"name": "g", "folder": str(tmp_path / "run")},
        model={"path": str(model), "kind": "vision", "dtype": "float32", "max_length": 512},
        train={"name": "jsonl", "args": {"path": "none"}},
        sampling={"n": 2, "max_tokens": 8},
        generator={"engine": "scripted", "max_samples": 8},
    )


class Seeing(ScriptedEngine):
    """Samples by a script, and answers the probe as a model does; notes the images that it was shown."""

    def __init__(self, policy: Policy) -> None:
        super().__init__(EngineSettings("none", "float32", 512, 8, args={"token_s": 0.001}))
        self.lacks = {}
        self.shown: list[bytes] = []
        self.loaded: list[int] = []
        self._policy = policy

    async def generate(self, *args: Any, images: Sequence[PromptImage] = (), **kwargs: Any) -> Any:
        self.shown += [image.data for image in images]
        return await super().generate(*args, images=images, **kwargs)

    async def load(self, source: WeightSource, version: int) -> None:
        await super().load(source, version)
        self.loaded.append(version)

    async def logprobs(self, token_ids: Sequence[int], images: Sequence[PromptImage] = ()) -> npt.NDArray[np.float32]:
        assert self._policy.vision is not None
        files = ImageFiles(self._policy.vision.settings, {image.digest: image.data for image in images})
        placed = [[PlacedImage(image.digest, image.start, image.end) for image in images]]
        ids = torch.tensor([list(token_ids)])
        every = torch.ones_like(ids[:, 1:], dtype=torch.bool)
        with torch.no_grad():
            scores = self._policy(ids, ids[:, 1:], every, images=files.batch(placed, ids.shape[1]))
        found: npt.NDArray[np.float32] = scores.logprobs[0].numpy()
        return found


def make_task(task_id: int, model: Path) -> tuple[Task, dict[str, bytes]]:
    settings = read_image_settings(model)
    files = make_group(task_id, [(60, 90)], settings).images
    images = [prepare_image(body, settings)[0] for body in files.values()]
    messages = [ChatMessage("user", [ContentPart("image"), ContentPart("text", "what?")])]
    task = Task(task_id=task_id, kind="train", n=2, sampling=Sampling(max_tokens=8), messages=messages, images=images)
    return task, dict(files)


def begin(broker: Broker, config: TidemillConfig, policy: Policy, folder: Path) -> None:
    """The trainer takes over and publishes version 1, with the probe of ``policy``."""
    training = take_over(broker)
    assert policy.vision is not None
    opening, picture = policy.vision.probe_tokens(policy.causal_lm)
    tokens = [*opening, 40, 50, 60, 70]
    with torch.no_grad():
        logprobs = reference_logprobs(policy, tokens)
    file = folder / "weights"
    file.write_bytes(b"weights")
    broker.weight_publication(make_transport(broker.connection, "redis", folder), keep=3).publish(
        file,
        version=1,
        step=1,
        leader_term=training.leader_term,
        tensors=[],
        probe=Probe(tokens=Array.of(tokens, "i4"), logprobs=Array.of(logprobs, "f4"), image=picture),
    )


async def test_an_image_whose_bytes_were_changed_in_the_broker_is_shown_to_no_engine(
    config: TidemillConfig, model: Path, broker: Broker, tmp_path: Path
) -> None:
    policy = load_policy(config, str(model), "float32")
    begin(broker, config, policy, tmp_path)
    (swapped, files), (whole, others) = make_task(0, model), make_task(1, model)
    assert broker.ledger.admit_all([swapped, whole], images=files | others).answer == "ok"
    (name,), (other,) = files, others
    broker.connection.client.hset(broker.connection.keys.images, name, others[other])
    engine = Seeing(policy)

    async with running_generator(config, broker, engine):
        published = await read_published(broker, 2)
        assert {item.task_id for item in published} == {1}
        await wait_until(lambda: broker.ledger.read_state().dead_letters > 0)
    assert engine.loaded == [1]
    assert set(engine.shown) == {others[other]}
    reasons = [stored.letter.reason for stored in broker.dead_letters.page(10, None, newest=False)[0]]
    assert all("an image of its prompt is missing from the broker, or is not the stored one" in one for one in reasons)


async def test_a_generator_with_another_vision_tower_fails_the_probe(
    config: TidemillConfig, model: Path, broker: Broker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(updates_module, "REJECTED_DEADLINE_S", 0.0)
    policy, other = (load_policy(config, str(model), "float32") for _ in range(2))
    begin(broker, config, policy, tmp_path)
    with torch.no_grad():
        for parameter in other.causal_lm.base_model.visual.parameters():
            parameter.mul_(1.2)
    task, files = make_task(0, model)
    broker.ledger.admit_all([task], images=files)
    engine = Seeing(other)

    async def scene() -> None:
        await asyncio.Event().wait()

    with pytest.raises(ExceptionGroup) as caught:
        await run_generator_while(config, broker, engine, scene)
    assert caught.group_contains(InfraError, match="version 1 fails its probe")
    assert not engine.shown
