"""The weights that several ranks begin with: rank 0 has read them, and every rank gets its part, layer by layer.

So main memory holds a model once and not once for each rank, and files are read once. The other ranks have it without
weights, on PyTorch's meta device; what they had in the place of rank 0's weights is dropped.
"""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from schemas.errors import ConfigError


class InitialWeights:
    """A model's weights on their way from rank 0 to all ranks, each of which does::

        weights = InitialWeights(model, main=rank == 0)
        weights.agree(broadcast_text(weights.described))
        cut(model)                      # nothing but shapes
        for layer in layers:
            weights.fill(layer, device)
            fully_shard(layer)

    described: on rank 0 the names, shapes and types of all tensors; "" on the others.
    """

    def __init__(self, model: nn.Module, main: bool) -> None:
        """Take the tensors out of a model; its parameters are empty afterwards. main: whether these are the weights."""
        self._model = model
        self._main = main
        self._tensors: dict[str, Tensor] = {}
        self._first: dict[int, str] = {}
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            self._tensors[name] = tensor.detach()
            self._first[id(tensor)] = name
        self.described = json.dumps(self._describe()) if main else ""
        empty: dict[int, nn.Parameter] = {}
        self._names: dict[tuple[int, str], str] = {}
        for module in model.modules():
            for name, held in [*module._parameters.items(), *module._buffers.items()]:
                if held is None:
                    continue
                self._names[id(module), name] = self._first[id(held)]
                if isinstance(held, nn.Parameter):
                    if id(held) not in empty:
                        empty[id(held)] = nn.Parameter(torch.empty_like(held, device="meta"), held.requires_grad)
                    module._parameters[name] = empty[id(held)]
        self._uses = Counter(self._names.values())

    def agree(self, described: str) -> None:
        """Take over the types of rank 0's tensors; ConfigError if this rank has built another model.

        described: that of rank 0.
        """
        own, wanted = self._describe(), json.loads(described)
        if [entry[:2] for entry in own] != [entry[:2] for entry in wanted]:
            mine, other = ({name: shape for name, shape, _ in found} for found in (own, wanted))
            name = next((n for n in [*other, *mine] if mine.get(n) != other.get(n)), "the order of its weights")
            raise ConfigError(
                f"model.path is another model on this rank than on rank 0: {name} is {mine.get(name, 'missing')} here,"
                f" {other.get(name, 'missing')} there"
            )
        self._dtypes = {name: getattr(torch, dtype) for name, _, dtype in wanted}
        self._shapes = {name: tensor.shape for name, tensor in self._tensors.items()}
        if not self._main:
            self._tensors.clear()

    @torch.no_grad()
    def fill(self, part: nn.Module, device: torch.device) -> None:
        """Give all modules of ``part`` that have no weights yet theirs, on ``device``: of cut ones this rank's part.

        All ranks call this for the same parts in the same order; whole is one tensor at a time.
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
        """The whole tensor, from rank 0."""
        if self._main:
            whole = self._tensors[name].to(device).contiguous()
        else:
            whole = torch.empty(self._shapes[name], dtype=self._dtypes[name], device=device)
        dist.broadcast(whole, 0)
        return whole

    def _describe(self) -> list[list[Any]]:
        return [[name, list(t.shape), str(t.dtype).removeprefix("torch.")] for name, t in self._tensors.items()]
