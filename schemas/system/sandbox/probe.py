"""Properties of this machine's sandboxes, found by a program that tries to break out."""

import json
import os
import secrets
import socket
import tempfile
from dataclasses import dataclass
from pathlib import Path

from schemas.errors import InfraError
from schemas.system.sandbox.jail import Sandbox
from schemas.system.sandbox.limits import Limits, find_interpreter

_LIMITS = Limits(wall_s=20.0, cpu_s=10.0, memory_mb=256, processes=8)
_PROGRAM = """
import json, os, signal, socket, sys, time
wanted = json.load(sys.stdin)

def got_through(attempt):
    try:
        return bool(attempt())
    except (OSError, MemoryError):
        return False

def read():
    return open(wanted["file"]).read()

def write():
    with open(wanted["file"], "a") as file:
        return file.write("x")

def connect():
    with socket.create_connection(("127.0.0.1", wanted["port"]), timeout=2):
        return True

def connect_unix():
    with socket.socket(socket.AF_UNIX) as there:
        there.connect(wanted["socket"])
        return True

def signal_service():
    os.kill(wanted["pid"], 0)
    return open("/proc/%d/cmdline" % wanted["pid"]).read() == wanted["name"]

def allocate():
    return bytearray(2 << 30)

def fork():
    children, failed = [], False
    while len(children) < 4 * wanted["processes"] and not failed:
        try:
            child = os.fork()
        except OSError:
            failed = True
        else:
            if child == 0:
                time.sleep(30)
                os._exit(0)
            children.append(child)
    for child in children:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    return len(children) > wanted["processes"]

tries = {
    "files": read,
    "writing": write,
    "network": connect,
    "unix sockets": connect_unix,
    "other processes": signal_service,
    "environment": lambda: wanted["marker"] in os.environ,
    "allocations": allocate,
    "fork loops": fork,
}
print(json.dumps({name: got_through(attempt) for name, attempt in tries.items()}))
"""


@dataclass(frozen=True)
class SandboxProbe:
    """Texts for what a sandbox prevents and allows."""

    blocked: list[str]
    allowed: list[str]


def probe(sandbox: Sandbox) -> SandboxProbe:
    """Have a program try a file, sockets, another process, a fork loop and an allocation. InfraError if it can't run.

    Nothing is harmed by what gets through.
    """
    python = find_interpreter()
    with (
        tempfile.TemporaryDirectory(prefix="tidemill-probe-") as folder,
        socket.create_server(("127.0.0.1", 0)) as server,
        socket.socket(socket.AF_UNIX) as local,
    ):
        secret = Path(folder) / "secret"
        secret.write_text("secret", encoding="utf-8")
        # The user that runs the program could read it if the sandbox allowed that.
        Path(folder).chmod(0o755)
        secret.chmod(0o666)
        # As the embedded broker's: in a temporary folder.
        local.bind(f"{folder}/broker.sock")
        local.listen()
        Path(folder, "broker.sock").chmod(0o666)
        wanted = {
            "file": str(secret),
            "port": server.getsockname()[1],
            "socket": f"{folder}/broker.sock",
            "pid": os.getpid(),
            "name": _command_line(),
            "marker": f"TIDEMILL_{secrets.token_hex(8)}",
            "processes": _LIMITS.processes,
        }
        os.environ[wanted["marker"]] = "seen"
        try:
            outcome = sandbox.run(
                [*python.command, "{job}/probe.py"],
                json.dumps(wanted).encode(),
                {"probe.py": _PROGRAM.encode()},
                _LIMITS,
                python.mounts,
            )
        finally:
            del os.environ[wanted["marker"]]
    try:
        through = json.loads(outcome.stdout)
    except ValueError:
        said = outcome.stderr.decode("utf-8", "replace").strip().splitlines()
        raise InfraError(f"the program that tries the sandbox failed: {said[-1] if said else outcome.end}") from None
    return SandboxProbe(
        [name for name, got in through.items() if not got], [name for name, got in through.items() if got]
    )


def _command_line() -> str:
    try:
        return Path(f"/proc/{os.getpid()}/cmdline").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
