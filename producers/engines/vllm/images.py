"""Prompts with images, as vLLM's engine core takes them after its own preparation, which is left out.

We make the patches, so that they are the trainer's, and place them by position: a sampled token that looks like one of
an image is text, as it is for the trainer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch

from producers.engines.base import PromptImage
from schemas.errors import DataError
from schemas.images import ImageSettings, cut_patches, join_patches

if TYPE_CHECKING:
    from vllm.inputs.engine import EngineInput

MOST_IMAGES = 64
"""Images of one prompt."""


def image_arguments(settings: ImageSettings | None, on_cpu: bool) -> dict[str, Any]:
    """vLLM's arguments for a model that reads images; nothing for one of text."""
    if settings is None:
        return {}
    # What is left out needs the library's own processor, which on a CPU cannot run.
    skipped = {"skip_mm_profiling": True} if on_cpu else {}
    # Patches come normalised, as the trainer has them: vLLM would do that once more.
    return {
        "mm_device_do_normalize": False,
        "limit_mm_per_prompt": {"image": MOST_IMAGES, "video": 0},
        "mm_processor_cache_gb": 0,
        **skipped,
    }


@dataclass(frozen=True)
class CutImages:
    """Images of a prompt, with the patches float32 [P, D] of all and their grids int64 [I, 3]."""

    images: Sequence[PromptImage]
    patches: npt.NDArray[np.float32]
    grids: npt.NDArray[np.int64]


def cut_images(images: Sequence[PromptImage], settings: ImageSettings | None) -> CutImages:
    """Cut a prompt's images. DataError if one does not have the tokens that stand for it."""
    if settings is None:
        raise DataError("this prompt has images, and the engine was started with model.kind text")
    cut = [cut_patches(image.data, settings) for image in images]
    for image, (_, (_, down, across)) in zip(images, cut, strict=True):
        tokens = down * across // settings.merge**2
        if image.end - image.start != tokens:
            raise DataError(f"an image of {tokens} tokens stands at {image.end - image.start} of the prompt")
    return CutImages(images, *join_patches(cut))


def prompt_input(ids: list[int], cut: CutImages | None, salt: str) -> EngineInput:
    """A prompt of tokens, with images in it.

    salt: tells apart what the vision tower made of the same image.
    """
    from transformers import BatchFeature
    from vllm.inputs.engine import mm_input, tokens_input
    from vllm.multimodal.inputs import MultiModalFieldConfig, MultiModalKwargsItems, PlaceholderRange

    if cut is None:
        return tokens_input(ids)
    images, patches, grids = cut.images, torch.from_numpy(cut.patches), torch.from_numpy(cut.grids)
    fields = {
        "pixel_values": MultiModalFieldConfig.flat_from_sizes("image", grids.prod(-1)),
        "image_grid_thw": MultiModalFieldConfig.batched("image", keep_on_cpu=True),
    }
    return mm_input(
        ids,
        MultiModalKwargsItems.from_hf_inputs(BatchFeature({"pixel_values": patches, "image_grid_thw": grids}), fields),
        {"image": [f"{image.digest}{salt}" for image in images]},
        {"image": [PlaceholderRange(offset=image.start, length=image.end - image.start) for image in images]},
    )
