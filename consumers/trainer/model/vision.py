"""Models that read images: how the policy puts what their vision tower makes into the text.

The tower runs on all images of a micro-batch, beside one another and each by itself; text is packed as ever. Which
tokens stand for an image is known by position, because the policy may sample the same token, which then is text. So the
parts of the model are called here one by one, and a trial run compares the outcome with the model's own forward pass.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from consumers.trainer.data.packed import Packed
from consumers.trainer.data.patches import ImageBatch, probe_batch
from schemas.config import ModelConfig
from schemas.errors import ConfigError
from schemas.images import ImageSettings, read_image_settings
from schemas.model_folder import resolve_folder

if TYPE_CHECKING:  # importing it takes seconds, and model.kind mlp does not need it
    from transformers import PreTrainedModel

FAMILIES = ("qwen2_5_vl", "qwen3_vl")
"""Model types that are tested; of others the trial run decides."""
_PARTS = ("visual", "language_model", "get_image_features", "get_input_embeddings")
TOLERANCE = 1e-3
"""Largest relative difference of the trial run's hidden states in float32."""


def image_settings_of(model: ModelConfig) -> ImageSettings:
    """Read how a vision model, a folder or a hub id, wants its images; ConfigError if it takes none."""
    return read_image_settings(resolve_folder(model.path, weights=False), model.max_pixels)


