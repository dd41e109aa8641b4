"""New weight versions on their way to the generators, in a thread, so that the next step starts at once.

The trainer's weights, offered to the generators as versions, unless these have them or newer ones already.
"""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor

import structlog
import torch

from broker.client import Broker
from broker.flow.fencing import term_number
from broker.flow.progress import Progress
from broker.weights.delta_writer import DeltaWriter
from broker.weights.store import make_transport
from consumers.trainer.disk_retry import DiskRetry
from consumers.trainer.leadership import Incarnation
from consumers.trainer.rank_group import RankGroup
from schemas.codec import Array
from schemas.config import TidemillConfig
from schemas.errors import DiskError, InfraError
from schemas.messages import Probe

log = structlog.get_logger()


class Publisher:
    """``publish`` returns at once; the weights are copied, written, hashed and sent in the background, in order.

    The next optimizer step waits only for the copy. A version that found no room on the disk is waited for.

    leader_term: the trainer's; once a newer one took over, sending ends with FencedError.
    """

    def __init__(self, config: TidemillConfig, broker: Broker, vocabulary: int) -> None:
        settings = config.trainer.publish
        self._store = broker.weights
        self._folder = (settings.folder or config.folder / "weights").resolve()
        self._transport = make_transport(broker.link, settings.transport, self._folder)
        self._deltas = DeltaWriter(self._folder, settings.max_chain) if settings.deltas else None
        self._keep = settings.keep
        self.leader_term = "0-none"
        generator = torch.Generator().manual_seed(config.run.seed)
        length = min(settings.probe_tokens, config.model.max_length - 1)
        self._probe = torch.randint(vocabulary, (length,), generator=generator).tolist()
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="publisher")
        self._last: Future[None] | None = None
        self._full = False
        """Whether the last version found no room."""

    def publish(self, crew: RankGroup, version: int, step: int) -> None:
        """Send the weights of ``crew`` as they are now as ``version``; errors of the version before surface here.

        DiskError when there is no room for it. When the one before found none, also this one's surface here.
        """
        self.flush()
        leader_term = self.leader_term
        file = self._folder / f"part-{version}-t{term_number(leader_term)}"
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise DiskError(f"cannot write weights version {version} to {file}: {error}") from error
        snapshot, logprobs = crew.gather(self._probe)
        probe = Probe(tokens=Array.of(self._probe, "i4"), logprobs=Array.of(logprobs, "f4"))
        adapter = crew.step.policy.adapter

        def send() -> None:
            snapshot.fill()
            try:
                digests = snapshot.write(file)
                self._store.publish(
                    self._transport,
                    file,
                    version=version,
                    step=step,
                    leader_term=leader_term,
                    tensors=snapshot.specs,
                    digests=digests,
                    probe=probe,
                    keep=self._keep,
                    deltas=self._deltas,
                    adapter=adapter,
                )
            except OSError as error:
                raise DiskError(f"cannot publish weights version {version} from {file}: {error}") from error

        self._last = self._executor.submit(send)
        if self._full:
            self.flush()

    def flush(self) -> None:
        """Wait until the last version is with the broker; its deadline is the broker's."""
        if self._last is not None:
            last, self._last = self._last, None
            self._full = isinstance(last.exception(), DiskError)
            last.result()

    def settle(self, tolerated: type[InfraError]) -> None:
        """Wait until nothing is under way; what was not sent for a ``tolerated`` reason has to be offered anew."""
        try:
            self.flush()
        except tolerated as error:
            log.warning("a weight version was not sent", error=str(error))

    def close(self) -> None:
        """Send what is left."""
        self.flush()
        self._executor.shutdown()


class Offers:
    """Of the weights as ``progress`` counts them. Training waits while the disk is full, as for a checkpoint."""

    def __init__(
        self,
        config: TidemillConfig,
        broker: Broker,
        crew: RankGroup,
        progress: Progress,
        term_number: Incarnation,
        patience: DiskRetry,
    ) -> None:
        self._store = broker.weights
        self._crew = crew
        self._progress = progress
        self._incarnation = term_number
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
            self._publisher.leader_term = self._incarnation.leader_term
            self._publisher.publish(self._crew, version, self._progress.step)
