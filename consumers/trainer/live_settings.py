"""Settings of the trainer that people change while the run goes on; else those of the configuration."""

from __future__ import annotations

from collections.abc import Mapping

import structlog

from schemas.config import TidemillConfig

log = structlog.get_logger()


class LiveSettings:
    """The values in force. ``follow`` is called with what the broker holds, between two steps."""

    def __init__(self, config: TidemillConfig) -> None:
        self._config = config.trainer
        self._changed: Mapping[str, float] = {}

    def follow(self, changed: Mapping[str, float]) -> None:
        """Take over what people have changed; what is not in it is as configured."""
        if changed != self._changed:
            log.info("settings changed", **{name: changed.get(name) for name in {*changed, *self._changed}})
            self._changed = dict(changed)

    @property
    def lr(self) -> float:
        """Peak learning rate, of which the schedule takes its fraction."""
        return self._changed.get("lr", self._config.optimizer.lr)

    @property
    def steps(self) -> int:
        """Steps of the whole run."""
        return int(self._changed.get("steps", self._config.steps))

    @property
    def checkpoint_every(self) -> int:
        """Steps between two checkpoints."""
        return int(self._changed.get("checkpoint_every", self._config.checkpoint.every))
