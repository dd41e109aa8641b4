"""The optimizer step on a tiny real model: independent of micro-batching, honest metrics, safe on bad numbers."""

import copy
import math
from pathlib import Path
from typing import Any, cast

import msgspec
import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import Gemma2Config, Gemma2ForCausalLM, PreTrainedModel

from consumers.trainer.data.groups import Group
from consumers.trainer.distributed.parts import Part
from consumers.trainer.model.policy import Policy, load_model
from consumers.trainer.step.critic import Critic
from consumers.trainer.step.gradient_update import lr_factor
from consumers.trainer.step.train_step import TrainStep, laid_out
from schemas.codec import Array
from schemas.config import OptimizerConfig
from schemas.errors import ConfigError, DataError
from schemas.messages import Span
from tests.support.models.tiny_model import make_tiny_model
from tests.support.trainer.train_steps import make_train_step
from tests.support.trainer.trajectories import make_groups, make_trajectory


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> PreTrainedModel:
    return load_model(make_tiny_model(tmp_path_factory.mktemp("tiny")), "float32")


def make_step(model: PreTrainedModel, **trainer: object) -> TrainStep:
    """A step over a copy of the model."""
    return make_train_step(Policy(copy.deepcopy(model)), {"optimizer": {"lr": 1e-3}, **trainer})


def weights(step: TrainStep) -> Tensor:
    return torch.cat([p.detach().flatten() for p in step.policy.parameters()])


def gradient(step: TrainStep, groups: list[Group]) -> Tensor:
    """The accumulated gradient of the batch, before clipping."""
    seen: list[Tensor] = []

    def look(parameters: object, limit: float) -> float:
        seen.append(torch.cat([p.grad.flatten() for p in step.policy.parameters() if p.grad is not None]))
        return 0.0

    step.ranks.clip_grad_norm = look  # type: ignore[method-assign, assignment]
    step.run(step.planner.plan(groups).batch(), version=5)
    return seen[0]


def current(model: PreTrainedModel, group: Group, version: int) -> Group:
    """The group with the log-probabilities that the model itself gives, all of one version."""
    samples = []
    for t, reward in group.samples:
        ids = torch.tensor(t.tokens.numpy().tolist())[None]
        logprobs = torch.log_softmax(model(ids).logits[0, :-1].float(), -1).gather(1, ids[0, 1:, None])[:, 0]
        mask = t.loss_mask.numpy()
        known = torch.cat([torch.zeros(1), logprobs.detach()]) * torch.tensor(mask)
        start = int(mask.argmax())
        fields = {f: getattr(t, f) for f in t.__struct_fields__ if f not in {"logprobs", "spans", "schema"}}
        spans = [Span(version, start, len(mask))]
        samples.append((type(t)(**fields, logprobs=Array.of(known.numpy(), "f4"), spans=spans), reward))
    return Group(group.task_id, samples)


@pytest.mark.parametrize("aggregation", ["token_mean", "sequence_mean", "prompt_mean", "constant"])
@settings(max_examples=8)
@given(seed=st.integers(0, 1000), budget=st.integers(8, 120))
def test_micro_batching_changes_no_gradient(model: PreTrainedModel, aggregation: str, seed: int, budget: int) -> None:
    groups = make_groups([3, 1, 4], seed)
    whole = gradient(make_step(model, aggregation=aggregation), groups)
    cut = gradient(make_step(model, aggregation=aggregation, micro_batch_tokens=budget), groups)
    assert torch.allclose(whole, cut, rtol=1e-4, atol=1e-6 * float(whole.abs().max() + 1))


def test_gradient_is_that_of_the_formula_through_the_plain_model(model: PreTrainedModel) -> None:
    """REINFORCE on one group, computed with the model's own logits and no code of the trainer."""
    groups = [current(model, Group(0, [(make_trajectory(0, 0), 1.0), (make_trajectory(0, 1, 2, 5), 0.0)]), 5)]
    got = gradient(make_step(model, loss={"name": "reinforce"}), groups)
    plain = copy.deepcopy(model)
    total = torch.zeros(())
    for (t, _), advantage in zip(groups[0].samples, (0.5, -0.5), strict=True):
        ids = torch.tensor(t.tokens.numpy().tolist())[None]
        logprobs = torch.log_softmax(plain(ids).logits[0, :-1].float(), -1).gather(1, ids[0, 1:, None])[:, 0]
        total = total - advantage * (logprobs * torch.tensor(t.loss_mask.numpy()[1:])).sum() / 9
    total.backward()
    want = torch.cat([p.grad.flatten() for p in plain.parameters() if p.grad is not None])
    # Both sum in float32, in different orders.
    assert torch.allclose(got, want, rtol=1e-3, atol=1e-6 * float(want.abs().max()))


