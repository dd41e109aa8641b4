"""The policy for restarting a dead service: a pure state machine that gets the time as an argument.

Promises: at most ``max_restarts`` within any ``window_s``, waits that double from ``backoff_s`` to 15 s, and no restart
after an exit that a restart cannot fix.
"""

from collections import deque
from dataclasses import dataclass, field
from enum import StrEnum

from schemas.config import SupervisorConfig
from schemas.errors import HOPELESS, OK_EXIT

MAX_BACKOFF_S = 15.0
RETURN_S = 5.0
"""Wait before a restart of a service that ended with exit code 0 without being asked: the run may just be over."""
SETTLED_S = 10.0
"""A service that runs this long after a restart has recovered: a later failure is a new one."""


class State(StrEnum):
    """The states of a supervised service."""

    RUNNING = "running"
    WAITING = "waiting"
    """Dead, will be restarted."""
    STOPPING = "stopping"
    """Asked to end."""
    STOPPED = "stopped"
    """Ended when asked."""
    LEFT = "left"
    """Ended on its own with exit code 0, as services of its kind may."""
    FINISHED = "finished"
    """Ended with exit code 0, and with it the run."""
    FAILED = "failed"
    """Dead, and not restarted."""


@dataclass
class RestartState:
    """The state of a service, from its starts and exits. ``finishes``, ``may_leave``: what exit code 0 means for it."""

    policy: SupervisorConfig
    finishes: bool = False
    may_leave: bool = False
    state: State = State.WAITING
    restarts: int = 0
    """Number of all restarts."""
    due: float = 0.0
    """Time of the restart, while waiting."""
    failing_since: float | None = None
    """Time of the first failure since the last recovery."""
    _started: float = 0.0
    _recent: deque[float] = field(default_factory=deque)

    def started(self, now: float) -> None:
        """Note that the process was started at ``now``."""
        self.state = State.RUNNING
        self._started = now

    def asked(self) -> None:
        """Note that the service was asked to stop: it is not restarted."""
        if self.state is State.RUNNING:
            self.state = State.STOPPING
        elif self.state is State.WAITING:
            self.state = State.STOPPED

    def exited(self, code: int, now: float) -> State:
        """Record an exit. Return the new state; ``due`` is the time of a restart."""
        if self.state is State.STOPPING:
            self.state = State.STOPPED
        elif code == OK_EXIT and self.finishes:
            self.state = State.FINISHED
        elif code == OK_EXIT and self.may_leave:
            self.state = State.LEFT
        elif code == OK_EXIT:
            self._wait(now + RETURN_S)
        else:
            if self.failing_since is None or now - self._started >= SETTLED_S:
                self.failing_since = now
            while self._recent and now - self._recent[0] > self.policy.window_s:
                self._recent.popleft()
            if code in HOPELESS or len(self._recent) >= self.policy.max_restarts:
                self.state = State.FAILED
            else:
                self._wait(now + min(self.policy.backoff_s * 2 ** len(self._recent), MAX_BACKOFF_S))
                self._recent.append(now)
        return self.state

    def healthy(self, now: float) -> bool:
        """Return whether the service runs and has recovered from its last failure."""
        return self.settled(now) or (self.state is State.RUNNING and self.failing_since is None)

    def settled(self, now: float) -> bool:
        """Return whether the service has run for a while, so that its configuration cannot be what is wrong."""
        return self.state is State.RUNNING and now - self._started >= SETTLED_S

    def _wait(self, due: float) -> None:
        self.state, self.due = State.WAITING, due
        self.restarts += 1
