"""Limits and files of a program in a sandbox, and its outcome."""

import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Literal

from schemas.errors import ConfigError


@dataclass(frozen=True)
class Limits:
    """Limits of one program and all that it starts.

    wall_s: seconds until it is killed. cpu_s, memory_mb: seconds of computing and address space of each of its
    processes. output_bytes: of stdout, and of stderr; it is killed at more. processes: threads count. disk_mb: of a
    file, and of all it writes, which lie in memory.
    """

    wall_s: float = 10.0
    cpu_s: float = 5.0
    memory_mb: int | None = 512
    output_bytes: int = 1 << 16
    processes: int = 16
    disk_mb: int = 16

    def prlimit(self, count_processes: bool = True) -> list[str]:
        """Return the start of a command that sets the kernel's limits, with util-linux's prlimit."""
        seconds = max(1, int(self.cpu_s + 0.999))
        limits = [f"--cpu={seconds}:{seconds + 1}", f"--fsize={self.disk_mb << 20}", "--core=0", "--nofile=256"]
        if self.memory_mb is not None:
            limits.append(f"--as={self.memory_mb << 20}")
        if count_processes:
            limits.append(f"--nproc={self.processes}")
        return ["/usr/bin/prlimit", *limits, "--"]


@dataclass(frozen=True)
class Outcome:
    """The end of a program. end: by itself, or killed at a limit of time or of output.

    code: exit code, 128 and more for a signal as in a shell; seconds: of wall time.
    """

    end: Literal["exit", "time", "output"]
    code: int
    stdout: bytes
    stderr: bytes
    seconds: float


@dataclass(frozen=True)
class Mount:
    """A file or folder of this machine that the program sees, at the same path.

    hidden: a folder in one that the program sees, in place of which it finds an empty one.
    """

    path: Path
    writable: bool = False
    hidden: bool = False


@dataclass(frozen=True)
class Interpreter:
    """A Python that programs run with. command: its beginning; mounts: what it needs of this machine, without /usr."""

    command: tuple[str, ...]
    mounts: tuple[Mount, ...]


@lru_cache(maxsize=16)
def find_interpreter(path: str | None = None) -> Interpreter:
    """Our own Python with its standard library alone, or that of another environment with its packages.

    ConfigError if ``path`` is no Python that runs.
    """
    if path is None:
        return Interpreter((os.path.realpath(sys.executable), "-I", "-S"), outside_usr([sys.base_prefix]))
    code = "import os, sys; print(sys.prefix, sys.base_prefix, os.path.realpath(sys.executable), sep='\\n')"
    try:
        said = subprocess.run([path, "-I", "-c", code], capture_output=True, text=True, timeout=30, check=True).stdout
        prefix, base, real = said.splitlines()[:3]
    except (OSError, ValueError, subprocess.SubprocessError) as error:
        raise ConfigError(f"python {path!r} must be an interpreter that can be run: {error}") from error
    return Interpreter((os.path.abspath(path), "-I"), outside_usr([prefix, base, str(Path(real).parent)]))


def outside_usr(folders: Sequence[str]) -> tuple[Mount, ...]:
    """Return a mount for each folder outside /usr, which every program sees, without those inside another one."""
    kept: list[Path] = []
    for folder in sorted({Path(folder) for folder in folders}):
        if not any(folder.is_relative_to(other) for other in (Path("/usr"), *kept)):
            kept.append(folder)
    return tuple(map(Mount, kept))
