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


class RunFailed(TidemillError):
    """The run cannot go on, nor after a restart: everything fails, or nothing teaches any more; it ends with this."""


def describe_error(error: BaseException, limit: int = 400) -> str:
    """Tell an exception of any code as one line, ``Type: text``, of at most ``limit`` characters, all of them UTF-8."""
    try:
        text = " ".join(str(error).split())
    except Exception:  # noqa: BLE001 - user code: even the text of an exception may raise
        text = ""
    return printable(f"{type(error).__name__}: {text}".rstrip(": "))[:limit]


def printable(text: str) -> str:
    """Return the text with escapes for what UTF-8 does not have: half characters."""
    return text.encode("utf-8", "backslashreplace").decode()


OK_EXIT = 0
ERROR_EXIT = 1
CONFIG_EXIT = 2
FENCED_EXIT = 3
NOT_DONE_EXIT = 4
"""Exit code for an order that was taken, and that not all services followed in the given time."""
REFUSED_EXIT = 5
"""Exit code for a request that the control plane refused, or that is not for a run that is alive."""
RUN_FAILED_EXIT = 6
"""Exit code when the run cannot go on, nor after a restart."""
INTERRUPTED_EXIT = 130
HOPELESS = frozenset({CONFIG_EXIT, FENCED_EXIT, RUN_FAILED_EXIT})
"""Exit codes that a restart can't mend: a wrong configuration stays wrong, a replaced trainer must not return, and what
always fails fails again."""
