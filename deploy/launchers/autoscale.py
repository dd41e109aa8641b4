"""How many generators a run can use, from what waits for them: a pure state machine, time comes in as an argument.

Admission bounds what waits, so a queue that stays full means that generators are what the run waits for, and one
that stays empty that there are enough.
"""

from __future__ import annotations

from dataclasses import dataclass

GROW_S = 30.0
"""How long tasks must have waited before one more generator is asked for."""
SHRINK_S = 300.0
"""How long none must have waited before one is given up: machines and models take minutes to come back."""


@dataclass
class Autoscaler:
    """least, most: bounds of the answer."""

    least: int
    most: int
    _waiting_since: float | None = None
    _idle_since: float | None = None

    def wanted(self, now: float, replicas: int, loading: int, waiting: int) -> int:
        """Replicas to have now. loading: those of ``replicas`` that can't work yet. waiting: tasks nobody has read."""
        bounded = min(max(replicas, self.least), self.most)
        if bounded != replicas or loading:
            # What was asked for is not there yet: nothing can be told from the queue.
            self._waiting_since = self._idle_since = None
            return bounded
        if waiting:
            self._idle_since = None
            self._waiting_since = now if self._waiting_since is None else self._waiting_since
            if now - self._waiting_since >= GROW_S:
                self._waiting_since = None
                return min(replicas + 1, self.most)
        else:
            self._waiting_since = None
            self._idle_since = now if self._idle_since is None else self._idle_since
            if now - self._idle_since >= SHRINK_S:
                self._idle_since = None
                return max(replicas - 1, self.least)
        return replicas
