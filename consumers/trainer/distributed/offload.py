"""The state of training moves from its device to main memory and back, while other processes use the device.

What moves is the memory below tensors, not the tensors: models, optimizers and FSDP2 keep the tensors that they have,
with their views and shared memory, and none of them is valid in between. Bytes are copied, so each value is the same
afterwards, NaN included.
"""

import time
from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor, UntypedStorage, nn
from torch.optim import Optimizer

from consumers.trainer.distributed.parts import plain_parts
from consumers.trainer.distributed.ranks import reshard
from schemas.errors import InfraError

FREE_DEADLINE_S = 10.0
POLL_S = 0.02


class StateOffload:
    """Moves models and the state of optimizers between ``device`` and main memory, as often as you like.

    Called between steps, when there are no gradients. What is on another device stays there. The buffers in main
    memory, pinned for a GPU, are used again each time.
    """

    def __init__(self, device: torch.device, models: Sequence[nn.Module], optimizers: Sequence[Optimizer]) -> None:
        self._device, self._models, self._optimizers = device, models, optimizers
        self._on_gpu = device.type != "cpu"
        self._buffers: list[Tensor] = []
        self._moved: list[UntypedStorage] = []

    @property
    def bytes_moved(self) -> int:
        """Bytes that are in main memory now."""
        return sum(len(buffer) for buffer, _ in zip(self._buffers, self._moved, strict=False))

    @torch.no_grad()
    def offload(self) -> None:
        """Move everything to main memory, and return the device's memory to its driver."""
        if self._moved:
            return
        for model in self._models:
            reshard(model)
        storages = self._storages()
        for place, storage in enumerate(storages):
            self._buffer(place, storage.nbytes()).copy_(_bytes_of(storage), non_blocking=True)
        del self._buffers[len(storages) :]
        self._synchronize()
        for storage in storages:
            storage.resize_(0)
        self._moved = storages
        if self._on_gpu:
            torch.accelerator.empty_cache()

    @torch.no_grad()
    def onload(self) -> None:
        """Move everything back to the device; InfraError if it has no room for it ``FREE_DEADLINE_S`` later."""
        self._wait_for_room()
        moved, self._moved = self._moved, []
        for storage, buffer in zip(moved, self._buffers, strict=False):
            storage.resize_(len(buffer))
            _bytes_of(storage).copy_(buffer, non_blocking=True)
        self._synchronize()

    def _wait_for_room(self) -> None:
        """Wait for memory that others have given back: a driver may report it as free only after a moment."""
        end = time.monotonic() + FREE_DEADLINE_S
        while (free := self._free_bytes()) is not None and free < self.bytes_moved:
            if time.monotonic() > end:
                raise InfraError(
                    f"the trainer's state takes {self.bytes_moved / 1e9:.1f} GB, and {self._device} has"
                    f" {free / 1e9:.1f} GB free {FREE_DEADLINE_S:.0f} s after generators gave it: another process has"
                    " the rest"
                )
            time.sleep(POLL_S)

    def _free_bytes(self) -> int | None:
        """Return how much memory the device has free; None for main memory."""
        return torch.accelerator.get_memory_info(self._device)[0] if self._on_gpu else None

    def _tensors(self) -> Iterator[Tensor]:
        for model in self._models:
            yield from model.parameters()
            yield from model.buffers()
        for optimizer in self._optimizers:
            for state in optimizer.state.values():
                yield from (value for value in state.values() if isinstance(value, Tensor))

    def _storages(self) -> list[UntypedStorage]:
        """Return the memory below all tensors on the device, each piece once."""
        tensors = [part for tensor in self._tensors() for part in plain_parts(tensor).values()]
        present = [tensor for tensor in tensors if tensor.device.type == self._device.type]
        _make_resizable(present)
        storages = (tensor.untyped_storage() for tensor in present)
        return list({storage.data_ptr(): storage for storage in storages if storage.nbytes()}.values())

    def _buffer(self, place: int, size: int) -> Tensor:
        """Return the buffer of this place, uint8 [size], the one of last time if it fits."""
        if place == len(self._buffers) or len(self._buffers[place]) != size:
            made = torch.empty(size, dtype=torch.uint8, pin_memory=self._on_gpu)
            self._buffers[place : place + 1] = [made]
        return self._buffers[place]

    def _synchronize(self) -> None:
        if self._on_gpu:
            torch.accelerator.synchronize(self._device)


def _bytes_of(storage: UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def _make_resizable(tensors: Iterable[Tensor]) -> None:
    """Copy memory that can't be freed, such as that of a mapped file, for all tensors that share it."""
    made: dict[int, UntypedStorage] = {}
    for tensor in tensors:
        storage = tensor.untyped_storage()
        if not storage.resizable():
            own = made.setdefault(storage.data_ptr(), storage.clone())
            tensor.data = tensor.data.new_empty(0).set_(own, tensor.storage_offset(), tensor.size(), tensor.stride())