def test_metrics_of_a_batch_of_the_current_version(model: PreTrainedModel) -> None:
    groups = [current(model, group, 5) for group in make_groups([4, 4], seed=1)]
    result = make_step(model).run(make_step(model).planner.plan(groups).batch(), version=5)
    metrics = result.metrics
    tokens = sum(int(t.loss_mask.numpy().sum()) for g in groups for t, _ in g.samples)
    assert metrics["tokens"] == metrics["logprob_gap_tokens"] == tokens
    assert metrics["logprob_gap_mean"] < 1e-5
    assert metrics["ratio_mean"] == pytest.approx(1.0, abs=1e-5)
    assert metrics["ess"] == pytest.approx(1.0, abs=1e-5)
    assert metrics["kl"] == pytest.approx(0.0, abs=1e-6)
    assert metrics["clip_fraction"] == metrics["staleness_max"] == 0.0
    assert result.staleness == {0: tokens}
    rewards = [r for g in groups for _, r in g.samples]
    assert metrics["reward_mean"] == pytest.approx(sum(rewards) / len(rewards))


def test_gap_counts_only_samples_that_are_wholly_current(model: PreTrainedModel) -> None:
    mixed = make_trajectory(0, 0, completion=4, version=4)
    fresh = current(model, Group(0, [(make_trajectory(0, 1), 0.0)]), 5).samples[0]
    step = make_step(model)
    result = step.run(step.planner.plan([Group(0, [(mixed, 1.0), fresh])]).batch(), version=5)
    assert result.metrics["logprob_gap_tokens"] == 4
    assert result.metrics["logprob_gap_mean"] < 1e-5
    assert result.staleness == {0: 2 + 4, 1: 2}
    assert result.metrics["staleness_mean"] == pytest.approx(2 / 8)


def test_a_gap_that_was_not_measured_is_left_out(model: PreTrainedModel) -> None:
    """Samples of older weights alone: 0 would look like perfect agreement."""
    step = make_step(model)
    metrics = step.run(step.planner.plan(make_groups([2], seed=1)).batch(), version=9).metrics
    assert metrics["logprob_gap_tokens"] == 0
    assert not {"logprob_gap_mean", "logprob_gap_max"} & set(metrics)


def test_temperature_divides_logits_as_in_generation(model: PreTrainedModel) -> None:
    ids = torch.tensor([[5, 9, 14, 3]])
    scores = Policy(model)(ids, ids[:, 1:], torch.ones(1, 3, dtype=torch.bool), temperatures=[0.5])
    distribution = torch.log_softmax(model(ids).logits[0, :-1].float() / 0.5, -1)
    assert torch.allclose(scores.logprobs[0], distribution.gather(1, ids[0, 1:, None])[:, 0], atol=1e-5)
    assert torch.allclose(scores.entropy[0], -(distribution.exp() * distribution).sum(-1), atol=1e-5)


@pytest.mark.parametrize("chunked", [True, False])
def test_samples_of_one_batch_are_each_scored_at_their_temperature(model: PreTrainedModel, chunked: bool) -> None:
    sampled = []
    for k, temperature in enumerate((1.0, 0.5, 1.7, 0.5)):
        made = make_trajectory(1, k, prompt=3 + k, completion=4, version=5)
        ids = torch.tensor(made.tokens.numpy().tolist())
        logprobs = torch.log_softmax(model(ids[None]).logits[0, :-1].float() / temperature, -1)
        own = logprobs.gather(1, ids[1:, None])[-4:, 0].tolist()
        rolled = np.array([0.0] * (3 + k) + own, dtype=np.float32)
        fields = {"logprobs": Array.of(rolled, "f4"), "temperature": temperature, "spans": [Span(5, 3 + k, 7 + k)]}
        sampled.append((msgspec.structs.replace(made, **fields), float(k % 2)))
    groups = [Group(1, sampled)]
    gradients = []
    for budget in (10_000, 8):
        policy = Policy(copy.deepcopy(model))
        policy.chunked, policy.packed = chunked, chunked
        step = make_train_step(policy, {"optimizer": {"lr": 1e-3}, "micro_batch_tokens": budget})
        metrics = step.run(step.planner.plan(groups).batch(), version=5).metrics
        assert metrics["logprob_gap_tokens"] == 16
        assert metrics["logprob_gap_max"] < 1e-4
        assert metrics["temperature"] == pytest.approx((1.0 + 0.5 + 1.7 + 0.5) / 4)
        gradients.append(gradient(step, groups))
    assert torch.allclose(*gradients, rtol=1e-3, atol=1e-6)


