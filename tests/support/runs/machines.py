"""Machines that tests make of this one: a network, process ids, a name and Ray's files of their own, and a cable."""

import os
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import psutil

from tests.support.runs.programs import find_program, skip_or_fail

BEGIN = r"""
hostname "$1"; ip link set lo up; mkdir -p /tmp/ray; mount --bind "$2" /tmp/ray
sleep infinity & wait $!
"""
"""The first process of a machine, which reaps all others: bash, until it is killed, and all of them with it."""
BOOT_S = 20.0


class Machine:
    """One end of the cable. It shares this machine's files, as a cluster shares a file system."""

    def __init__(self, name: str, address: str, folder: Path) -> None:
        """name: of its network namespace and its host. folder: for what its programs print."""
        self.name, self.address, self._folder = name, address, folder
        self._started: list[subprocess.Popen[bytes]] = []
        self._switch_on()

    def start(self, argv: Sequence[str], output: str, environment: Mapping[str, str] | None = None) -> Path:
        """Start a program there; returns the file that gets its output."""
        file = self._folder / f"{self.name}-{output}.txt"
        with file.open("ab") as stream:
            command = [*self._enter, *argv]
            shown = {**os.environ, **(environment or {})}
            process = subprocess.Popen(command, env=shown, stdin=subprocess.DEVNULL, stdout=stream, stderr=stream)
        self._started.append(process)
        return file

    def run(self, argv: Sequence[str], environment: Mapping[str, str] | None = None) -> str:
        """What a program prints there; fails if it does."""
        shown = {**os.environ, **(environment or {})}
        done = subprocess.run([*self._enter, *argv], env=shown, capture_output=True, text=True, timeout=60, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    @property
    def newest(self) -> subprocess.Popen[bytes]:
        """The program that was started last."""
        return self._started[-1]

    def count(self, *words: str) -> int:
        """Processes there whose command line has all of these words."""
        found = 0
        for process in psutil.process_iter():
            try:
                there = os.readlink(f"/proc/{process.pid}/ns/pid") == self._processes
                found += there and set(words) <= set(process.cmdline())
            except (psutil.Error, OSError):
                continue
        return found

    def cut_off(self) -> None:
        """Pull its cable: nobody is told, and everything there goes on."""
        subprocess.run(["ip", "-n", self.name, "link", "set", "cable", "down"], check=True)

    def connect(self) -> None:
        """Plug its cable in."""
        subprocess.run(["ip", "-n", self.name, "link", "set", "cable", "up"], check=True)

    def switch_off(self) -> None:
        """Take its power: not even its connections are closed."""
        self.cut_off()
        self.end()

    def switch_on(self) -> None:
        """Start it again, with an empty memory."""
        self._switch_on()
        self.connect()

    def end(self) -> None:
        """Kill everything there."""
        if psutil.pid_exists(self._first):
            os.kill(self._first, 9)
        for process in [*self._started, self._holder]:
            process.wait(BOOT_S)
        self._started.clear()

    def _switch_on(self) -> None:
        temporary = tempfile.mkdtemp(dir=self._folder)
        within = ["unshare", "--mount", "--uts", "--pid", "--fork", "--mount-proc", "--kill-child"]
        self._holder = subprocess.Popen(
            ["ip", "netns", "exec", self.name, *within, "bash", "-ec", BEGIN, "machine", self.name, temporary],
            stdin=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        deadline = time.monotonic() + BOOT_S
        while not (found := [each for each in psutil.Process(self._holder.pid).children() if each.children()]):
            assert self._holder.poll() is None, f"{self.name} has ended"
            assert time.monotonic() < deadline, f"{self.name} does not start within {BOOT_S:.0f} s"
            time.sleep(0.02)
        self._first = found[0].pid
        self._processes = os.readlink(f"/proc/{self._first}/ns/pid")
        self._enter = ["nsenter", f"--target={self._first}", "--net", "--mount", "--uts", "--pid"]


@contextmanager
def two_machines(folder: Path) -> Iterator[tuple[Machine, Machine]]:
    """Two of them, with a cable between; skips the test where they can't be."""
    for program in ("ip", "unshare", "nsenter"):
        find_program(program)
    if os.geteuid() != 0:
        skip_or_fail("network namespaces with names need root")
    names = [f"tm{os.getpid()}{letter}" for letter in "ab"]
    with ExitStack() as stack:
        for name in names:
            made = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True, check=False)
            if made.returncode:
                skip_or_fail(f"no network namespaces here: {made.stderr.strip()}")
            stack.callback(subprocess.run, ["ip", "netns", "del", name], check=False)
        ends = [["cable", "netns", name] for name in names]
        subprocess.run(["ip", "link", "add", *ends[0], "type", "veth", "peer", "name", *ends[1]], check=True)
        machines = []
        for number, name in enumerate(names, start=1):
            address = f"10.9.8.{number}"
            subprocess.run(["ip", "-n", name, "addr", "add", f"{address}/24", "dev", "cable"], check=True)
            machine = Machine(name, address, folder)
            stack.callback(machine.end)
            machine.connect()
            machines.append(machine)
        yield machines[0], machines[1]
