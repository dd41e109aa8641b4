"""Main memory that each rank of a trainer takes while it publishes, exports and saves a model, on a CPU over gloo::

    python -m benchmarks.memory.publish_memory --ranks 2 --layers 14 --hidden 512
    python -m benchmarks.memory.publish_memory --ranks 2 --layers 24 --hidden 1280
    python -m benchmarks.memory.publish_memory --ranks 2 --layers 14 --hidden 512 --apart

The model has random weights. Each rank reports the peak of its resident memory, less what it had before, beside the
largest tensor in the type of the file. ``--apart``: only rank 0 sees the folder of versions, and gathers each tensor.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch

from benchmarks.memory.load_memory import write_model
from consumers.trainer.checkpoint.store import CheckpointStore
from consumers.trainer.distributed.ranks import Ranks
from consumers.trainer.model.hf_weights import save_model
from consumers.trainer.model.probe import reference_logprobs
from consumers.trainer.model.snapshot import Snapshots
from consumers.trainer.step.build import build_train_step
from schemas.config import TidemillConfig

WIRE_BYTES = 2


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--layers", type=int, default=14)
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--folder", type=Path, help="of a model that is there already")
    parser.add_argument("--apart", action="store_true", help="only rank 0 sees the folder of versions")
    given = parser.parse_args()
    if "RANK" in os.environ:
        measure(given.folder, given.apart)
        return
    with tempfile.TemporaryDirectory() as folder:
        write_model(Path(folder), given.layers, given.hidden)
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(given.ranks)]
        module = ["-m", "benchmarks.memory.publish_memory", "--folder", folder, *(["--apart"] if given.apart else [])]
        subprocess.run([*command, *module], check=True, timeout=600)


def measure(folder: Path, apart: bool) -> None:
    """Publish, export and save on this rank; prints a line. apart: rank 0 alone sees the folder of versions."""
    torch.set_num_threads(1)
    config = TidemillConfig.model_validate(
        {
            "run": {"name": "publish", "folder": str(folder / "run")},
            "model": {"path": str(folder), "dtype": "bfloat16", "max_length": 64},
            "train": {"name": "jsonl", "args": {"path": "unused"}},
            "reward": {"terms": [{"name": "exact"}]},
            "sampling": {"n": 4, "max_tokens": 8},
            "trainer": {"processes": int(os.environ["WORLD_SIZE"])},
        }
    )
    ranks = Ranks(300.0, config.trainer.parallel)
    step = build_train_step(config, ranks)
    policy, out = step.policy, folder / "run"
    out.mkdir(exist_ok=True)
    snapshots, store = Snapshots(policy, "bfloat16", ranks), CheckpointStore(out / "checkpoints")
    mark = ranks.broadcast_text(Snapshots.create(out / "weights") if ranks.is_main else "")
    seen = out / ("weights" if ranks.is_main or not apart else "elsewhere")
    peaks = {
        "publish": peak_of(lambda: snapshots.take(seen, mark).fill()),
        "probe": peak_of(lambda: reference_logprobs(policy, [5, 6])),
        "export": peak_of(lambda: save_model(policy, out / "model", "bfloat16", ranks)),
        "checkpoint": peak_of(lambda: store.save(step, step=0, version=0, leader_term=1, extra={})),
    }
    found = {
        "rank": ranks.rank,
        "parameters": sum(p.numel() for p in policy.parameters()),
        "file_mb": megabytes(WIRE_BYTES * sum(p.numel() for p in policy.parameters())),
        "largest_mb": megabytes(WIRE_BYTES * max(p.numel() for p in policy.parameters())),
        **{f"{name}_mb": megabytes(peak) for name, peak in peaks.items()},
    }
    print(json.dumps(found), flush=True)


def peak_of(act: Callable[[], object]) -> int:
    """Return by how many bytes the resident memory of this process grew while it did this, at the most."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")
    before = _status("VmRSS")
    act()
    return _status("VmHWM") - before


def _status(name: str) -> int:
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(name))


def megabytes(size: int) -> float:
    return round(size / 1e6, 1)


if __name__ == "__main__":
    main()
