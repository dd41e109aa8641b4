"""A step of several epochs and minibatches is the same as its updates one after the other."""

import copy

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from consumers.trainer.data.groups import Group
from consumers.trainer.model.policy import Policy, load_model
from consumers.trainer.step.critic import Critic
from consumers.trainer.step.train_step import StepResult, TrainStep
from schemas.errors import ConfigError
from tests.support.models.tiny_model import make_tiny_model
from tests.support.trainer.train_steps import make_train_step
from tests.support.trainer.trajectories import make_groups


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> PreTrainedModel:
    return load_model(make_tiny_model(tmp_path_factory.mktemp("tiny")), "float32")


def make_step(model: PreTrainedModel, **trainer: object) -> TrainStep:
    return make_train_step(Policy(copy.deepcopy(model)), {"optimizer": {"lr": 1e-3}, **trainer})


def train(step: TrainStep, groups: list[Group]) -> StepResult:
    return step.run(step.planner.plan(groups).batch(), version=5)


def weights(step: TrainStep) -> Tensor:
    return torch.cat([p.detach().flatten() for p in step.policy.parameters()])


@pytest.mark.parametrize("aggregation", ["token_mean", "sequence_mean", "prompt_mean", "constant"])
def test_two_epochs_of_two_minibatches_are_four_updates(model: PreTrainedModel, aggregation: str) -> None:
    groups = make_groups([4, 3, 4, 5], seed=3)
    settings = {"aggregation": aggregation, "micro_batch_tokens": 40, "advantage": {"name": "grpo"}}
    several = make_step(model, epochs=2, minibatches=2, **settings)
    result = train(several, groups)
    single = make_step(model, **settings)
    results = [train(single, part) for _ in range(2) for part in (groups[:2], groups[2:])]
    assert torch.equal(weights(several), weights(single))
    assert result.metrics["loss"] == pytest.approx(sum(each.metrics["loss"] for each in results) / 4)
    assert result.metrics["grad_norm"] == pytest.approx(sum(each.metrics["grad_norm"] for each in results) / 4)


def test_tokens_count_once_and_the_gap_is_that_before_the_first_update(model: PreTrainedModel) -> None:
    groups = make_groups([4, 3, 4, 5], seed=3)
    one, several = train(make_step(model), groups), train(make_step(model, epochs=3), groups)
    assert several.metrics["tokens"] == one.metrics["tokens"]
    assert several.staleness == one.staleness
    assert several.metrics["ratio_mean"] != pytest.approx(one.metrics["ratio_mean"], rel=1e-6)
    for name in ("logprob_gap_tokens", "staleness_mean", "reward_mean", "samples"):
        assert several.metrics[name] == pytest.approx(one.metrics[name])
    assert several.metrics["forward_flops"] == 3 * one.metrics["forward_flops"]


def test_decoupled_ppo_clips_around_the_policy_before_the_first_update(model: PreTrainedModel) -> None:
    groups = make_groups([4, 4], seed=7)
    settings = {
        "loss": {"name": "decoupled_ppo", "proximal": "recompute", "args": {"clip_low": 1e-3, "clip_high": 1e-3}}
    }
    assert train(make_step(model, **settings), groups).metrics["clip_fraction"] == 0.0
    assert train(make_step(model, epochs=2, **settings), groups).metrics["clip_fraction"] > 0.0


@pytest.mark.parametrize(("epochs", "acts"), [(1, False), (2, True)])
def test_the_critics_clip_acts_from_the_second_update_on(model: PreTrainedModel, epochs: int, acts: bool) -> None:
    trained = []
    for clip in (None, 1e-6):
        critic = {"clip": clip, "optimizer": {"lr": 1e-2}}
        trainer = {"advantage": {"name": "gae"}, "critic": critic, "epochs": epochs}
        step = make_train_step(Policy(copy.deepcopy(model)), trainer, critic=Critic(copy.deepcopy(model)))
        assert step.critic is not None
        train(step, make_groups([4, 4], seed=7))
        trained.append(torch.cat([p.detach().flatten() for p in step.critic.critic.parameters()]))
    assert torch.equal(*trained) != acts


def test_the_critic_is_trained_by_the_same_updates(model: PreTrainedModel) -> None:
    groups = make_groups([4, 4], seed=7)
    trainer = {"advantage": {"name": "gae"}, "critic": {"clip": None, "optimizer": {"lr": 1e-3}}, "epochs": 3}
    step = make_train_step(
        Policy(copy.deepcopy(model)), {**trainer, "minibatches": 2}, critic=Critic(copy.deepcopy(model))
    )
    assert step.critic is not None
    result = train(step, groups)
    assert {float(state["step"]) for state in step.critic.update.optimizer.state.values()} == {6.0}
    assert result.metrics["critic_loss"] > 0


def test_an_update_that_is_not_finite_is_left_out_and_the_others_count(model: PreTrainedModel) -> None:
    groups = make_groups([4, 4], seed=7)
    step = make_step(model, minibatches=2)
    plan = step.planner.plan(groups)
    batch = plan.batch()
    batch.micro_batches[0].advantages.fill_(float("nan"))
    before = weights(step)
    result = step.run(batch, version=5)
    assert (result.metrics["skipped"], result.skipped) == (0.5, False)
    assert bool(weights(step).isfinite().all())
    assert not torch.equal(before, weights(step))


def test_more_minibatches_than_groups_are_refused(model: PreTrainedModel) -> None:
    with pytest.raises(ConfigError, match=r"minibatches 5 must be at most trainer\.batch_groups, 4"):
        make_step(model, minibatches=5, batch_groups=4)
