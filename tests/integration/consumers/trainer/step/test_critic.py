"""The critic: what it learns, its loss against the formula, and that a checkpoint brings it back to the bit."""

import copy
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from transformers import PreTrainedModel

from broker.flow.progress import Progress
from consumers.trainer.checkpoint.store import CheckpointStore
from consumers.trainer.checkpointing import Checkpointing
from consumers.trainer.context import TrainerContext
from consumers.trainer.data.groups import Group
from consumers.trainer.model.policy import Policy, load_model
from consumers.trainer.step import build
from consumers.trainer.step.build import build_critic
from consumers.trainer.step.critic import Critic, value_loss
from consumers.trainer.step.train_step import TrainStep
from schemas.config import parse_config
from schemas.errors import ConfigError
from tests.support.broker.leadership import configuration_in
from tests.support.models.tiny_model import make_tiny_model
from tests.support.trainer.train_steps import make_train_step
from tests.support.trainer.trajectories import make_groups, make_trajectory

GAE = {"advantage": {"name": "gae"}, "critic": {"optimizer": {"lr": 3e-3}}}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> PreTrainedModel:
    return load_model(make_tiny_model(tmp_path_factory.mktemp("tiny"), hidden=32, layers=1), "float32")


def make_step(model: PreTrainedModel, **trainer: object) -> TrainStep:
    settings = {"optimizer": {"lr": 1e-3}, **GAE, **trainer}
    policy, critic = Policy(copy.deepcopy(model)), Critic(copy.deepcopy(model))
    return make_train_step(policy, settings, critic=critic)


def weights(step: TrainStep) -> torch.Tensor:
    assert step.critic is not None
    modules = (step.policy, step.critic.critic)
    return torch.cat([p.detach().flatten() for module in modules for p in module.parameters()])


@pytest.mark.parametrize("clip", [0.2, None])
def test_value_loss(clip: float | None) -> None:
    cases = [(1.0, 0.5, 0.0), (0.6, 0.5, 2.0), (-1.0, 0.0, 1.0), (0.4, 0.5, 0.45), (0.9, 0.5, 0.8)]
    want = []
    for v, old, target in cases:
        near = min(max(v, old - 0.2), old + 0.2)
        errors = [(v - target) ** 2, (near - target) ** 2]
        want.append(0.5 * (errors[0] if clip is None else max(errors)))
    got = value_loss(*torch.tensor(cases, dtype=torch.float64).unbind(1), clip)
    assert got.tolist() == pytest.approx(want)


def test_value_loss_gradcheck() -> None:
    values = torch.tensor([1.0, 0.6, -1.0], dtype=torch.float64, requires_grad=True)
    old, target = torch.tensor([[0.5, 0.55, 0.0], [0.0, 2.0, 1.0]], dtype=torch.float64)
    assert torch.autograd.gradcheck(lambda v: value_loss(v, old, target, 0.2), (values,))


def test_the_critic_says_nothing_at_first_and_learns_the_returns(model: PreTrainedModel) -> None:
    step = make_step(model, steps=60, advantage={"name": "gae", "args": {"lam": 1.0}})
    groups = [Group(0, [(make_trajectory(0, 0), 1.0)]), Group(1, [(make_trajectory(1, 0), 0.0)])]
    batch = step.planner.plan(groups).batch()
    first = step.run(batch, 0).metrics
    assert first["critic_error"] == pytest.approx(1.0)
    assert first["critic_loss"] == pytest.approx(0.5 * 4 / 8)
    for version in range(1, 40):
        last = step.run(batch, version).metrics
    assert last["critic_error"] < 0.3
    assert first["critic_explained_variance"] == pytest.approx(0.0)
    assert last["critic_explained_variance"] > 0.8
    assert last["critic_lr"] == 3e-3


def test_without_clip_nothing_depends_on_micro_batching(model: PreTrainedModel) -> None:
    groups = make_groups([3, 1, 4], seed=1)
    steps = [make_step(model, micro_batch_tokens=budget) for budget in (10000, 20)]
    for step in steps:
        step.run(step.planner.plan(groups).batch(), 0)
    # Adam's first step is the gradient's sign: where it is nearly zero, summing in another order decides.
    assert (weights(steps[0]) - weights(steps[1])).abs().mean() < 1e-5


def test_a_skipped_step_leaves_the_critic_as_it_was(model: PreTrainedModel) -> None:
    step = make_step(model)
    assert step.critic is not None
    with torch.no_grad():
        next(step.policy.parameters()).fill_(float("nan"))
    before = [parameter.detach().clone() for parameter in step.critic.critic.parameters()]
    result = step.run(step.planner.plan(make_groups([3, 1], seed=1)).batch(), 0)
    assert result.skipped
    assert all(map(torch.equal, before, step.critic.critic.parameters()))


