"""Preparations before vLLM, PyTorch and transformers are imported: variables, and a stand-in for torchvision."""

import importlib.util
import os
import sys
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from schemas.errors import ConfigError
from schemas.system.gpu_memory import ask_driver

INVARIANT_FROM = "8.0"
"""Lowest compute capability of GPUs on which vLLM 0.32 has its batch-invariant mode."""


def vllm_variables(on_cpu: bool) -> dict[str, str]:
    """Return the environment variables that vLLM and PyTorch should see when they are imported."""
    variables = {"VLLM_LOGGING_LEVEL": "ERROR", "VLLM_LOGGING_STREAM": "ext://sys.stderr", "VLLM_NO_USAGE_STATS": "1"}
    if not on_cpu:
        return variables
    return variables | {
        "TORCHDYNAMO_DISABLE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "OMP_NUM_THREADS": str(max(1, len(os.sched_getaffinity(0)) // 2)),
        "OMP_WAIT_POLICY": "PASSIVE",
        # vLLM's warnings at every start on a CPU (no Triton, no tcmalloc, NUMA) help no user.
        "TORCH_CPP_LOG_LEVEL": "ERROR",
        "PYTHONWARNINGS": "ignore::FutureWarning",
    }


def set_environment(on_cpu: bool) -> None:
    """Set these variables for this process and its children, unless they are set."""
    for name, value in vllm_variables(on_cpu).items():
        os.environ.setdefault(name, value)


def stand_in_for_torchvision() -> None:
    """Let vLLM and its processes import a stand-in for a missing torchvision; call it before importing transformers."""
    if importlib.util.find_spec("torchvision") is None:
        folder = str(Path(__file__).parent / "without_torchvision")
        sys.path.append(folder)
        before = os.environ.get("PYTHONPATH")
        os.environ["PYTHONPATH"] = f"{before}{os.pathsep}{folder}" if before else folder


def is_cpu_build() -> bool:
    """Tell whether vLLM is the build for CPUs, by its package's name or version, as vLLM itself does."""
    with suppress(PackageNotFoundError):
        return "cpu" in version("vllm")
    with suppress(PackageNotFoundError):
        return bool(version("vllm-cpu"))
    return False


def check_batch_invariance() -> str:
    """Return the lowest compute capability here; ConfigError if vLLM has no batch-invariant mode for it."""
    lowest = ""
    if not is_cpu_build():
        found = [version for (version,) in ask_driver("gpu=compute_cap") if version[:1].isdigit()]
        lowest = min(found, key=_number, default="")
    if not lowest or _number(lowest) < _number(INVARIANT_FROM):
        raise ConfigError(
            f"generator.exact: vLLM's batch-invariant mode needs NVIDIA GPUs of compute capability {INVARIANT_FROM} or"
            f" higher, and here is {lowest or 'none'}: set generator.engine to transformers"
        )
    return lowest


def _number(capability: str) -> tuple[int, ...]:
    return tuple(map(int, capability.split(".")))
