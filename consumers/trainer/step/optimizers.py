"""The optimizers: AdamW, AdamW with moments in 8 bits, and Muon for the matrices of layers with AdamW for the rest.

Each has its state from the start: a checkpoint of step 0 has it, too. A weight of a tied output layer is one parameter,
that of the embedding.
"""

import math
import re
from collections.abc import Callable, Iterator, Sequence
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

PINNED = 1 << 28
"""Elements of a block of pinned memory, 1 GiB of float32, unless a moment is larger."""
_ADAMW, _MUON = ("exp_avg", "exp_avg_sq"), ("momentum_buffer",)
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
        gradient = local_part(cast(Tensor, parameter.grad))
        moving = local_part(self.state[parameter]["momentum_buffer"])
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
    """Build the optimizer of trainable parameters; only matrices decay. ConfigError if a package is not installed."""
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
    moments = [(p, each) for name, p in trained.items() for each in (_MUON if name in muon else _ADAMW)]
    made = _zeros_like([p for p, _ in moments], settings.offload)
    for (parameter, each), zeros in zip(moments, made, strict=True):
        optimizer.state[parameter][each] = zeros
    for parameter in trained.values():
        # AdamW looks for a step in every state that it loads.
        optimizer.state[parameter]["step"] = torch.zeros((), dtype=torch.float32, device=parameter.device)
    return optimizer


def _zeros_like(parameters: Sequence[nn.Parameter], offload: bool) -> list[Tensor]:
    """Make a moment of each parameter, sharded like it. offload: in main memory, pinned for a GPU."""
    if not offload:
        return [torch.zeros_like(p, memory_format=torch.preserve_format) for p in parameters]
    parts = [local_part(p) for p in parameters]
    held = pin_zeros(parts) if is_pinned(parts) else [torch.zeros_like(part, device="cpu") for part in parts]
    # DTensor.from_local would move it to the device of the mesh.
    return [
        DTensor(zeros, p._spec, requires_grad=False) if isinstance(p, DTensor) else zeros
        for p, zeros in zip(parameters, held, strict=True)
    ]


def is_pinned(parts: Sequence[Tensor]) -> bool:
    """Return whether the moments of these parameters are pinned: for a GPU."""
    return any(part.device.type == "cuda" for part in parts)


def pin_zeros(parts: Sequence[Tensor], pin: bool = True) -> list[Tensor]:
    """Make zeros like each tensor, all of one type, in pinned main memory: many in one block.

    PyTorch rounds the size of a pinned block up to a power of two, which for each tensor alone may be twice its size.
    """
    # Each begins at a multiple of 256 bytes.
    sizes = [part.numel() + -part.numel() % 64 for part in parts]
    largest = max(PINNED, *(_power_of_two(size) for size in sizes))
    used: list[int] = []
    places = []
    for size in sizes:
        block = next((at for at, taken in enumerate(used) if taken + size <= largest), len(used))
        used += [0] * (block == len(used))
        places.append((block, used[block]))
        used[block] += size
    blocks = [torch.zeros(_power_of_two(taken), dtype=parts[0].dtype, pin_memory=pin) for taken in used]
    return [
        blocks[block].as_strided(part.shape, part.stride(), offset)
        for part, (block, offset) in zip(parts, places, strict=True)
    ]


def _power_of_two(size: int) -> int:
    return 1 << max(0, size - 1).bit_length()


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
        from torchao.optim.subclass_8bit import OptimState8bit
    except ImportError as error:
        raise ConfigError(
            f"trainer.optimizer.name adamw_8bit needs the package torchao: pip install torchao ({error})"
        ) from error
    _allow_copies(OptimState8bit)
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


def _allow_copies(kind: Any) -> None:
    """Have torchao's moments be made without values: copies for checkpoints begin so, and torchao leaves it out."""

    def make(_: Any, __: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        like, device = args[0], kwargs.get("device") or args[0].device
        codes, scale = (torch.empty_like(part, device=device) for part in (like.codes, like.scale))
        return kind(codes, scale, like.qmap.to(device), like.signed, dtype=like.dtype)

    kind.implements([torch.ops.aten.new_empty.default, torch.ops.aten.empty_like.default])(make)


def _convert_lr(optimizer: Optimizer, kind: Callable[[Any], Any]) -> None:
    for group in optimizer.param_groups:
        group["lr"] = kind(group["lr"])
