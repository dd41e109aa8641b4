"""Ways to run a program in a sandbox, the choice among them by what works on this machine, and a program's start."""

import os
import shutil
import subprocess
import tempfile
import threading
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from pathlib import Path

from schemas.errors import ConfigError, InfraError
from schemas.system.sandbox import bubblewrap, others
from schemas.system.sandbox.limits import Limits, Mount, Outcome, find_interpreter
from schemas.system.sandbox.process import BwrapProgram, GuardedProgram, Program, Running

SANDBOXES = ("auto", "bwrap", "sandlock", "gvisor", "none")
_TRIAL = Limits(wall_s=20.0, cpu_s=10.0)
_FIX = (
    "install bubblewrap (apt-get install bubblewrap) and let users make namespaces (sysctl -w"
    " user.max_user_namespaces=10000, and kernel.apparmor_restrict_unprivileged_userns=0 on Ubuntu; in a container its"
    " seccomp profile forbids them), or pip install sandlock on Linux 6.7 or newer; sandbox: none, written out, runs"
    " programs in no sandbox"
)


class Sandbox:
    """A way to run programs, which see /usr and their own files, no network, and no other process::

        sandbox = choose("auto")
        outcome = sandbox.run(["/usr/bin/cat", "{job}/word"], files={"word": b"hello"})
        outcome.stdout

    name: one of bwrap, sandlock, gvisor, none.
    """

    def __init__(self, name: str) -> None:
        self.name = name

    def run(
        self,
        program: Sequence[str],
        stdin: bytes = b"",
        files: Mapping[str, bytes] = {},
        limits: Limits = Limits(),  # noqa: B008 - it can't be changed
        mounts: Sequence[Mount] = (),
    ) -> Outcome:
        """Run a program to its end. files: by their names in the folder that ``{job}`` in an argument stands for.

        It can read these and not write them.
        InfraError if it could not be started, or hardly came to run: that says nothing of the program.
        """
        if self.name == "gvisor":
            limits = replace(limits, wall_s=limits.wall_s + 2)
        with self.start(program, files, limits, mounts) as running:
            return running.finish(stdin, limits)

    def start(
        self,
        program: Sequence[str],
        files: Mapping[str, bytes] = {},
        limits: Limits = Limits(),  # noqa: B008 - it can't be changed
        mounts: Sequence[Mount] = (),
        env: Mapping[str, str] = {},
    ) -> Running:
        """Start a program with pipes to it; the caller enforces ``wall_s``. InfraError if it can't start.

        It is killed when the thread ends that started it.
        """
        folder = Path(tempfile.mkdtemp(prefix="tidemill-sandbox-"))
        pipes: list[int] = []
        try:
            self._write(folder, files)
            for _ in range(3):
                pipes += os.pipe()
            started = self._start(program, limits, folder, mounts, dict(env), (pipes[0], pipes[3], pipes[5]))
        except OSError as error:
            for end in pipes:
                os.close(end)
            shutil.rmtree(folder, ignore_errors=True)
            raise InfraError(f"the sandbox could not be started: {error}") from error
        for end in (pipes[0], pipes[3], pipes[5]):
            os.close(end)
        stdin = os.fdopen(pipes[1], "wb", buffering=0)
        stdout, stderr = (os.fdopen(end, "rb", buffering=0) for end in (pipes[2], pipes[4]))
        return Running(started, folder, stdin, stdout, stderr)

    def _write(self, folder: Path, files: Mapping[str, bytes]) -> None:
        for name in ("job", "tmp"):
            (folder / name).mkdir()
        for name, data in files.items():
            (folder / "job" / name).write_bytes(data)
        if os.geteuid() == 0:
            # Whom the program runs as is an ordinary user then.
            for path in (folder, folder / "job", *(folder / "job" / name for name in files)):
                path.chmod(0o755)

    def _start(
        self,
        program: Sequence[str],
        limits: Limits,
        folder: Path,
        mounts: Sequence[Mount],
        env: dict[str, str],
        streams: tuple[int, int, int],
    ) -> Program:
        if self.name == "bwrap":
            shown = {"PATH": "/usr/local/bin:/usr/bin:/bin", "HOME": "/tmp", "LANG": "C.UTF-8", **env}
            return BwrapProgram(
                lambda fd: bubblewrap.bwrap_command(program, limits, folder, mounts, fd), shown, streams
            )
        shown = others.plain_env(folder, {} if self.name == "gvisor" else env)
        if self.name == "sandlock":
            command = others.sandlock_command(program, limits, folder, mounts, env)
        elif self.name == "gvisor":
            command = others.gvisor_command(program, limits, folder, mounts, env)
        else:
            command = others.plain_command(program, limits, folder)
        return GuardedProgram(command, shown, folder / "tmp", streams)


def choose(name: str = "auto") -> Sandbox:
    """Choose the sandbox of this name, or the first that works. ConfigError says what to do if there is none.

    It is tried once a process, which takes up to a second.
    """
    if name not in SANDBOXES:
        raise ConfigError(f"sandbox {name!r} must be one of {', '.join(SANDBOXES)}")
    with _trying:
        reasons = []
        for one in ("bwrap", "sandlock") if name == "auto" else (name,):
            reason = why_not(one)
            if reason is None:
                return Sandbox(one)
            reasons.append(f"{one}: {reason}")
    raise ConfigError(f"sandbox {name} does not work here ({'; '.join(reasons)}): {_FIX}")


_trying = threading.Lock()


@lru_cache(maxsize=8)
def why_not(name: str) -> str | None:
    """Why this sandbox can't run a Python program here; None if it can."""
    if (name == "bwrap" and not shutil.which("bwrap")) or (name == "sandlock" and not others.has_sandlock()):
        return "not installed"
    if name == "gvisor" and not shutil.which("runsc"):
        return "no program runsc"
    python = find_interpreter()
    try:
        outcome = Sandbox(name).run([*python.command, "-c", "print(7)"], limits=_TRIAL, mounts=python.mounts)
    except (InfraError, subprocess.SubprocessError) as error:
        return str(error).removeprefix("the sandbox could not be started: ")
    if outcome.stdout == b"7\n":
        return None
    said = outcome.stderr.decode("utf-8", "replace").strip().splitlines()
    return said[-1][:300] if said else f"a program in it ended with exit code {outcome.code}"
