"""What a trainer's Slurm job, or that of a whole run, does with signals and exit codes; all programs are fakes."""

import os
import re
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

from deploy.launchers.slurm import GRACE_S, TURNS_GRACE_S, Slurm
from schemas.errors import HOPELESS, UNFINISHED_EXIT, ConfigError
from tests.support.configurations import minimal_config

DEADLINE_S = 30.0
UNTIL_ASKED = "trap 'echo saved >>$LOG; exit 0' TERM; echo ready >>$LOG; while :; do /bin/sleep 0.05; done"
FAKES = {
    "srun": 'echo "srun $*" >>$LOG; while [ "$1" != tidemill ]; do shift; done; "$@" & wait $!',
    "scontrol": 'echo "scontrol $*" >>$LOG; [ "$1" != show ] || echo node-a',
    "scancel": 'echo "scancel $*" >>$LOG',
    "squeue": ":",
    "sleep": ":",
}


TURNS = {"trainer": "0", "generator": "0-2"}


class Job:
    """The script of a trainer's job, or of a run in turns; tidemill: shell that stands for `tidemill`."""

    def __init__(self, folder: Path, tidemill: str, turns: bool = False, **options: int) -> None:
        self.log, bin = folder / "log", folder / "bin"
        bin.mkdir()
        for name, text in (FAKES | {"tidemill": f'echo "tidemill $1" >>$LOG; {tidemill}'}).items():
            (bin / name).write_text(f"#!/bin/bash\n{text}\n")
            (bin / name).chmod(0o755)
        self.log.touch()
        run = {"name": "big", "folder": str(folder / "run")}
        slurm = Slurm(folder=folder / "slurm", setup=f"export PATH={bin}:$PATH LOG={self.log}", **options)  # type: ignore[arg-type]
        if turns:
            slurm.prepare(minimal_config(run=run, placement=TURNS, generator={"engine": "transformers"}))
        else:
            slurm.write(minimal_config(run=run))
            (folder / "slurm" / "redis_url").write_text("redis://nowhere")
        self.command = ["bash", str(folder / "slurm" / ("up.sbatch" if turns else "trainer.sbatch"))]

    def start(self, number: int = 7) -> subprocess.Popen[bytes]:
        environment = {**os.environ, "SLURM_JOB_ID": str(number), "SLURM_JOB_NODELIST": "node-[a-b]"}
        return subprocess.Popen(self.command, env=environment, start_new_session=True)

    def lines(self) -> list[str]:
        return self.log.read_text().splitlines()

    def run(self, number: int = 7) -> tuple[int, list[str]]:
        process = self.start(number)
        try:
            return process.wait(DEADLINE_S), self.lines()
        finally:
            process.kill()


