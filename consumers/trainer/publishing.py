"""Publication of weight versions, in a thread, so that the next step starts at once.

Two watches look at what generators make of them: a run ends if no generator can use its weights, and a generator whose
tokens are not from the weights that they name is drained.
"""

from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial

import numpy as np
import structlog

from broker.flow.fencing import term_number
from broker.flow.run_control import ControlState
from broker.heartbeat import FRESH_S
from broker.telemetry.heartbeats import Heartbeats
from broker.weights.delta_writer import DeltaWriter
from broker.weights.publication import WeightPublication
from broker.weights.transports import NcclOrigin, PeerOrigin, make_transport
from consumers.trainer.context import TrainerContext, describe_broken
from consumers.trainer.data.groups import Batch
from consumers.trainer.leadership import Leadership
from consumers.trainer.metrics.mismatch import KL_BOUNDS, MismatchJudge, SampleMismatch, mismatch_metrics
from consumers.trainer.model.hf_weights import check_published
from consumers.trainer.model.probe import probe_tokens
from consumers.trainer.step.learner import StepResult
from schemas.codec import Array
from schemas.config import by_pool
from schemas.errors import DiskError, InfraError, RunFailed
from schemas.messages import Probe
from schemas.system.files import disk_errors

MOST_REFUSALS = 3
"""Refusals of a version, by generators that have no other weights, after which the run may end."""

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
        """Wait for the version that is being sent, then end its thread."""
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


class RefusalWatch:
    """Checks, while no batch comes, whether any generator can use the trainer's weights; otherwise none will come.

    A generator that can't use them and has no others ends and is restarted, in vain if all generators find the same:
    numbers too large for float16, say, in an engine that computes in another order than the trainer.
    """

    def __init__(self, context: TrainerContext) -> None:
        self._context = context
        self._first = (-1, 0)
        """The version of the last check, and its refusals then."""

    def check(self) -> None:
        """Raise RunFailed if generators refuse this version repeatedly, none could use it, and none has another.

        At least one refusal must be newer than this trainer, because the cause of older ones may be fixed. A generator
        that has been silent for long does not count as one that may help; one that is loading does.
        """
        context = self._context
        version = context.progress.version
        found = context.broker.weights.read_refusals()
        if found.version != version:
            self._first = (version, 0)
            return
        if self._first[0] != version:
            self._first = (version, found.count)
        new = found.count > self._first[1]
        if not new or found.count < MOST_REFUSALS or found.usable or context.progress.pause != "none":
            return
        heartbeats = context.broker.heartbeats
        now = heartbeats.read_clock()
        generators = [beat for beat in heartbeats.list() if beat.role == "generator" and now - beat.time < FRESH_S]
        if all(beat.version < 0 and beat.service in found.generators for beat in generators):
            text = (
                f"no generator can use weights version {version}: {found.count} refusals by"
                f" {len(found.generators)} of them, the last: {found.last}"
            )
            context.notify("run_failed", "error", text)
            raise RunFailed(text)


def find_drained(control: ControlState, heartbeats: Heartbeats) -> set[str]:
    """Return the generators whose samples must not be trained. One of a new process is trusted again."""
    running = {beat.service: beat.process for beat in heartbeats.list()} if control.mismatch else {}
    return {name for name, process in control.mismatch.items() if running.get(name, process) == process}


class MismatchWatch:
    """Compares the log-probabilities of each generator with the trainer's, and drains one that is at fault.

    A generator that has ended is not drained: nothing more comes of it, and another process may get its name.
    """

    def __init__(self, context: TrainerContext) -> None:
        self._context = context
        settings, sampling = context.config.trainer.mismatch, context.config.sampling
        dtype = context.config.model.dtype
        # Neither samples from the policy as the trainer computes it.
        scripted = any(one.generator.engine == "scripted" for one in by_pool(context.config).values())
        other = sampling.top_p < 1 or sampling.top_k > 0 or scripted
        kl = settings.kl or (None if other else KL_BOUNDS[dtype])
        self._drains = settings.action == "drain"
        self._judge = MismatchJudge(dtype, settings.ratio, kl)
        self._told: dict[str, str] = {}
        """Process of each generator that was reported, by name."""
        self._pools: dict[str, str] = {}
        """Pool of each generator that was seen, by name."""

    def observe(self, batch: Batch, result: StepResult) -> dict[str, float]:
        """Judge the generators of a step's samples; return the step's metrics of them."""
        trained = [sample for group in batch.groups for sample, _ in group.samples]
        samples = [
            SampleMismatch(
                sample.generator, batch.record.version - sample.oldest_version, sample.process, *result.samples[index]
            )
            for index, sample in enumerate(trained)
            if index in result.samples
        ]
        heartbeats = self._context.broker.heartbeats
        now, beats = heartbeats.read_clock(), [beat for beat in heartbeats.list() if beat.role == "generator"]
        self._pools |= {beat.service: beat.pool for beat in beats if beat.pool}
        alive = {beat.service: beat.process for beat in beats if now - beat.time < FRESH_S}
        # Tokens that another process has sampled, under this name or before it handed over, say nothing of this one.
        own = [one for one in samples if one.process and alive.get(one.generator) == one.process]
        for name, problem in self._judge.add(own, self._pools).items():
            self._report(name, problem, alive)
        return mismatch_metrics(samples, self._pools)

    def _report(self, name: str, problem: str, alive: Mapping[str, str]) -> None:
        context, process = self._context, alive.get(name)
        drained = find_drained(context.broker.run_control.read() or ControlState(), context.broker.heartbeats)
        drains = self._drains and bool(alive.keys() - drained - {name})
        # What was drained may still send what it began. What was only reported is drained as soon as it can be.
        if process is None or name in drained or (self._told.get(name) == process and not drains):
            return
        self._told[name] = process
        if drains:
            context.broker.run_control.drain(name, process, "trainer")
            done = "it gets no more tasks, and its samples end as mismatch"
        else:
            done = "no other generator is alive" if self._drains else "trainer.mismatch.action is report"
        log.warning("a generator is not the policy that it names", generator=name, reason=problem)
        context.notify("mismatch", "error", f"{name}: {problem}; {done}")
