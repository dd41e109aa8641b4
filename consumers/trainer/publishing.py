"""Publication of weight versions, in a thread, so that the next step starts at once."""

from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial

import numpy as np
import structlog

from broker.flow.fencing import term_number
from broker.weights.delta_writer import DeltaWriter
from broker.weights.publication import WeightPublication
from broker.weights.transports import NcclOrigin, PeerOrigin, make_transport
from consumers.trainer.context import TrainerContext, describe_broken
from consumers.trainer.leadership import Leadership
from consumers.trainer.model.hf_weights import check_published
from consumers.trainer.model.probe import probe_tokens
from schemas.codec import Array
from schemas.errors import DiskError, InfraError, RunFailed
from schemas.messages import Probe
from schemas.system.files import disk_errors

log = structlog.get_logger()


class WeightPublisher:
    """Publishes the trainer's weights as versions: copied, written, hashed and sent in the background, in order.

    The next optimizer step waits only for the copy. While the disk is full, training waits, as for a checkpoint. Once a
    newer trainer has taken over, sending ends with FencedError.
    """

    def __init__(self, context: TrainerContext, leadership: Leadership) -> None:
        config = context.config
        settings = config.trainer.publish
        self._context = context
        self._leadership = leadership
        self._store = context.broker.weights
        self._folder = (settings.folder or config.folder / "weights").resolve()
        self._publication: WeightPublication | None = None
        self._peers: PeerOrigin | None = None
        check_published(context.rank_group.step.policy, config.model)
        self._probe, self._probe_image = probe_tokens(config, context.rank_group.step.policy)
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="publisher")
        self._sending: Future[None] | None = None
        self._full = False
        """True if the disk was full for the last version."""

    def publish(self, wait: bool = False) -> None:
        """Send the current weights, unless the broker already has them or newer ones.

        On return they are being sent; with ``wait`` they have arrived. Errors of the version before are raised here;
        DiskError if the disk is full until the deadline.
        """
        self._context.retry("weights", partial(self._publish, wait))

    def abandon(self, tolerated: type[InfraError] = InfraError) -> None:
        """Wait until nothing is being sent; a version that failed with a ``tolerated`` error must be sent again."""
        try:
            self._wait_sent()
        except tolerated as error:
            log.warning("a weight version was not sent", error=str(error))

    def close(self) -> None:
        """Wait until the last version is sent, whose error is raised here; then end the thread that sends."""
        self._wait_sent()
        self._executor.shutdown()

    def stop_serving(self) -> None:
        """Stop serving versions to peers, at the end of this process."""
        if self._peers is not None:
            self._peers.close()

    def _open_publication(self) -> WeightPublication:
        """Return what publishes. The first call, after the takeover has repaired keys, begins to serve peers."""
        if self._publication is None:
            settings, connection = self._context.config.trainer.publish, self._context.broker.connection
            # Versions published through peers stay there after the setting was changed.
            if settings.transport == "nccl":
                self._peers = nccl = NcclOrigin(connection, self._folder, settings)
                nccl.process.check()
            elif settings.transport == "peer" or any(
                manifest.state.uri.startswith("peer:") for manifest in self._store.published()
            ):
                self._peers = PeerOrigin(connection, self._folder, settings.peer)
            if self._peers is not None:
                self._store.serve(self._peers)
            own = self._peers if settings.from_peers else None
            transport = own or make_transport(connection, settings.transport, self._folder)
            deltas = DeltaWriter(self._folder, settings.max_chain) if settings.deltas else None
            self._publication = self._context.broker.weight_publication(transport, settings.keep, deltas)
        return self._publication

    def _publish(self, wait: bool) -> None:
        self._wait_sent()
        publication = self._open_publication()
        version = self._context.progress.version
        newest = self._store.newest()
        if newest is None or newest.version < version or (newest.version == version and not self._store.holds(newest)):
            self._leadership.reserve_version(version)
            self._send(publication, version)
            if self._full or wait:
                # After a version for which the disk was full, wait until this one is written.
                self._wait_sent()

    def _send(self, publication: WeightPublication, version: int) -> None:
        step, leader_term = self._context.progress.step, self._leadership.leader_term
        file = self._folder / f"part-{version}-t{term_number(leader_term)}"
        rank_group = self._context.rank_group
        with disk_errors(f"cannot write weights version {version} to {file}"):
            self._folder.mkdir(parents=True, exist_ok=True)
            snapshot, logprobs = rank_group.gather(self._probe, file)
        if not np.isfinite(logprobs).all():
            raise RunFailed(describe_broken(version))
        probe = Probe(tokens=Array.of(self._probe, "i4"), logprobs=Array.of(logprobs, "f4"), image=self._probe_image)

        def send() -> None:
            with disk_errors(f"cannot publish weights version {version} from {file}"):
                snapshot.fill()
                publication.publish(
                    file,
                    version=version,
                    step=step,
                    leader_term=leader_term,
                    tensors=snapshot.specs,
                    probe=probe,
                    adapter=rank_group.step.policy.adapter,
                )

        self._sending = self._executor.submit(send)

    def _wait_sent(self) -> None:
        """Wait until the last version is with the broker, whose deadline bounds it; its error is raised here, once."""
        if self._sending is not None:
            sending, self._sending = self._sending, None
            self._full = isinstance(sending.exception(), DiskError)
            sending.result()