def test_a_checkpoint_restores_the_critic_to_the_bit(model: PreTrainedModel, tmp_path: Path) -> None:
    """Elsewhere it was saved, but never restored."""
    groups, more = make_groups([3, 4], seed=2), make_groups([4, 2], seed=3)
    step = make_step(model, steps=5)
    step.run(step.planner.plan(groups).batch(), 0)
    path = CheckpointStore(tmp_path).save(step, step=1, version=1, leader_term=1, extra={})
    metrics = step.run(step.planner.plan(more).batch(), 1).metrics
    again = make_step(model, steps=5)
    CheckpointStore(tmp_path).load(path, again)
    assert again.run(again.planner.plan(more).batch(), 1).metrics["critic_loss"] == metrics["critic_loss"]
    assert torch.equal(weights(again), weights(step))


def test_activations_of_the_critic_are_recomputed(model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    compiled: list[object] = []
    monkeypatch.setattr(build, "compile_layers", lambda module, device: compiled.append(module))
    groups = make_groups([3, 4], seed=2)
    plain, again = make_step(model), make_step(model, activation_checkpointing=True, compile=True)
    assert again.critic is not None
    assert again.critic.critic.causal_lm.is_gradient_checkpointing
    assert compiled == [again.policy, again.critic.critic]
    found, wanted = (step.run(step.planner.plan(groups).batch(), 0).metrics for step in (again, plain))
    for name in ("critic_loss", "critic_grad_norm", "grad_norm"):
        assert found[name] == pytest.approx(wanted[name], rel=1e-5)


def test_gae_and_the_critic_need_each_other(tmp_path: Path) -> None:
    smallest = {
        "model": {"path": str(make_tiny_model(tmp_path, hidden=32, layers=1)), "dtype": "float32"},
        "train": {"name": "arithmetic"},
        "reward": {"terms": [{"name": "exact"}]},
    }
    for trainer in ({"advantage": {"name": "gae"}}, {"critic": {}}):
        with pytest.raises(ConfigError, match="go together"):
            parse_config({**smallest, "trainer": trainer})
    config = parse_config({**smallest, "trainer": {"advantage": {"name": "gae"}, "critic": {}}})
    critic = build_critic(config)
    assert critic is not None
    assert critic.causal_lm.get_output_embeddings().out_features == 1


def test_a_critic_that_only_checkpoint_or_configuration_has_is_named(model: PreTrainedModel, tmp_path: Path) -> None:
    with_critic, without = make_step(model), make_train_step(Policy(copy.deepcopy(model)), {"optimizer": {"lr": 1e-3}})
    assert without.critic is None
    batch = with_critic.planner.plan(make_groups([3, 1], seed=1)).batch()
    store = CheckpointStore(tmp_path)
    for number, (source, target, told) in enumerate(
        [
            (with_critic, make_step(model), ""),
            (with_critic, without, "the critic in checkpoint .* is left out: .* no trainer.critic"),
            (without, make_step(model), "checkpoint .* has no critic: that of trainer.critic starts untrained"),
        ]
    ):
        source.run(batch, 0)
        path = store.save(source, step=number, version=0, leader_term=1, extra={})
        assert re.match(told or "$", store.load(path, target).difference)
        for ours, theirs in zip(target.policy.parameters(), source.policy.parameters(), strict=True):
            assert torch.equal(ours, theirs)
    begun, new = target.critic, make_step(model).critic
    assert begun is not None
    assert new is not None
    for ours, theirs in zip(begun.critic.parameters(), new.critic.parameters(), strict=True):
        assert torch.equal(ours, theirs), "the critic begins with its first step"
    assert str(begun.update.optimizer.state_dict()) == str(new.update.optimizer.state_dict())
    target.run(batch, 0)


def test_a_trainer_that_leaves_a_critic_out_says_so_as_an_event(model: PreTrainedModel, tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path / "checkpoints")
    store.save(make_step(model), step=1, version=1, leader_term=1, extra=Progress().to_json())
    config = configuration_in(tmp_path)
    step = make_train_step(Policy(copy.deepcopy(model)), {"optimizer": {"lr": 1e-3}})
    events: list[Any] = []
    context = SimpleNamespace(
        config=config,
        rank_group=SimpleNamespace(checkpoint_store=store, load=lambda path: store.load(path, step)),
        session=None,
        progress=Progress(),
        settings=None,
        notify=lambda *event: events.append(event),
    )
    assert Checkpointing(cast(TrainerContext, context)).load_latest()
    ((name, level, text),) = events
    assert (name, level) == ("critic", "warning")
    assert "is left out" in text
