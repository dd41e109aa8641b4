"""How a process is distinguished from others, also from a later one with its number; and the programs of a machine."""

import os
import shutil
import socket
import subprocess
from collections.abc import Sequence
from pathlib import Path

ASK_S = 20.0
"""How long a program of the machine may take to answer."""


def find_place() -> str:
    """Identify the boot and the process namespace in which process ids are valid; "" if unknown."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return f"{boot}:{os.stat('/proc/self/ns/pid').st_ino}"
    except OSError:
        return ""


def identify_process(host: str = "", place: str = "", pid: int = 0) -> str:
    """Return a text that no two processes share; by default that of this process."""
    return f"{host or socket.gethostname()}/{place or find_place()}/{pid or os.getpid()}"


def find_start(pid: int) -> str:
    """Return when a process started, in ticks since the boot; "" if it has ended, or if that is unknown."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()[19]
    except (OSError, IndexError):
        return ""


def locate_interpreter(python: str, base: Path) -> str:
    """Return an interpreter that a configuration names: a path starts from its folder ``base``, a command is itself."""
    return str(base.resolve() / python) if os.sep in python else python


def ask(command: Sequence[str]) -> str:
    """Return the output of a program of the machine; "" where it is missing, fails or does not answer."""
    if shutil.which(command[0]) is None:
        return ""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=ASK_S, check=True)
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout
