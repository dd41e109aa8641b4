"""vLLM's own server on this machine, for one model."""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.support.runs.programs import free_port, serve

START_S = 600.0


@contextmanager
def serving(folder: Path, *options: str) -> Iterator[str]:
    """The address of `vllm serve` with this model and these options, without a path."""
    port = free_port()
    # What `vllm serve` starts; under its name the CPU's wheel is not found by the command itself.
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(folder), *options]
    command += ["--dtype", "float32", "--max-model-len", "1024", "--host", "127.0.0.1", "--port", str(port)]
    environment = {**os.environ, "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    with serve([*command, "--enforce-eager"], port, folder / "vllm.log", START_S, environment) as url:
        yield url
