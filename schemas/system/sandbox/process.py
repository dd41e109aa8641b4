"""A program that runs in a sandbox, however it was started: its streams and its end, with all that it started."""

import contextlib
import json
import os
import select
import selectors
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import IO, Literal, Protocol, Self

from schemas.errors import InfraError
from schemas.system import guard
from schemas.system.guarded_process import CLOSE_TIMEOUT_S, GuardedProcess
from schemas.system.sandbox.limits import Limits, Outcome

_STATUS_BYTES = 1 << 16
_END_S = 2.0
"""How long bwrap may take to end after its child."""
_LONGEST = 5
"""So many times its wall time a program gets at most where it waits for a processor."""
_MOST_LOOKS = 100
"""So often processes are looked for that are to stop."""


class Program(Protocol):
    """A program in a sandbox. Its methods are for one thread."""

    @property
    def pid(self) -> int:
        """Process whose end is the program's."""

    def end(self) -> int | None:
        """Kill the program, unless it has ended, with all that it started, and wait for it.

        Returns its exit code, 128 and more for a signal; None if it never began.
        """


class BwrapProgram:
    """A program under bubblewrap: at the end of its first process the kernel kills all others."""

    def __init__(
        self, command: Callable[[int], Sequence[str]], env: dict[str, str], streams: tuple[int, int, int]
    ) -> None:
        """Start it; OSError if the system can't. command: gets the descriptor to which bwrap says how far it came.

        env: of the program, and of bwrap, whose own it could read in /proc.
        """
        self._status, status_end = os.pipe()
        try:
            stdin, stdout, stderr = streams
            self._process = subprocess.Popen(
                list(command(status_end)),
                stdin=stdin,
                stdout=stdout,
                stderr=stderr,
                env=env,
                cwd="/",
                pass_fds=(status_end,),
            )
        except BaseException:
            os.close(self._status)
            raise
        finally:
            os.close(status_end)
        self.pid = self._process.pid

    def end(self) -> int | None:
        killed = self._process.poll() is None
        if killed:
            self._kill()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(CLOSE_TIMEOUT_S)
        with open(self._status, "rb") as status:
            said = status.read(_STATUS_BYTES)
        code = None
        with contextlib.suppress(ValueError):
            for line in said.splitlines():
                code = json.loads(line).get("exit-code", code)
        # bwrap says the code of a program that ended by itself.
        return 128 + signal.SIGKILL if code is None and killed and said else code

    def _kill(self) -> None:
        """Kill the first process of the namespace, which is gone when all others in there are; bwrap ends after it.

        While it makes the namespace that process doesn't die with it yet. A stopped bwrap starts none behind our back.
        """
        self._process.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, self.pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT)
        for pid in guard.descendants(self.pid, guard.parents())[:1]:
            with contextlib.suppress(OSError):
                pidfd = os.pidfd_open(pid)
                signal.pidfd_send_signal(pidfd, signal.SIGKILL)
                poll = select.poll()
                poll.register(pidfd, select.POLLIN)
                poll.poll(CLOSE_TIMEOUT_S * 1000)
                os.close(pidfd)
                # It collects its child itself, so that not even a zombie is left to others.
                self._process.send_signal(signal.SIGCONT)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    self._process.wait(_END_S)
        self._process.kill()


class GuardedProgram:
    """A program behind a guardian, for ways of sandboxing that leave it to us to kill what it started."""

    def __init__(
        self, command: Sequence[str], env: dict[str, str], folder: Path, streams: tuple[int, int, int]
    ) -> None:
        """Start it; OSError if the system can't."""
        stdin, stdout, stderr = streams
        self._process = GuardedProcess(
            command, "sandbox", env, stdin=stdin, stdout=stdout, stderr=stderr, folder=folder
        )
        self.pid = self._process.pid

    def end(self) -> int | None:
        self._process.kill()
        code = self._process.exit_code
        return 128 - code if code is not None and code < 0 else code


