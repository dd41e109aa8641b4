"""A judge's calls in flight, and its throughput beside its rate limit while the server fails at times."""

from __future__ import annotations

import resource
import time
from pathlib import Path
from typing import Any

from benchmarks.rewards.server import FlakyJudge
from consumers.reward.scorer import Scorer
from schemas.codec import Array
from schemas.config import RewardTerm
from schemas.messages import Score, Span, Trajectory

TIMEOUT_S = 8.0


def measure_in_flight(calls: int, concurrency: int, seconds: float) -> dict[str, Any]:
    """Judge samples as fast as it goes: calls a second, and processor time of a call in the judge's worker."""
    with FlakyJudge(seconds=seconds) as server:
        before = _children_s()
        scorer = _scorer(server.url, concurrency)
        try:
            scorer.score([_sample("first")])
            started = time.perf_counter()
            scores = scorer.score([_sample(str(number)) for number in range(calls)])
            wall_s = time.perf_counter() - started
        finally:
            scorer.close()
        spent_s = _children_s() - before
        # What the start of a worker costs is left out.
        before = _children_s()
        empty = _scorer(server.url, concurrency)
        try:
            empty.score([_sample("first")])
        finally:
            empty.close()
        start_s = _children_s() - before
    return {
        "calls": calls,
        "concurrency": concurrency,
        "most_in_flight": server.most,
        "answer_s": seconds,
        "calls_per_s": calls / wall_s,
        "ideal_per_s": concurrency / seconds,
        "cpu_ms_per_call": 1000 * max(0.0, spent_s - start_s) / calls,
        "failed": sum(score.status != "ok" for score in scores),
    }


def measure_limited(
    samples: int, requests_per_minute: float, refuse: float, garble: float, timeout_s: float = TIMEOUT_S
) -> dict[str, Any]:
    """Judge samples under a rate limit, with a server that refuses, talks nonsense, and hangs once."""
    with FlakyJudge(refuse=refuse, garble=garble, hang=frozenset({samples // 3}), seconds=0.3) as server:
        scorer = _scorer(server.url, 64, timeout_s, requests_per_minute=requests_per_minute)
        try:
            scorer.score([_sample("first")])
            seen, started = server.seen, time.perf_counter()
            futures = [scorer.submit(_sample(str(number))) for number in range(samples)]
            ended: list[float] = []
            for future in futures:
                future.add_done_callback(lambda _: ended.append(time.perf_counter()))
            scores: list[Score] = [future.result(600) for future in futures]
        finally:
            scorer.close()
    # The one that hangs runs alone to its deadline; it holds up nobody, and is no part of the throughput.
    wall_s = sorted(ended)[-2] - started
    counts = {status: sum(score.status == status for score in scores) for status in ("ok", "error", "timeout")}
    return {
        "samples": samples,
        "limit_per_minute": requests_per_minute,
        "requests_per_minute": 60 * (server.seen - seen) / wall_s,
        "share_of_limit": 60 * (server.seen - seen) / wall_s / requests_per_minute,
        "scored_per_minute": 60 * counts["ok"] / wall_s,
        "refused": server.refused,
        "garbled": server.garbled,
        **counts,
        "made_up_zeros": sum(score.status == "ok" and score.reward == 0 for score in scores),
    }


def _scorer(url: str, concurrency: int, timeout_s: float = TIMEOUT_S, **more: Any) -> Scorer:
    parse = {"regex": r"Score: (\d+)", "min": 1, "max": 10}
    args = {"base_url": url, "model": "judge", "template": "Rate this: {completion}", "parse": parse, **more}
    return Scorer([RewardTerm(name="judge", concurrency=concurrency, args=args)], Path.cwd(), 1, timeout_s)


def _sample(text: str) -> Trajectory:
    return Trajectory(
        run="bench",
        task_id=0,
        sample=0,
        kind="train",
        tokens=Array.of([1, 2], "i4"),
        loss_mask=Array.of([0, 1], "u1"),
        logprobs=Array.of([0.0, 0.0], "f4"),
        spans=[Span(0, 1, 2)],
        turns=[],
        finish="stop",
        prompt="?",
        completion=text,
        generator="bench",
    )


def _children_s() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime
