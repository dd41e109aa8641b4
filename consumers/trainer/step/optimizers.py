"""The optimizers: AdamW, AdamW with moments in 8 bits, and Muon for the matrices of layers with AdamW for the rest.

Each has its state from the start: a checkpoint of step 0 has it, too. A weight of a tied output layer is one parameter,
that of the embedding.
"""

import math
import re
from collections.abc import Callable, Iterator
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.optim._muon import DEFAULT_A, DEFAULT_B, DEFAULT_C, DEFAULT_NS_STEPS, EPS, _zeropower_via_newtonschulz

from consumers.trainer.distributed.parts import own_blocks
from consumers.trainer.distributed.ranks import local_part
from consumers.trainer.step.gradient_update import LocalAdamW
from schemas.config import OptimizerConfig
from schemas.errors import ConfigError

_NUMBERED = re.compile(r"\.\d+\.")
"""Part of the name of what belongs to one of many layers."""


class LocalMuon(LocalAdamW):
    """Muon (Jordan et al. 2024) for the groups that have a ``momentum``, AdamW for the others.

    The step of a matrix is orthogonal and has the size of AdamW's (0.2 sqrt(max(rows, columns)), arXiv:2502.16982), so
    that both take one learning rate. A matrix is gathered in bfloat16 for it, which is the type that Muon computes in
    anyway, and computed by one rank, as many matrices at a time as there are ranks: so every number of ranks takes the
    same step. A stack of matrices, such as the experts of a layer, is computed matrix by matrix.
    """

    def _update(self, trained: list[nn.Parameter], group: dict[str, Any]) -> None:
        if "momentum" not in group:
            super()._update(trained, group)
            return
        sharded = any(isinstance(p, DTensor) for p in trained)
        rank, world = (dist.get_rank(), dist.get_world_size()) if sharded else (0, 1)
        for at in range(0, len(trained), world):
            some, own = trained[at : at + world], torch.empty(0)
            for place, parameter in enumerate(some):
                gathered = self._direction(parameter, group["momentum"])
                if place == rank:
                    own = _orthogonal(gathered)
            for place, parameter in enumerate(some):
                part, shape = local_part(parameter), parameter.shape
                found = own if place == rank else torch.empty(shape, dtype=torch.bfloat16, device=part.device)
                if world > 1:
                    dist.broadcast(found, place)
                part.mul_(1 - group["lr"] * group["weight_decay"])
                size = 0.2 * math.sqrt(max(shape[-2:]))
                for own_block, block in own_blocks(parameter):
                    part[own_block].add_(found[block], alpha=-group["lr"] * size)

    def _direction(self, parameter: nn.Parameter, momentum: float) -> Tensor:
        """Move a parameter's momentum on, and return where it points with Nesterov's step, whole, in bfloat16."""
        gradient, moving = (
            local_part(cast(Tensor, parameter.grad)),
            local_part(self.state[parameter]["momentum_buffer"]),
        )
        moving.lerp_(gradient, 1 - momentum)
        direction = gradient.lerp(moving, momentum).bfloat16()
        if not isinstance(parameter, DTensor):
            return direction
        mesh, placements = parameter.device_mesh, parameter.placements
        shape, stride = parameter.shape, parameter.stride()
        return DTensor.from_local(direction, mesh, placements, shape=shape, stride=stride).full_tensor()


def _orthogonal(matrix: Tensor) -> Tensor:
    """Return the orthogonal matrix that is nearest, roughly; of a stack each."""
    if matrix.ndim > 2:
        return torch.stack([_orthogonal(each) for each in matrix])
    coefficients = (DEFAULT_A, DEFAULT_B, DEFAULT_C)
    return _zeropower_via_newtonschulz(matrix, coefficients, DEFAULT_NS_STEPS, EPS).contiguous()


def build_optimizer(model: nn.Module, settings: OptimizerConfig) -> Optimizer:
    """Build the optimizer of the parameters that need a gradient. Matrices decay, vectors (norms, biases) don't.

    ConfigError if it needs a package that is not installed.
    """
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    muon = set(_matrices_of_layers(model)) & trained.keys() if settings.name == "muon" else set()
    rest = [p for name, p in trained.items() if name not in muon]
    groups: list[dict[str, Any]] = [
        {
            "params": [trained[name] for name in trained if name in muon],
            "weight_decay": settings.weight_decay,
            "momentum": settings.momentum,
        },
        {"params": [p for p in rest if p.ndim >= 2], "weight_decay": settings.weight_decay},
        {"params": [p for p in rest if p.ndim < 2], "weight_decay": 0.0},
    ]
    # A group without parameters would lose its settings in a checkpoint.
    groups = [group for group in groups if group["params"]]
    values: dict[str, Any] = {"lr": settings.lr, "betas": settings.betas, "eps": settings.eps}
    if settings.name == "adamw_8bit":
        return _build_8bit(groups, values)
    optimizer = (LocalMuon if settings.name == "muon" else LocalAdamW)(groups, **values, fused=True)
    optimizer.offloaded = settings.offload
    # AdamW makes its state at the first step, and saving before that would count as one: so make it now.
    for name, parameter in trained.items():
        moments = ("momentum_buffer",) if name in muon else ("exp_avg", "exp_avg_sq")
        state = {each: _zeros_like(parameter, settings.offload) for each in moments}
        # AdamW looks for a step in every state that it loads.
        state["step"] = torch.zeros((), dtype=torch.float32, device=parameter.device)
        optimizer.state[parameter] = state
    return optimizer


def _zeros_like(parameter: nn.Parameter, offload: bool) -> Tensor:
    """Make a moment of a parameter, sharded like it. offload: in main memory, pinned for a GPU."""
    zeros = torch.zeros_like(parameter, memory_format=torch.preserve_format)
    if not offload:
        return zeros
    part = local_part(zeros)
    held = torch.zeros_like(part, device="cpu", pin_memory=part.device.type == "cuda")
    # DTensor.from_local would move it to the device of the mesh.
    return DTensor(held, zeros._spec, requires_grad=False) if isinstance(zeros, DTensor) else held


def _matrices_of_layers(model: nn.Module) -> Iterator[str]:
    """Yield the names of the hidden matrices: in one of many layers, and no embedding."""
    for path, module in model.named_modules():
        for name, parameter in module.named_parameters(recurse=False):
            full = f"{path}.{name}"
            if parameter.ndim in (2, 3) and not isinstance(module, nn.Embedding) and _NUMBERED.search(full):
                yield full


def _build_8bit(groups: list[dict[str, Any]], values: dict[str, Any]) -> Optimizer:
    try:
        from torchao.optim import AdamW8bit
    except ImportError as error:
        raise ConfigError(
            f"trainer.optimizer.name adamw_8bit needs the package torchao: pip install torchao ({error})"
        ) from error
    optimizer: Any = AdamW8bit(groups, **values)
    # It takes its learning rate as a tensor, everything else as a number.
    optimizer.register_step_pre_hook(lambda *_: _convert_lr(optimizer, torch.tensor))
    optimizer.register_step_post_hook(lambda *_: _convert_lr(optimizer, float))
    _convert_lr(optimizer, float)
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            moments = {name: optimizer._new_buffer(parameter, name == "exp_avg") for name in ("exp_avg", "exp_avg_sq")}
            optimizer.state[parameter] = {"step": torch.tensor(0.0), **moments}
    return cast(Optimizer, optimizer)


def _convert_lr(optimizer: Optimizer, kind: Callable[[Any], Any]) -> None:
    for group in optimizer.param_groups:
        group["lr"] = kind(group["lr"])
