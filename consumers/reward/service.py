"""The reward service: scores trajectories as they come. Any number of replicas share the stream.

A service takes as many samples as its workers have capacity for, and a few more; the others wait for any replica. When
it ends, it gives back what no worker has begun.
"""

import asyncio
import contextlib
import time
from collections.abc import Callable, Mapping, Sequence

import redis
import structlog

from broker.client import Broker
from broker.connection.connection import BLOCK_MS
from broker.heartbeat import HeartbeatThread, check_name
from broker.queues.consumer_group import Delivery
from broker.queues.scores import ScoreQueue
from consumers.reward.scorer import Scorer
from schemas.config import TidemillConfig
from schemas.errors import TidemillError
from schemas.messages import Score, Trajectory
from schemas.run_record import JoinedRun
from schemas.system.lifecycle import SILENT_S, StopFlag

BATCH = 256
"""Most trajectories that are taken but not scored, unless workers have capacity for more."""
AHEAD_S = 1.0
"""Seconds of work that wait for each call that workers have capacity for, so that none waits for the broker; at
least one sample."""
RECENT = 0.1
"""Share of the newest sample in the mean time of a sample."""
READ = 64
"""Most trajectories of a read: a larger one would allocate memory each time."""
CHECK_S = 1.0
"""Seconds between checks of the run's identity."""
BUSY_MS = 20
"""Longest wait of a read while samples are being scored, milliseconds."""

log = structlog.get_logger()


def run_reward(config: TidemillConfig, name: str) -> None:
    """Score until the process is asked to end."""
    stop = StopFlag().install()
    with stop.ending_within(0.0):
        broker = Broker.connect(config)
        check_name(broker, name)
        scorer = Scorer(config.reward, config.base, config.trace is not None)
        held_out = _eval_scorers(config)
    joined = JoinedRun(config.folder)
    queue = broker.score_queue(name)
    service = RewardService(
        queue,
        scorer,
        held_out,
        lease_s=2 * config.reward.timeout_s + 10,
        check=lambda: joined.check(*broker.run_control.read_run()),
        keep=broker.eval_samples.keep,
    )
    renew_s = config.reward.timeout_s / 2
    heartbeat = HeartbeatThread(
        broker, name, "reward", service.describe, queue.renew_leases, renew_s, probes=config.probes, sole=True
    )
    with stop.ending_within(SILENT_S, broker.connection.silent_s), heartbeat:
        asyncio.run(service.run(stop))


def _eval_scorers(config: TidemillConfig) -> dict[str, Scorer]:
    """Make scorers of held-out samples by dataset, if they have their own terms; equal terms share one."""
    found: dict[str, Scorer] = {}
    made: dict[str, Scorer] = {}
    for dataset in config.eval.dataset if config.eval else []:
        if config.eval and (terms := config.eval.terms_of(dataset)):
            if repr(terms) not in made:
                reward = config.reward.model_copy(update={"terms": terms})
                made[repr(terms)] = Scorer(reward, config.base, config.trace is not None)
            found[dataset.label] = made[repr(terms)]
    return found


