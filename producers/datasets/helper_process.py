"""The process of a dataset whose examples come from another interpreter, or need environment variables of their own."""

import json
import threading
import weakref
from collections.abc import Mapping, Sequence
from typing import Any

from schemas.errors import ConfigError, DataError, InfraError
from schemas.system.worker_process import WorkerProcess

START_TIMEOUT_S = 120.0
ITEM_TIMEOUT_S = 60.0


class HelperProcess:
    """A worker process that answers each JSON line with one.

    name: of what makes the examples. recipe: the first line that the process gets; ``hello`` is the answer to it.
    If an answer has an ``error``: ConfigError for the first, DataError for an example.
    """

    def __init__(
        self, name: str, program: Sequence[str], environment: Mapping[str, str], recipe: dict[str, Any]
    ) -> None:
        self._name, self._program, self._environment, self._recipe = name, program, environment, recipe
        self._lock = threading.Lock()
        self._process: WorkerProcess | None = None
        self._end: weakref.finalize[Any, HelperProcess] | None = None
        self.hello: dict[str, Any] = {}
        self._start()

    def ask(self, request: dict[str, Any]) -> dict[str, Any]:
        """Return the answer. InfraError if the process can't start, DataError if it dies or hangs at this request."""
        with self._lock:
            try:
                return self._exchange(request, ITEM_TIMEOUT_S)
            except InfraError:
                # A process that died is replaced once: nothing of it was state.
                self.close()
            self._start()
            try:
                return self._exchange(request, ITEM_TIMEOUT_S)
            except InfraError as error:
                self.close()
                raise DataError(f"{error}, and once more after a restart") from error

    def close(self) -> None:
        """End the process; it is started again when needed."""
        if self._end is not None:
            self._end()
        self._process = None

    def _start(self) -> WorkerProcess:
        try:
            process = self._process = WorkerProcess(self._program, self._name, self._environment)
        except OSError as error:
            raise InfraError(f"cannot start the {self._name} process: {error}") from error
        self._end = weakref.finalize(self, process.kill)
        try:
            self.hello = self._exchange(self._recipe, START_TIMEOUT_S)
        except InfraError:
            self.close()
            raise
        except DataError as error:
            self.close()
            # A recipe that has worked once is right.
            raise (InfraError if self.hello else ConfigError)(str(error)) from error
        return process

    def _exchange(self, request: dict[str, Any], timeout_s: float) -> dict[str, Any]:
        process = self._process or self._start()
        try:
            reply: dict[str, Any] = json.loads(process.ask(json.dumps(request).encode(), timeout_s))
        except TimeoutError:
            raise InfraError(f"{self._name} made no example within {timeout_s:g} s: {request}") from None
        except OSError as error:
            raise InfraError(f"the {self._name} process ended: {error}") from error
        if "error" in reply:
            raise DataError(f"dataset {self._name.replace('-', '_')!r}: {reply['error']}")
        return reply
