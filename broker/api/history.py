"""Step metrics as columns, read once and kept: charts ask for them again and again."""

from __future__ import annotations

import math
from array import array
from typing import Any

from schemas.status import MetricsHistory

KEPT = 10_000
"""Newest steps that are kept, as many as the broker keeps."""
HISTOGRAM = "staleness/histogram"


class History:
    """Columns of the same length; NaN where a step has no such figure. 8 bytes a figure."""

    def __init__(self) -> None:
        self.steps: list[int] = []
        self.histograms: list[dict[str, int]] = []
        self._columns: dict[str, array[float]] = {}

    def add(self, line: dict[str, Any]) -> None:
        """One line of the trainer. A step that is trained again replaces itself and everything after it."""
        step = line.get("step")
        if not isinstance(step, int):
            return
        while self.steps and self.steps[-1] >= step:
            self._drop(-1)
        if len(self.steps) >= KEPT:
            self._drop(0)
        self.steps.append(step)
        histogram = line.get(HISTOGRAM)
        self.histograms.append(dict(histogram) if isinstance(histogram, dict) else {})
        for name, value in line.items():
            if name != "step" and isinstance(value, int | float) and name not in self._columns:
                self._columns[name] = array("d", [math.nan]) * (len(self.steps) - 1)
        for name, column in self._columns.items():
            value = line.get(name)
            column.append(float(value) if isinstance(value, int | float) else math.nan)

    def _drop(self, index: int) -> None:
        self.steps.pop(index)
        self.histograms.pop(index)
        for column in self._columns.values():
            column.pop(index)

    @property
    def names(self) -> list[str]:
        return sorted(self._columns)

    def last(self, name: str, count: int = 1) -> list[float]:
        """The newest values of one series, oldest first, without those that are missing."""
        column = self._columns.get(name)
        return [value for value in column[-count:] if math.isfinite(value)] if column else []

    def since(self, after: int, limit: int, names: set[str] | None = None) -> MetricsHistory:
        """The newest ``limit`` steps after step ``after``; all series, or those of ``names``."""
        first = next((i for i, step in enumerate(self.steps) if step > after), len(self.steps))
        first = max(first, len(self.steps) - limit)
        return MetricsHistory(
            step=self.steps[first:],
            series={
                name: [value if math.isfinite(value) else None for value in column[first:]]
                for name, column in sorted(self._columns.items())
                if names is None or name in names
            },
            staleness=self.histograms[first:],
            names=self.names,
        )
