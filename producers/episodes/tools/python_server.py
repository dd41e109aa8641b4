"""The interpreter that the tool ``python`` talks to, in the sandbox: ``python python_server.py TIMEOUT LONGEST``.

Each request on stdin is JSON with a length in four bytes before it, ``{"code": ...}``, and so is each answer on stdout,
``{"text": ..., "failed": ...}``. Standard library only.
"""

from __future__ import annotations

import ast
import contextlib
import json
import os
import signal
import struct
import sys
import traceback
from typing import Any

LENGTH = struct.Struct("<I")


class TooLong(BaseException):
    """The code took too long. Code that handles all exceptions lets it pass."""


def main() -> None:
    """Run the code that is sent, in one scope that lasts; answer with what it printed."""
    timeout_s, longest = float(sys.argv[1]), int(sys.argv[2])
    requests, answers = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    printed = os.open("/tmp/.printed" if os.access("/tmp", os.W_OK) else ".printed", os.O_RDWR | os.O_CREAT, 0o600)
    os.dup2(printed, 1)
    os.dup2(printed, 2)
    signal.signal(signal.SIGALRM, _stop)
    scope: dict[str, Any] = {"__name__": "__main__"}
    while True:
        head = requests.read(LENGTH.size)
        if len(head) < LENGTH.size:
            return
        code = json.loads(requests.read(LENGTH.unpack(head)[0]))["code"]
        os.ftruncate(printed, 0)
        os.lseek(printed, 0, os.SEEK_SET)
        failed = _run(code, scope, timeout_s)
        with contextlib.suppress(OSError, ValueError):
            sys.stdout.flush()
            sys.stderr.flush()
        text = os.pread(printed, longest, 0).decode("utf-8", "replace")
        data = json.dumps({"text": text, "failed": failed}).encode()
        answers.write(LENGTH.pack(len(data)) + data)
        answers.flush()


def _run(code: str, scope: dict[str, Any], timeout_s: float) -> bool:
    """Run code, and show the value of a last expression, as the prompt of Python does; whether it failed."""
    try:
        signal.setitimer(signal.ITIMER_REAL, timeout_s)
        tree = ast.parse(code, "code")
        last = tree.body[-1] if tree.body and isinstance(tree.body[-1], ast.Expr) else None
        exec(compile(ast.Module(tree.body[: -1 if last else None], []), "code", "exec"), scope)
        if last is not None:
            value = eval(compile(ast.Expression(last.value), "code", "eval"), scope)
            if value is not None:
                print(repr(value))  # noqa: T201
        return False
    except TooLong:
        print(f"error: it took longer than {timeout_s:g} s and was interrupted", file=sys.stderr)  # noqa: T201
        return True
    except BaseException as error:  # noqa: BLE001 - the policy's code: it reads whatever it raises
        signal.setitimer(signal.ITIMER_REAL, 0)
        # The first frame is ours.
        traceback.print_exception(type(error), error, error.__traceback__ and error.__traceback__.tb_next)
        return True
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)


def _stop(*_: Any) -> None:
    raise TooLong


if __name__ == "__main__":
    main()
