"""Sharded tensors of which a rank has several blocks, such as experts' fused gates: PyTorch would write them as one."""

import io
from typing import Any, Self

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
        """Take what is to be written."""
        super().set_up_planner(state_dict, storage_meta, is_coordinator)
        self.state_dict = {name: _in_blocks(value) for name, value in self.state_dict.items()}


class LoadPlanner(DefaultLoadPlanner):
    """Plans as PyTorch does, but each block by itself, and takes only plain values where a checkpoint has no tensor."""

    def set_up_planner(self, *args: Any, **kwargs: Any) -> None:
        """Take what is to be filled."""
        super().set_up_planner(*args, **kwargs)
        self.state_dict = {name: _in_blocks(value) for name, value in self.state_dict.items()}

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """Put a value in its place."""
        plain = torch.load(value, weights_only=True)
        value = io.BytesIO()
        torch.save(plain, value)
        value.seek(0)
        super().load_bytes(read_item, value)


class _Blocks(Tensor):
    """This rank's part of a sharded tensor, which tells torch.distributed.checkpoint where each of its blocks is."""

    places: list[tuple[ChunkStorageMetadata, tuple[slice, ...]]]

    @classmethod
    def of(cls, whole: DTensor) -> Self:
        """Return the part of ``whole``, in the same memory."""
        part = whole.to_local().detach().as_subclass(cls)
        part.places = []
        for own, there in own_blocks(whole):
            sizes = Size([each.stop - each.start for each in there])
            if sizes.numel():
                part.places.append((ChunkStorageMetadata(Size([each.start for each in there]), sizes), own))
        return part

    def __create_write_items__(self, name: str, whole: DTensor) -> list[WriteItem]:
        properties = TensorProperties.create_from_tensor(self)
        return [
            WriteItem(
                MetadataIndex(name, chunk.offsets),
                WriteItemType.SHARD,
                tensor_data=TensorWriteData(chunk, properties, whole.size()),
            )
            for chunk, _ in self.places
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [chunk for chunk, _ in self.places]

    def __get_tensor_shard__(self, index: MetadataIndex) -> Tensor:
        own = next(own for chunk, own in self.places if chunk.offsets == index.offset)
        return self.as_subclass(Tensor)[own]


def _in_blocks(value: Any) -> Any:
    """Return a tensor that is cut in strides as one of ``_Blocks``; anything else as it is."""
    if not isinstance(value, DTensor) or not any(isinstance(how, _StridedShard) for how in value.placements):
        return value
    return DTensor(_Blocks.of(value), value._spec, requires_grad=False)
