"""Programs that tests drive and pip does not bring (`make system` installs them), and ports for them."""

import os
import random
import shutil
import socket
import subprocess
import time
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NoReturn

import pytest

_ports = random.Random()


def free_port() -> int:
    """A TCP port of this machine that nothing listens on, and that the kernel gives no connection meanwhile."""
    while True:
        port = _ports.randrange(10_000, 32_000)
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


@contextmanager
def serve(
    command: Sequence[str], port: int, log: Path, start_s: float, environment: Mapping[str, str] | None = None
) -> Iterator[str]:
    """Run a program that listens on ``port`` until the body ends; yields its URL when /health answers."""
    with log.open("w") as output:
        process = subprocess.Popen(command, env=environment, stdout=output, stderr=output)
    url, deadline = f"http://127.0.0.1:{port}", time.monotonic() + start_s
    try:
        while not _healthy(url):
            assert process.poll() is None, log.read_text()[-3000:]
            assert time.monotonic() < deadline, log.read_text()[-3000:]
            time.sleep(0.2)
        yield url
    finally:
        process.terminate()
        process.wait(60)


def _healthy(url: str) -> bool:
    try:
        with urllib.request.urlopen(url + "/health", timeout=5) as response:
            return bool(response.status == 200)
    except OSError:
        return False


def find_program(*names: str) -> str:
    """Path of the first of ``names`` that is installed; skips the test without it, or fails it in CI."""
    found = next(filter(None, map(shutil.which, names)), None)
    if found is None:
        skip_or_fail(f"not installed: {' or '.join(names)}; as root, make system")
    return found


def skip_or_fail(why: str) -> NoReturn:
    """Skip this test for what this machine lacks. CI installs it, and must not lose a test without a word."""
    if os.environ.get("CI"):
        pytest.fail(why)
    pytest.skip(why)


def sglang_command() -> list[str]:
    """What launches a real SGLang server on this CPU. Skips the test without its packages: not every index has them."""
    root = Path(__file__).resolve().parents[3]
    if not (root / ".sglang" / "sglang").is_dir():
        pytest.skip("SGLang's packages are not there: make sglang")
    return [str(root / "tests" / "support" / "sglang_cpu" / "serve.sh")]


def environment_python(name: str) -> Path:
    """The interpreter with a package of `make environments`. Skips the test without it: not every index has them."""
    folder = Path(__file__).resolve().parents[3] / ".environments" / name
    if not (folder / "installed").is_file():
        pytest.skip(f"{name} is not there: make environments")
    return folder / "bin" / "python"
