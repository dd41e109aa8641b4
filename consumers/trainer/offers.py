"""The trainer's weights, offered to the generators as versions, unless these have them or newer ones already."""

from __future__ import annotations

from broker.client import Broker
from consumers.trainer.crew import Crew
from consumers.trainer.incarnation import Incarnation
from consumers.trainer.patience import Patience
from consumers.trainer.progress import Progress
from consumers.trainer.publisher import Publisher
from schemas.config import TidemillConfig
from schemas.errors import InfraError


class Offers:
    """Of the weights as ``progress`` counts them. Training waits while the disk is full, as for a checkpoint."""

    def __init__(
        self,
        config: TidemillConfig,
        broker: Broker,
        crew: Crew,
        progress: Progress,
        incarnation: Incarnation,
        patience: Patience,
    ) -> None:
        self._store = broker.weights
        self._crew = crew
        self._progress = progress
        self._incarnation = incarnation
        self._patience = patience
        vocabulary = crew.step.policy.causal_lm.config.get_text_config().vocab_size
        self._publisher = Publisher(config, broker, vocabulary)

    def offer(self) -> None:
        """These weights are on their way when it returns."""
        self._patience("weights", self._offer)

    def send(self) -> None:
        """These weights are there when it returns."""

        def act() -> None:
            self._offer()
            self._publisher.flush()

        self._patience("weights", act)

    def settle(self, tolerated: type[InfraError]) -> None:
        """Wait until nothing is under way; what was not sent for a ``tolerated`` reason has to be offered anew."""
        self._publisher.settle(tolerated)

    def close(self) -> None:
        """Send what is left."""
        self._publisher.close()

    def _offer(self) -> None:
        self._publisher.flush()
        version = self._progress.version
        newest = self._store.newest()
        if newest is None or newest.version < version or (newest.version == version and not self._store.holds(newest)):
            self._incarnation.publishes(version)
            self._publisher.epoch = self._incarnation.epoch
            self._publisher.publish(self._crew, version, self._progress.step)
