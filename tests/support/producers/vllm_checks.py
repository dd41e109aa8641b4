"""What the answers of engines are held against, and what vLLM's processes are."""

from collections.abc import Callable, Coroutine, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

EVERY = 20
"""Tokens between two reports of a growing sample."""

Run = Callable[[Coroutine[Any, Any, Any]], Any]


def reference_logprobs(folder: Path, tokens: Sequence[int], temperature: float = 1.0) -> np.ndarray:
    """Log-probability of each token after the first, float32 [T-1]."""
    import torch

    model = _load_model(folder, (folder / "model.safetensors").stat().st_mtime_ns)
    with torch.no_grad():
        logprobs = torch.log_softmax(model(torch.tensor([list(tokens)])).logits[0] / temperature, dim=-1)
    return logprobs[:-1].gather(1, torch.tensor(list(tokens))[1:, None])[:, 0].numpy()


@lru_cache(maxsize=4)
def _load_model(folder: Path, written_ns: int) -> Any:
    """The model whose weights were written then: a test asks the same one dozens of times."""
    import torch
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


def find_engine_cores(owner: int) -> list[int]:
    """Process ids of ``owner``'s children that vLLM named so."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        fields = _stat(int(folder.name))
        if fields and fields[1] == str(owner) and "EngineCore" in (folder / "cmdline").read_text():
            found.append(int(folder.name))
    return found


def is_alive(pid: int) -> bool:
    fields = _stat(pid)
    return bool(fields) and fields[0] != "Z"


def _stat(pid: int) -> list[str]:
    """State and parent of a process, and what follows; empty when it is gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []
