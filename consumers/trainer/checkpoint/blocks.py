"""Sharded tensors of which a rank has several blocks, such as experts' fused gates: PyTorch would write them as one."""

import io
from typing import Any

import torch
from torch import Size, Tensor
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, StorageMeta, TensorProperties
from torch.distributed.checkpoint.planner import ReadItem, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import _StridedShard

from consumers.trainer.distributed.parts import own_blocks


class SavePlanner(DefaultSavePlanner):
    """Plans as PyTorch does, but each block by itself."""

    def set_up_planner(
        self, state_dict: dict[str, Any], storage_meta: StorageMeta | None = None, is_coordinator: bool = False
    ) -> None:
        """Prepare the save; a tensor that is cut in strides is written block by block, anything else as usual."""
        super().set_up_planner(state_dict, storage_meta, is_coordinator)
        self.state_dict = {name: _in_blocks(value) for name, value in self.state_dict.items()}


class LoadPlanner(DefaultLoadPlanner):
    """Plans as PyTorch does, but each block by itself, and takes only plain values where a checkpoint has no tensor."""

    def set_up_planner(self, *args: Any, **kwargs: Any) -> None:
        """Prepare the load; a tensor that is cut in strides is read block by block, anything else as usual."""
        super().set_up_planner(*args, **kwargs)
        self.state_dict = {name: _in_blocks(value) for name, value in self.state_dict.items()}

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """Load a value that is no tensor. UnpicklingError if it is more than plain data."""
        plain = torch.load(value, weights_only=True)
        value = io.BytesIO()
        torch.save(plain, value)
        value.seek(0)
        super().load_bytes(read_item, value)


class _Blocks:
    """Tells torch.distributed.checkpoint where the blocks of this rank's part of a sharded tensor are in the whole."""

    def __init__(self, whole: DTensor) -> None:
        self._whole, self._part = whole, whole.to_local().detach()
        self._places: list[tuple[ChunkStorageMetadata, tuple[slice, ...]]] = []
        for own, there in own_blocks(whole):
            sizes = Size([each.stop - each.start for each in there])
            if sizes.numel():
                self._places.append((ChunkStorageMetadata(Size([each.start for each in there]), sizes), own))

    def __create_write_items__(self, name: str, _: object) -> list[WriteItem]:
        properties = TensorProperties.create_from_tensor(self._part)
        return [
            WriteItem(
                MetadataIndex(name, chunk.offsets),
                WriteItemType.SHARD,
                tensor_data=TensorWriteData(chunk, properties, self._whole.size()),
            )
            for chunk, _ in self._places
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [chunk for chunk, _ in self._places]

    def __get_tensor_shard__(self, index: MetadataIndex) -> Tensor:
        return self._part[next(own for chunk, own in self._places if chunk.offsets == index.offset)]


def _in_blocks(value: Any) -> Any:
    """Return a tensor that is cut in strides as one that is written in blocks; anything else as it is."""
    if not isinstance(value, DTensor) or not any(isinstance(how, _StridedShard) for how in value.placements):
        return value
    blocks, part = _Blocks(value), value.to_local().detach()
    # A sharded tensor lets its part answer.
    for name in ("__create_write_items__", "__create_chunk_list__", "__get_tensor_shard__"):
        setattr(part, name, getattr(blocks, name))
    return DTensor(part, value._spec, requires_grad=False)
