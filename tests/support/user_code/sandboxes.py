"""Sandboxes in tests: the one that this machine should have, and what is left of programs that ran in it."""

import secrets

import psutil

from schemas.errors import ConfigError
from schemas.system.sandbox.jail import Sandbox, choose
from schemas.system.sandbox.limits import Limits, Outcome, find_interpreter
from tests.support.runs.programs import find_program, skip_or_fail

LIMITS = Limits(wall_s=20.0, cpu_s=3.0, memory_mb=256, processes=8)


def sandbox(name: str = "bwrap") -> Sandbox:
    """A sandbox that works here; skips the test without it, or fails it in CI."""
    if name == "bwrap":
        find_program("bwrap")
    try:
        return choose(name)
    except ConfigError as error:
        skip_or_fail(str(error))


def run_python(code: str, name: str = "bwrap", limits: Limits = LIMITS, stdin: bytes = b"") -> Outcome:
    """Run Python code in a sandbox."""
    python = find_interpreter()
    program = [*python.command, "{job}/main.py"]
    return sandbox(name).run(program, stdin, {"main.py": code.encode()}, limits, python.mounts)


def mark() -> str:
    """A word for a program's arguments, by which its processes are found."""
    return f"marked-{secrets.token_hex(8)}"


def left_with(word: str) -> list[psutil.Process]:
    """Those of ``processes_with`` that are not gone at once: a killed process takes a moment to end."""
    _, alive = psutil.wait_procs(processes_with(word), timeout=5)
    return list(alive)


def processes_with(word: str) -> list[psutil.Process]:
    """Processes of this machine that have the word in their command lines."""
    found = []
    for process in psutil.process_iter():
        try:
            if any(word in part for part in process.cmdline()):
                found.append(process)
        except psutil.Error:
            continue
    return found
