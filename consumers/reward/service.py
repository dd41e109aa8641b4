"""The reward service: scores trajectories as they come. Any number of replicas share the stream."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence

import structlog

from broker.client import Broker
from broker.presence import Presence
from broker.queues import Delivery, ScoreQueue
from consumers.reward.scorer import Scorer
from schemas.config import RewardTerm, TidemillConfig
from schemas.lifecycle import StopFlag
from schemas.messages import Score, Trajectory

BATCH = 256
"""Trajectories read at once."""

log = structlog.get_logger()


def run_reward(config: TidemillConfig, name: str) -> None:
    """Score until the process is asked to end."""
    stop = StopFlag().install()
    broker = Broker.connect(config)
    scorer = _scorer(config, config.reward.terms)
    eval_terms = config.eval.terms if config.eval else None
    eval_scorer = _scorer(config, eval_terms) if eval_terms else scorer
    service = RewardService(broker.trajectories(name), scorer, eval_scorer, lease_s=2 * config.reward.timeout_s + 10)
    try:
        with Presence(broker, name, "reward", service.describe, service.renew, config.reward.timeout_s / 2):
            service.run(stop)
    finally:
        scorer.close()
        eval_scorer.close()


def _scorer(config: TidemillConfig, terms: list[RewardTerm]) -> Scorer:
    return Scorer(terms, config.base, config.reward.workers, config.reward.timeout_s)


class RewardService:
    """Reads a batch, scores it, publishes each score with its acknowledgement."""

    def __init__(self, queue: ScoreQueue, scorer: Scorer, eval_scorer: Scorer, lease_s: float) -> None:
        self._queue = queue
        self._scorers = {"train": scorer, "eval": eval_scorer}
        self._lease_s = lease_s
        self._counts = {"ok": 0, "error": 0, "timeout": 0}
        self._lock = threading.Lock()

    def describe(self) -> tuple[str, int, dict[str, float]]:
        with self._lock:
            return "running", -1, {name: float(count) for name, count in self._counts.items()}

    def renew(self) -> None:
        """Keep the leases of what is being scored."""
        self._queue.renew()

    def run(self, stop: StopFlag) -> None:
        """Until stop; what was read is scored first."""
        next_claim = 0.0
        while not stop:
            deliveries: list[Delivery[Trajectory]] = []
            if time.monotonic() >= next_claim:
                deliveries = self._queue.claim_stale(self._lease_s, BATCH)
                next_claim = time.monotonic() + self._lease_s / 2
            self.score(deliveries or self._queue.read(BATCH))

    def score(self, deliveries: Sequence[Delivery[Trajectory]]) -> None:
        """Score and publish a batch."""
        for kind, scorer in self._scorers.items():
            chosen = [item for item in deliveries if item.message.kind == kind]
            if not chosen:
                continue
            scores = scorer.score([item.message for item in chosen])
            self._queue.publish(list(zip(chosen, scores, strict=True)))
            self._count(scores)

    def _count(self, scores: Sequence[Score]) -> None:
        with self._lock:
            for score in scores:
                self._counts[score.status] += 1
        failed = [score for score in scores if score.status != "ok"]
        if failed:
            log.warning("samples without a reward", count=len(failed), reason=failed[0].reason)
