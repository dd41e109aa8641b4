"""Time series in memory, for pages that open later: step metrics, rates of counts, and recent tokens a second."""

import math
from array import array
from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Iterator, Mapping
from typing import Any

from schemas.control_api.history import MetricsHistory, ThroughputHistory
from schemas.control_api.status import RunStatus

STEPS_KEPT = 10_000
"""Newest steps that are kept, as many as the broker keeps."""
SERIES_KEPT = 1000
"""Most series that are kept: a user's metrics have names of their own."""
HISTOGRAM = "staleness/histogram"


class MetricsSeries:
    """Columns of the same length; NaN where a step has no such metric. 8 bytes a value."""

    def __init__(self, keep: int = STEPS_KEPT) -> None:
        """keep: the newest steps that are kept."""
        self._keep = keep
        self.steps: list[int] = []
        self.histograms: list[dict[str, int]] = []
        self._columns: dict[str, array[float]] = {}

    def add(self, line: dict[str, Any]) -> None:
        """Add a step's line; a step that is trained again replaces its line and all later ones."""
        step = line.get("step")
        if not isinstance(step, int):
            return
        while self.steps and self.steps[-1] >= step:
            self._drop(-1)
        if len(self.steps) >= self._keep:
            self._drop(0)
        self.steps.append(step)
        histogram = line.get(HISTOGRAM)
        self.histograms.append(dict(histogram) if isinstance(histogram, dict) else {})
        figures = dict(_figures(line))
        for name in figures:
            if name not in self._columns and len(self._columns) < SERIES_KEPT:
                self._columns[name] = array("d", [math.nan]) * (len(self.steps) - 1)
        for name, column in self._columns.items():
            column.append(figures.get(name, math.nan))

    def _drop(self, index: int) -> None:
        self.steps.pop(index)
        self.histograms.pop(index)
        for column in self._columns.values():
            column.pop(index)

    @property
    def names(self) -> list[str]:
        """Names of the metrics that have a column, sorted."""
        return sorted(self._columns)

    def last(self, name: str, count: int = 1) -> list[float]:
        """Return the newest values of a series, oldest first, without missing ones."""
        column = self._columns.get(name)
        return [value for value in column[-count:] if math.isfinite(value)] if column else []

    def since(self, after: int, limit: int, names: set[str] | None = None) -> MetricsHistory:
        """Return the newest ``limit`` steps after step ``after``; all series, or those of ``names``."""
        first = max(bisect_right(self.steps, after), len(self.steps) - limit)
        return self._part(slice(first, None), names)

    def history(self, cursor: int | None, limit: int, newest: bool, names: set[str] | None) -> MetricsHistory:
        """Return a page of steps: ``limit`` after the step ``cursor``, or, from the newest back, before it."""
        if newest:
            end = len(self.steps) if cursor is None else bisect_left(self.steps, cursor)
            first = max(0, end - limit)
            following = self.steps[first] if first > 0 and end > 0 else None
        else:
            first = 0 if cursor is None else bisect_right(self.steps, cursor)
            end = min(len(self.steps), first + limit)
            following = self.steps[end - 1] if first < end < len(self.steps) else None
        return self._part(slice(first, end), names, following)

    def _part(self, part: slice, names: set[str] | None, following: int | None = None) -> MetricsHistory:
        series = {
            name: [value if math.isfinite(value) else None for value in column[part]]
            for name, column in sorted(self._columns.items())
            if names is None or name in names
        }
        steps, staleness, cursor = (
            self.steps[part],
            self.histograms[part],
            None if following is None else str(following),
        )
        return MetricsHistory(step=steps, series=series, staleness=staleness, names=self.names, next=cursor)


def _figures(line: dict[str, Any]) -> Iterator[tuple[str, float]]:
    """Yield the numbers of a line by name; those of a metric with several parts under NAME/PART."""
    for name, value in line.items():
        if isinstance(value, int | float) and name != "step":
            yield name, float(value)
        elif isinstance(value, dict) and name != HISTOGRAM:
            yield from ((f"{name}/{part}", float(of)) for part, of in value.items() if isinstance(of, int | float))


WINDOW_S = 10.0


class Rates:
    """``add`` counts as they are read; ``of`` tells how fast one grows."""

    def __init__(self) -> None:
        self._points: deque[tuple[float, Mapping[str, int]]] = deque()

    def add(self, now: float, counts: Mapping[str, int]) -> None:
        """Add counts at ``now``, seconds of any clock."""
        if self._points and any(counts.get(name, 0) < value for name, value in self._points[-1][1].items()):
            # The broker was rebuilt, and counts from 0.
            self._points.clear()
        self._points.append((now, counts))
        while len(self._points) > 2 and now - self._points[0][0] > WINDOW_S:
            self._points.popleft()

    def of(self, name: str) -> float | None:
        """Return the growth per second of a count; None before two readings."""
        if len(self._points) < 2:
            return None
        (then, before), (now, after) = self._points[0], self._points[-1]
        return round((after.get(name, 0) - before.get(name, 0)) / (now - then), 3) if now > then else None


POINTS_KEPT = 900
"""Points that are kept: a quarter of an hour."""
APART_S = 0.9
"""The status is read more often while a request waits for an order."""


class ThroughputSeries:
    """``add`` each look at a run; ``history`` has them as columns."""

    def __init__(self) -> None:
        self._points: deque[tuple[float, float, float]] = deque(maxlen=POINTS_KEPT)

    def add(self, status: RunStatus) -> None:
        """Add a status; ignored when it comes too soon after the one before."""
        if not self._points or status.time - self._points[-1][0] >= APART_S:
            rates = status.throughput
            self._points.append((status.time, rates.generated_tokens, rates.trained_tokens))

    def history(self) -> ThroughputHistory:
        """Return all points as columns, oldest first."""
        time, generated, trained = ([point[column] for point in self._points] for column in range(3))
        return ThroughputHistory(time=time, generated_tokens=generated, trained_tokens=trained)
