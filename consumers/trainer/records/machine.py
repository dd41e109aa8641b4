"""environment.json in the run's folder: versions of packages, the machine, and the git commit of the user's code.

Each trainer that starts writes it, and keeps those of earlier trainers in ``before``.
"""

import json
import os
import platform
import socket
import subprocess
import sys
import time
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import structlog
import torch

from schemas.run_folder import ENVIRONMENT
from schemas.system.files import atomic_write

PACKAGES = (
    *("tidemill", "torch", "transformers", "vllm", "accelerate", "peft", "redis", "numpy", "datasets"),
    *("safetensors", "tokenizers", "flash-attn", "triton"),
)
GIT_S = 5.0
EARLIER = 20
"""Earlier trainers that are kept in it."""

log = structlog.get_logger()


def write_environment(folder: Path, base: Path, ranks: int) -> None:
    """Write the file; only log if it can't be written. base: folder of the user's code. ranks: of the trainer."""
    file = folder / ENVIRONMENT
    try:
        before = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        before = None
    earlier = [*before.pop("before", []), before][-EARLIER:] if isinstance(before, dict) else []
    found = describe_environment(base, ranks) | {"before": earlier}
    try:
        atomic_write(file, json.dumps(found, indent=2) + "\n")
    except OSError as error:
        log.warning("the environment is not written", file=str(file), error=str(error))


def describe_environment(base: Path, ranks: int) -> dict[str, Any]:
    """Return the content of environment.json without ``before``: the machine, versions and the git commit."""
    gpus = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    packages = {}
    for name in PACKAGES:
        with suppress(PackageNotFoundError):
            packages[name] = version(name)
    return {
        "time": time.time(),
        "host": socket.gethostname(),
        "platform": platform.platform(),
        "python": sys.version.split()[0],
        "cpus": os.cpu_count(),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "gpus": gpus,
        "cuda": torch.version.cuda,
        "ranks": ranks,
        "packages": packages,
        "git": _git(base),
    }


def _git(folder: Path) -> dict[str, Any] | None:
    """Return the commit of the repository that holds ``folder``, and whether files changed since; None without one."""
    commit = _ask_git(folder, "rev-parse", "HEAD")
    if not commit:
        return None
    return {
        "commit": commit,
        "branch": _ask_git(folder, "rev-parse", "--abbrev-ref", "HEAD"),
        "changed": bool(_ask_git(folder, "status", "--porcelain", "--untracked-files=no")),
    }


def _ask_git(folder: Path, *words: str) -> str:
    try:
        found = subprocess.run(["git", "-C", str(folder), *words], capture_output=True, text=True, timeout=GIT_S)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return found.stdout.strip() if found.returncode == 0 else ""
