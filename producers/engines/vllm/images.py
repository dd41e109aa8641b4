"""Prompts with images, in the form of vLLM's engine core, without vLLM's own preparation.

We cut the patches, so that they equal the trainer's, and place them by position: a sampled token that looks like an
image token is text, as it is for the trainer.
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
"""The most images in one prompt."""


def image_arguments(settings: ImageSettings | None, on_cpu: bool) -> dict[str, Any]:
    """Return vLLM's arguments for a model that reads images; empty for a text model."""
    if settings is None:
        return {}
    # vLLM's own preparation needs the library's processor, which does not run on a CPU.
    skipped = {"skip_mm_profiling": True} if on_cpu else {}
    # Patches are already normalised, as in the trainer; vLLM would normalise them again.
    return {
        "mm_device_do_normalize": False,
        "limit_mm_per_prompt": {"image": MOST_IMAGES, "video": 0},
        "mm_processor_cache_gb": 0,
        **skipped,
    }


@dataclass(frozen=True)
class CutImages:
    """The images of a prompt: patches float32 [P, D] of all, and their grids int64 [I, 3]."""

    images: Sequence[PromptImage]
    patches: npt.NDArray[np.float32]
    grids: npt.NDArray[np.int64]


def cut_images(images: Sequence[PromptImage], settings: ImageSettings | None) -> CutImages:
    """Cut a prompt's images into patches. DataError if one does not match the tokens that stand for it."""
    if settings is None:
        raise DataError("this prompt has images, and the engine was started with model.kind text")
    cut = [cut_patches(image.data, settings) for image in images]
    for image, (_, (_, down, across)) in zip(images, cut, strict=True):
        tokens = down * across // settings.merge**2
        if image.end - image.start != tokens:
            raise DataError(f"an image of {tokens} tokens stands at {image.end - image.start} of the prompt")
    return CutImages(images, *join_patches(cut))


def prompt_input(ids: list[int], cut: CutImages | None, salt: str) -> EngineInput:
    """Return a prompt of tokens with its images. salt: distinguishes the vision tower's outputs for the same image."""
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
