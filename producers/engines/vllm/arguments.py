"""The arguments of vLLM that a configuration may set, read without importing vLLM, which takes seconds."""

import ast
import difflib
import importlib.util
import math
from pathlib import Path
from typing import Any

from schemas.config.generator import PARALLEL_SIZES
from schemas.errors import ConfigError

OURS = {
    "model": "it is model.path",
    "dtype": "it is model.dtype",
    "max_model_len": "it is model.max_length",
    "max_num_seqs": "it is generator.max_samples",
    "trust_remote_code": "it is model.trust_remote_code",
    "logprobs_mode": "training needs the log-probabilities of the distribution that was sampled from",
    "override_generation_config": "set sampling instead",
    "weight_transfer_config": "weights come from the trainer",
}
"""Arguments that users can't set, for the engine in this process and for servers, each with the reason."""
_OURS = {
    **OURS,
    "enable_lora": "trainer.lora sets it",
    "mm_device_do_normalize": "images are cut into patches as in the trainer",
    "enable_return_routed_experts": "trainer.router_replay sets it",
    "max_loras": "one version is in use at a time",
    "max_lora_rank": "it follows from trainer.lora.rank",
}


def check_names_of_arguments(args: dict[str, Any]) -> None:
    """Raise ConfigError for an argument that the installed vLLM does not know, or that users can't set."""
    # If another release keeps them elsewhere, vLLM itself reports a wrong name at its start.
    if args and (names := read_names(vllm_file("engine", "arg_utils.py"))):
        checked_args(args, names)


def check_machine(arguments: dict[str, Any], on_cpu: bool, devices: int) -> None:
    """Raise ConfigError for arguments that this machine can't follow: too few devices, or a CPU that compiles."""
    sizes = {name: int(arguments.get(name) or 1) for name in PARALLEL_SIZES}
    asked = ", ".join(f"{name} {size}" for name, size in sizes.items() if size > 1)
    if asked and on_cpu:
        raise ConfigError(f"generator.args: {asked}: vLLM on a CPU runs in one process; start more generators instead")
    if on_cpu and arguments.get("enforce_eager") is False:
        raise ConfigError("generator.args: enforce_eager False: vLLM does not compile on a CPU here; leave it out")
    needed = math.prod(sizes.values())
    if asked and needed > devices and not arguments.get("distributed_executor_backend"):
        raise ConfigError(
            f"generator.args: {asked} need {needed} GPUs, this machine shows {devices}: lower them, or set"
            " distributed_executor_backend for several machines"
        )


def vllm_file(*path: str) -> Path | None:
    """Return the path of a file of the installed vLLM without importing it; None if vLLM is not installed."""
    spec = importlib.util.find_spec("vllm")
    folders = spec.submodule_search_locations if spec is not None else None
    return Path(folders[0], *path) if folders else None


def parse_source(file: Path | None) -> list[ast.stmt]:
    """Return the statements of a Python file; empty if it can't be read."""
    try:
        return ast.parse(file.read_text(encoding="utf-8")).body if file is not None else []
    except (OSError, SyntaxError):
        return []


def read_names(file: Path | None) -> list[str]:
    """Return the fields of AsyncEngineArgs from the source of its module; empty if it does not declare them."""
    classes = {node.name: node for node in parse_source(file) if isinstance(node, ast.ClassDef)}
    return [
        statement.target.id
        for name in ("EngineArgs", "AsyncEngineArgs")
        for statement in (classes[name].body if name in classes else [])
        if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name)
    ]


def checked_args(args: dict[str, Any], known: list[str]) -> dict[str, Any]:
    """Return the user's arguments; ConfigError names one that vLLM does not know or that users can't set."""
    for name in args:
        if name in _OURS:
            raise ConfigError(f"generator.args.{name} can't be set: {_OURS[name]}")
        if name not in known:
            close = difflib.get_close_matches(name, known, n=1)
            hint = f", did you mean {close[0]}?" if close else ""
            raise ConfigError(f"generator.args.{name} is not an argument of vLLM's AsyncEngineArgs{hint}")
    return args
