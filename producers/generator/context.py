"""The objects that the parts of one generator share."""

import asyncio
import functools
from dataclasses import dataclass
from typing import Self

import structlog

from broker.client import Broker
from broker.queues.partials import Partials
from broker.queues.tasks import TaskQueue
from producers.engines.base import Engine
from producers.generator.orders import OrderFollower
from producers.generator.outbox import Outbox, PartialSaver
from producers.generator.weight_updates import WeightUpdater
from producers.images.placeholders import ImagePlaceholders
from producers.tokenizer import HfTokenizer, NoTokenizer
from producers.workflows.base import Workflow, find_workflow
from schemas.config import TidemillConfig
from schemas.errors import TidemillError
from schemas.messages import Event
from schemas.run_record import JoinedRun
from schemas.system.processes import identify_process

log = structlog.get_logger()


@dataclass(frozen=True)
class GeneratorContext:
    """The engine of one generator, what it generates with, and its access to the broker."""

    config: TidemillConfig
    name: str
    broker: Broker
    engine: Engine
    tokenizer: HfTokenizer
    workflow: Workflow
    orders: OrderFollower
    updates: WeightUpdater
    queue: TaskQueue
    partials: Partials
    outbox: Outbox
    saver: PartialSaver
    placeholders: ImagePlaceholders | None

    @classmethod
    def create(
        cls,
        config: TidemillConfig,
        name: str,
        broker: Broker,
        engine: Engine,
        orders: OrderFollower,
        updates: WeightUpdater,
        run: JoinedRun,
    ) -> Self:
        """Load the configured tokenizer and workflow, and open the queues."""
        chosen = config.generator.workflow
        queue, partials = broker.task_queue(name, run), broker.partials(name)
        return cls(
            config,
            name,
            broker,
            engine,
            NoTokenizer()
            if config.model.kind == "mlp"
            else HfTokenizer(config.model.path, config.model.trust_remote_code),
            find_workflow(chosen.name, chosen.args, config.base)(),
            orders,
            updates,
            queue,
            partials,
            Outbox(queue),
            PartialSaver(partials),
            ImagePlaceholders.of(config),
        )

    @property
    def is_drained(self) -> bool:
        """Whether this process must take no more tasks, because the trainer found a mismatch."""
        found = self.orders.control.mismatch.get(self.name)
        return found is not None and found == self.process

    @functools.cached_property
    def process(self) -> str:
        """The identity of this process."""
        return identify_process()

    def report(self, name: str, text: str) -> None:
        """Report an event to the broker in the background; log it if that fails. Call it in the event loop."""
        emitting = asyncio.create_task(self._emit(Event(name=name, service=self.name, level="warning", text=text)))
        _emitting.add(emitting)
        emitting.add_done_callback(_emitting.discard)

    async def _emit(self, event: Event) -> None:
        try:
            await asyncio.to_thread(self.broker.events.emit, event)
        except TidemillError as error:
            log.warning("could not report an event", text=event.text, reason=str(error))


_emitting: set[asyncio.Task[None]] = set()
"""Events that are being reported: an event loop does not keep references to its tasks."""
