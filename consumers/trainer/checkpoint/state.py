"""States of all random generators, as JSON; restored, they go on with the same numbers.

All that a checkpoint holds in tensors: the policy and the critic, each with its optimizer, sharded or not.

Of a policy with an adapter that is the adapter: the rest never changes.
"""

from __future__ import annotations

import random
from typing import Any, cast

import numpy as np
import torch
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_state_dict,
)

from consumers.trainer.model.policy import Policy
from consumers.trainer.step.train_step import TrainStep


def random_states() -> dict[str, Any]:
    """Those of Python, numpy and torch (all devices), as JSON."""
    kind, numbers, gauss = random.getstate()
    return {
        "python": [kind, list(numbers), gauss],
        "numpy": _plain(np.random.get_state(legacy=False)),
        "torch": torch.get_rng_state().numpy().tobytes().hex(),
        "cuda": [state.numpy().tobytes().hex() for state in torch.cuda.get_rng_state_all()]
        if torch.cuda.is_available()
        else [],
    }


def set_random_states(state: dict[str, Any]) -> None:
    """Those of the GPUs only where there are as many as there were."""
    kind, numbers, gauss = state["python"]
    random.setstate((kind, tuple(numbers), gauss))
    np.random.set_state(state["numpy"])
    torch.set_rng_state(_byte_tensor(state["torch"]))
    if torch.cuda.is_available() and len(state["cuda"]) == torch.cuda.device_count():
        torch.cuda.set_rng_state_all([_byte_tensor(text) for text in state["cuda"]])


def _byte_tensor(text: str) -> torch.Tensor:
    return torch.frombuffer(bytearray.fromhex(text), dtype=torch.uint8)


def _plain(value: Any) -> Any:
    """Arrays to lists, inside dictionaries too."""
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    return value.tolist() if isinstance(value, np.ndarray) else value


def tensors_of(train: TrainStep) -> dict[str, Any]:
    """State dictionaries by name; also what a checkpoint is loaded into."""
    model, optimizer = get_state_dict(train.policy, train.optimizer, options=_options(train.policy))
    tensors = {"model": _trained(train.policy, model), "optimizer": optimizer}
    if train.critic is not None:
        model, optimizer = get_state_dict(train.critic.critic, train.critic.optimizer)
        tensors |= {"critic": model, "critic_optimizer": optimizer}
    return tensors


def copied(tensors: dict[str, Any]) -> dict[str, Any]:
    """The same in host memory, of sharded tensors this rank's parts, where the next step does not change them."""
    on_gpu = torch.cuda.is_available()
    options = StagingOptions(
        use_pinned_memory=on_gpu, use_shared_memory=False, use_async_staging=False, use_non_blocking_copy=on_gpu
    )
    # A new one every time: it would keep the memory until the next.
    stager = DefaultStager(options)
    copy = cast(dict[str, Any], stager.stage(tensors))
    stager.close()
    return copy


def put_tensors(train: TrainStep, tensors: dict[str, Any]) -> None:
    """Make ``tensors`` the state of training."""
    set_state_dict(
        train.policy,
        train.optimizer,
        model_state_dict=tensors["model"],
        optim_state_dict=tensors["optimizer"],
        options=_options(train.policy),
    )
    if train.critic is not None:
        set_state_dict(
            train.critic.critic,
            train.critic.optimizer,
            model_state_dict=tensors["critic"],
            optim_state_dict=tensors["critic_optimizer"],
        )


def model_tensors(policy: Policy) -> dict[str, Any]:
    """The part ``model`` of a checkpoint alone, of a policy without an optimizer."""
    return _trained(policy, get_model_state_dict(policy, options=_options(policy)))


def put_model_tensors(policy: Policy, tensors: dict[str, Any]) -> None:
    """Make ``tensors`` the weights of the policy."""
    set_model_state_dict(policy, tensors, options=_options(policy))


def _trained(policy: Policy, model: dict[str, Any]) -> dict[str, Any]:
    """Without the second name of a frozen tied weight, and buffers, which are frozen too."""
    if policy.adapter is None:
        return model
    names = {name for name, parameter in policy.named_parameters() if parameter.requires_grad}
    return {name: tensor for name, tensor in model.items() if name in names}


def _options(policy: Policy) -> StateDictOptions:
    frozen = policy.adapter is not None
    # A file that lacks a tensor was refused when it was read.
    return StateDictOptions(ignore_frozen_params=frozen, strict=not frozen)
