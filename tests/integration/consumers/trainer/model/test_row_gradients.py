"""Samples of several rows on a tiny real model: their gradient is that of rows trained by hand."""

import copy

import msgspec
import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from consumers.trainer.data.groups import Group
from consumers.trainer.model.policy import Policy, load_model
from consumers.trainer.step.critic import Critic
from consumers.trainer.step.train_step import TrainStep
from schemas.codec import Array
from schemas.messages import Segment, Span, Trajectory, Turn
from tests.support.models.tiny_model import make_tiny_model
from tests.support.trainer.train_steps import make_train_step
from tests.support.trainer.trajectories import make_trajectory


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> PreTrainedModel:
    return load_model(make_tiny_model(tmp_path_factory.mktemp("tiny")), "float32")


def make_step(model: PreTrainedModel, **trainer: object) -> TrainStep:
    return make_train_step(Policy(copy.deepcopy(model)), {"optimizer": {"lr": 1e-3}, **trainer})


def gradient(step: TrainStep, groups: list[Group]) -> Tensor:
    """The accumulated gradient of the batch, before clipping."""
    seen: list[Tensor] = []

    def look(parameters: object, limit: float) -> float:
        found = [p.grad.flatten() for p in step.policy.parameters() if p.grad is not None]
        # A critic's gradient is clipped by the same, after the policy's.
        seen.extend([torch.cat(found)] if found else [])
        return 0.0

    step.ranks.clip_grad_norm = look  # type: ignore[method-assign, assignment]
    step.run(step.planner.plan(groups).batch(), version=5)
    return seen[0]


def sharing() -> Trajectory:
    """Two rows: the second begins with the first row's prompt and answer, but not with what came after."""
    body = make_trajectory(0, 0, prompt=3, completion=12, version=4)
    return msgspec.structs.replace(
        body,
        loss_mask=Array.of([0, 0, 0, 1, 1, 1, 0, 1, 1, 0, 1, 1, 1, 1, 1], "u1"),
        spans=[Span(4, 3, 6), Span(5, 7, 15)],
        turns=[Turn("assistant", 3, 6, 0), Turn("assistant", 7, 9, 1), Turn("assistant", 10, 15, 2)],
        segments=[Segment(0, 9), Segment(9, 15, 0, 6)],
    )


@pytest.mark.parametrize("aggregation", ["token_mean", "sequence_mean", "prompt_mean", "constant"])
@pytest.mark.parametrize("budget", [16, 1000])
def test_a_sample_of_two_rows_has_the_gradient_of_both(model: PreTrainedModel, aggregation: str, budget: int) -> None:
    """REINFORCE through the plain model, both rows by hand, each with the whole sample's advantage and weight."""
    body, other = sharing(), make_trajectory(0, 1, 2, 5)
    got = gradient(
        make_step(
            model,
            loss={"name": "reinforce", "args": {"truncate": 1e9}},
            aggregation=aggregation,
            micro_batch_tokens=budget,
        ),
        [Group(0, [(body, 1.0), (other, 0.0)])],
    )
    ids = body.tokens.numpy().tolist()
    logprobs = body.logprobs.numpy().tolist()
    weight = {"token_mean": (1 / 15,) * 2, "prompt_mean": (1 / 15,) * 2, "constant": (1 / 16,) * 2}
    first, second = {**weight, "sequence_mean": (1 / 20, 1 / 10)}[aggregation]
    rows = [
        (ids[:9], [3, 4, 5, 7, 8], logprobs[:9], 0.5 * first),
        (ids[:6] + ids[9:], [7, 8, 9, 10, 11], logprobs[:6] + logprobs[9:], 0.5 * first),
        (other.tokens.numpy().tolist(), [2, 3, 4, 5, 6], other.logprobs.numpy().tolist(), -0.5 * second),
    ]
    plain = copy.deepcopy(model).double()
    total = torch.zeros((), dtype=torch.float64)
    for tokens, trained, rollout, factor in rows:
        row = torch.tensor(tokens)[None]
        scores = torch.log_softmax(plain(row).logits[0, :-1], -1).gather(1, row[0, 1:, None])[:, 0]
        for place in trained:
            ratio = (scores[place - 1].detach() - rollout[place]).exp()
            total = total - factor * ratio * scores[place - 1]
    total.backward()
    want = torch.cat([p.grad.flatten() for p in plain.parameters() if p.grad is not None])
    assert torch.allclose(got.double(), want, rtol=1e-4, atol=1e-6 * float(want.abs().max()))


def test_tokens_of_shared_beginnings_are_counted_once_by_age(model: PreTrainedModel) -> None:
    step = make_step(model)
    result = step.run(
        step.planner.plan([Group(0, [(sharing(), 1.0), (make_trajectory(0, 1), 0.0)])]).batch(), version=5
    )
    assert result.metrics["tokens"] == 10 + 4
    assert result.staleness == {0: 7, 1: 3, 4: 2, 5: 2}
    assert result.metrics["rows_mean"] == 1.5


def test_a_row_whose_context_older_weights_sampled_does_not_measure_the_gap(model: PreTrainedModel) -> None:
    """Keys and values of that context may be the older weights'."""
    step = make_step(model)
    body = msgspec.structs.replace(sharing(), loss_mask=Array.of([0] * 9 + [1] * 6, "u1"))
    metrics = step.run(step.planner.plan([Group(0, [(body, 1.0), (make_trajectory(0, 1), 0.0)])]).batch(), 5).metrics
    assert metrics["logprob_gap_tokens"] == 0
    fresh = msgspec.structs.replace(body, spans=[Span(5, 3, 15)])
    metrics = step.run(step.planner.plan([Group(0, [(fresh, 1.0), (make_trajectory(0, 1), 0.0)])]).batch(), 5).metrics
    assert metrics["logprob_gap_tokens"] == 6


@pytest.mark.parametrize(
    "settings",
    [
        {"advantage": {"name": "turns", "args": {"turn_gamma": 0.9}}},
        {"advantage": {"name": "turns", "by_name": True}, "kl": {"coef": 0.1, "place": "reward"}},
        {"advantage": {"name": "reinforce_pp", "args": {"gamma": 0.9}}},
        {"advantage": {"name": "gae"}, "critic": {}},
        {"loss": {"name": "gspo"}, "advantage": {"name": "grpo", "by_name": True}},
    ],
)
def test_a_step_does_not_depend_on_its_micro_batches(model: PreTrainedModel, settings: dict[str, object]) -> None:
    samples = [(sharing(), 1.0), (make_trajectory(0, 1, 2, 5), 0.0)]

    def gradient_of(budget: int) -> Tensor:
        step = make_train_step(
            Policy(copy.deepcopy(model)),
            {"optimizer": {"lr": 1e-3}, "micro_batch_tokens": budget, **settings},
            critic=Critic(copy.deepcopy(model)) if "critic" in settings else None,
            reference=Policy(copy.deepcopy(model)) if "kl" in settings else None,
        )
        return gradient(step, [Group(0, samples)])

    whole, cut = gradient_of(1000), gradient_of(8)
    assert float(whole.abs().max()) > 0
    assert torch.allclose(whole, cut, rtol=1e-3, atol=1e-6 * float(whole.abs().max() + 1))