def test_a_chunked_head_gives_the_same_gradients(model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    groups = make_groups([3, 3], seed=2)
    loss = {"entropy_coef": 0.1}
    whole = gradient(make_step(model, loss=loss), groups)
    monkeypatch.setattr("consumers.trainer.model.head.CPU_LOGITS", 600)
    monkeypatch.setattr("consumers.trainer.model.head.LEAST_ROWS", 1)
    assert torch.allclose(whole, gradient(make_step(model, loss=loss), groups), rtol=1e-4, atol=1e-6)


def test_activations_computed_again_give_the_same_gradient(model: PreTrainedModel) -> None:
    groups = make_groups([3, 3], seed=2)
    kept, again = (gradient(make_step(model, activation_checkpointing=on), groups) for on in (False, True))
    assert torch.allclose(kept, again, rtol=1e-5, atol=1e-7)


class Attention(TorchDispatchMode):
    """Counts the calls of attention's forward kernels."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls += "attention" in str(func) and "backward" not in str(func)
        return func(*args, **(kwargs or {}))


def test_selective_checkpointing_gives_the_same_gradient_and_computes_attention_once(model: PreTrainedModel) -> None:
    groups = make_groups([3, 3], seed=2)
    found, calls = [], []
    for checkpointing in (False, True, "selective"):
        step = make_step(model, activation_checkpointing=checkpointing)
        with Attention() as counted:
            found.append(gradient(step, groups))
        calls.append(counted.calls)
    assert all(torch.allclose(found[0], other, rtol=1e-5, atol=1e-7) for other in found[1:])
    plain, again, selective = calls
    assert plain > 0
    assert again == 2 * plain
    assert selective == plain


@pytest.mark.parametrize("checkpointing", [True, "selective"])
def test_activations_in_main_memory_give_the_same_gradient(
    model: PreTrainedModel, checkpointing: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    groups = make_groups([3, 3], seed=2)
    kept = gradient(make_step(model), groups)
    moved = 0

    class Counted(torch.autograd.graph.saved_tensors_hooks):
        """save_on_cpu with a count of what it moves."""

        def __init__(self, pin_memory: bool) -> None:
            def pack(tensor: torch.Tensor) -> torch.Tensor:
                nonlocal moved
                moved += tensor.numel()
                return tensor.clone()

            super().__init__(pack, lambda tensor: tensor)

    monkeypatch.setattr("torch.autograd.graph.save_on_cpu", Counted)
    moving = gradient(make_step(model, activation_checkpointing=checkpointing, activation_offload=True), groups)
    assert torch.allclose(kept, moving, rtol=1e-5, atol=1e-7)
    config = model.config.get_text_config()
    tokens = sum(len(item.tokens) for group in groups for item, _ in group.samples)
    layers = config.num_hidden_layers * config.hidden_size
    assert layers <= moved / tokens < 4 * layers, "inputs of layers, and no weights"


def test_a_step_with_a_broken_gradient_changes_nothing_and_says_so(model: PreTrainedModel) -> None:
    step = make_step(model)
    before = weights(step)
    groups = [Group(0, [(make_trajectory(0, 0), 1e38), (make_trajectory(0, 1), -1e38)])]
    result = step.run(step.planner.plan(groups).batch(), version=0)
    assert result.skipped
    assert result.metrics["skipped"] == 1.0
    assert torch.equal(weights(step), before)
    good = step.run(step.planner.plan(make_groups([4, 4, 4], seed=5)).batch(), version=1)
    assert not good.skipped
    assert not torch.equal(weights(step), before)


@pytest.mark.parametrize("second", ["reference", "critic"])
def test_micro_batches_fit_a_second_model_that_pads(model: PreTrainedModel, second: str) -> None:
    """The policy packs, so its limit says nothing of rows that are padded to the longest."""
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    capped = Gemma2ForCausalLM(Gemma2Config(vocab_size=300, **sizes, num_key_value_heads=2, head_dim=16))
    settings: dict[str, object] = {"micro_batch_tokens": 60}
    if second == "reference":
        step = make_train_step(Policy(copy.deepcopy(model)), settings, reference=Policy(capped))
    else:
        settings |= {"advantage": {"name": "gae"}, "critic": {}}
        step = make_train_step(Policy(copy.deepcopy(model)), settings, critic=Critic(capped))
    read: list[int] = []
    capped.base_model.register_forward_pre_hook(
        lambda _, args, kwargs: read.append(kwargs["input_ids"].numel()), with_kwargs=True
    )
    samples = [(make_trajectory(0, sample, 2, 40 if sample == 0 else 2), float(sample)) for sample in range(12)]
    step.run(step.planner.plan([Group(0, samples)]).batch(), version=0)
    assert max(read) <= 60


def test_a_batch_without_loss_tokens_is_survived(model: PreTrainedModel) -> None:
    step = make_step(model)
    result = step.run(
        step.planner.plan([Group(0, [(make_trajectory(0, s, 3, 0), float(s)) for s in range(2)])]).batch(), version=0
    )
    assert result.metrics["tokens"] == 0
    assert math.isfinite(result.metrics["loss"])


def test_training_raises_the_probability_of_what_was_rewarded(model: PreTrainedModel) -> None:
    step = make_step(model, steps=20)
    groups = [current(model, Group(0, [(make_trajectory(0, 0), 1.0), (make_trajectory(0, 1), 0.0)]), 0)]
    batch = step.planner.plan(groups).batch()

    def logprob(sample: int) -> float:
        micro = batch.micro_batches[0]
        row = micro.sequence.tolist().index(sample)
        with torch.no_grad():
            return float(step.policy(micro.tokens, micro.targets, micro.mask).logprobs[row].sum())

    good, bad = logprob(0), logprob(1)
    for version in range(5):
        step.run(batch, version)
    assert logprob(0) > good
    assert logprob(1) < bad


def test_schedules() -> None:
    linear = OptimizerConfig(schedule="linear", warmup_steps=2)
    assert [lr_factor(s, linear, 6) for s in range(6)] == pytest.approx([1 / 3, 2 / 3, 1.0, 0.75, 0.5, 0.25])
    cosine = OptimizerConfig(schedule="cosine")
    assert [lr_factor(s, cosine, 2) for s in range(3)] == pytest.approx([1.0, 0.5, 0.0])
    assert lr_factor(99, OptimizerConfig(), 10) == 1.0
    for name in ("linear", "cosine"):
        least = OptimizerConfig(schedule=name, min_lr_ratio=0.2)
        assert [lr_factor(s, least, 2) for s in (0, 1, 2, 9)] == pytest.approx([1.0, 0.6, 0.2, 0.2])


def test_arguments_that_a_loss_does_not_take_are_refused(model: PreTrainedModel) -> None:
    with pytest.raises(ConfigError, match="clip_lo"):
        make_step(model, loss={"name": "ppo", "args": {"clip_lo": 0.1}})


def test_a_users_own_loss_and_advantage(model: PreTrainedModel, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "from consumers.trainer.algorithms.losses import LossOutput\n"
        "def loss(inputs, *, scale):\n    return LossOutput(-scale * inputs.advantages * inputs.logprobs)\n"
        "def doubled(rewards, groups):\n    return 2 * rewards\n"
    )
    settings = {"loss": {"name": "mine.py:loss", "args": {"scale": 2.0}}, "advantage": {"name": "mine.py:doubled"}}
    step = make_train_step(Policy(copy.deepcopy(model)), settings, base=tmp_path)
    batch = step.planner.plan(make_groups([2, 2])).batch()
    assert batch.plan is not None
    assert batch.plan.credit.samples.tolist() == (2 * batch.plan.samples.rewards).tolist()
    assert not step.run(batch, 0).skipped


def test_a_users_own_aggregation(model: PreTrainedModel, tmp_path: Path) -> None:
    (tmp_path / "weights.py").write_text(
        "import numpy as np\n"
        "def halved(lengths, groups, totals):\n    return np.full(len(lengths), 0.5 / totals.tokens)\n"
        "def short(lengths, groups, totals):\n    return np.zeros(1)\n"
    )
    groups = make_groups([2, 2])
    policy = Policy(copy.deepcopy(model))
    halved = gradient(make_train_step(policy, {"aggregation": "weights.py:halved"}, base=tmp_path), groups)
    assert torch.allclose(2 * halved, gradient(make_step(model), groups), rtol=1e-5, atol=1e-7)
    wrong = make_train_step(Policy(copy.deepcopy(model)), {"aggregation": "weights.py:short"}, base=tmp_path)
    with pytest.raises(DataError, match="weights of the aggregation"):
        wrong.planner.plan(groups)
    with pytest.raises(ConfigError, match=r"'token_meen' is not known, must be one of constant, .*token_mean"):
        make_step(model, aggregation="token_meen")


def test_a_reference_in_main_memory_calls_no_rank_that_shares_the_tokens(model: PreTrainedModel) -> None:
    """Their group is of GPUs, and takes no tensor in main memory."""
    reference = Policy(copy.deepcopy(model))
    step = make_train_step(Policy(copy.deepcopy(model)), {"kl": {"coef": 0.5}}, reference=reference)
    assert step.preparation is not None
    (micro,) = step.planner.plan(make_groups([3, 2])).batch().micro_batches
    step.policy.context = Part(cast(dist.ProcessGroup, None), rank=0, size=2)
    shared = laid_out(micro, step.policy)
    (scored,) = step.preparation.run_on_host([shared])
    (alone,) = step.preparation.run_on_host([micro])
    assert scored.reference_logprobs is not None
    assert alone.reference_logprobs is not None
    assert torch.equal(scored.reference_logprobs, alone.reference_logprobs)
    assert scored.layout is shared.layout
