"""Router replay: what an engine noted of a mixture's routers is what training repeats."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import (
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from consumers.trainer.data.collate import collate
from consumers.trainer.data.groups import Group
from consumers.trainer.model.activations import save_activations
from consumers.trainer.model.policy import Policy
from consumers.trainer.rank_group import Train
from schemas.errors import ConfigError
from schemas.messages import RoutedExperts, Trajectory
from tests.support.trainer.train_steps import make_train_step
from tests.support.trainer.trajectories import make_groups

SIZES: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "num_experts_per_tok": 2,
    "initializer_range": 0.3,
}
EXPERTS = 8


def qwen() -> PreTrainedModel:
    """Its middle layer has no experts."""
    config = Qwen3MoeConfig(**SIZES, num_experts=EXPERTS, moe_intermediate_size=16, head_dim=16, mlp_only_layers=[1])
    return Qwen3MoeForCausalLM(config)


def mixtral() -> PreTrainedModel:
    return MixtralForCausalLM(MixtralConfig(**SIZES, num_local_experts=EXPERTS))


def deepseek() -> PreTrainedModel:
    """Its router chooses groups of experts first."""
    attention = {
        "q_lora_rank": None,
        "kv_lora_rank": 16,
        "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 8,
        "v_head_dim": 16,
    }
    mixture = {"n_routed_experts": EXPERTS, "n_group": 4, "topk_group": 2, "moe_intermediate_size": 16}
    return DeepseekV3ForCausalLM(DeepseekV3Config(**SIZES, **attention, **mixture, first_k_dense_replace=1))


def make_policy(build: Any = qwen) -> Policy:
    torch.manual_seed(0)
    policy = Policy(build())
    policy.replay_routers()
    return policy


def make_batch(lengths: tuple[int, ...] = (9, 6, 12)) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(96, (len(lengths), max(lengths)), generator=generator)
    ends = torch.tensor(lengths)
    mask = torch.arange(1, max(lengths)) < ends[:, None]
    return {"tokens": tokens, "targets": tokens[:, 1:], "mask": mask, "lengths": ends - 1}


def heard_choices(policy: Policy) -> dict[int, list[Tensor]]:
    """What the experts of each layer are given from now on."""
    heard: dict[int, list[Tensor]] = {}
    for name, module in policy.causal_lm.named_modules():
        if any(p.ndim == 3 for p in module.parameters(recurse=False)):
            layer = int(name.split("layers.")[1].split(".")[0])
            heard[layer] = []
            module.register_forward_pre_hook(lambda _, args, layer=layer: heard[layer].append(args[1].clone()))
    return heard


def random_choices(batch: dict[str, Tensor]) -> Tensor:
    """Two different experts for each token in each layer: int16 [R, T, L, k]."""
    generator = torch.Generator().manual_seed(2)
    noise = torch.rand(*batch["tokens"].shape, 3, EXPERTS, generator=generator)
    return noise.topk(2).indices.to(torch.int16)


@pytest.mark.parametrize("build", [qwen, mixtral, deepseek])
def test_tokens_go_to_the_experts_of_the_rollout_and_the_routers_keep_their_gradient(build: Any) -> None:
    policy, batch = make_policy(build), make_batch()
    chosen = random_choices(batch)
    heard = heard_choices(policy)
    policy(**batch, routed_experts=chosen).logprobs.sum().backward()
    places = torch.arange(11) < batch["lengths"][:, None]
    assert heard
    for layer, given in heard.items():
        assert torch.equal(given[0], chosen[:, :-1][places][:, layer].long())
    gates = [p for name, p in policy.named_parameters() if name.endswith(".gate.weight")]
    assert len(gates) == len(heard)
    assert all(gate.grad is not None and gate.grad.abs().sum() > 0 for gate in gates)


@pytest.mark.parametrize("build", [qwen, mixtral, deepseek])
def test_a_routers_own_choice_replayed_changes_nothing(build: Any) -> None:
    policy, batch = make_policy(build), make_batch()
    heard = heard_choices(policy)
    alone = policy(**batch)
    chosen = torch.full((3, 12, 3, 2), -1, dtype=torch.int16)
    places = torch.nn.functional.pad(torch.arange(11) < batch["lengths"][:, None], (0, 1))
    for layer, given in heard.items():
        chosen[places, layer] = given[0].to(torch.int16)
    again = policy(**batch, routed_experts=chosen)
    assert torch.equal(again.logprobs, alone.logprobs)
    assert policy.router_replay is not None
    assert policy.router_replay.result(lambda counts: counts) == {"experts_changed": 0.0}


def test_where_nobody_noted_a_choice_the_router_chooses() -> None:
    policy, batch = make_policy(), make_batch()
    nothing = torch.full((3, 12, 3, 2), -1, dtype=torch.int16)
    assert torch.equal(policy(**batch, routed_experts=nothing).logprobs, policy(**batch).logprobs)
    chosen = random_choices(batch)
    chosen[1] = -1
    half = policy(**batch, routed_experts=chosen).logprobs
    assert torch.allclose(half[1], policy(**batch).logprobs[1], atol=1e-6)
    assert not torch.allclose(half[0], policy(**batch).logprobs[0], atol=1e-3)


@pytest.mark.parametrize("how", [True, "selective"])
def test_activations_that_are_computed_again_go_to_the_same_experts(how: Any) -> None:
    batch = make_batch()
    gradients = []
    for checkpointing in (False, how):
        policy = make_policy()
        policy.train()
        save_activations(policy.causal_lm, checkpointing, False)
        policy(**batch, routed_experts=random_choices(batch)).logprobs.sum().backward()
        gradients.append({name: p.grad for name, p in policy.named_parameters()})
    for name, gradient in gradients[0].items():
        assert torch.allclose(gradient, gradients[1][name], atol=1e-6), name


def test_rows_side_by_side_are_replayed_as_packed_ones() -> None:
    batch = make_batch()
    chosen = random_choices(batch)
    packed, padded = make_policy(), make_policy()
    padded.packed = False
    assert packed.packed
    found = padded(**batch, routed_experts=chosen).logprobs
    assert torch.allclose(packed(**batch, routed_experts=chosen).logprobs, found, atol=1e-5)


def test_a_model_without_experts_is_refused() -> None:
    sizes = {name: size for name, size in SIZES.items() if name != "num_experts_per_tok"}
    with pytest.raises(ConfigError, match=r"trainer\.router_replay: Qwen2ForCausalLM has no experts"):
        Policy(Qwen2ForCausalLM(Qwen2Config(**sizes))).replay_routers()


def with_choices(groups: Sequence[Group]) -> list[Group]:
    """The same groups, of whose samples each token was sent to experts at random."""
    rng = np.random.default_rng(3)

    def noted(sample: Trajectory) -> Trajectory:
        chosen = rng.random((len(sample.tokens), 3, EXPERTS)).argsort(-1)[..., :2].astype(np.uint8)
        return msgspec.structs.replace(sample, routed_experts=RoutedExperts.of(chosen))

    return [replace(g, samples=[(noted(sample), reward) for sample, reward in g.samples]) for g in groups]


def test_a_step_repeats_the_rollouts_choices_and_tells_how_many_it_would_not_have_made() -> None:
    torch.manual_seed(0)
    step = make_train_step(Policy(qwen()), {"router_replay": True, "micro_batch_tokens": 40})
    heard = heard_choices(step.policy)
    plan = step.planner.plan(with_choices(make_groups([4, 3], vocabulary=96)))
    metrics = step.run(plan.batch(), 0).metrics
    assert 0.5 < metrics["experts_changed"] < 1, "of choices at random"
    micro_batches = plan.batch().micro_batches
    assert len(micro_batches) > 1
    for micro, given in zip(micro_batches, heard[2], strict=True):
        places = torch.arange(micro.tokens.shape[1]) < micro.lengths[:, None]
        assert micro.routed_experts is not None
        assert torch.equal(given, micro.routed_experts[places][:, 2].long())
    plain = step.run(step.planner.plan(make_groups([4, 3], vocabulary=96)).batch(), 1).metrics
    assert "experts_changed" not in plain, "none were reported"


def test_choices_travel_to_other_ranks_with_their_rows() -> None:
    step = make_train_step(Policy(qwen()), {"router_replay": True, "micro_batch_tokens": 40})
    share = step.planner.plan(with_choices(make_groups([4, 3], vocabulary=96))).share(0)
    sent = Train(version=0, micro_batches=share, trace="", lr=1e-3, steps=1)
    found = msgspec.msgpack.decode(msgspec.msgpack.encode(sent), type=Train)
    for own, other in zip(share, found.micro_batches, strict=True):
        tensors = [collate(rows).routed_experts for rows in (own, other)]
        assert tensors[0] is not None
        assert tensors[1] is not None
        assert torch.equal(tensors[0], tensors[1])
