"""The part of a forward pass that is kept until backward: less memory for more time, and the same gradient.

Layers may be computed again in backward, wholly or all but their attention, whose cost grows with the square of a
sample's length. What is kept between layers may wait in main memory.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from schemas.config.trainer import CHECKPOINTED_FROM

if TYPE_CHECKING:  # importing it takes seconds, and model.kind mlp does not need it
    from transformers import PreTrainedModel

Checkpointing = bool | Literal["auto", "selective"]


def save_activations(model: PreTrainedModel, checkpointing: Checkpointing, offload: bool = False) -> None:
    """Have a model keep less in backward's memory; call it before the model is sharded.

    checkpointing: False: all is kept. True: each layer's input. ``selective``: also the results of attention. ``auto``:
    True for models of CHECKPOINTED_FROM parameters or more. offload:
    keep these inputs in main memory, which is pinned where the model computes on a GPU; only with checkpointing, since
    otherwise weights would be copied as well.
    """
    if checkpointing == "auto":
        checkpointing = sum(parameter.numel() for parameter in model.parameters()) >= CHECKPOINTED_FROM
    if not checkpointing:
        return
    arguments: dict[str, Any] = {"use_reentrant": False}
    if checkpointing == "selective":
        arguments["context_fn"] = functools.partial(create_selective_checkpoint_contexts, _keep_attention)
    model.gradient_checkpointing_enable(arguments)
    if offload:
        # Of a vision model the text, whose layers the policy calls by themselves.
        body = getattr(model.base_model, "language_model", model.base_model)
        body.forward = _offloaded(body.forward)


def _keep_attention(_: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    """Keep what any attention kernel returns: PyTorch's, or that of flash_attn."""
    name = str(operator)
    kept = "attention" in name or "attn" in name
    return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE


def _offloaded(forward: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(forward)
    def run(*args: Any, **kwargs: Any) -> Any:
        with torch.autograd.graph.save_on_cpu(pin_memory=torch.cuda.is_available()):
            return forward(*args, **kwargs)

    return run
