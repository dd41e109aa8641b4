"""One service on the node where Ray has put it: an actor around a guarded process.

When the actor goes, with its node or because the driver went, the guardian ends the service within seconds.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from deploy.process import Process

LOOK_S = 0.05


class Host:
    """Calls run in threads beside each other: ``wait`` until the service has ended, the others at any time."""

    def __init__(
        self, argv: Sequence[str], name: str, log: str | None, environment: Mapping[str, str], folder: str
    ) -> None:
        """argv: after the name of Python itself, which is this node's own. folder: to run in."""
        os.chdir(folder)
        self._process = Process([sys.executable, *argv], name, Path(log) if log else None, environment, Path(folder))

    def ready(self) -> bool:
        """Answered once the service has been started."""
        return True

    def wait(self) -> int:
        """Exit code of the service, negative for a signal, once nothing of it is left."""
        while (ended := self._process.poll()) is None:
            time.sleep(LOOK_S)
        return ended.code

    def terminate(self) -> None:
        """Ask it to end."""
        self._process.terminate()

    def kill(self) -> None:
        """Kill it and all that it started."""
        self._process.kill()
