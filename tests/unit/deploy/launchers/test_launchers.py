"""Launchers: built-in or the user's own class, the GPUs of one machine, and scripts for Slurm."""

import inspect
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from deploy.checks import preflight
from deploy.cli.app import app
from deploy.launchers import LAUNCHERS
from deploy.launchers.factory import Launcher, build_launcher
from deploy.launchers.local import VISIBLE, Local
from deploy.launchers.ray import RayCluster
from deploy.launchers.slurm import Slurm
from deploy.supervisor.process import Processes
from deploy.supervisor.services import Starter
from schemas.config import TidemillConfig, load_config, parse_config
from schemas.errors import ConfigError
from schemas.run_record import claim_folder

CONFIG: dict[str, Any] = {
    "model": {"path": "m"},
    "train": {"name": "arithmetic"},
    "reward": {"terms": [{"name": "exact"}]},
}
OWN = """
from pathlib import Path

class Mine:
    def __init__(self, file, code=0):
        self.file, self.code = file, code

    def launch(self, config, fresh=False):
        Path(self.file).write_text(f"{config.run.name} {config.trainer.steps} {fresh}")
        return self.code

def function(config): ...
"""
DEADLINE_S = 30.0
SLURM_CONFIG: dict[str, Any] = {
    "model": {"path": "m"},
    "train": {"name": "arithmetic"},
    "reward": {"terms": [{"name": "exact"}], "replicas": 2},
}
WARM_START = {"model": "m.py:f", "dataset": {"name": "arithmetic"}, "eval": {"name": "arithmetic"}}


def config(name: str, base: Path | None = None, **args: Any) -> TidemillConfig:
    return parse_config(CONFIG | {"launcher": {"name": name, "args": args}}, base)


def parameters(method: Any) -> list[str]:
    return list(inspect.signature(method).parameters)


@pytest.mark.parametrize("name", LAUNCHERS.names)
def test_every_built_in_launcher_is_one(name: str) -> None:
    launcher = build_launcher(config(name))
    assert parameters(type(launcher).launch) == parameters(Launcher.launch)


@pytest.mark.parametrize("starter", [Processes, RayCluster])
def test_every_starter_is_one(starter: type) -> None:
    for method in ("start", "tick"):
        assert parameters(getattr(starter, method)) == parameters(getattr(Starter, method))


def test_arguments_are_options_of_the_launcher() -> None:
    launcher = build_launcher(config("slurm", partition="gpu", trainer_nodes=2))
    assert vars(launcher) | {"partition": "gpu", "trainer_nodes": 2} == vars(launcher)


def test_a_launcher_of_ones_own_starts_the_run(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(OWN)
    file = tmp_path / "config.yaml"
    file.write_text(
        "model: {path: m}\ntrain: {name: arithmetic}\nreward: {terms: [{name: exact}]}\nrun: {name: own}\n"
        f"launcher: {{name: 'mine.py:Mine', args: {{file: {tmp_path / 'seen'}}}}}\n"
    )
    words = ["up", str(file), "--fresh", "trainer.steps=7", "launcher.args.code=3"]
    assert CliRunner().invoke(app, words).exit_code == 3
    assert (tmp_path / "seen").read_text() == "own 7 True"


@pytest.mark.parametrize(
    ("name", "args", "message"),
    [
        ("slrum", {}, r"unknown launcher 'slrum' \(did you mean 'slurm'\?\)"),
        ("ray", {"adddrs": "auto"}, r"'adddrs', did you mean 'address'\?"),
        ("local", {"hosts": []}, "'hosts'; it takes trainer_gpus, generator_gpus"),
        ("mine.py:function", {}, r"must be a class with a method launch\(config, fresh\)"),
        ("mine.py:Mine", {}, "missing a required argument: 'file'; it takes file, code"),
    ],
)
def test_a_mistake_is_one_line_on_what_is_right(name: str, args: dict[str, Any], message: str, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(OWN)
    with pytest.raises(ConfigError, match=message) as refused:
        build_launcher(config(name, tmp_path, **args))
    assert "\n" not in str(refused.value)


def test_a_queue_is_not_told_to_start_anew() -> None:
    with pytest.raises(ConfigError, match="tidemill purge"):
        build_launcher(config("slurm")).launch(config("slurm"), fresh=True)


def seen(launcher: Local, role: str, name: str, folder: Path) -> str:
    """The variable as a service finds it."""
    log = folder / f"{name}.log"
    argv = [sys.executable, "-c", f"import os; print(os.environ.get({VISIBLE!r}, 'unset'))"]
    process = launcher.start(argv, name, role, log, {}, "")
    deadline = time.monotonic() + DEADLINE_S
    while process.poll() is None:
        assert time.monotonic() < deadline, f"{name} did not end"
        time.sleep(0.02)
    return log.read_text().strip()


def test_the_trainer_has_the_first_and_each_generator_the_next(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VISIBLE, raising=False)
    launcher = Local(trainer_gpus=2, generator_gpus=1)
    assert seen(launcher, "trainer", "trainer", tmp_path) == "0,1"
    assert seen(launcher, "generator", "generator-0", tmp_path) == "2"
    assert seen(launcher, "generator", "generator-3", tmp_path) == "5"
    assert seen(launcher, "reward", "reward-0", tmp_path) == "unset"


def test_who_asks_for_nothing_gets_what_there_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VISIBLE, "4,7")
    assert seen(Local(), "trainer", "trainer", tmp_path) == "4,7"


def test_they_are_dealt_from_those_that_this_process_sees(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VISIBLE, "GPU-a,GPU-b,GPU-c")
    launcher = Local(trainer_gpus=1, generator_gpus=2)
    assert seen(launcher, "generator", "generator-0", tmp_path) == "GPU-b,GPU-c"
    with pytest.raises(ConfigError, match="generator-1 would have GPU 5 of the 3 that there are"):
        launcher.start(["true"], "generator-1", "generator", None, {}, "")


def written(folder: Path, settings: dict[str, Any] = SLURM_CONFIG, **options: Any) -> dict[str, str]:
    run = {"name": "big", "folder": str(folder / "a run")}
    slurm = Slurm(folder=folder / "a folder", **options)
    return {path.name: path.read_text() for path in slurm.write(parse_config(settings | {"run": run}))}


def test_every_script_is_valid_shell(tmp_path: Path) -> None:
    for name in written(tmp_path, SLURM_CONFIG | {"warm_start": WARM_START}, trainer_nodes=2, trainer_gpus=8):
        done = subprocess.run(["bash", "-n", str(tmp_path / "a folder" / name)], capture_output=True, check=False)
        assert (done.returncode, done.stderr) == (0, b""), name


def test_generators_are_an_array_that_is_requeued(tmp_path: Path) -> None:
    script = written(tmp_path, generators=16, generator_gpus=1, partition="spot", sbatch=["--qos=low"])[
        "generators.sbatch"
    ]
    for option in ("--array=0-15", "--requeue", "--gpus-per-node=1", "--partition=spot", "--qos=low"):
        assert f"#SBATCH {option}\n" in script


POOLS = {
    "l40s": {
        "generator": {"engine": "vllm", "replicas": 3, "args": {"tensor_parallel_size": 2}},
        "slurm": {"partition": "l40s", "constraint": "l40s", "exclusive": ""},
    },
    "cpu": {"generator": {"engine": "transformers"}},
    "later": {"generator": {"replicas": 0}},
}


def test_each_pool_is_an_array_with_its_own_options_and_gpus(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("deploy.launchers.slurm.ask", lambda command: "gpu:8")
    monkeypatch.setattr("deploy.launchers.slurm.check", lambda *_, **__: None)
    run = {"name": "big", "folder": str(tmp_path / "a run")}
    slurm = Slurm(folder=tmp_path / "a folder", partition="all", sbatch=["--qos=low"])
    paths = slurm.prepare(parse_config(SLURM_CONFIG | {"pools": POOLS, "run": run}))
    scripts = {path.name: path.read_text() for path in paths}
    assert capsys.readouterr().err == (
        "GPUs: 1 for each trainer node, 2 for each generator of l40s, 1 for each generator of cpu,"
        " 1 for each generator of later\n"
    )
    for name in scripts:
        done = subprocess.run(["bash", "-n", str(tmp_path / "a folder" / name)], capture_output=True, check=False)
        assert (done.returncode, done.stderr) == (0, b""), name
    own = [line for line in scripts["generators-l40s.sbatch"].splitlines() if line.startswith("#SBATCH")]
    for option in ("array=0-2", "gpus-per-node=2", "partition=l40s", "constraint=l40s", "exclusive", "qos=low"):
        assert f"#SBATCH --{option}" in own
    assert "#SBATCH --partition=all" not in own
    assert '--pool l40s --name "generator-l40s-$SLURM_ARRAY_TASK_ID"' in scripts["generators-l40s.sbatch"]
    assert "#SBATCH --partition=all\n" in scripts["generators-cpu.sbatch"]
    queued = [line.rpartition("/")[2].strip("'") for line in scripts["submit.sh"].splitlines() if "generators-" in line]
    assert queued[1:] == ["generators-l40s.sbatch", "generators-cpu.sbatch"], "none of the pool that has no replicas"
    assert "generators.sbatch" not in scripts
    assert "generators-POOL.sbatch" in scripts["services.sbatch"], "where a user finds what adds generators"


def test_a_login_node_needs_no_gpus_for_vllms_exact_mode(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def check(config: TidemillConfig, here: bool, skip: set[str]) -> None:
        preflight.check(config, here=here, skip={*skip, "model", "user code"})

    monkeypatch.setattr(preflight, "_need", lambda *_: None)
    monkeypatch.setattr(preflight, "is_cpu_build", lambda: False)
    monkeypatch.setattr("producers.engines.vllm.before_import.ask_driver", lambda _: [])
    monkeypatch.setattr("deploy.launchers.slurm.check", check)
    exact = {"generator": {"engine": "vllm", "exact": True, "update": "recompute"}}
    config = parse_config(SLURM_CONFIG | exact | {"run": {"folder": str(tmp_path / "run")}})
    with pytest.raises(ConfigError, match="batch-invariant mode needs NVIDIA GPUs"):
        check(config, here=True, skip={"control plane"})
    assert Slurm().prepare(config)


def test_one_trainer_process_needs_no_launcher_and_many_meet_at_the_first_node(tmp_path: Path) -> None:
    assert "srun" not in written(tmp_path)["trainer.sbatch"]
    script = written(tmp_path, trainer_nodes=4, trainer_gpus=8)["trainer.sbatch"]
    assert "#SBATCH --nodes=4\n" in script
    assert "supervisor.grace_s=160 --ranks 8 --nodes 4 " in script
    assert '--meet "$head:$((40000 + SLURM_JOB_ID % 20000))"' in script, "two runs on a node do not share a port"


def test_the_trainer_has_a_rank_for_each_gpu_that_was_asked_for_whatever_the_configuration_says(tmp_path: Path) -> None:
    two = SLURM_CONFIG | {"trainer": {"processes": 2}}
    asked = written(tmp_path, two, trainer_gpus=1)["trainer.sbatch"]
    (line,) = [line for line in asked.splitlines() if line.startswith("keep forward")]
    assert line.endswith("/a run/config.yaml' --ranks 1")
    assert "--ranks" not in written(tmp_path, two)["trainer.sbatch"], "without GPUs, as many as the configuration says"


def test_the_control_plane_is_reached_from_other_nodes(tmp_path: Path) -> None:
    """The name of the node may be its loopback address, as Debian writes it to /etc/hosts."""
    assert " --host 0.0.0.0 --port 0 --stay" in written(tmp_path)["services.sbatch"]


def test_a_model_that_has_to_be_made_is_made_first(tmp_path: Path) -> None:
    assert "prepare.sbatch" not in written(tmp_path)
    scripts = written(tmp_path, SLURM_CONFIG | {"warm_start": WARM_START})
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
        written(tmp_path, SLURM_CONFIG | {"model": {"path": "other"}})
    assert configuration.read_bytes() == before
    written(tmp_path, SLURM_CONFIG | {"trainer": {"steps": 7}})
    assert configuration.with_name("config.yaml.1").read_bytes() == before


def test_services_run_in_the_image_of_their_role(tmp_path: Path) -> None:
    scripts = written(
        tmp_path, SLURM_CONFIG | {"warm_start": WARM_START}, container="run-in {role}.sif", trainer_gpus=2
    )
    services = scripts["services.sbatch"]
    for role in ("feeder", "reward", "control"):
        assert f"keep forward run-in {role}.sif tidemill {role} " in services
    assert "run-in control.sif tidemill broker " in services
    assert "run-in generator.sif tidemill generator " in scripts["generators.sbatch"]
    assert "run-in trainer.sif tidemill prepare " in scripts["prepare.sbatch"]
    assert "run-in trainer.sif tidemill trainer " in scripts["trainer.sbatch"]


def test_a_server_of_the_configuration_excludes_one_of_the_jobs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Services would all use that server, and the broker of the job would be idle."""
    monkeypatch.setattr("deploy.launchers.slurm.check", lambda *_, **__: None)
    other = parse_config(SLURM_CONFIG | {"broker": {"url": "redis://other"}, "run": {"folder": str(tmp_path / "run")}})
    with pytest.raises(ConfigError, match=r"^broker\.url redis://other excludes .*, which Slurm starts.* --no-broker$"):
        Slurm().prepare(other)
    assert not (tmp_path / "run").exists()
    assert Slurm(own_broker=False).prepare(other)


def test_options_that_cannot_be_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="1 or more generators and trainer nodes, not 0 and 1"):
        written(tmp_path, generators=0)
