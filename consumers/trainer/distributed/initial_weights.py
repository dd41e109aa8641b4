"""The weights that several ranks begin with: rank 0 reads them, and every rank gets its part, layer by layer.

So main memory holds a model once: the other ranks build it without weights, on PyTorch's meta device.
"""

import json
from collections import Counter
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from schemas.errors import ConfigError


class InitialWeights:
    """A model's weights on their way from rank 0: every rank calls ``agree``, cuts the model, and fills each part.

    described: on rank 0 the names, shapes and types of all tensors, and which are tied; "" on the others.
    """

    def __init__(self, model: nn.Module, main: bool, kept: torch.dtype | None = None) -> None:
        """main: whether all ranks get these weights. kept: the type that parameters get, by default their own."""
        self._main = main
        self._tensors: dict[str, Tensor] = {}
        self._places: list[tuple[nn.Module, str]] = []
        self._own: list[list[Any]] = []
        firsts: dict[int, str] = {}
        for path, module in model.named_modules():
            for key, tensor in [*module._parameters.items(), *module._buffers.items()]:
                if tensor is None:
                    continue
                name = f"{path}.{key}".removeprefix(".")
                first = firsts.setdefault(id(tensor), name)
                if first == name:
                    self._tensors[name] = tensor.detach()
                self._places.append((module, key))
                convert = kept is not None and isinstance(tensor, nn.Parameter) and tensor.is_floating_point()
                dtype = str(kept if convert else tensor.dtype).removeprefix("torch.")
                self._own.append([name, list(tensor.shape), dtype, first])
        self.described = json.dumps(self._own) if main else ""

    def agree(self, described: str) -> None:
        """Take the tensors out of the model, whose parameters are empty afterwards, and tie what rank 0 has tied.

        A checkpoint may have an output layer of its own though its configuration ties it, which only rank 0 sees.
        described: that of rank 0. ConfigError if this rank has built another model.
        """
        wanted = json.loads(described)
        if [entry[:2] for entry in self._own] != [entry[:2] for entry in wanted]:
            mine, other = ({name: shape for name, shape, *_ in found} for found in (self._own, wanted))
            name = next((n for n in [*other, *mine] if mine.get(n) != other.get(n)), "the order of its weights")
            raise ConfigError(
                f"model.path is another model on this rank than on rank 0: {name} is {mine.get(name, 'missing')} here,"
                f" {other.get(name, 'missing')} there"
            )
        if not self._main:
            self._tensors.clear()
        self._names: dict[tuple[int, str], str] = {}
        self._kinds: dict[str, tuple[list[int], torch.dtype]] = {}
        empty: dict[str, nn.Parameter] = {}
        for (module, key), (_, shape, dtype, first) in zip(self._places, wanted, strict=True):
            self._names[id(module), key] = first
            self._kinds[first] = shape, getattr(torch, dtype)
            held = module._parameters.get(key)
            if held is not None:
                if first not in empty:
                    empty[first] = nn.Parameter(torch.empty_like(held, device="meta"), held.requires_grad)
                module._parameters[key] = empty[first]
        self._uses = Counter(self._names.values())

    @torch.no_grad()
    def fill(self, part: nn.Module, device: torch.device) -> None:
        """Fill the modules of ``part`` that have no weights yet, on ``device``; of cut ones with this rank's part.

        All ranks call this for the same parts in the same order. One tensor at a time is in memory as a whole.
        """
        made: dict[int, nn.Parameter] = {}
        for module in part.modules():
            for name, held in [*module._parameters.items(), *module._buffers.items()]:
                first = self._names.pop((id(module), name), None)
                if first is None or held is None:
                    continue
                if not isinstance(held, nn.Parameter):
                    module._buffers[name] = self._receive(first, device)
                    continue
                # Tied: one parameter under two names.
                if id(held) not in made:
                    whole = self._receive(first, device)
                    if isinstance(held, DTensor):
                        whole = distribute_tensor(whole, held.device_mesh, held.placements, src_data_rank=None)
                    made[id(held)] = nn.Parameter(whole, held.requires_grad)
                self._uses[first] -= 1
                module._parameters[name] = made[id(held)]
                if not self._uses[first]:
                    self._tensors.pop(first, None)

    def _receive(self, name: str, device: torch.device) -> Tensor:
        shape, dtype = self._kinds[name]
        if self._main:
            whole = self._tensors[name].to(device, dtype).contiguous()
        else:
            whole = torch.empty(shape, dtype=dtype, device=device)
        dist.broadcast(whole, 0)
        return whole
