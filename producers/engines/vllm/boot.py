"""The start of vLLM: our defaults, the settings that users may override, and the needs of a CPU."""

from __future__ import annotations

import os
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from producers.engines.base import EngineSettings
from producers.engines.vllm.arguments import check_machine, checked_args
from producers.engines.vllm.before_import import set_environment
from producers.engines.vllm.images import image_arguments
from producers.engines.vllm.lora import lora_arguments
from producers.engines.vllm.plugin import BACKEND, OWNER_VARIABLE
from schemas.errors import ConfigError, InfraError

if TYPE_CHECKING:
    from vllm.v1.engine.async_llm import AsyncLLM

_GIB = 2**30


def boot(folder: Path, settings: EngineSettings) -> AsyncLLM:
    """Load the model and start vLLM's engine core process; blocks until it can generate.

    Sets environment variables of vLLM, unless they are set. ConfigError if an argument is wrong, else InfraError.
    """
    set_environment(on_cpu=False)
    os.environ[OWNER_VARIABLE] = str(os.getpid())
    try:
        import vllm
    except ImportError as error:
        raise ConfigError(
            f"generator.engine vllm: {error}: install vLLM, or set generator.engine to transformers"
        ) from error
    from vllm.platforms import current_platform
    from vllm.v1.engine.async_llm import AsyncLLM

    arguments = engine_arguments(folder, settings, current_platform.is_cpu(), current_platform.device_count())
    try:
        return AsyncLLM.from_engine_args(vllm.AsyncEngineArgs(**arguments))
    except (ValueError, TypeError) as error:  # pydantic's errors are ValueErrors
        raise ConfigError(f"vllm rejects the model or generator.args: {_line(error)}") from error
    except RuntimeError as error:
        raise InfraError(f"vllm did not start: {_line(error)} (set VLLM_LOGGING_LEVEL=INFO to see why)") from error


def engine_arguments(folder: Path, settings: EngineSettings, on_cpu: bool, devices: int) -> dict[str, Any]:
    """Return arguments of vLLM's AsyncEngineArgs: our defaults, overridden by the user's, then our fixed ones."""
    from vllm import AsyncEngineArgs
    from vllm.config import WeightTransferConfig

    arguments = {
        "dtype": settings.dtype,
        "max_model_len": settings.max_length,
        "max_num_seqs": settings.max_samples,
        "seed": settings.seed,
        "trust_remote_code": settings.trust_remote_code,
        "logprobs_mode": "processed_logprobs",
        "disable_log_stats": True,
        "use_tqdm_on_load": False,
        **({"enable_sleep_mode": True} if settings.sleeps and not on_cpu else {}),
        **(_cpu_defaults(folder, settings) if on_cpu else {}),
        **lora_arguments(settings.lora),
        **image_arguments(settings.images, on_cpu),
        **routed_experts_arguments(settings, on_cpu),
        **checked_args(settings.args, [field.name for field in fields(AsyncEngineArgs)]),
    }
    check_machine(arguments, on_cpu, devices)
    return {**arguments, "model": str(folder), "weight_transfer_config": WeightTransferConfig(backend=BACKEND)}


def routed_experts_arguments(settings: EngineSettings, on_cpu: bool) -> dict[str, Any]:
    """Return arguments with which vLLM reports experts; ConfigError on a CPU, where it does not support that."""
    if not settings.routed_experts:
        return {}
    if on_cpu:
        raise ConfigError(
            "trainer.router_replay: vLLM reports the experts of tokens on GPUs only (its second model runner needs"
            " Triton); set generator.engine to transformers, or leave it out"
        )
    os.environ.setdefault("VLLM_USE_V2_MODEL_RUNNER", "1")
    return {"enable_return_routed_experts": True}


def _cpu_defaults(folder: Path, settings: EngineSettings) -> dict[str, Any]:
    """Return defaults for a CPU: eager, the model in the engine core's process, no more KV cache than needed.

    vLLM would give the worker its own process and bind its threads to cores. One process less starts 5 to 10 s sooner,
    and threads that are not bound can share cores with a trainer. The default is one thread if there are few cores:
    OpenMP threads that spin for a core that another process uses are 20 times slower than a single thread.
    """
    from vllm.v1.executor.uniproc_executor import UniProcExecutor

    set_environment(on_cpu=True)
    return {
        "enforce_eager": True,
        "distributed_executor_backend": UniProcExecutor,
        "kv_cache_memory_bytes": kv_cache_bytes(folder, settings),
    }


def kv_cache_bytes(folder: Path, settings: EngineSettings) -> int:
    """Return the bytes of keys and values of ``max_samples`` full sequences, at most 1 GiB.

    vLLM clears the whole cache at start, which takes 3 s per GiB. ``VLLM_CPU_KVCACHE_SPACE`` (GiB) or
    ``generator.args.kv_cache_memory_bytes`` overrides it.
    """
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(folder, trust_remote_code=settings.trust_remote_code).get_text_config()
    heads = getattr(config, "num_key_value_heads", None) or getattr(config, "num_attention_heads", None)
    layers, hidden = getattr(config, "num_hidden_layers", None), getattr(config, "hidden_size", None)
    if not (heads and layers and hidden):
        return _GIB
    head = getattr(config, "head_dim", None) or hidden // config.num_attention_heads
    token = 2 * layers * heads * head * (4 if settings.dtype == "float32" else 2)
    blocks = settings.max_samples * (settings.max_length // 128 + 1) + 8
    return int(min(_GIB, max(blocks * 128 * token, 16 * 2**20)))


def _line(error: Exception) -> str:
    lines = [line.strip() for line in str(error).strip().splitlines() if line.strip()]
    return " ".join(lines[:3])[:400] if lines else type(error).__name__
