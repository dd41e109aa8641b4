"""Models that read images: how the policy puts what their vision tower makes into the text.

The tower runs on all images of a micro-batch, beside one another and each by itself; text is packed as ever. Which
tokens stand for an image is known by position, because the policy may sample the same token, which then is text. So the
parts of the model are called here one by one, and a trial run compares the outcome with the model's own forward pass.
"""

from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from consumers.trainer.data.packed import Packed
from consumers.trainer.data.patches import ImageBatch, probe_batch
from schemas.config import ModelConfig
from schemas.errors import ConfigError
from schemas.images import ImageSettings, read_image_settings
from schemas.model_folder import resolve_folder

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
        if frozen:
            base.visual.requires_grad_(False)
        self._check(model)

    def probe_tokens(self, model: PreTrainedModel) -> tuple[list[int], tuple[int, int]]:
        """Return the tokens of the fixed image with those that open and close it, and the range of its own."""
        config = model.config
        around = (getattr(config, name, None) for name in ("vision_start_token_id", "vision_end_token_id"))
        opening, closing = ([token] if isinstance(token, int) else [] for token in around)
        return [*opening, *[self.token] * 4, *closing], (len(opening), len(opening) + 4)

    def arguments(
        self, model: PreTrainedModel, ids: Tensor, packed: Packed | None, images: ImageBatch | None
    ) -> dict[str, Any]:
        """Return embeddings, positions and further arguments of the language model.

        ids: int64 [1, N] of ``packed``, or [R, T] where that is None.
        """
        base: Any = model.base_model
        embeddings = base.get_input_embeddings()(ids)
        found: dict[str, Any] = {}
        if images is not None:
            if packed is None:
                marks, positions = images.marks[:, : ids.shape[1]], images.positions[:, :, : ids.shape[1]]
            else:
                marks = packed.tokens_of(images.marks)[None]
                positions = packed.tokens_of(images.positions.movedim(0, -1)).T[:, None]
            features, deep = self._features(base, images.patches, images.grids)
            embeddings = embeddings.masked_scatter(marks[..., None], features.to(embeddings.dtype))
            found["position_ids"] = positions
            if deep:
                found |= {"visual_pos_masks": marks, "deepstack_visual_embeds": deep}
        elif self.always:
            probe = probe_batch(self.settings).to(embeddings.device)
            features, deep = self._features(base, probe.patches, probe.grids)
            # What the other ranks wait for; it changes nothing.
            embeddings = embeddings + 0.0 * torch.stack([part.sum() for part in (features, *deep)]).sum()
        return {"inputs_embeds": embeddings, **found}

    def _features(self, base: Any, patches: Tensor, grids: Tensor) -> tuple[Tensor, list[Tensor]]:
        """Run the tower on images: features [tokens, H], and those for further layers of the text."""
        with torch.set_grad_enabled(torch.is_grad_enabled() and not self.frozen):
            out = base.get_image_features(patches, grids, return_dict=True)
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
                image_grid_thw=images.grids,
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
