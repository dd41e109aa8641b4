"""Rates of counts that only grow, over the last seconds."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping

WINDOW_S = 10.0


class Rates:
    """``add`` counts as they are read; ``of`` tells how fast one grows."""

    def __init__(self, window_s: float = WINDOW_S) -> None:
        self._window_s = window_s
        self._points: deque[tuple[float, Mapping[str, int]]] = deque()

    def add(self, now: float, counts: Mapping[str, int]) -> None:
        """Counts at ``now``, seconds of any clock."""
        if self._points and any(counts.get(name, 0) < value for name, value in self._points[-1][1].items()):
            # The broker was rebuilt, and counts anew.
            self._points.clear()
        self._points.append((now, counts))
        while len(self._points) > 2 and now - self._points[0][0] > self._window_s:
            self._points.popleft()

    def of(self, name: str) -> float | None:
        """Growth a second; None before two readings."""
        if len(self._points) < 2:
            return None
        (then, before), (now, after) = self._points[0], self._points[-1]
        return round((after.get(name, 0) - before.get(name, 0)) / (now - then), 3) if now > then else None
