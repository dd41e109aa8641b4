"""vLLM's own server on this machine, for one model."""

import os
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

START_S = 600.0


@contextmanager
def serving(folder: Path, *options: str) -> Iterator[str]:
    """The address of `vllm serve` with this model and these options, without a path."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    # What `vllm serve` starts; under its name the CPU's wheel is not found by the command itself.
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(folder), *options]
    command += ["--dtype", "float32", "--max-model-len", "1024", "--host", "127.0.0.1", "--port", str(port)]
    environment = {**os.environ, "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    with (folder / "vllm.log").open("w") as log:
        process = subprocess.Popen([*command, "--enforce-eager"], env=environment, stdout=log, stderr=log)
    url = f"http://127.0.0.1:{port}"
    deadline = time.monotonic() + START_S
    try:
        while not _healthy(url):
            assert process.poll() is None, (folder / "vllm.log").read_text()[-3000:]
            assert time.monotonic() < deadline, (folder / "vllm.log").read_text()[-3000:]
            time.sleep(0.5)
        yield url
    finally:
        process.terminate()
        process.wait(60)


def _healthy(url: str) -> bool:
    try:
        with urllib.request.urlopen(url + "/health", timeout=5) as response:
            return bool(response.status == 200)
    except (urllib.error.URLError, OSError):
        return False
