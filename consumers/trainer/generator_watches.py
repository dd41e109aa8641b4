"""What the trainer concludes from its generators: that no weights of it can be used, or that one computes wrongly.

A run ends if no generator can use its weights. A generator whose tokens are not from the weights that they name is
quarantined.
"""

from collections.abc import Mapping

import structlog

from broker.flow.run_control import ControlState
from broker.heartbeat import FRESH_S
from broker.telemetry.heartbeats import Heartbeats
from consumers.trainer.context import TrainerContext
from consumers.trainer.data.groups import Batch
from consumers.trainer.metrics.mismatch import KL_BOUNDS, MismatchJudge, SampleMismatch, mismatch_metrics
from consumers.trainer.step.learner import StepResult
from schemas.config import by_pool
from schemas.errors import RunFailed

MOST_REJECTIONS = 3
"""Rejections of a version, by generators that have no other weights, after which the run may end."""

log = structlog.get_logger()


class RejectedWeightsWatch:
    """Checks, while no batch comes, whether any generator can use the trainer's weights; otherwise none will come.

    A generator that can't use them and has no others ends and is restarted, in vain if all generators find the same:
    numbers too large for float16, say, in an engine that computes in another order than the trainer.
    """

    def __init__(self, context: TrainerContext) -> None:
        self._context = context
        self._first = (-1, 0)
        """The version of the last check, and its rejections then."""

    def check(self) -> None:
        """Raise RunFailed if generators reject this version repeatedly, none could use it, and none has another.

        At least one rejection must be newer than this trainer, because the cause of older ones may be fixed. A
        generator that has been silent for long does not count as one that may help; one that is loading does.
        """
        context = self._context
        version = context.progress.version
        found = context.broker.weights.read_rejections()
        if found.version != version:
            self._first = (version, 0)
            return
        if self._first[0] != version:
            self._first = (version, found.count)
        new = found.count > self._first[1]
        if not new or found.count < MOST_REJECTIONS or found.usable or context.progress.pause != "none":
            return
        heartbeats = context.broker.heartbeats
        now = heartbeats.read_clock()
        generators = [beat for beat in heartbeats.list() if beat.role == "generator" and now - beat.time < FRESH_S]
        if all(beat.version < 0 and beat.service in found.generators for beat in generators):
            text = (
                f"no generator can use weights version {version}: {found.count} rejections by"
                f" {len(found.generators)} of them, the last: {found.last}"
            )
            context.notify("run_failed", "error", text)
            raise RunFailed(text)


def find_quarantined(control: ControlState, heartbeats: Heartbeats) -> set[str]:
    """Return the generators whose samples must not be trained. One of a new process is trusted again."""
    running = {beat.service: beat.process for beat in heartbeats.list()} if control.mismatch else {}
    return {name for name, process in control.mismatch.items() if running.get(name, process) == process}


class MismatchWatch:
    """Compares the log-probabilities of each generator with the trainer's, and quarantines one that is at fault.

    A generator that has ended is not quarantined: nothing more comes of it, and another process may get its name.
    """

    def __init__(self, context: TrainerContext) -> None:
        self._context = context
        settings, sampling = context.config.trainer.mismatch, context.config.sampling
        dtype = context.config.model.dtype
        # Neither samples from the policy as the trainer computes it.
        scripted = any(one.generator.engine == "scripted" for one in by_pool(context.config).values())
        other = sampling.top_p < 1 or sampling.top_k > 0 or scripted
        kl = settings.kl or (None if other else KL_BOUNDS[dtype])
        self._quarantines = settings.action == "quarantine"
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
        quarantined = find_quarantined(context.broker.run_control.read() or ControlState(), context.broker.heartbeats)
        quarantines = self._quarantines and bool(alive.keys() - quarantined - {name})
        # What was quarantined may still send what it began. What was only reported is quarantined as soon as it can be.
        if process is None or name in quarantined or (self._told.get(name) == process and not quarantines):
            return
        self._told[name] = process
        if quarantines:
            context.broker.run_control.quarantine(name, process, "trainer")
            done = "it gets no more tasks, and its samples end as mismatch"
        else:
            done = "no other generator is alive" if self._quarantines else "trainer.mismatch.action is report"
        log.warning("a generator is not the policy that it names", generator=name, reason=problem)
        context.notify("mismatch", "error", f"{name}: {problem}; {done}")
