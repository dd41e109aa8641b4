"""Images in a rendered prompt: how many tokens stand for each, and where.

A chat template writes one token for an image; the model reads as many as the image has. Which image stands where is
known by position, since the policy may sample the same token.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

from producers.images.settings import image_settings
from schemas.config import TidemillConfig
from schemas.errors import ConfigError, DataError
from schemas.images import ImageSettings
from schemas.messages import Image, PlacedImage
from schemas.model_folder import resolve_folder


@dataclass(frozen=True)
class ImagePlaceholders:
    """Finds the places of images. token: that which stands for images. settings: how the model wants them."""

    token: int
    settings: ImageSettings

    @classmethod
    def of(cls, config: TidemillConfig) -> Self | None:
        """Return those of a run's model, None for a text model. ConfigError if the model reads no images."""
        settings = image_settings(config)
        if settings is None:
            return None
        from transformers import AutoConfig

        folder = resolve_folder(config.model.path)
        token = getattr(
            AutoConfig.from_pretrained(folder, trust_remote_code=config.model.trust_remote_code), "image_token_id", None
        )
        if not isinstance(token, int):
            raise ConfigError(f"model.kind vision: {folder / 'config.json'} names no image_token_id")
        return cls(token, settings)

    def expand(self, ids: Sequence[int], images: Sequence[Image]) -> tuple[list[int], list[PlacedImage]]:
        """Expand the images' placeholders; return ids and the images' positions. DataError if they differ in number."""
        places = sum(token == self.token for token in ids)
        if places != len(images):
            raise DataError(f"the prompt has {len(images)} images, and the chat template gives it places for {places}")
        found: list[int] = []
        placed: list[PlacedImage] = []
        following = iter(images)
        for token in ids:
            if token != self.token:
                found.append(token)
                continue
            image = next(following)
            count = self.settings.tokens(image.width, image.height)
            placed.append(PlacedImage(image.digest, len(found), len(found) + count))
            found += [token] * count
        return found, placed
