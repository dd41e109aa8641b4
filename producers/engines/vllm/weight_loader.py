"""The weight transfer engine in vLLM's workers: a mapped safetensors file, loaded tensor by tensor.

It is imported only in vLLM's worker processes, by the name that ``plugin.register`` gives.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from vllm.distributed.weight_transfer.base import WeightTransferEngine, WeightTransferInitInfo, WeightTransferUpdateInfo
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload
from vllm.platforms import current_platform

from producers.engines.tensor_file import iterate_tensors


@dataclass
class FileInitInfo(WeightTransferInitInfo):
    """The initialisation, which needs no arguments."""


@dataclass
class FileUpdateInfo(WeightTransferUpdateInfo):
    """An update. path: a safetensors file or model folder with checkpoint names, which every worker can read."""

    path: str


class FileWeightTransferEngine(WeightTransferEngine[FileInitInfo, FileUpdateInfo]):
    """Loads checkpoint-format weights through vLLM's layerwise reload, which repacks them where the device needs it."""

    init_info_cls = FileInitInfo
    update_info_cls = FileUpdateInfo

    def init_transfer_engine(self, init_info: FileInitInfo) -> None:
        """Do nothing: any file can be loaded at any time."""

    def start_weight_update(self) -> None:
        if current_platform.is_cpu():
            # The kernel for experts packs their weights only when it is set up: vLLM has to do that again.
            for module in self.model.modules():
                method: Any = getattr(module, "quant_method", None)
                if getattr(method, "moe_kernel", None) is not None:
                    method.moe_kernel = None
        initialize_layerwise_reload(self.model)

    def receive_weights(self, update_info: FileUpdateInfo) -> None:
        self.model.load_weights(_tensors(update_info.path))  # type: ignore[operator]

    def finish_weight_update(self) -> None:
        finalize_layerwise_reload(self.model, self.model_config)
        # On the CPU a linear layer computes with a packed copy of its weight. A tied lm_head owns no
        # checkpoint tensor, so layerwise reload never repacks it and it would keep using the old copy.
        for module in self.model.modules():
            if isinstance(module, ParallelLMHead):
                module.quant_method.process_weights_after_loading(module)

    def shutdown(self) -> None:
        """Do nothing: no resources are held between updates."""


def _tensors(path: str) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors in file order, which is layer by layer, as views of the mapped files."""
    for part in sorted(Path(path).glob("*.safetensors")) if Path(path).is_dir() else [path]:
        yield from iterate_tensors(Path(part))
