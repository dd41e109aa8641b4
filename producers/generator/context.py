"""The objects that the parts of one generator share."""

import asyncio

import structlog

from broker.client import Broker
from producers.engines.base import Engine
from producers.generator.orders import OrderFollower
from producers.generator.outbox import Outbox, PartialSaver
from producers.generator.weight_updates import WeightUpdater
from producers.images.placeholders import ImagePlaceholders
from producers.tokenizer import HfTokenizer, NoTokenizer
from producers.workflows.base import find_workflow
from schemas.config import TidemillConfig
from schemas.errors import TidemillError
from schemas.messages import Event
from schemas.run_record import JoinedRun
from schemas.system.processes import identify_process

log = structlog.get_logger()


class GeneratorContext:
    """The engine of one generator, what it generates with, and its access to the broker."""

    def __init__(
        self,
        config: TidemillConfig,
        name: str,
        broker: Broker,
        engine: Engine,
        orders: OrderFollower,
        updates: WeightUpdater,
        run: JoinedRun,
    ) -> None:
        """Load the configured tokenizer and workflow, and open the queues."""
        self.config, self.name, self.broker = config, name, broker
        self.process = identify_process()
        self.engine, self.orders, self.updates = engine, orders, updates
        model, chosen = config.model, config.generator.workflow
        self.tokenizer = NoTokenizer() if model.kind == "mlp" else HfTokenizer(model.path, model.trust_remote_code)
        self.workflow = find_workflow(chosen.name, chosen.args, config.base)()
        self.queue, self.partials = broker.task_queue(name, run), broker.partials(name)
        self.outbox, self.saver = Outbox(self.queue), PartialSaver(self.partials)
        self.placeholders = ImagePlaceholders.of(config)

    @property
    def is_quarantined(self) -> bool:
        """Whether this process must take no more tasks, because the trainer found a mismatch."""
        return self.orders.control.mismatch.get(self.name) == self.process

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
