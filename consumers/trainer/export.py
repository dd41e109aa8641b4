"""The policy's weights as generators read them: a safetensors file in the wire dtype, under Hugging Face names."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from safetensors.torch import save_file
from torch import Tensor

from consumers.trainer.policy import Policy
from schemas.messages import TensorSpec


def write_weights(policy: Policy, path: Path) -> list[TensorSpec]:
    """Write every parameter to ``path``, gathered one at a time where it is sharded; returns what was written."""
    tensors = dict(full_parameters(policy))
    save_file(tensors, path)
    return [TensorSpec(name, str(t.dtype).removeprefix("torch."), list(t.shape)) for name, t in tensors.items()]


def full_parameters(policy: Policy) -> Iterator[tuple[str, Tensor]]:
    """Name and contiguous CPU copy of each parameter, a tied one once. Collective when sharded."""
    for name, parameter in policy.causal_lm.named_parameters():
        value = parameter.detach()
        if hasattr(value, "full_tensor"):
            value = value.full_tensor()
        yield name, value.to("cpu", copy=True).contiguous()


@torch.no_grad()
def reference_logprobs(policy: Policy, tokens: Sequence[int]) -> npt.NDArray[np.float32]:
    """Log-probability of each token after the first at temperature 1, float32 [T-1]: what a probe compares with."""
    ids = torch.tensor([list(tokens)], device=policy.device)
    mask = torch.ones(1, len(tokens) - 1, dtype=torch.bool, device=policy.device)
    scores = policy(ids, ids[:, 1:], mask, temperature=1.0)
    return scores.logprobs[0].float().cpu().numpy()
