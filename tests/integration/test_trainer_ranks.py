"""Two ranks with FSDP2 on gloo: parameters are really sharded and the training is that of one rank."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import ranks_script
from tiny import make_tiny_model

pytestmark = pytest.mark.integration


def launch(folder: Path, model: Path, world: int, *arguments: str) -> dict[str, object]:
    """Run the script on ``world`` ranks; what rank 0 reported."""
    report = folder / f"report-{world}-{len(list(folder.iterdir()))}.json"
    if world == 1:
        ranks_script.main(str(model), str(report), *arguments)
    else:
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
        launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(world)]
        command = [*launcher, ranks_script.__file__, str(model), str(report), *arguments]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240, check=False)
        assert done.returncode == 0, done.stderr[-3000:]
    result: dict[str, object] = json.loads(report.read_text())
    return result


def test_two_ranks_train_like_one(tmp_path: Path) -> None:
    model = make_tiny_model(tmp_path / "model", hidden=32, layers=2)
    one, two = launch(tmp_path, model, 1), launch(tmp_path, model, 2, str(tmp_path / "checkpoints"))
    assert two["sharded"]
    assert not one["sharded"]
    for a, b in zip(one["metrics"], two["metrics"], strict=True):  # type: ignore[call-overload]
        for name in ("loss", "tokens", "entropy", "grad_norm", "kl", "ess", "ratio_max", "staleness_mean"):
            assert b[name] == pytest.approx(a[name], rel=1e-4, abs=1e-6), name
    assert two["staleness"] == one["staleness"]
    assert two["weights"] == pytest.approx(one["weights"], rel=1e-4, abs=1e-5)
    assert two["resumed"] == two["weights"]
