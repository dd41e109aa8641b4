"""The commands of other ways to sandbox a program: sandlock, which needs no namespaces, gVisor, and none at all."""

import importlib.util
import json
import os
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from schemas.system.sandbox import sandlock_stage
from schemas.system.sandbox.limits import Limits, Mount

_ENV = {"PATH": "/usr/local/bin:/usr/bin:/bin", "LANG": "C.UTF-8"}
_SYSTEM = ("/usr", "/lib", "/lib64", "/bin", "/sbin", "/etc/alternatives", "/etc/ld.so.cache", "/etc/ssl/certs")
_DEVICES = ("/dev/null", "/dev/zero", "/dev/urandom", "/dev/random")


def has_sandlock() -> bool:
    """Return whether the package sandlock is installed."""
    return importlib.util.find_spec("sandlock") is not None


def sandlock_command(
    program: Sequence[str], limits: Limits, folder: Path, mounts: Sequence[Mount], env: dict[str, str]
) -> list[str]:
    """Return the command that runs ``program`` under sandlock, which writes to the folder's ``tmp`` only."""
    here = plain_env(folder, env)
    writable = [str(folder / "tmp"), *(str(mount.path) for mount in mounts if mount.writable), *_DEVICES[:2]]
    readable = [*_SYSTEM, *_DEVICES, "/proc", str(folder / "job"), *(str(mount.path) for mount in mounts)]
    settings: dict[str, Any] = {
        "fs_readable": [path for path in readable if os.path.exists(path)],
        "fs_writable": writable,
        "max_processes": limits.processes,
        "clean_env": True,
        "env": here,
        "cwd": here["HOME"],
    }
    wanted = plain_command(program, limits, folder)
    return [sys.executable, "-I", sandlock_stage.__file__, json.dumps(settings), *wanted]


def plain_command(program: Sequence[str], limits: Limits, folder: Path) -> list[str]:
    """Return the command that runs ``program`` within limits, without a sandbox."""
    job = str(folder / "job")
    return [*limits.prlimit(count_processes=False), *(part.replace("{job}", job) for part in program)]


def plain_env(folder: Path, env: dict[str, str]) -> dict[str, str]:
    """Return the environment of a program that sees the folder as it is."""
    return {**_ENV, "HOME": str(folder / "tmp"), "TMPDIR": str(folder / "tmp"), **env}


def gvisor_command(
    program: Sequence[str], limits: Limits, folder: Path, mounts: Sequence[Mount], env: dict[str, str]
) -> list[str]:
    """Write a container's bundle to ``folder``; the command that runs it with gVisor's kernel, and no network."""
    seconds = max(1, int(limits.cpu_s + 0.999))
    rlimits = {"RLIMIT_CPU": seconds, "RLIMIT_FSIZE": limits.disk_mb << 20, "RLIMIT_CORE": 0, "RLIMIT_NOFILE": 256}
    rlimits["RLIMIT_NPROC"] = limits.processes
    if limits.memory_mb is not None:
        rlimits["RLIMIT_AS"] = limits.memory_mb << 20
    system = [path for path in _SYSTEM if os.path.exists(path)]
    binds = [(os.path.realpath(path), path, "ro") for path in system] + [(str(folder / "job"), "/job", "ro")]
    binds += [(str(mount.path), str(mount.path), "rw" if mount.writable else "ro") for mount in mounts]
    tmpfs = {"type": "tmpfs", "source": "tmpfs", "options": ["nosuid", "nodev", f"size={limits.disk_mb << 20}"]}
    bundle = {
        "ociVersion": "1.0.0",
        "process": {
            "user": {"uid": 65534, "gid": 65534},
            "args": [part.replace("{job}", "/job") for part in program],
            "env": [f"{name}={value}" for name, value in {**_ENV, "HOME": "/tmp", **env}.items()],
            "cwd": "/tmp",
            "noNewPrivileges": True,
            "rlimits": [{"type": name, "hard": value, "soft": value} for name, value in rlimits.items()],
        },
        "root": {"path": "root", "readonly": True},
        "hostname": "sandbox",
        "mounts": [
            {"destination": "/proc", "type": "proc", "source": "proc"},
            {"destination": "/tmp", **tmpfs},
            *(
                {"destination": place, "type": "bind", "source": source, "options": ["rbind", mode]}
                for source, place, mode in binds
            ),
        ],
        "linux": {"namespaces": [{"type": kind} for kind in ("pid", "network", "ipc", "uts", "mount")]},
    }
    (folder / "root").mkdir()
    (folder / "config.json").write_text(json.dumps(bundle), encoding="utf-8")
    rootless = [] if os.geteuid() == 0 else ["--rootless"]
    state = ["--root", str(folder / "state"), "--network=none", *rootless]
    return [
        shutil.which("runsc") or "runsc",
        *state,
        "run",
        "--bundle",
        str(folder),
        f"tidemill-{os.getpid()}-{folder.name}",
    ]
