"""The training state that a checkpoint holds: tensors of the policy and the critic, and all random generators.

The tensors are those of both models and their optimizers, sharded or not; where the policy has an adapter, its weights
alone, since the rest never changes. The states of the random generators are JSON; restored, they continue with the same
numbers.
"""

import random
from typing import Any, cast

import numpy as np
import torch
from torch import nn
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_state_dict,
)

from consumers.trainer.model.policy import Policy
from consumers.trainer.step.learner import Learner


def tensors_of(train: Learner, critic: bool = True) -> dict[str, Any]:
    """Return state dictionaries of models and optimizers by name. critic: whether those of the critic are included."""
    tensors: dict[str, Any] = {}
    for name, (module, update) in train.parts().items():
        if name != "critic" or critic:
            model, optimizer = get_state_dict(module, update.optimizer, options=_options(module))
            tensors |= {name: _trained(module, model), _optimizer(name): optimizer}
    return tensors


def _optimizer(name: str) -> str:
    return "optimizer" if name == "model" else f"{name}_optimizer"


def copy_tensors(tensors: dict[str, Any]) -> dict[str, Any]:
    """Copy tensors, of sharded ones this rank's parts, to host memory, where the next step does not change them."""
    on_gpu = torch.cuda.is_available()
    options = StagingOptions(
        use_pinned_memory=on_gpu, use_shared_memory=False, use_async_staging=False, use_non_blocking_copy=on_gpu
    )
    # A new one every time: it would keep the memory until the next.
    stager = DefaultStager(options)
    copy = cast(dict[str, Any], stager.stage(tensors))
    stager.close()
    return copy


def put_tensors(train: Learner, tensors: dict[str, Any]) -> None:
    """Make ``tensors`` the state of training; a critic of which they have nothing stays as it is.

    Optimizers keep their settings, which may have changed since the checkpoint.
    """
    for name, (module, update) in train.parts().items():
        if name in tensors:
            settings = [{**group} for group in update.optimizer.param_groups]
            set_state_dict(
                module,
                update.optimizer,
                model_state_dict=tensors[name],
                optim_state_dict=tensors[_optimizer(name)],
                options=_options(module),
            )
            for group, kept in zip(update.optimizer.param_groups, settings, strict=True):
                group |= {key: value for key, value in kept.items() if key != "params"}


def model_tensors(policy: Policy) -> dict[str, Any]:
    """Return the state dictionary of a policy without an optimizer: the part ``model`` of a checkpoint."""
    return _trained(policy, get_model_state_dict(policy, options=_options(policy)))


def put_model_tensors(policy: Policy, tensors: dict[str, Any]) -> None:
    """Set the policy's parameters from tensors by their names, each rank its own parts."""
    set_model_state_dict(policy, tensors, options=_options(policy))


def _trained(module: nn.Module, model: dict[str, Any]) -> dict[str, Any]:
    """Leave out the second name of a frozen tied weight, and buffers, which are frozen too."""
    if getattr(module, "adapter", None) is None:
        return model
    names = {name for name, parameter in module.named_parameters() if parameter.requires_grad}
    return {name: tensor for name, tensor in model.items() if name in names}


def _options(module: nn.Module) -> StateDictOptions:
    frozen = getattr(module, "adapter", None) is not None
    # A file that lacks a tensor was refused when it was read.
    return StateDictOptions(ignore_frozen_params=frozen, strict=not frozen)


def random_states() -> dict[str, Any]:
    """Return the states of the random generators of Python, numpy and torch (all devices), as JSON."""
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
    """Restore states from ``random_states``; those of the GPUs only if their number is the same."""
    kind, numbers, gauss = state["python"]
    random.setstate((kind, tuple(numbers), gauss))
    np.random.set_state(state["numpy"])
    torch.set_rng_state(_byte_tensor(state["torch"]))
    if torch.cuda.is_available() and len(state["cuda"]) == torch.cuda.device_count():
        torch.cuda.set_rng_state_all([_byte_tensor(text) for text in state["cuda"]])


def _byte_tensor(text: str) -> torch.Tensor:
    return torch.frombuffer(bytearray.fromhex(text), dtype=torch.uint8)


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    return value.tolist() if isinstance(value, np.ndarray) else value
