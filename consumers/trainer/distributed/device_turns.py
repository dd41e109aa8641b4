"""The trainer's turns on GPUs that it shares with generators: they generate there while it has nothing to compute.

Each rank holds the lock of every such generator, shared, while its tensors are on the GPU; the generator holds it alone
while its engine is awake. Rank 0 also holds the lock that makes generators sleep. The kernel frees the locks of a
process that dies, so that a crash in any state leaves the GPUs to the others.
"""

import time
from collections.abc import Callable, Iterable

import structlog

from schemas.errors import InfraError
from schemas.system.device_lock import DeviceLock, LockToucher, SharedGpus, TurnClock, generator_lock, trainer_lock

DEADLINE_S = 1800.0
"""Seconds that the trainer waits for a generator, which may be loading its engine."""
FORGET = 0.8
"""What remains of the measured cost of a hand-over after a wait that was shorter."""
TELL_S = 1.0
POLL_S = 0.01

log = structlog.get_logger()


class GiveRule:
    """Decides when a trainer that waits gives the GPUs: after as long as the last hand-over there and back took.

    So it loses at most twice what it would lose if it knew how long the wait will be (ski rental: Karlin et al.,
    Competitive snoopy caching, 1988). A hand-over may have been slow by exception, as one to a generator that loads its
    engine: each wait that ends before it is due lowers the cost, or no wait might ever be long enough to measure it
    again. alone: whether no other generator works meanwhile, so that waiting is in vain; asked when a wait begins.
    """

    def __init__(self, alone: Callable[[], bool]) -> None:
        self._alone, self._at_once = alone, False
        self._waits_since: float | None = None
        self._give_s = self._hold_s = 0.0
        self._given = False

    @property
    def cost_s(self) -> float:
        """Seconds of the last hand-over to the generators and back."""
        return self._give_s + self._hold_s

    def due(self, now: float) -> bool:
        """Whether to give the GPUs at the time ``now``, in seconds; the first call since ``compute`` begins a wait."""
        if self._waits_since is None:
            self._waits_since, self._at_once = now, self._alone()
        return self._at_once or now - self._waits_since >= self.cost_s

    def compute(self) -> None:
        """Note that the trainer waits no more."""
        if self._waits_since is not None and not self._given:
            self._give_s *= FORGET
            self._hold_s *= FORGET
        self._waits_since, self._given = None, False

    def gave(self, seconds: float) -> None:
        """Note how long it took to give the GPUs."""
        self._give_s, self._given = seconds, True

    def held(self, seconds: float) -> None:
        """Note how long it took to get them back."""
        self._hold_s = seconds


class DeviceTurns:
    """This rank's locks on the GPUs that it shares. rule: of rank 0, when to give them. holding: whether it has them.

    clock: of its turns. main: whether this is rank 0. deadline_s: seconds to wait for each generator. generators:
    returns the names of all that run now, whose number users and the plan may change.
    """

    def __init__(self, shared: SharedGpus, main: bool, deadline_s: float = DEADLINE_S) -> None:
        self.rule = GiveRule(lambda: own.issuperset(self.generators()))
        self.generators: Callable[[], Iterable[str]] = tuple
        self.holding = False
        self.clock = TurnClock()
        self._deadline_s = deadline_s
        own = set(shared.generators)
        self._locks = [(trainer_lock(shared.folder), False)] if main else []
        """Pairs of a lock and whether it is held shared, as a generator's is."""
        self._locks += [(generator_lock(shared.folder, name), True) for name in shared.generators]
        self._held: list[DeviceLock] = []
        self._toucher: LockToucher | None = None

    def hold(self) -> None:
        """Wait until no generator's engine is awake on the GPUs, and take them; InfraError after the deadline."""
        if self._toucher is None:
            self._toucher = LockToucher([lock for lock, _ in self._locks])
            self._toucher.start()
        for lock, shared in self._locks:
            self._take(lock, shared)
        self.holding = True
        self.clock.turn(True)

    def give(self) -> None:
        """Let the generators have the GPUs, on which this rank has no tensors any more."""
        self.holding = False
        self.clock.turn(False)
        while self._held:
            self._held.pop().release()

    def _take(self, lock: DeviceLock, shared: bool) -> None:
        started, told = time.monotonic(), False
        while not lock.try_hold(shared):
            waited = time.monotonic() - started
            if waited > self._deadline_s:
                raise InfraError(
                    f"the trainer waited {self._deadline_s:.0f} s for its GPUs, which it shares: another process holds"
                    f" {lock.file}"
                )
            if not told and waited > TELL_S:
                told = True
                log.info("waiting for the shared GPUs", holder=lock.file.stem)
            time.sleep(POLL_S)
        self._held.append(lock)
