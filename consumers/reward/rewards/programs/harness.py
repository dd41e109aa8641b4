"""The program that runs in the sandbox beside the policy's: calls and tests, each in a copy of its process.

``python harness.py FOLDER``; the folder's case.json has setup, program, cases, wall_s (of a case) and late: after
so many cases over it no further one is run. stdin has a key that comes before each value and before the list of them,
so that what the program prints is not taken for one. Standard library only.
"""

from __future__ import annotations

import json
import os
import select
import signal
import sys
import time
from typing import Any


def main() -> None:
    """Run the program once, then each case; write the results: ``[passed the end, value, too late]``."""
    said = os.dup(1)
    os.dup2(2, 1)
    key = sys.stdin.readline().strip()
    with open(os.path.join(sys.argv[1], "case.json"), encoding="utf-8") as file:
        told = json.load(file)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    scope: dict[str, Any] = {"__name__": "program"}
    exec(compile(told["setup"], "setup.py", "exec"), scope)
    exec(compile(told["program"], "program.py", "exec"), scope)
    found: list[list[Any]] = []
    for case in told["cases"]:
        found.append(_run(case, scope, key, told["wall_s"]))
        if sum(late for _, _, late in found) >= told["late"]:
            break
    _write(said, key + json.dumps(found))
    os._exit(0)


def _run(case: dict[str, str], scope: dict[str, Any], key: str, wall_s: float) -> list[Any]:
    end, begin = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(end)
        os.setsid()
        value = None
        if "call" in case:
            value = eval(case["call"], scope)
        else:
            exec(compile(case["test"], "test.py", "exec"), scope)
        _write(begin, key + json.dumps(value))
        os._exit(0)
    os.close(begin)
    text, late = _read(end, child, wall_s)
    os.close(end)
    if late:
        os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    late = late or (os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGXCPU)
    _, whole, value = text.partition(key)
    try:
        return [bool(whole), json.loads(value) if whole else None, late]
    except ValueError:
        return [False, None, late]


def _read(end: int, child: int, wall_s: float) -> tuple[str, bool]:
    """Return the child's output, and whether it took too long, not counting its waits for a processor."""
    began, data = time.monotonic(), b""
    while True:
        left = began + wall_s - time.monotonic()
        if left <= 0:
            left += _waited_s(child)
        if left <= 0 or time.monotonic() > began + 5 * wall_s:
            return "", True
        if select.select([end], [], [], left)[0]:
            part = os.read(end, 1 << 16)
            if not part:
                return data.decode("utf-8", "replace"), False
            data += part


def _waited_s(child: int) -> float:
    try:
        with open(f"/proc/{child}/schedstat", encoding="ascii") as file:
            return int(file.read().split()[1]) / 1e9
    except (OSError, ValueError, IndexError):
        return 0.0


def _write(end: int, text: str) -> None:
    data = text.encode("utf-8", "backslashreplace")
    while data:
        data = data[os.write(end, data) :]


if __name__ == "__main__":
    main()
