"""The broker of a run, as producers, consumers and deploy use it.

::

    broker = Broker.connect(config)          # ConfigError when the server can't be used
    queue = broker.task_queue("generator-0")
    for delivery in queue.read(8): ...
"""

from typing import Self

import redis
import structlog

from broker.connection.connection import Connection, check_server, find_url
from broker.connection.keys import Keys
from broker.connection.runs import check_schema, memory_of
from broker.evaluations.samples import EvalSamples
from broker.evaluations.store import Evals
from broker.flow.ledger import Ledger
from broker.flow.owner import RunOwner
from broker.flow.run_control import RunControl
from broker.flow.trainer_session import TrainerSession
from broker.queues.dead_letters import DeadLetterStore
from broker.queues.images import ImageStore
from broker.queues.live_episodes import LiveEpisodes
from broker.queues.partials import Partials
from broker.queues.questions import Questions
from broker.queues.scores import ScoreQueue
from broker.queues.tasks import TaskQueue
from broker.telemetry.events import Events
from broker.telemetry.heartbeats import Heartbeats
from broker.telemetry.metrics import Metrics
from broker.telemetry.trajectories import TrajectoryStore
from broker.weights.delta_writer import DeltaWriter
from broker.weights.publication import WeightPublication
from broker.weights.store import WeightStore
from broker.weights.transports import Transport
from schemas.config import BrokerConfig, TidemillConfig
from schemas.errors import ConfigError
from schemas.run_record import JoinedRun

log = structlog.get_logger()


class Broker:
    """Everything that the processes of a run share."""

    def __init__(self, connection: Connection, config: BrokerConfig) -> None:
        self.connection = connection
        self._config = config
        self.ledger = Ledger(connection, config.max_message_bytes)
        self.weights = WeightStore(connection)
        self.heartbeats = Heartbeats(connection)
        self.events = Events(connection)
        self.metrics = Metrics(connection)
        self.evals = Evals(connection, config.max_message_bytes)
        self.images = ImageStore(connection)
        self.eval_samples = EvalSamples(connection)
        self.dead_letters = DeadLetterStore(connection)
        self.run_control = RunControl(connection)
        self.questions = Questions(connection)
        self.owner = RunOwner(connection)
        self.trajectory_store = TrajectoryStore(connection, config.max_message_bytes)

    @classmethod
    def connect(cls, config: TidemillConfig, *, any_schema: bool = False, deadline_s: float | None = None) -> Self:
        """Connect to broker.url, else REDIS_URL; wait if the server is still starting.

        any_schema: also connect to a run of another version of Tidemill, which can then only be purged. deadline_s:
        instead of broker.deadline_s. ConfigError if no server is configured or the run can't be read, InfraError if the
        server does not answer by the deadline.
        """
        url = find_url(config.broker.url)
        if url is None:
            raise ConfigError("no broker: set REDIS_URL or broker.url; `tidemill up` starts an embedded one by itself")
        keys = Keys(config.broker.prefix, config.run.name)
        connection = Connection(url, keys, deadline_s or config.broker.deadline_s)
        for warning in connection.run("looking at the server", lambda client: check_server(client, url)):
            log.warning(warning)
        if not any_schema:
            connection.run("looking at the run", check_schema, keys)
        return cls(connection, config.broker)

    def task_queue(self, consumer: str, run: JoinedRun | None = None) -> TaskQueue:
        """Return the queue of tasks for one generator, which works for this run only."""
        return TaskQueue(self.connection, consumer, self._config.max_deliveries, self._config.max_message_bytes, run)

    def live_episodes(self, generator: str = "") -> LiveEpisodes:
        """Return the conversations of users, which this generator holds."""
        return LiveEpisodes(self.connection, generator)

    def partials(self, generator: str) -> Partials:
        """Return the store of unfinished samples, which this generator saves or continues."""
        return Partials(self.connection, generator, self._config.max_message_bytes)

    def score_queue(self, consumer: str) -> ScoreQueue:
        """Return the queue of trajectories for one reward service."""
        return ScoreQueue(self.connection, consumer, self._config.max_deliveries, self._config.max_message_bytes)

    def trainer_session(self) -> TrainerSession:
        """Return the trainer's side of the pipeline."""
        return TrainerSession(self.connection, self._config.max_message_bytes)

    def weight_publication(
        self, transport: Transport, keep: int, deltas: DeltaWriter | None = None
    ) -> WeightPublication:
        """Return the trainer's side of the weights: it publishes versions through ``transport``, and keeps ``keep``."""
        return WeightPublication(self.connection, self.weights, transport, keep=keep, deltas=deltas)

    def measure_memory(self) -> int:
        """Return the bytes that the run occupies in the broker."""
        keys = self.connection.keys.all()
        return self.connection.run("measuring the run", lambda client: sum(memory_of(client, key) for key in keys))

    def purge(self) -> int:
        """Delete every key of the run; return how many there were."""

        def delete(client: redis.Redis) -> int:
            keys = list(client.scan_iter(match=f"{self.connection.keys.base}:*", count=1000))
            for start in range(0, len(keys), 1000):
                client.unlink(*keys[start : start + 1000])
            return len(keys)

        return self.connection.run("deleting the run", delete)
