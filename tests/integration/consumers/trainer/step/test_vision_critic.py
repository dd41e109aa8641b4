"""A critic that reads images: its values are those of the model's own forward, and pictures can tell them apart."""

from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from consumers.trainer.checkpoint.compare import compare
from consumers.trainer.checkpoint.store import CheckpointStore
from consumers.trainer.data.groups import Group
from consumers.trainer.step.build import build_critic, build_train_step
from consumers.trainer.step.train_step import TrainStep
from deploy.offline.tiny_vision_model import Family, write_tiny_vision_model
from schemas.config import TidemillConfig, parse_config
from schemas.config.loading import dump_config
from schemas.images import read_image_settings
from tests.support.trainer.vision_steps import make_config, make_group

pytestmark = pytest.mark.integration


MORE = pytest.mark.matrix("one more family of models that read images")


@pytest.fixture(scope="module", params=[pytest.param("qwen2_5_vl", marks=MORE), "qwen3_vl"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    family: Family = request.param
    folder = tmp_path_factory.mktemp("vision") / family
    write_tiny_vision_model(folder, family)
    return folder


def configure(model: Path, folder: Path, **changes: Any) -> TidemillConfig:
    config = dump_config(make_config(model, folder))
    critic = {"optimizer": {"lr": 3e-3}}
    config["trainer"] |= {"advantage": {"name": "gae", "args": {"lam": 1.0}}, "critic": critic, "steps": 80, **changes}
    return parse_config(config)


def two_pictures(model: Path) -> list[Group]:
    """Two groups of the same tokens; the picture of the first pays 1, that of the second nothing."""
    settings = read_image_settings(model)
    paid, unpaid = (make_group(number, [(60, 60)], settings, samples=1) for number in (0, 1))
    (first, _), (second, _) = paid.samples[0], unpaid.samples[0]
    return [
        Group(0, [(first, 1.0)], paid.images),
        Group(1, [(msgspec.structs.replace(second, tokens=first.tokens), 0.0)], unpaid.images),
    ]


@pytest.mark.parametrize("packed", [True, False])
def test_a_value_is_that_of_the_models_own_forward(model: Path, tmp_path: Path, packed: bool) -> None:
    config = configure(model, tmp_path)
    step = build_train_step(config)
    assert step.critic is not None
    critic = step.critic.critic
    assert critic.packed
    critic.packed = packed
    head = critic.causal_lm.get_output_embeddings()
    torch.manual_seed(1)
    torch.nn.init.normal_(head.weight)
    (micro,) = step.planner.plan(two_pictures(model)[:1]).batch().micro_batches
    assert micro.images is not None
    found = step.critic.values(micro)
    base: Any = critic.causal_lm.base_model
    ids = micro.tokens[:, :-1]
    with torch.no_grad():
        hidden = base(
            input_ids=ids,
            pixel_values=micro.images.patches,
            image_grid_thw=torch.from_numpy(micro.images.grids),
            mm_token_type_ids=torch.zeros_like(ids).masked_fill(micro.images.marks[:, : ids.shape[1]], 1),
            use_cache=False,
        ).last_hidden_state
    expected = head(hidden)[..., 0]
    assert (found - expected)[micro.mask].abs().max() < 1e-4
    assert found[micro.mask].abs().max() > 0.1
    assert not found[~micro.mask].any()


def test_pictures_alone_tell_what_a_state_is_worth_and_a_checkpoint_has_it(model: Path, tmp_path: Path) -> None:
    config = configure(model, tmp_path)
    step = build_train_step(config)
    batch = step.planner.plan(two_pictures(model)).batch()
    for version in range(60):
        last = step.run(batch, version).metrics
    assert last["critic_explained_variance"] > 0.8
    store = CheckpointStore(tmp_path / "checkpoints")
    store.save(step, step=60, version=60, leader_term=1, extra={})
    again: TrainStep = build_train_step(config)
    assert store.load(store.at(), again).step == 60
    assert compare(again, store.at()).equal
    assert step.critic is not None
    assert again.critic is not None
    for micro in batch.micro_batches:
        assert torch.equal(step.critic.values(micro), again.critic.values(micro))


def test_a_tower_is_trained_with_the_critic_unless_it_is_frozen(model: Path, tmp_path: Path) -> None:
    for freeze in (True, False):
        config = configure(model, tmp_path)
        config.model.freeze_vision = freeze
        critic = build_critic(config)
        assert critic is not None
        tower: Any = critic.causal_lm.base_model
        assert all(parameter.requires_grad != freeze for parameter in tower.visual.parameters())
