"""Main memory that each rank of a trainer takes while it loads its model and shards it, on a CPU over gloo::

    python -m benchmarks.memory.load_memory --ranks 4
    python -m benchmarks.memory.load_memory --ranks 4 --tensor 2

The model has random weights, stored in bfloat16 as models are released, and is trained in float32. Each rank reports
the most memory of its own that it had, less what the process had before, and what it has left of that. Files that are
mapped into memory do not count: the system shares them, and drops them when it needs room.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from typing import Any

import torch
from torch import nn

from consumers.trainer.distributed.ranks import Ranks
from consumers.trainer.model.lora import make_policy
from consumers.trainer.step.build import build_critic
from deploy.offline.tiny_model import random_model
from deploy.services.allocator import keep_freed_memory
from schemas.config import TidemillConfig

INTERVAL_S = 0.002


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--tensor", type=int, default=1)
    parser.add_argument("--critic", action="store_true")
    parser.add_argument("--layers", type=int, default=14)
    parser.add_argument("--hidden", type=int, default=768)
    parser.add_argument("--folder", type=Path, help="of a model that is there already")
    given = parser.parse_args()
    if "RANK" in os.environ:
        measure(given.folder, given.tensor, given.critic)
        return
    with tempfile.TemporaryDirectory() as folder:
        write_model(Path(folder), given.layers, given.hidden)
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(given.ranks)]
        options = ["--tensor", str(given.tensor), "--folder", folder, *(["--critic"] if given.critic else [])]
        subprocess.run([*command, "-m", "benchmarks.memory.load_memory", *options], check=True, timeout=600)


def write_model(folder: Path, layers: int, hidden: int) -> None:
    """Write a random Qwen2 in bfloat16."""
    shape = {"hidden": hidden, "intermediate": 4 * hidden, "layers": layers, "heads": hidden // 64}
    model: Any = random_model(32_000, 0, max_length=1024, num_key_value_heads=2, tie_word_embeddings=True, **shape)
    model.to(torch.bfloat16).save_pretrained(folder)


def measure(folder: Path, tensor: int, critic: bool) -> None:
    """Load and shard the policy, and a critic if wanted, on this rank; prints a line."""
    torch.set_num_threads(1)
    trainer: dict[str, object] = {"processes": int(os.environ["WORLD_SIZE"]), "parallel": {"tensor": tensor}}
    if critic:
        trainer |= {"critic": {}, "advantage": {"name": "gae"}}
    config = TidemillConfig.model_validate(
        {
            "run": {"name": "load"},
            "model": {"path": str(folder)},
            "train": {"name": "jsonl", "args": {"path": "unused"}},
            "reward": {"terms": [{"name": "exact"}]},
            "sampling": {"n": 4},
            "trainer": trainer,
        }
    )
    keep_freed_memory()  # as every service does
    ranks = Ranks(60.0, config.trainer.parallel)
    before = own_memory()
    peak = Peak()
    models: list[nn.Module] = [
        ranks.prepare(make_policy(config, empty=not ranks.is_main, stored=ranks.world > 1), kept=torch.float32)
    ]
    if (valued := build_critic(config, empty=not ranks.is_main)) is not None:
        models.append(ranks.prepare(valued))
    highest = peak.stop()
    gc.collect()
    whole = sum(p.numel() for model in models for p in model.parameters())
    found = {
        "rank": ranks.rank,
        "parameters": whole,
        "whole_gb": round(4 * whole / 1e9, 3),
        "peak_gb": round((highest - before) / 1e9, 3),
        "left_gb": round((own_memory() - before) / 1e9, 3),
    }
    lines = json.dumps(found)
    for rank in range(ranks.world):
        if rank == ranks.rank:
            print(lines, flush=True)
        ranks.sum_over_ranks([0.0])


class Peak:
    """Looks at this process's memory all the time, in a thread, until it is stopped."""

    def __init__(self) -> None:
        self._highest = own_memory()
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)
        self._thread.start()

    def stop(self) -> int:
        self._stopped.set()
        self._thread.join(10)
        return self._highest

    def _look(self) -> None:
        while not self._stopped.wait(INTERVAL_S):
            self._highest = max(self._highest, own_memory())


def own_memory() -> int:
    """Bytes of this process that are in no file."""
    return 1024 * int(Path("/proc/self/status").read_text().partition("RssAnon:")[2].split()[0])


if __name__ == "__main__":
    main()
