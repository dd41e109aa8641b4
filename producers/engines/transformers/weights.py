"""New weights of the transformers engine: files that are mapped before the engine stops, and adapters by peft.

As in the trainer, an adapter is not merged into the weights: in a 16-bit type most of a step's change would be lost in
rounding.
"""

from collections.abc import Iterable, Mapping
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

from producers.engines.adapter_files import adapted_layers
from producers.engines.tensor_file import iterate_tensors
from schemas.config import LoraConfig
from schemas.errors import ConfigError, DataError
from schemas.weight_files import Shapes, check_fits, read_shapes

PAGE = 4096
"""Bytes; with larger pages, some are touched more than once."""


def map_tensors(path: Path, names: Iterable[str]) -> dict[str, Tensor]:
    """Return tensors of a safetensors file as views of it, with all pages read and mapped.

    They remain valid when the file is deleted. OSError if it can't be opened.
    """
    wanted = set(names)
    tensors = {name: tensor for name, tensor in iterate_tensors(path) if name in wanted}
    for tensor in tensors.values():
        # Otherwise the copy that follows would fault at each page that this process has not touched.
        tensor.reshape(-1).view(torch.uint8)[::PAGE].sum()
    return tensors


class ModelWeights:
    """All weights of a model, which each version replaces in place.

    A file holds them in the form of the model's folder. transformers keeps some in another form in memory, such as all
    experts of a layer as one tensor, and converts them when it loads a model.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = model
        self._tied = bool(getattr(model.config.get_text_config(), "tie_word_embeddings", False))
        saved = model.state_dict().keys()
        weights = [(name, each) for name, each in model.named_parameters() if each.is_floating_point()]
        kept = {name: each for name, each in [*weights, *model.named_buffers()] if name in saved}
        self._names = kept.keys()
        empty = {name: torch.empty(each.shape, device="meta") for name, each in kept.items()}
        stored = revert_weight_conversion(model, dict(empty))
        self._shapes: Shapes = {name: tuple(each.shape) for name, each in stored.items()}
        self._converted = any(stored.get(name) is not each for name, each in empty.items())

    def read(self, path: Path) -> dict[str, Tensor]:
        """Return the file's tensors, mapped, by their names in memory. DataError if they do not fit."""
        check_fits(path, read_shapes(path), self._shapes, self._tied)
        tensors = map_tensors(path, self._shapes)
        if not self._converted:
            return tensors
        model = self._model
        state = (
            type(model).from_pretrained(None, config=model.config, state_dict=tensors, dtype=model.dtype).state_dict()
        )
        return {name: state[name] for name in self._names}

    @torch.no_grad()
    def replace(self, tensors: Mapping[str, Tensor]) -> None:
        """Load the tensors that ``read`` returned into the model."""
        # Looked up each time: buffers are other tensors after the model moved to another device.
        for name, tensor in [*self._model.named_parameters(), *self._model.named_buffers()]:
            if name in self._names:
                tensor.copy_(tensors[name])


class PeftAdapter:
    """An adapter that the first version adds to the model and each later version replaces in place."""

    def __init__(self, model: PreTrainedModel, lora: LoraConfig) -> None:
        try:
            import peft  # noqa: F401
        except ImportError as error:
            raise ConfigError(f"trainer.lora needs the package peft: pip install peft ({error})") from error
        self._model = model
        self._lora = lora
        self._shapes: Shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
        self._layers: list[str] | None = None

    def read(self, path: Path) -> dict[str, Tensor]:
        """Return the file's tensors, mapped. DataError if they do not fit."""
        shapes = read_shapes(path)
        layers = adapted_layers(path, shapes, self._shapes, self._lora.rank)
        if self._layers not in (None, layers):
            raise DataError(f"the adapter {path} is of other layers than the version before: trainer.lora.targets")
        return map_tensors(path, shapes)

    @torch.no_grad()
    def replace(self, tensors: Mapping[str, Tensor]) -> None:
        if self._layers is None:
            from peft import LoraConfig as PeftConfig
            from peft import inject_adapter_in_model

            self._layers = sorted({name.removeprefix("base_model.model.").rpartition(".lora_")[0] for name in tensors})
            config = PeftConfig(
                r=self._lora.rank,
                lora_alpha=self._lora.alpha,  # type: ignore[arg-type]
                target_modules=self._layers,
                lora_dropout=0.0,
            )
            inject_adapter_in_model(config, self._model)
            self._model.eval().requires_grad_(False)
        for name, parameter in self._model.named_parameters():
            if ".lora_" in name:
                parameter.copy_(tensors["base_model.model." + name.replace(".default.weight", ".weight")])
