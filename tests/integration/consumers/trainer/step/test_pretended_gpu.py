"""Trainers and an engine on a GPU, which is pretended: no operation has tensors of both devices."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForImageTextToText

from consumers.trainer.data.collate import MicroBatch
from consumers.trainer.distributed.ranks import Ranks
from consumers.trainer.model.policy import Policy
from consumers.trainer.model.vision import VisionTower
from consumers.trainer.step.prepare import Preparation
from deploy.offline.tiny_vision_model import Family, write_tiny_vision_model
from producers.engines.base import EngineSettings
from producers.engines.transformers.engine import TransformersEngine
from schemas.images import read_image_settings
from schemas.messages import Sampling
from tests.support.models.pretended_gpu import pretend_gpu
from tests.support.models.tiny_model import make_tiny_model
from tests.support.trainer.sharded_algorithms import LORA, algorithm, run_algorithms
from tests.support.trainer.vision_steps import run_vision_steps

pytestmark = pytest.mark.integration
MORE = pytest.mark.matrix("one more family of models that read images")
FAMILIES = (pytest.param("qwen2_5_vl", marks=MORE), "qwen3_vl")


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[torch.device]:
    with pretend_gpu(monkeypatch) as device:
        yield device


def test_what_pytorch_refuses_on_a_gpu_is_refused(gpu: torch.device) -> None:
    weights = torch.nn.Linear(2, 2).to(gpu)
    for wrong in (
        lambda: weights(torch.zeros(1, 2)),
        lambda: weights.weight.detach().numpy(),
        lambda: torch.zeros(2, device=gpu).normal_(generator=torch.Generator()),
        lambda: torch.zeros(2)[torch.zeros(1, dtype=torch.int64, device=gpu)],
        lambda: torch.zeros(2).add_(weights.bias.detach()),
    ):
        with pytest.raises((RuntimeError, TypeError)):
            wrong()
    weights(torch.zeros(1, 2, device=gpu)).sum().backward()
    assert weights.bias.grad is not None
    assert weights.bias.grad.device == gpu
    assert weights.bias.grad.tolist() == [1.0, 1.0]


def test_algorithms_and_trainers_without_generators(gpu: torch.device, tmp_path: Path) -> None:
    model = make_tiny_model(tmp_path / "tiny", hidden=32, layers=1)
    other = make_tiny_model(tmp_path / "other", seed=1, hidden=32, layers=1)
    run_algorithms(model, other, tmp_path, sft={"stop_accuracy": None, "max_steps": 10})
    assert "sft" in json.loads((tmp_path / "report.json").read_text())


def test_an_adapter(gpu: torch.device, tmp_path: Path) -> None:
    found = algorithm(Ranks(), str(make_tiny_model(tmp_path, hidden=32, layers=1)), "", LORA)
    assert found["metrics"][1]["kl"] > 0


def test_a_reference_in_main_memory_reads_nothing_from_the_gpu(
    gpu: torch.device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The host would wait for the GPU, which may have much to do."""
    places: list[torch.device] = []
    score = Preparation._score

    def noted(self: Preparation, policy: Policy, micro: MicroBatch, replayed: bool = False) -> torch.Tensor:
        assert policy.device == micro.tokens.device
        places.append(policy.device)
        return score(self, policy, micro, replayed)

    monkeypatch.setattr(Preparation, "_score", noted)
    model, other = (str(make_tiny_model(tmp_path / str(seed), seed=seed, hidden=32, layers=1)) for seed in (0, 1))
    found = algorithm(Ranks(), model, other, {"kl": {"coef": 0.5, "device": "cpu"}})
    assert {*places} == {torch.device("cpu")}
    assert found["metrics"][0]["kl"] > 0


@pytest.mark.parametrize("family", FAMILIES)
def test_a_vision_model_that_is_on_the_gpu_is_checked_there(gpu: torch.device, tmp_path: Path, family: Family) -> None:
    write_tiny_vision_model(tmp_path, family)
    model = AutoModelForImageTextToText.from_pretrained(tmp_path).to(gpu)
    assert VisionTower(model, read_image_settings(tmp_path), frozen=True).frozen


@pytest.mark.parametrize("family", FAMILIES)
def test_pictures_their_critic_and_published_weights(gpu: torch.device, tmp_path: Path, family: Family) -> None:
    write_tiny_vision_model(tmp_path / "model", family)
    run_vision_steps(tmp_path / "model", tmp_path / "found", freeze=False, critic=True)
    assert (tmp_path / "found" / "probe.npy").exists()


@pytest.mark.parametrize("exact", [False, True])
async def test_an_engine_samples_sleeps_and_wakes(
    gpu: torch.device, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, exact: bool
) -> None:
    monkeypatch.setattr("producers.engines.transformers.engine._device", lambda: "pretended")
    folder = str(make_tiny_model(tmp_path))
    engine = TransformersEngine(EngineSettings(folder, "float32", max_length=64, max_samples=4, exact=exact))
    await engine.start()
    try:
        for seed in (1, 2):
            found = await engine.generate([5, 6, 7], Sampling(max_tokens=4, top_p=0.9, seed=seed), n=2)
            assert all(sample.tokens for sample in found)
            await engine.logprobs([5, 6, 7])
            await engine.sleep()
            await engine.wake()
    finally:
        await engine.close()
