"""LoRA in vLLM: one adapter, which each version replaces in place, under the name of the version.

All requests use the same adapter id. vLLM puts a new version in the place of the old one, so requests in flight
continue under it as they do with full weights, the version recorded for a token is the one that made it, and memory
holds one adapter. The version's name is in the hash of every cached block.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

from producers.engines.adapter_files import adapted_layers, write_adapter_folder
from schemas.config import LoraConfig
from schemas.errors import ConfigError, InfraError
from schemas.weight_files import Shapes, read_shapes

if TYPE_CHECKING:
    from vllm.lora.request import LoRARequest
    from vllm.v1.engine.async_llm import AsyncLLM

_ID = 1


def lora_arguments(lora: LoraConfig | None) -> dict[str, Any]:
    """Return vLLM's arguments for one adapter of this rank; ConfigError if vLLM does not support the rank."""
    if lora is None:
        return {}
    from vllm.config.lora import MaxLoRARanks

    sizes = sorted(get_args(MaxLoRARanks))
    size = next((size for size in sizes if size >= lora.rank), None)
    if size is None:
        raise ConfigError(f"trainer.lora.rank {lora.rank}: vLLM takes at most {sizes[-1]}; lower it")
    return {"enable_lora": True, "max_loras": 1, "max_lora_rank": size}


class VllmAdapter:
    """The adapter of one vLLM engine. ``request``: the adapter of new requests; None at first."""

    def __init__(self, lora: LoraConfig, model: Shapes) -> None:
        self._lora = lora
        self._model = model
        self.request: LoRARequest | None = None

    def check(self, path: Path, shapes: Shapes) -> None:
        """Raise DataError if a file with tensors of these shapes does not fit the model."""
        adapted_layers(path, shapes, self._model, self._lora.rank)

    async def put(self, llm: AsyncLLM, file: Path, version: int) -> None:
        """Replace the adapter by that in ``file``; no request may run meanwhile."""
        from vllm.lora.request import LoRARequest

        layers = adapted_layers(file, read_shapes(file), self._model, self._lora.rank)
        name = f"version-{version}"
        # vLLM reads the file once and never reads an adapter in use again.
        with tempfile.TemporaryDirectory(prefix="tidemill-adapter-") as parent:
            folder = Path(parent) / name
            write_adapter_folder(folder, self._lora, layers, file)
            if not await llm.add_lora(LoRARequest(name, _ID, str(folder), load_inplace=True)):
                raise InfraError(f"vllm did not take the adapter {name}")
            # Without load_inplace: requests must not load the adapter again at each of their steps.
            self.request = LoRARequest(name, _ID, str(folder))
        await llm.update_weight_version(str(version))
