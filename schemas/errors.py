"""The error types that decide what happens to work: elsewhere, dead letter, or stop.

Every service handles exactly these; anything else is a bug and ends the process.

Exit codes of a service, and which of them a restart cannot mend.
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
    """What the broker knows of the run contradicts itself: nothing of its pipeline is used."""


class DataError(TidemillError):
    """This piece of work can never succeed: it goes to the dead-letter stream with this reason."""


class RefusedError(TidemillError):
    """The control plane refuses a request, and says why; the same one is refused again."""


class FencedError(TidemillError):
    """A newer trainer took over this run: this one must stop without writing anything more."""


OK_EXIT = 0
ERROR_EXIT = 1
CONFIG_EXIT = 2
FENCED_EXIT = 3
NOT_DONE_EXIT = 4
"""An order was taken, and was not followed by all in the time that was given."""
REFUSED_EXIT = 5
"""The control plane refuses an order or a question, and says why."""
INTERRUPTED_EXIT = 130
HOPELESS = frozenset({CONFIG_EXIT, FENCED_EXIT})
"""A wrong configuration stays wrong, and a trainer that was replaced must not take the run back."""