class VisionTower:
    """The vision part of a policy's model. frozen: it has no gradient. settings: how the model wants its images."""

    def __init__(self, model: PreTrainedModel, settings: ImageSettings, frozen: bool) -> None:
        """Find the parts of the model; ConfigError if it has others."""
        base, kind = model.base_model, model.config.model_type
        lacking = [name for name in _PARTS if not hasattr(base, name)]
        token = getattr(model.config, "image_token_id", None)
        if lacking or not isinstance(token, int):
            raise ConfigError(
                f"model.kind vision: a model of type {kind} has no {lacking[0] if lacking else 'image_token_id'};"
                f" supported are {', '.join(FAMILIES)}"
            )
        self.settings = settings
        self.frozen = frozen
        self.token = token
        self.always = False
        """Whether the tower also runs without images: ranks that share it must run it equally often."""
        self._probe: ImageBatch | None = None
        """What it runs on then."""
        if frozen:
            base.visual.requires_grad_(False)
        self._check(model)

    def lay_out(self, base: Any, images: ImageBatch) -> ImageBatch:
        """Return images with what the forward pass of the tower else computes from their grids and waits for."""
        if images.layout is not None or base.config.model_type not in FAMILIES:
            return images
        visual, grids = base.visual, torch.from_numpy(images.grids)
        from transformers.utils.generic import get_max_seqlen
        from transformers.vision_utils import (
            get_vision_cu_seqlens,
            get_vision_interpolation_indices_and_weights,
            get_vision_position_ids,
            get_vision_window_index,
        )

        layout: dict[str, Any] = {"position_ids": get_vision_position_ids(grids, visual.spatial_merge_size)}
        bounds = {"seqlen": get_vision_cu_seqlens(grids)}
        if hasattr(visual, "window_size"):
            layout["window_index"], bounds["window_seqlen"] = get_vision_window_index(
                grids, visual.spatial_merge_size, visual.window_size, visual.patch_size
            )
        else:
            layout["interp_indices"], layout["interp_weights"] = get_vision_interpolation_indices_and_weights(
                grids,
                visual.num_grid_per_side,
                visual.interpolation_mode,
                visual.interpolation_align_corners,
                visual.spatial_merge_size,
            )
        for name, ends in bounds.items():
            longest = get_max_seqlen(ends, visual.config)
            # A flash kernel reads the bounds on its device. For others transformers cuts by them, on the host.
            layout[f"cu_{name}s"] = ends.numpy() if longest is None else ends
            if longest is not None:
                layout[f"max_{name}"] = longest
        return replace(images, layout=layout)

    def probe_tokens(self, model: PreTrainedModel) -> tuple[list[int], tuple[int, int]]:
        """Return the tokens of the fixed image with those that open and close it, and the range of its own."""
        config = model.config
        around = (getattr(config, name, None) for name in ("vision_start_token_id", "vision_end_token_id"))
        opening, closing = ([token] if isinstance(token, int) else [] for token in around)
        return [*opening, *[self.token] * 4, *closing], (len(opening), len(opening) + 4)

    def arguments(
        self, model: PreTrainedModel, ids: Tensor, packed: Packed | None, images: ImageBatch | None
    ) -> dict[str, Any]:
        """Return embeddings, positions and more for the language model. ids: int64 [1, N] of ``packed``, or [R, T]."""
        base: Any = model.base_model
        embeddings = base.get_input_embeddings()(ids)
        found: dict[str, Any] = {}
        if images is not None:
            if packed is None:
                marks, positions = images.marks[:, : ids.shape[1]], images.positions[:, :, : ids.shape[1]]
            else:
                marks = packed.tokens_of(images.marks)[None]
                positions = packed.tokens_of(images.positions.movedim(0, -1)).T[:, None]
            features, deep = self._features(base, images)
            embeddings = embeddings.masked_scatter(marks[..., None], features.to(embeddings.dtype))
            found["position_ids"] = positions
            if deep:
                # The host would wait for a mask as index: all rows get something added, by number, and text zeros.
                zeros = torch.zeros_like(embeddings)
                found["deepstack_visual_embeds"] = [
                    zeros.masked_scatter(marks[..., None], part.to(zeros.dtype)) for part in deep
                ]
                found["visual_pos_masks"] = torch.arange(len(embeddings), device=embeddings.device)
        elif self.always:
            if self._probe is None or self._probe.patches.device != embeddings.device:
                self._probe = self.lay_out(base, probe_batch(self.settings)).to(embeddings.device)
            features, deep = self._features(base, self._probe)
            # What the other ranks wait for; it changes nothing.
            embeddings = embeddings + 0.0 * torch.stack([part.sum() for part in (features, *deep)]).sum()
        return {"inputs_embeds": embeddings, **found}

    def _features(self, base: Any, images: ImageBatch) -> tuple[Tensor, list[Tensor]]:
        """Run the tower on images: features [tokens, H], and those for further layers of the text."""
        device = images.patches.device
        found = self.lay_out(base, images).to(device)
        # With a layout, the tower only counts by the grids.
        grids: Any = torch.from_numpy(found.grids).to(device) if found.layout is None else found.grids
        with torch.set_grad_enabled(torch.is_grad_enabled() and not self.frozen):
            out = base.get_image_features(found.patches, grids, return_dict=True, **(found.layout or {}))
        deep = [torch.cat(list(part)) for part in getattr(out, "deepstack_features", None) or []]
        return torch.cat(list(out.pooler_output)), deep

    @torch.no_grad()
    def _check(self, model: PreTrainedModel) -> None:
        """Raise ConfigError unless the parts, called one by one, compute what the model does on an image."""
        if model.device.type == "meta":
            return
        base: Any = model.base_model
        length = 12
        tokens, (start, end) = self.probe_tokens(model)
        ids = torch.tensor([[*tokens, *range(1, 1 + length - len(tokens) % length)]], device=model.device)
        ids = torch.where((ids == self.token) & (torch.arange(ids.shape[1], device=ids.device) >= end), 0, ids)
        images = probe_batch(self.settings, ids.shape[1], start).to(model.device)
        types = torch.zeros_like(ids).masked_fill(images.marks, 1)
        try:
            own = base(
                input_ids=ids,
                pixel_values=images.patches,
                image_grid_thw=torch.from_numpy(images.grids).to(model.device),
                mm_token_type_ids=types,
                use_cache=False,
            ).last_hidden_state
            base.rope_deltas = None
            found = base.language_model(**self.arguments(model, ids, None, images), use_cache=False).last_hidden_state
        except (TypeError, ValueError, RuntimeError, AttributeError, KeyError) as error:
            reason = (str(error).splitlines() or [type(error).__name__])[0]
            raise ConfigError(
                f"model.kind vision: a model of type {model.config.model_type} can't be run as those of"
                f" {', '.join(FAMILIES)}: {reason[:200]}"
            ) from error
        difference = float((found - own).float().norm() / own.float().norm().clamp(min=1e-9))
        if not difference < (TOLERANCE if own.dtype == torch.float32 else 30 * TOLERANCE):
            raise ConfigError(
                f"model.kind vision: a model of type {model.config.model_type} computes another result than we do on an"
                f" image (relative difference {difference:.2g}), so it can't be trained; supported are"
                f" {', '.join(FAMILIES)}"
            )
