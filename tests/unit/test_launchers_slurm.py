"""What ``tidemill slurm`` writes: valid shell, with what was asked for and nothing left to fill in."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest

from deploy.launchers.slurm import Slurm, SlurmOptions
from schemas.config import parse_config
from schemas.errors import ConfigError

CONFIG: dict[str, Any] = {
    "run": {"name": "big"},
    "model": {"path": "m"},
    "train": {"name": "arithmetic"},
    "reward": {"terms": [{"name": "exact"}], "replicas": 2},
}
WARM_START = {"model": "m.py:f", "dataset": {"name": "arithmetic"}, "eval": {"name": "arithmetic"}}


def written(folder: Path, config: dict[str, Any] = CONFIG, **options: Any) -> dict[str, str]:
    slurm = Slurm(parse_config(config), folder / "a file.yaml", SlurmOptions(**options))
    return {path.name: path.read_text() for path in slurm.write(folder / "a folder")}


def test_every_script_is_valid_shell(tmp_path: Path) -> None:
    for name in written(tmp_path, CONFIG | {"warm_start": WARM_START}, trainer_nodes=2, trainer_gpus=8):
        done = subprocess.run(["bash", "-n", str(tmp_path / "a folder" / name)], capture_output=True, check=False)
        assert (done.returncode, done.stderr) == (0, b""), name


def test_generators_are_an_array_that_is_requeued(tmp_path: Path) -> None:
    script = written(tmp_path, generators=16, generator_gpus=1, partition="spot", extra=("--qos=low",))[
        "generators.sbatch"
    ]
    for option in ("--array=0-15", "--requeue", "--gpus-per-node=1", "--partition=spot", "--qos=low"):
        assert f"#SBATCH {option}\n" in script


def test_one_trainer_process_needs_no_launcher_and_many_meet_at_the_first_node(tmp_path: Path) -> None:
    assert "torchrun" not in written(tmp_path)["trainer.sbatch"]
    script = written(tmp_path, trainer_nodes=4, trainer_gpus=8)["trainer.sbatch"]
    assert "#SBATCH --nodes=4\n" in script
    assert "--nnodes 4 --nproc-per-node 8" in script
    assert '--rdzv-endpoint "$head:29500"' in script


def test_a_model_that_has_to_be_made_is_made_first(tmp_path: Path) -> None:
    assert "prepare.sbatch" not in written(tmp_path)
    scripts = written(tmp_path, CONFIG | {"warm_start": WARM_START})
    assert "--dependency=afterok" in scripts["submit.sh"]
    assert "tidemill prepare" in scripts["prepare.sbatch"]


def test_options_that_cannot_be_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--generators and --trainer-nodes must be 1 or more"):
        written(tmp_path, generators=0)
