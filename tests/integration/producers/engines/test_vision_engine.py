"""Images in prompts: what real vLLM samples, the trainer's policy gives the same log-probabilities."""

import copy
import os
import subprocess
import sys
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from consumers.trainer.data.collate import MicroBatch, collate
from consumers.trainer.data.groups import Group
from consumers.trainer.data.patches import ImageFiles, probe_batch
from consumers.trainer.data.rows import CutRow, TrainRow
from consumers.trainer.model.hf_weights import wire_weights
from consumers.trainer.model.lora import make_policy
from consumers.trainer.model.policy import Policy, load_model
from consumers.trainer.model.probe import reference_logprobs
from consumers.trainer.model.vision import VisionTower
from deploy.offline.tiny_vision_model import Family, write_tiny_vision_model
from schemas.codec import Array, decode
from schemas.config import parse_config
from schemas.config.loading import dump_config
from schemas.images import read_image_settings
from schemas.messages import Span, Trajectory
from tests.support.models.weight_files import write_weights
from tests.support.producers import vision_samples
from tests.support.producers.vision_samples import Found, VisionSample
from tests.support.trainer.train_steps import make_train_step
from tests.support.trainer.vision_steps import make_config

pytestmark = pytest.mark.timeout(600)
COUNT = 64


def policy_of(folder: Path) -> Policy:
    causal_lm = load_model(folder, "float32", vision=True)
    return Policy(causal_lm, vision=VisionTower(causal_lm, read_image_settings(folder), frozen=True))


def row(sample: VisionSample, number: int) -> TrainRow:
    length, generated = len(sample.tokens), len(sample.logprobs)
    cut = CutRow(
        tokens=Array.of(sample.tokens, "i4"),
        loss_mask=Array.of([0] * (length - generated) + [1] * generated, "u1"),
        logprobs=Array.of([0.0] * (length - generated) + sample.logprobs, "f4"),
        spans=[Span(0, 0, length)],
        sample=number,
        images=sample.images,
    )
    return TrainRow(cut, advantage=1.0, weight=1.0, sequence=number, group=0)


def micro_batch(policy: Policy, samples: list[VisionSample]) -> MicroBatch:
    assert policy.vision is not None
    files = {digest: body for sample in samples for digest, body in sample.files.items()}
    return collate(
        [row(sample, number) for number, sample in enumerate(samples)], ImageFiles(policy.vision.settings, files)
    )


def score(policy: Policy, micro: MicroBatch) -> torch.Tensor:
    with torch.no_grad():
        return policy(micro.tokens, micro.targets, micro.mask, micro.lengths, images=micro.images).logprobs


MORE = pytest.mark.matrix("one more family of models that read images")


@pytest.fixture(scope="module", params=["qwen2_5_vl", pytest.param("qwen3_vl", marks=MORE)])
def sampled(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Policy, Found]:
    family: Family = request.param
    folder = tmp_path_factory.mktemp(family)
    write_tiny_vision_model(folder, family)
    policy, out, weights = policy_of(folder), folder / "samples", folder / "new.weights"
    with torch.no_grad():
        for parameter in policy.causal_lm.base_model.language_model.parameters():
            parameter.mul_(1.05)
    save_file({name: tensor.contiguous() for name, tensor in wire_weights(policy)}, weights)
    found = run_vllm(folder, out, COUNT, weights)
    return policy_of(folder), found


