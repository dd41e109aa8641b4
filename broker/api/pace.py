"""Tokens a second of the last minutes, one point a second, so that a page that is opened shows what came before."""

from __future__ import annotations

from collections import deque

from schemas.status import RunStatus, ThroughputHistory

KEPT = 900
"""Points that are kept: a quarter of an hour."""
APART_S = 0.9
"""The run is looked at more often while somebody waits for an order."""


class Pace:
    """``add`` each look at a run; ``history`` has them as columns."""

    def __init__(self) -> None:
        self._points: deque[tuple[float, float, float]] = deque(maxlen=KEPT)

    def add(self, status: RunStatus) -> None:
        """One look; ignored when it comes too soon after the one before."""
        if not self._points or status.time - self._points[-1][0] >= APART_S:
            rates = status.throughput
            self._points.append((status.time, rates.generated_tokens, rates.trained_tokens))

    def history(self) -> ThroughputHistory:
        """Oldest first."""
        points = list(self._points)
        return ThroughputHistory(
            time=[point[0] for point in points],
            generated_tokens=[point[1] for point in points],
            trained_tokens=[point[2] for point in points],
        )
