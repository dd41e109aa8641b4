"""Image settings of a run's model, from the model folder, for the feeder, generators and evaluation."""

from schemas.config import TidemillConfig
from schemas.images import ImageSettings, read_image_settings
from schemas.model_folder import resolve_folder


def image_settings(config: TidemillConfig) -> ImageSettings | None:
    """Return how the run's model wants its images; None for a text model."""
    if config.model.kind != "vision":
        return None
    return read_image_settings(resolve_folder(config.model.path), config.model.max_pixels)