class RewardService:
    """Reads trajectories, scores them side by side, publishes each score with its acknowledgement."""

    def __init__(
        self,
        queue: ScoreQueue,
        scorer: Scorer,
        held_out: Mapping[str, Scorer],
        lease_s: float,
        check: Callable[[], None] = lambda: None,
        keep: Callable[[Sequence[tuple[Trajectory, Score]]], None] = lambda scored: None,
    ) -> None:
        """held_out: scorers of evaluations by dataset, ``scorer`` by default. check: raises the error of JoinedRun once
        the trajectories belong to another run. keep: stores samples of evaluations for the dashboard.
        """
        self._queue = queue
        self._check = check
        self._keep = keep
        self._scorer, self._held_out = scorer, held_out
        self._lease_s = lease_s
        self._counts = {"ok": 0, "error": 0, "timeout": 0}
        self._scorers = {scorer, *held_out.values()}
        self._capacity = max(one.capacity for one in self._scorers)
        self._sample_s = AHEAD_S
        self._pending: dict[asyncio.Task[Score], Delivery[Trajectory]] = {}

    def describe(self) -> tuple[str, int, dict[str, float]]:
        """Return state, version (none: -1) and counts, for the heartbeat."""
        return "running", -1, {name: float(count) for name, count in self._counts.items()}

    async def run(self, stop: StopFlag) -> None:
        """Score until ``stop`` is set; then give back what has not begun, and score the rest."""
        async with contextlib.AsyncExitStack() as workers:
            for scorer in self._scorers:
                await workers.enter_async_context(scorer)
            try:
                await self._score(stop)
                await self._end()
            finally:
                for task in self._pending:
                    task.cancel()

    async def _score(self, stop: StopFlag) -> None:
        next_claim = next_check = 0.0
        while not stop:
            if time.monotonic() >= next_check:
                await asyncio.to_thread(self._check)
                next_check = time.monotonic() + CHECK_S
            if (room := self._room()) and time.monotonic() >= next_claim:
                self._submit(await asyncio.to_thread(self._queue.claim_stale, self._lease_s, room))
                next_claim = time.monotonic() + self._lease_s / 2
            if room := self._room():
                wait_ms = BUSY_MS if self._pending else BLOCK_MS
                self._submit(await asyncio.to_thread(self._queue.read, min(READ, room), wait_ms))
                # What no worker is needed for is scored now.
                await asyncio.sleep(0)
            else:
                await asyncio.wait(self._pending, timeout=1.0, return_when=asyncio.FIRST_COMPLETED)
            await self._publish()

    async def _end(self) -> None:
        """Give back the samples that no worker has begun, and publish the others."""
        for scorer in self._scorers:
            scorer.cancel_waiting()
        await asyncio.sleep(0)
        waiting = [task for task in self._pending if task.cancelled()]
        await asyncio.to_thread(self._queue.give_back, [self._pending.pop(task) for task in waiting])
        while self._pending:
            await asyncio.wait(self._pending, timeout=1.0, return_when=asyncio.FIRST_COMPLETED)
            await self._publish()

    def _room(self) -> int:
        """Return how many trajectories may be taken now: the workers' capacity, and work for the next ``AHEAD_S``."""
        most = self._capacity * (1 + max(1, int(AHEAD_S / max(self._sample_s, AHEAD_S / BATCH)))) or BATCH
        return max(0, min(max(BATCH, 2 * self._capacity), most) - len(self._pending))

    def _submit(self, deliveries: Sequence[Delivery[Trajectory]]) -> None:
        for delivery in deliveries:
            scoring = self._scorer_of(delivery.message).score(delivery.message)
            self._pending[asyncio.create_task(scoring)] = delivery

    def _scorer_of(self, trajectory: Trajectory) -> Scorer:
        return self._held_out.get(trajectory.dataset, self._scorer) if trajectory.kind == "eval" else self._scorer

    async def _publish(self) -> None:
        """Publish every score that is ready; a slow sample delays no other."""
        done = [task for task in self._pending if task.done()]
        if results := [(self._pending.pop(task), task.result()) for task in done]:
            await asyncio.to_thread(self._publish_scores, results)

    def _publish_scores(self, results: Sequence[tuple[Delivery[Trajectory], Score]]) -> None:
        for delivery, score in results:
            if self._scorer_of(delivery.message).capacity:
                self._sample_s += RECENT * (score.seconds - self._sample_s)
        evaluated = [(delivery.message, score) for delivery, score in results if delivery.message.kind == "eval"]
        try:
            # Samples are kept before their scores count. If the broker has no space for them, they are dropped.
            self._keep(evaluated)
        except (TidemillError, redis.RedisError) as error:
            log.warning("samples of an evaluation are not kept", count=len(evaluated), error=str(error))
        self._queue.publish(results)
        failed = [score for _, score in results if score.status != "ok"]
        if failed:
            log.warning("samples without a reward", count=len(failed), reason=failed[0].reason)
        for _, score in results:
            self._counts[score.status] += 1
