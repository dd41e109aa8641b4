"""Error types, which decide what happens to work (retry elsewhere, dead letter, or stop), and exit codes of services.

Every service handles exactly these errors; any other is a bug and ends the process.
"""

from collections.abc import Mapping
from typing import TypeVar

E = TypeVar("E", bound=BaseException)


class TidemillError(Exception):
    """Base of all errors that Tidemill raises on purpose."""


class ConfigError(TidemillError):
    """The configuration or the environment is wrong: one line, exit code 2, before any model loads."""


class InfraError(TidemillError):
    """A machine, process or connection failed: the same work can succeed elsewhere or later."""


class DiskError(InfraError):
    """A file can't be written or read: a full disk, or a missing folder, which a user has to repair."""


class BrokerLost(InfraError):
    """The broker has lost its data of the run; the trainer rebuilds it from its own state."""


class BrokerDamaged(BrokerLost):
    """The broker's data of the run contradicts itself: none of its pipeline is used."""


class DataError(TidemillError):
    """A piece of work can never succeed: it goes to the dead-letter stream with this reason."""


class RefusedError(TidemillError):
    """The control plane rejects a request with a reason; a retry would be rejected too."""


class FencedError(TidemillError):
    """A newer trainer took over the run: the older must stop without writing anything more."""


class RunFailed(TidemillError):
    """The run can't continue, and a restart would not help: everything fails, or no group can be trained."""


def first_error(group: BaseExceptionGroup[E]) -> E:
    """Return the first exception of a group, or of the groups in it."""
    error = group.exceptions[0]
    return first_error(error) if isinstance(error, BaseExceptionGroup) else error


def describe_error(error: BaseException) -> str:
    """Describe an exception of any code in one line, ``Type: text``, of at most 400 characters of UTF-8."""
    try:
        text = " ".join(str(error).split())
    except Exception:  # noqa: BLE001 - user code: even the text of an exception may raise
        text = ""
    return printable(f"{type(error).__name__}: {text}".rstrip(": "))[:400]


def first_line(error: BaseException) -> str:
    """Return the first line of an exception's text, or its type if it has none."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def printable(text: str) -> str:
    """Return the text with escapes for half characters, which UTF-8 can't encode."""
    return text.encode("utf-8", "backslashreplace").decode()


OK_EXIT = 0
ERROR_EXIT = 1
CONFIG_EXIT = 2
FENCED_EXIT = 3
NOT_DONE_EXIT = 4
"""Exit code for an accepted order that not all services followed in the given time."""
REFUSED_EXIT = 5
"""Exit code for a request that the control plane rejected, or that is not for an active run."""
RUN_FAILED_EXIT = 6
"""Exit code if the run can't continue, even after a restart."""
UNFINISHED_EXIT = 75
"""Exit code of a service that ended in order before its run, unasked by the program that restarts it."""
INTERRUPTED_EXIT = 130
EXIT_CODES: Mapping[type[TidemillError], int] = {
    ConfigError: CONFIG_EXIT,
    RefusedError: REFUSED_EXIT,
    RunFailed: RUN_FAILED_EXIT,
    FencedError: FENCED_EXIT,
}
"""All other errors end with ERROR_EXIT."""
HOPELESS = frozenset({CONFIG_EXIT, FENCED_EXIT, RUN_FAILED_EXIT})
"""Exit codes after which a restart is useless: wrong configuration, replaced trainer, failed run."""
