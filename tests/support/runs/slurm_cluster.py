"""A real Slurm of one node with two imitated GPUs in a temporary folder: controller, daemon, no authentication."""

import os
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.support.runs.programs import find_program, skip_or_fail

PROGRAMS = ("slurmctld", "slurmd", "sbatch", "scontrol", "squeue")
DEADLINE_S = 60.0
CONFIG = """
ClusterName=test
SlurmctldHost={host}
SlurmUser=root
SlurmdUser=root
AuthType=auth/none
CredType=cred/none
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
ReturnToService=2
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SlurmdParameters=config_overrides
SlurmctldPort={controller_port}
SlurmdPort={daemon_port}
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
SlurmdSpoolDir={folder}/spool
StateSaveLocation={folder}/state
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.log
GresTypes=gpu
NodeName={host} NodeAddr=127.0.0.1 CPUs=8 RealMemory=1000 Gres=gpu:2 State=UNKNOWN
PartitionName=all Nodes={host} Default=YES MaxTime=INFINITE State=UP
"""


@contextmanager
def run_slurm_cluster(folder: Path) -> Iterator[None]:
    """Run it; Slurm's own commands, and what they start, find it by SLURM_CONF. Skips the test where it can't be."""
    for name in PROGRAMS:
        find_program(name)
    if os.geteuid() != 0:
        skip_or_fail("a Slurm of its own needs root")
    for name in ("spool", "state"):
        (folder / name).mkdir(parents=True)
    file = folder / "slurm.conf"
    host = socket.gethostname().split(".")[0]
    controller_port, daemon_port = _free_ports(2)
    text = CONFIG.format(host=host, folder=folder, controller_port=controller_port, daemon_port=daemon_port)
    file.write_text(text)
    # Slurm wants a device for each GPU; without a control group it keeps nobody from these.
    (folder / "gres.conf").write_text("Name=gpu File=/dev/null\nName=gpu File=/dev/zero\n")
    before = os.environ.get("SLURM_CONF")
    os.environ["SLURM_CONF"] = str(file)
    with (folder / "output.txt").open("w") as output:
        daemons = [
            subprocess.Popen([name, "-D", "-f", str(file)], stdout=output, stderr=output, stdin=subprocess.DEVNULL)
            for name in ("slurmctld", "slurmd")
        ]
        try:
            _wait_until_idle(folder)
            yield
        finally:
            subprocess.run(["scancel", "--state=RUNNING"], check=False, timeout=30)
            subprocess.run(["scancel", "--state=PENDING"], check=False, timeout=30)
            _wait_until_empty()
            for daemon in reversed(daemons):
                daemon.terminate()
                daemon.wait(30)
            os.environ.pop("SLURM_CONF") if before is None else os.environ.update(SLURM_CONF=before)


def list_jobs() -> dict[str, str]:
    """State of every job and array task that is queued or runs, by name and index: ``name`` or ``name.3``."""
    done = subprocess.run(
        ["squeue", "--noheader", "--array", "--format=%j %K %T"], capture_output=True, text=True, check=True, timeout=30
    )
    found = {}
    for line in done.stdout.splitlines():
        name, index, state = line.split()
        found[name if index == "N/A" else f"{name}.{index}"] = state
    return found


def _wait_until_idle(folder: Path) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while True:
        done = subprocess.run(["sinfo", "--noheader", "--format=%T"], capture_output=True, text=True, check=False)
        if done.stdout.strip() == "idle":
            return
        log = (folder / "output.txt").read_text()[-2000:]
        assert time.monotonic() < deadline, f"no idle node: {done.stdout}{done.stderr}\n{log}"
        time.sleep(0.2)


def _wait_until_empty() -> None:
    deadline = time.monotonic() + DEADLINE_S
    while list_jobs() and time.monotonic() < deadline:
        time.sleep(0.2)


def _free_ports(count: int) -> list[int]:
    sockets = [socket.socket() for _ in range(count)]
    for sock in sockets:
        sock.bind(("127.0.0.1", 0))
    ports = [sock.getsockname()[1] for sock in sockets]
    for sock in sockets:
        sock.close()
    return ports
