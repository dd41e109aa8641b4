"""A judge's calls in flight, and its throughput against its rate limit while the server fails sometimes."""

from __future__ import annotations

import asyncio
import resource
import time
from pathlib import Path
from typing import Any

from benchmarks.harness.report import ResultRow, Table
from benchmarks.harness.trajectories import make_trajectory
from benchmarks.rewards.server import FlakyJudge
from consumers.reward.scorer import Scorer
from schemas.config import RewardConfig, RewardTerm
from schemas.messages import Score, Trajectory

TIMEOUT_S = 8.0


IN_FLIGHT = Table(
    "A judge's calls in flight",
    {
        "in flight": "{concurrency}",
        "seconds of an answer": "{answer_s:g}",
        "calls/s": "{calls_per_s:.1f}",
        "at most": "{ideal_per_s:.1f}",
        "processor ms a call": "{cpu_ms_per_call:.1f}",
    },
    part="judge",
)
"""Results with a number of calls in flight. cpu_ms_per_call: processor time in the judge's worker."""


LIMITED = Table(
    "A judge that fails at times, under a rate limit",
    {
        "limit, requests a minute": "{limit_per_minute:.0f}",
        "requests a minute": "{requests_per_minute:.0f}",
        "share of the limit": "{share_of_limit:.2f}",
        "refused": "{refused}",
        "unreadable": "{garbled}",
        "scored": "{ok}",
        "excluded": "{error} failed, {timeout} timed out",
        "zeros made up": "{made_up_zeros}",
    },
    part="limit",
)
"""Results under a rate limit. ok, error, timeout: samples by their score's status."""


def measure_in_flight(calls: int, concurrency: int, seconds: float) -> ResultRow:
    """Judge samples at full speed: calls per second, and processor time of a call in the judge's worker."""
    return asyncio.run(_measure_in_flight(calls, concurrency, seconds))


async def _measure_in_flight(calls: int, concurrency: int, seconds: float) -> ResultRow:
    with FlakyJudge(seconds=seconds) as server:
        before = _children_s()
        async with _scorer(server.url, concurrency) as scorer:
            await scorer.score(_sample("first"))
            started = time.perf_counter()
            scores = await scorer.score_all([_sample(str(number)) for number in range(calls)])
            wall_s = time.perf_counter() - started
        spent_s = _children_s() - before
        # The start of a worker is not measured.
        before = _children_s()
        async with _scorer(server.url, concurrency) as empty:
            await empty.score(_sample("first"))
        start_s = _children_s() - before
    return IN_FLIGHT.row(
        calls=calls,
        concurrency=concurrency,
        most_in_flight=server.most,
        answer_s=seconds,
        calls_per_s=calls / wall_s,
        ideal_per_s=concurrency / seconds,
        cpu_ms_per_call=1000 * max(0.0, spent_s - start_s) / calls,
        failed=sum(score.status != "ok" for score in scores),
    )


def measure_limited(
    samples: int, requests_per_minute: float, refuse: float, garble: float, timeout_s: float = TIMEOUT_S
) -> ResultRow:
    """Judge samples under a rate limit, with a server that rejects some, sends invalid replies, and hangs once."""
    with FlakyJudge(refuse=refuse, garble=garble, hang=frozenset({samples // 3}), seconds=0.3) as server:
        scorer = _scorer(server.url, 64, timeout_s, requests_per_minute=requests_per_minute)
        scores, ended, seen, started = asyncio.run(_score_limited(scorer, server, samples))
    # The sample that hangs runs to its deadline; it delays no other, and is not part of the throughput.
    wall_s = sorted(ended)[-2] - started
    counts = {status: sum(score.status == status for score in scores) for status in ("ok", "error", "timeout")}
    return LIMITED.row(
        samples=samples,
        limit_per_minute=requests_per_minute,
        requests_per_minute=60 * (server.seen - seen) / wall_s,
        share_of_limit=60 * (server.seen - seen) / wall_s / requests_per_minute,
        scored_per_minute=60 * counts["ok"] / wall_s,
        refused=server.refused,
        garbled=server.garbled,
        made_up_zeros=sum(score.status == "ok" and score.reward == 0 for score in scores),
        **counts,
    )


async def _score_limited(
    scorer: Scorer, server: FlakyJudge, samples: int
) -> tuple[list[Score], list[float], int, float]:
    """Return the scores, when each arrived, the server's requests, and the time before the first."""
    ended: list[float] = []
    async with scorer:
        await scorer.score(_sample("first"))
        seen, started = server.seen, time.perf_counter()
        tasks = [asyncio.create_task(scorer.score(_sample(str(number)))) for number in range(samples)]
        for task in tasks:
            task.add_done_callback(lambda _: ended.append(time.perf_counter()))
        return await asyncio.wait_for(asyncio.gather(*tasks), 600), ended, seen, started


def _scorer(url: str, concurrency: int, timeout_s: float = TIMEOUT_S, **more: Any) -> Scorer:
    parse = {"regex": r"Score: (\d+)", "min": 1, "max": 10}
    args = {"base_url": url, "model": "judge", "template": "Rate this: {completion}", "parse": parse, **more}
    term = RewardTerm(name="judge", concurrency=concurrency, args=args)
    return Scorer(RewardConfig(terms=[term], workers=1, timeout_s=timeout_s), Path.cwd())


def _sample(text: str) -> Trajectory:
    return make_trajectory([1, 2], 1, text=text)


def _children_s() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime
