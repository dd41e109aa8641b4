"""What ``tidemill slurm`` writes: valid shell, with what was asked for and nothing left to fill in."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest

from deploy.launchers.slurm import Slurm
from schemas.config import load_config, parse_config
from schemas.errors import ConfigError
from schemas.run_record import claim_folder

CONFIG: dict[str, Any] = {
    "model": {"path": "m"},
    "train": {"name": "arithmetic"},
    "reward": {"terms": [{"name": "exact"}], "replicas": 2},
}
WARM_START = {"model": "m.py:f", "dataset": {"name": "arithmetic"}, "eval": {"name": "arithmetic"}}


def written(folder: Path, settings: dict[str, Any] = CONFIG, **options: Any) -> dict[str, str]:
    run = {"name": "big", "folder": str(folder / "a run")}
    slurm = Slurm(folder=folder / "a folder", **options)
    return {path.name: path.read_text() for path in slurm.write(parse_config(settings | {"run": run}))}


def test_every_script_is_valid_shell(tmp_path: Path) -> None:
    for name in written(tmp_path, CONFIG | {"warm_start": WARM_START}, trainer_nodes=2, trainer_gpus=8):
        done = subprocess.run(["bash", "-n", str(tmp_path / "a folder" / name)], capture_output=True, check=False)
        assert (done.returncode, done.stderr) == (0, b""), name


def test_generators_are_an_array_that_is_requeued(tmp_path: Path) -> None:
    script = written(tmp_path, generators=16, generator_gpus=1, partition="spot", sbatch=["--qos=low"])[
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


def test_jobs_run_the_configuration_as_it_was_then(tmp_path: Path) -> None:
    assert f"tidemill feeder '{tmp_path}/a run/config.yaml'" in written(tmp_path)["services.sbatch"]
    assert load_config(tmp_path / "a run" / "config.yaml", environment={}).reward.replicas == 2


def test_the_scripts_of_a_run_that_has_begun_are_not_written_for_another_model(tmp_path: Path) -> None:
    written(tmp_path)
    configuration = tmp_path / "a run" / "config.yaml"
    before = configuration.read_bytes()
    claim_folder(load_config(configuration, environment={}))
    with pytest.raises(ConfigError, match=r"model\.path m, which cannot become other"):
        written(tmp_path, CONFIG | {"model": {"path": "other"}})
    assert configuration.read_bytes() == before
    written(tmp_path, CONFIG | {"trainer": {"steps": 7}})
    assert configuration.with_name("config.yaml.1").read_bytes() == before


def test_services_run_in_the_image_of_their_role(tmp_path: Path) -> None:
    scripts = written(tmp_path, CONFIG | {"warm_start": WARM_START}, container="run-in {role}.sif", trainer_gpus=2)
    services = scripts["services.sbatch"]
    for role in ("feeder", "reward", "control"):
        assert f"keep forward run-in {role}.sif tidemill {role} " in services
    assert "run-in control.sif tidemill broker " in services
    assert "run-in generator.sif tidemill generator " in scripts["generators.sbatch"]
    assert "run-in trainer.sif tidemill prepare " in scripts["prepare.sbatch"]
    assert "run-in trainer.sif torchrun " in scripts["trainer.sbatch"]


def test_options_that_cannot_be_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="1 or more generators and trainer nodes, not 0 and 1"):
        written(tmp_path, generators=0)