class Running:
    """A program with pipes to it. ``with`` ends it. folder: of its files, which is removed then."""

    def __init__(self, program: Program, folder: Path, stdin: IO[bytes], stdout: IO[bytes], stderr: IO[bytes]) -> None:
        self.stdin, self.stdout, self.stderr = stdin, stdout, stderr
        self._program = program
        self._folder = folder
        self._ended = False
        self.code: int | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the program and all that it started; a second call does nothing."""
        if self._ended:
            return
        self._ended = True
        try:
            self.code = self._program.end()
        finally:
            for stream in (self.stdin, self.stdout, self.stderr):
                with contextlib.suppress(OSError):
                    stream.close()
            shutil.rmtree(self._folder, ignore_errors=True)

    def pause(self) -> None:
        """Stop the program and all that it started, until ``resume``; end it if it starts more than can be stopped."""
        stopped: set[int] = set()
        for _ in range(_MOST_LOOKS):
            found = set(guard.descendants(self._program.pid, guard.parents())) - stopped
            if not found:
                return
            # What one of them started before it was stopped is found by the next look.
            _signal(found, signal.SIGSTOP)
            stopped |= found
        self.close()

    def resume(self) -> None:
        """Let the program and all that it started run again."""
        _signal(guard.descendants(self._program.pid, guard.parents()), signal.SIGCONT)

    def finish(self, stdin: bytes, limits: Limits) -> Outcome:
        """Give it its input, wait for its end within the limits. InfraError if it was not started, or not let run."""
        began = time.monotonic()
        kept = {self.stdout: bytearray(), self.stderr: bytearray()}
        end = self._talk(stdin, kept, limits)
        starved = end == "time" and time.monotonic() > began + _LONGEST * limits.wall_s
        self.close()
        seconds = time.monotonic() - began
        stdout, stderr = bytes(kept[self.stdout]), bytes(kept[self.stderr])
        if self.code is None:
            said = stderr.decode("utf-8", "replace").strip().splitlines()
            raise InfraError(f"the sandbox could not be started: {said[-1] if said else 'it said nothing'}")
        if starved:
            raise InfraError(f"the machine is too busy: in {seconds:.0f} s a program hardly came to run")
        if self.code == 128 + signal.SIGXCPU:
            end = "time"
        return Outcome(end, self.code, stdout, stderr, seconds)

    def _talk(
        self, stdin: bytes, kept: dict[IO[bytes], bytearray], limits: Limits
    ) -> Literal["exit", "time", "output"]:
        given, most, began = memoryview(stdin), limits.output_bytes, time.monotonic()
        until, last = began + limits.wall_s, began + _LONGEST * limits.wall_s
        pidfd = os.pidfd_open(self._program.pid)
        with selectors.DefaultSelector() as selector:
            try:
                selector.register(pidfd, selectors.EVENT_READ)
                for stream in kept:
                    os.set_blocking(stream.fileno(), False)
                    selector.register(stream, selectors.EVENT_READ)
                os.set_blocking(self.stdin.fileno(), False)
                selector.register(self.stdin, selectors.EVENT_WRITE)
                while True:
                    left = until - time.monotonic()
                    if left <= 0:
                        # What it waited for a processor is not its time.
                        further = began + limits.wall_s + self._waited_s()
                        if further < until + limits.wall_s / 20 or until >= last:
                            return "time"
                        until = min(further, last)
                        continue
                    ready = [key.fileobj for key, _ in selector.select(left)]
                    if self.stdin in ready:
                        given = self._write(given, selector)
                    for stream in [one for one in kept if one in ready]:
                        data = _read(stream)
                        kept[stream] += (data or b"")[: most - len(kept[stream])]
                        if data == b"":
                            selector.unregister(stream)
                        elif data and len(kept[stream]) >= most:
                            return "output"
                    if pidfd in ready and not any(stream in ready for stream in kept):
                        return "exit"
            finally:
                os.close(pidfd)

    def _write(self, given: memoryview, selector: selectors.BaseSelector) -> memoryview:
        try:
            given = given[os.write(self.stdin.fileno(), given[: 1 << 16]) :] if given else given
        except BlockingIOError:
            return given
        except OSError:
            given = given[:0]
        if not given:
            selector.unregister(self.stdin)
            self.stdin.close()
        return given

    def _waited_s(self) -> float:
        """Return how long the program was ready to run without a processor, one process after the other.

        bwrap, the first process in there, and whichever of the others waited longest.
        """
        chain = [self._program.pid, *guard.descendants(self._program.pid, guard.parents())]
        waits = []
        for pid in chain:
            with contextlib.suppress(OSError, ValueError, IndexError):
                waits.append(int(Path(f"/proc/{pid}/schedstat").read_text().split()[1]) / 1e9)
        return sum(waits[:2]) + max(waits[2:], default=0.0)


def _signal(pids: Iterable[int], number: int) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


def _read(stream: IO[bytes]) -> bytes | None:
    """Read what is available; b"" at the end, None if there is nothing yet."""
    try:
        return os.read(stream.fileno(), 1 << 16)
    except BlockingIOError:
        return None