def run_vllm(folder: Path, out: Path, count: int, weights: Path, *more: str) -> Found:
    """What a process with vLLM found, see vision_samples."""
    command = [sys.executable, "-m", vision_samples.__name__, str(folder), str(out), str(count), str(weights), *more]
    root = Path(__file__).parents[4]
    done = subprocess.run(
        command,
        cwd=root,
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
        env=os.environ | {"HF_HUB_OFFLINE": "1"},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return msgspec.msgpack.decode(out.read_bytes(), type=Found)


@pytest.mark.matrix("an adapter of a model with images; make test loads whole ones, and adapters of text")
@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl"])
def test_an_adapter_of_a_model_that_reads_images_is_loaded_as_the_trainer_publishes_it(
    family: Family, tmp_path: Path
) -> None:
    """The names in the file are those of the model's files, which vLLM reads, and the tower has no adapter."""
    write_tiny_vision_model(tmp_path / "model", family)
    config = dump_config(make_config(tmp_path / "model", tmp_path))
    config["trainer"]["lora"] = {"rank": 4}
    policy = make_policy(parse_config(config))
    torch.manual_seed(1)
    for name, parameter in policy.named_parameters():
        assert parameter.requires_grad == ("lora_" in name)
        if parameter.requires_grad:
            assert "visual" not in name
            torch.nn.init.normal_(parameter, std=0.1)
    write_weights(policy, tmp_path / "adapter", "float32")
    found = run_vllm(tmp_path / "model", tmp_path / "samples", 3, tmp_path / "adapter", "4")
    ours = reference_logprobs(policy, found.probe_tokens)
    assert np.abs(ours - found.reloaded).max() < 1e-3
    assert np.abs(ours - found.probe).max() > 1e-2


def test_the_trainer_agrees_with_the_log_probabilities_of_samples_with_images(
    sampled: tuple[Policy, Found],
) -> None:
    policy, found = sampled
    assert {len(sample.images) for sample in found.samples} == {0, 1, 2}
    micro = micro_batch(policy, found.samples)
    difference = (score(policy, micro) - micro.rollout_logprobs)[micro.mask].abs().max()
    assert float(difference) < 1e-4
    # A sampled token that stands for images elsewhere is text; random models sample it.
    assert any(6 in sample.tokens[sample.prompt :] for sample in found.samples)


def test_packed_rows_with_images_are_computed_as_rows_alone(sampled: tuple[Policy, Found]) -> None:
    policy, found = sampled
    samples = found.samples[:9]
    assert policy.packed
    micro = micro_batch(policy, samples)
    together = score(policy, micro)
    for number, sample in enumerate(samples):
        alone = micro_batch(policy, [sample])
        one = score(policy, alone)[0]
        assert torch.allclose(one, together[number, : len(one)], atol=1e-5)
    side_by_side = policy(micro.tokens, micro.targets, micro.mask, images=micro.images).logprobs
    assert torch.allclose(side_by_side, together, atol=1e-5)


def test_the_probe_sees_the_picture_and_tells_another_from_it(sampled: tuple[Policy, Found]) -> None:
    policy, found = sampled
    ids = torch.tensor([found.probe_tokens])
    assert policy.vision is not None
    images = probe_batch(policy.vision.settings, ids.shape[1], 1)
    with torch.no_grad():
        scores = policy(ids, ids[:, 1:], torch.ones_like(ids[:, 1:], dtype=torch.bool), images=images)
    ours = scores.logprobs[0].numpy()
    assert np.abs(ours - found.probe).max() < 1e-3
    assert np.abs(ours - found.other).max() > 1e-2


def test_new_weights_without_the_frozen_tower_change_what_the_probe_says(
    sampled: tuple[Policy, Found],
) -> None:
    policy, found = sampled
    assert policy.vision is not None
    assert not any(name.startswith("model.visual") for name, _ in wire_weights(policy))
    with torch.no_grad():
        for parameter in policy.causal_lm.base_model.language_model.parameters():
            parameter.mul_(1.05)
        ids = torch.tensor([found.probe_tokens])
        images = probe_batch(policy.vision.settings, ids.shape[1], 1)
        scores = policy(ids, ids[:, 1:], torch.ones_like(ids[:, 1:], dtype=torch.bool), images=images)
        for parameter in policy.causal_lm.base_model.language_model.parameters():
            parameter.div_(1.05)
    assert np.abs(scores.logprobs[0].numpy() - found.reloaded).max() < 1e-3
    assert np.abs(np.array(found.probe) - found.reloaded).max() > 1e-2


def test_the_trainer_agrees_with_log_probabilities_of_episodes_with_images(
    sampled: tuple[Policy, Found],
) -> None:
    policy, found = sampled
    episodes = [(decode(episode.trajectory, Trajectory), episode) for episode in found.episodes]
    assert {episode.shown for _, episode in episodes} == {0, 1, 2, 3}
    assert any(len(trajectory.rows()) > 1 for trajectory, _ in episodes)
    assert {"first", "joined", "history rewritten"} <= {why for _, episode in episodes for why in episode.why}
    for trajectory, episode in episodes:
        tokens, rows = trajectory.tokens.numpy(), trajectory.rows()
        asked = sorted([*prompt, *answer] for prompt, answer in zip(episode.prompts, episode.answers, strict=True))
        for row in rows:
            assert tokens[row.places].tolist() in asked
        assert trajectory.loss_mask.numpy().sum() == sum(map(len, episode.answers))
    images = [image for trajectory, _ in episodes for image in trajectory.images]
    after_answers = [
        image
        for trajectory, _ in episodes
        for image in trajectory.images
        if trajectory.loss_mask.numpy()[: image.start].any()
    ]
    assert len(images) > 24
    assert len(after_answers) > 10
    step = make_train_step(copy.deepcopy(policy), {"micro_batch_tokens": 2048})
    groups = [Group(one.task_id, [(one, one.reward or 0.0)], episode.files) for one, episode in episodes]
    metrics = step.run(step.planner.plan(groups).batch(), 0).metrics
    assert metrics["tokens"] == sum(int(one.loss_mask.numpy().sum()) for one, _ in episodes)
    assert metrics["logprob_gap_max"] < 1e-4


AS_A_GENERATOR_STARTS = """
import sys
from producers.engines.factory import prepare_engine

prepare_engine("vllm", vision=True)
from transformers import Qwen2VLVideoProcessor

Qwen2VLVideoProcessor()
print("made with", sys.modules["torchvision"].__file__)
"""


@pytest.mark.parametrize("chosen", [{}, {"VLLM_WORKER_MULTIPROC_METHOD": "spawn"}], ids=["forked", "user's choice"])
def test_what_a_generator_imports_first_finds_what_stands_in_for_torchvision(chosen: dict[str, str]) -> None:
    """Transformers looks once whether torchvision is there, so this has to come before it is imported."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("VLLM_")} | chosen
    command = [sys.executable, "-c", AS_A_GENERATOR_STARTS]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment)
    assert done.returncode == 0, done.stderr[-2000:]
    assert "made with" in done.stdout
