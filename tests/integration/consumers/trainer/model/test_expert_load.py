"""The metrics of a mixture's routers."""

from collections import Counter
from typing import Any

import pytest
import torch
from torch import nn
from transformers import MixtralConfig, MixtralForCausalLM, PreTrainedModel, Qwen3MoeConfig, Qwen3MoeForCausalLM

from consumers.trainer.model.policy import Policy
from consumers.trainer.model.router_replay import has_experts
from tests.support.trainer.train_steps import make_train_step
from tests.support.trainer.trajectories import make_groups

SIZES: dict[str, Any] = {
    "vocab_size": 256,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "num_experts_per_tok": 2,
    "initializer_range": 0.5,
}


def qwen() -> PreTrainedModel:
    return Qwen3MoeForCausalLM(Qwen3MoeConfig(**SIZES, num_experts=8, moe_intermediate_size=16, head_dim=16))


def mixtral() -> PreTrainedModel:
    return MixtralForCausalLM(MixtralConfig(**SIZES, num_local_experts=8))


@pytest.mark.parametrize("build", [qwen, mixtral])
def test_the_load_of_experts_is_what_the_routers_chose(build: Any) -> None:
    torch.manual_seed(0)
    model = build()
    step = make_train_step(Policy(model), {"micro_batch_tokens": 40})
    chosen: dict[str, Counter[int]] = {}
    for name, module in model.named_modules():
        if name.endswith(".gate"):
            counter = chosen[name] = Counter()

            def count(_: Any, __: Any, output: Any, counter: Counter[int] = counter) -> None:
                if torch.is_grad_enabled():
                    counter.update(output[-1].reshape(-1).tolist())

            module.register_forward_hook(count)
    metrics = step.run(step.planner.plan(make_groups([4, 3])).batch(), 0).metrics
    assert len(chosen) == 2
    worst = max(max(counter.values()) * 8 / counter.total() for counter in chosen.values())
    assert metrics["expert_load_max"] == pytest.approx(worst)
    assert metrics["expert_load_max"] > 1
    unused = sum(8 - len(counter) for counter in chosen.values()) / 16
    assert metrics["experts_unused"] == pytest.approx(unused)
    again = step.run(step.planner.plan(make_groups([4, 3])).batch(), 0).metrics
    assert again["expert_load_max"] == pytest.approx(worst, rel=0.2), "each step has its own counts"


def test_a_convolution_is_no_layer_of_experts() -> None:
    """Hybrids have one in each layer of linear attention: half of the experts would be called unused."""
    convolution, experts = nn.Conv1d(8, 8, 4, groups=8), nn.Module()
    experts.gate_up_proj = nn.Parameter(torch.zeros(8, 4, 4))
    assert convolution.weight.ndim == 3
    assert (has_experts(convolution), has_experts(experts), has_experts(nn.Linear(4, 4))) == (False, True, False)
