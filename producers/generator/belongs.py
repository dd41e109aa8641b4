"""Whether published weights are for this generator: an adapter of its model, or a whole model, as it is configured."""

from __future__ import annotations

from broker.weights.base_model import base_digest
from producers.engines.checkpoint import resolve_folder
from schemas.config import TidemillConfig
from schemas.errors import ConfigError, DataError
from schemas.messages import Adapter


class Belongs:
    """Asked of each version before anything of it is fetched."""

    def __init__(self, config: TidemillConfig) -> None:
        self._path = config.model.path
        self._lora = config.trainer.lora
        self._base: str | None = None

    def problem(self, adapter: Adapter | None) -> str | None:
        """Why weights of this kind can't be used here; None if they can. Looks into model.path the first time."""
        if adapter is None:
            if self._lora is None:
                return None
            return "it is a whole model, and this generator is configured with trainer.lora: start it without"
        if self._lora is None:
            return "it is an adapter, and this generator is configured without trainer.lora: start it with the run's"
        for name in ("rank", "alpha"):
            theirs, ours = getattr(adapter, name), getattr(self._lora, name)
            if theirs != ours:
                return f"it is an adapter of {name} {theirs:g}, and this generator's trainer.lora.{name} is {ours:g}"
        try:
            self._base = self._base or base_digest(resolve_folder(self._path))
        except (ConfigError, DataError) as error:
            return f"it is an adapter, and the model that it belongs to can't be compared: {error}"
        if self._base != adapter.base:
            return f"it is an adapter of another model than this generator's model.path {self._path}"
        return None
