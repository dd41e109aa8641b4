"""Error types, which decide what happens to work (elsewhere, dead letter, or stop), and a service's exit codes.

Every service handles exactly these errors; any other is a bug and ends the process.
"""

from __future__ import annotations


class TidemillError(Exception):
    """Base of all errors that Tidemill raises on purpose."""


class ConfigError(TidemillError):
    """The configuration or the environment is wrong: one line, exit code 2, before any model loads."""


class InfraError(TidemillError):
    """A machine, process or connection failed: the same work can succeed elsewhere or later."""


class DiskError(InfraError):
    """A file can't be written or read: a full disk, a folder that is gone; mended from outside."""


class BrokerLost(InfraError):
    """The broker has forgotten what it knew of the run; the trainer builds it anew from what it knows itself."""


class BrokerDamaged(BrokerLost):
    """The broker's data of the run contradicts itself: nothing of its pipeline is used."""


class DataError(TidemillError):
    """A piece of work can never succeed: it goes to the dead-letter stream with this reason."""


class RefusedError(TidemillError):
    """The control plane refuses a request, and says why; the same one is refused again."""


class FencedError(TidemillError):
    """A newer trainer took over the run: the older must stop without writing anything more."""


OK_EXIT = 0
ERROR_EXIT = 1
CONFIG_EXIT = 2
FENCED_EXIT = 3
NOT_DONE_EXIT = 4
"""Exit code for an order that was taken, and that not all services followed in the given time."""
REFUSED_EXIT = 5
"""Exit code for a request that the control plane refused."""
INTERRUPTED_EXIT = 130
HOPELESS = frozenset({CONFIG_EXIT, FENCED_EXIT})
"""Exit codes that a restart can't mend: a wrong configuration stays wrong, a replaced trainer must not return."""
