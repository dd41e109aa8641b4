"""The end of a service's process, without the interpreter's work on what it imported.

It would look for garbage once more and take every module apart: 2 s of processor time where vLLM or PyTorch are loaded,
longer than a service's grace on a busy machine.
"""

import atexit
import os
import sys
from contextlib import suppress
from types import TracebackType
from typing import Self


class EndAtOnce:
    """The end of a process that does not take its modules and their objects apart, whose memory goes anyway.

    ``with`` it around what the process does, whose exit code stays as it is. All that is to be done at the end is done
    before: threads are waited for, functions that were registered after this was made are called, output is written.
    An interrupt ends the process as ever.
    """

    def __init__(self) -> None:
        self._code: int | None = None
        # What is registered first is called last.
        atexit.register(self._end)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        if error is None:
            self._code = 0
        elif isinstance(error, SystemExit):
            self._code = (error.code or 0) if isinstance(error.code, int | None) else 1
        elif isinstance(error, Exception):
            self._code = 1

    def _end(self) -> None:
        if self._code is None:
            return
        for stream in (sys.stdout, sys.stderr):
            with suppress(OSError, ValueError):
                stream.flush()
        os._exit(self._code & 0xFF)
