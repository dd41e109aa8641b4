"""The commands of bubblewrap: namespaces of its own for each program, which need no rights where users may make them.

The program sees /usr, its own files, and nothing else of this machine: no network, no other process, no environment. A
service that runs as root starts it as an ordinary user, since the kernel's limit of processes doesn't hold for root.
"""

import os
import shlex
import shutil
import stat
from collections.abc import Sequence
from pathlib import Path

from schemas.system.sandbox.limits import Limits, Mount

UID = 65534
_NICE = 5
"""A program that spins shall not slow down its neighbours."""
_SEEN = "/job"
_FROM_USR = ("bin", "lib", "lib32", "lib64", "sbin")
_FIRST = "echo 1000 >/proc/self/oom_score_adj; "
"""Where memory runs out, the kernel takes a program in a sandbox first."""


def bwrap_command(
    program: Sequence[str], limits: Limits, folder: Path, mounts: Sequence[Mount], status_fd: int | None = None
) -> list[str]:
    """Return the command that runs ``program`` in a sandbox. folder: with its files in ``job``, and space for mounts.

    The program gets the environment that the command is run with. status_fd: where bwrap writes how far it came.
    """
    before: list[str] = []
    sources: list[tuple[Path, Mount]] = []
    as_root = os.geteuid() == 0
    for mount in mounts:
        if mount.hidden:
            continue
        source = mount.path
        if as_root and not _is_open(source):
            # The ordinary user could not get there.
            source = folder / f"mount{len(sources)}"
            source.mkdir() if mount.path.is_dir() else source.touch()
            before.append(f"mount --bind {shlex.quote(str(mount.path))} {shlex.quote(str(source))}")
        sources.append((source, mount))
    command = ["nice", "-n", str(_NICE)]
    if as_root:
        command += ["setpriv", f"--reuid={UID}", f"--regid={UID}", "--clear-groups", "--"]
    command += [shutil.which("bwrap") or "bwrap", "--unshare-all", "--unshare-user", "--disable-userns"]
    command += ["--die-with-parent", "--new-session", "--cap-drop", "ALL", "--uid", str(UID), "--gid", str(UID)]
    command += ["--hostname", "sandbox"]
    if status_fd is not None:
        command += ["--json-status-fd", str(status_fd)]
    command += ["--ro-bind", "/usr", "/usr"]
    for name in _FROM_USR:
        if os.path.islink(f"/{name}"):
            command += ["--symlink", f"usr/{name}", f"/{name}"]
        elif os.path.isdir(f"/{name}"):
            command += ["--ro-bind", f"/{name}", f"/{name}"]
    for name in ("/etc/alternatives", "/etc/ld.so.cache", "/etc/ssl/certs"):
        command += ["--ro-bind-try", name, name]
    size = str(limits.disk_mb << 20)
    command += ["--proc", "/proc", "--dev", "/dev", "--size", size, "--tmpfs", "/dev/shm"]
    command += ["--size", size, "--tmpfs", "/tmp", "--ro-bind", str(folder / "job"), _SEEN]
    for source, mount in sources:
        command += ["--bind" if mount.writable else "--ro-bind", str(source), str(mount.path)]
    for mount in mounts:
        if mount.hidden:
            command += ["--size", "4096", "--tmpfs", str(mount.path), "--remount-ro", str(mount.path)]
    # What bwrap makes to put these into is in memory, too, and without a limit.
    command += ["--remount-ro", "/dev", "--remount-ro", "/", "--chdir", "/tmp", "--"]
    command += [*limits.prlimit(), *(part.replace("{job}", _SEEN) for part in program)]
    script = " && ".join([*before, f"exec {shlex.join(command)}"])
    shell = ["/bin/sh", "-c", _FIRST + script]
    return ["unshare", "--mount", "--propagation", "private", *shell] if before else shell


def _is_open(path: Path) -> bool:
    """Return whether every user may read this path."""
    wanted = stat.S_IROTH | (stat.S_IXOTH if path.is_dir() else 0)
    return path.stat().st_mode & wanted == wanted and all(
        parent.stat().st_mode & stat.S_IXOTH for parent in path.absolute().parents
    )