@pytest.mark.parametrize("turns", [False, True])
@pytest.mark.parametrize(
    ("number", "after"), [(signal.SIGUSR1, ["saved", "scontrol requeue 7"]), (signal.SIGTERM, ["saved"])]
)
def test_a_trainer_that_is_asked_to_end_saves_and_its_job_is_queued_again(
    number: signal.Signals, after: list[str], turns: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SIGUSR1 comes before the time limit. After SIGTERM Slurm itself queues a preempted job. Other jobs continue."""
    monkeypatch.setattr("deploy.launchers.slurm.check", lambda *_, **__: None)
    job = Job(tmp_path, UNTIL_ASKED, turns)
    process = job.start()
    try:
        deadline = time.monotonic() + DEADLINE_S
        while "ready" not in job.lines():
            assert time.monotonic() < deadline
            time.sleep(0.05)
        os.kill(process.pid, number)
        assert process.wait(DEADLINE_S) == 0
    finally:
        os.killpg(process.pid, signal.SIGKILL) if process.poll() is None else None
    if turns:
        assert job.lines() == ["tidemill up", "ready", *after]
        return
    generators = "jobname=tidemill-big-generator"
    began = [f"scontrol release {generators}", "tidemill trainer", "ready", after[0]]
    assert job.lines() == [*began, f"scontrol hold {generators}", *after[1:]]


@pytest.mark.parametrize("nodes", [1, 2])
@pytest.mark.parametrize("code", sorted(HOPELESS))
def test_what_no_restart_mends_ends_the_job_with_its_code(code: int, nodes: int, tmp_path: Path) -> None:
    ended, lines = Job(tmp_path, f"exit {code}", trainer_nodes=nodes).run()
    assert ended == code
    assert lines.count("tidemill trainer") == 1
    assert not [line for line in lines if line.startswith("scancel")], "the others wait for a trainer that is mended"


@pytest.mark.parametrize("code", [1, UNFINISHED_EXIT, 137])
def test_a_trainer_that_fails_is_started_again_and_the_end_of_the_run_ends_all_jobs(code: int, tmp_path: Path) -> None:
    job = Job(tmp_path, f"[ $(grep -c 'tidemill trainer' $LOG) = 3 ] || exit {code}")
    ended, lines = job.run()
    assert ended == 0
    assert lines.count("tidemill trainer") == 3
    ending = [line for line in lines if line.startswith("scancel")]
    assert {name for line in ending for name in re.findall(r"tidemill-big-\w+", line)} == {
        "tidemill-big-generator",
        "tidemill-big-services",
    }


def test_two_trainers_on_one_node_have_a_port_each_and_a_lost_rank_ends_the_others(tmp_path: Path) -> None:
    job = Job(tmp_path, "exit 0", trainer_nodes=2)
    started = [line for number in (7, 8) for line in job.run(number)[1] if line.startswith("srun")]
    ports = {meet for line in started for meet in re.findall(r"--meet node-a:(\d+)", line)}
    assert len(ports) == 2
    assert all("--kill-on-bad-exit=1" in line for line in started)


def test_a_checkpoint_has_most_of_the_time_of_the_warning(tmp_path: Path) -> None:
    Job(tmp_path, "exit 0", trainer_nodes=2)
    script = (tmp_path / "slurm" / "trainer.sbatch").read_text()
    (warning,) = re.findall(r"--signal=B:USR1@(\d+)", script)
    assert 60 < GRACE_S < int(warning)
    assert f"supervisor.grace_s={GRACE_S} " in script


def test_a_run_whose_gpus_are_used_in_turns_is_one_job_with_a_broker_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("deploy.launchers.slurm.check", lambda *_, **__: None)
    monkeypatch.setenv("REDIS_URL", "redis://of-another-run")
    ended, lines = Job(tmp_path, "echo url=$REDIS_URL$REDIS_URL_FILE >>$LOG; exit 0", turns=True).run()
    assert (ended, lines) == (0, ["tidemill up", "url="])
    folder = tmp_path / "slurm"
    assert sorted(path.name for path in folder.iterdir()) == ["job.sh", "logs", "up.sbatch"]
    script = (folder / "up.sbatch").read_text()
    assert "#SBATCH --gpus-per-node=3\n" in script, "as many as the last one that placement names"
    assert f" supervisor.grace_s={TURNS_GRACE_S}\n" in script
    (warning,) = re.findall(r"--signal=B:USR1@(\d+)", script)
    # Generators and reward services may hang in code of users; the other kinds end within seconds.
    assert int(warning) >= 3 * TURNS_GRACE_S + 30


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"generators": 4}, "--generators 4"),
        ({"generator_gpus": 1}, "--generator-gpus 1"),
        ({"trainer_nodes": 2}, "--trainer-nodes 2"),
        ({"trainer_gpus": 0}, "--trainer-gpus 0"),
        ({"container": "run-in {role}.sif"}, "--container run-in {role}.sif"),
    ],
)
def test_what_one_job_cannot_have_is_said_in_a_line(options: dict[str, Any], named: str, tmp_path: Path) -> None:
    config = minimal_config(run={"folder": str(tmp_path / "run")}, placement=TURNS, generator={"engine": "vllm"})
    with pytest.raises(ConfigError) as raised:
        Slurm(**options).prepare(config)
    assert str(raised.value) == f"{named} excludes placement, with which one node has the whole run"
    assert not (tmp_path / "run").exists()
