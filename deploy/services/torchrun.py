"""The trainer, and whatever else trains, as several processes of this machine, alone or with those of other machines.

PyTorch's own launcher (torchrun), with exit codes that mean the same as those of one process. A rank that ends
badly takes the others along (consumers/trainer/distributed/watchdog.py); this process's parent restarts them all.
"""

import logging
import os
from collections.abc import Sequence
from dataclasses import dataclass

from deploy.services.main import command
from schemas.errors import ERROR_EXIT, HOPELESS, OK_EXIT, UNFINISHED_EXIT, ConfigError


@dataclass(frozen=True)
class Machines:
    """Machines that train together with equally many ranks. rank: of this one, from 0. meet: HOST:PORT of the first."""

    count: int
    rank: int
    meet: str

    def __post_init__(self) -> None:
        """ConfigError: a rank that no machine has, or an address without a port."""
        if not 0 <= self.rank < self.count:
            raise ConfigError(f"--node-rank {self.rank} must be from 0 to {self.count - 1}: --nodes is {self.count}")
        host, colon, port = self.meet.rpartition(":")
        if not (host and colon and port.isascii() and port.isdigit() and 0 < int(port) < 65_536):
            raise ConfigError(f"--meet {self.meet!r} must be HOST:PORT of the first node, such as trainer-0:29500")


def is_rank() -> bool:
    """Return whether a launcher, this one or any other, has started this process as one of several."""
    return "LOCAL_RANK" in os.environ


def launch(processes: int, arguments: Sequence[str], grace_s: float, machines: Machines | None = None) -> int:
    """Run ``tidemill ARGUMENTS`` in ``processes`` ranks until all have ended; returns the exit code.

    It is 0 if this process was asked to end, and ``UNFINISHED_EXIT`` if only another one of ``machines`` was.
    grace_s: when this process is asked to end it asks all ranks, and kills them after so long.
    """
    # Imported here: this takes as long as loading PyTorch.
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import parse_args, run

    # What it has to say is in the exit codes, and would hide what the ranks say.
    logging.disable(logging.ERROR)
    # Without it the launcher gives each rank one thread, and says so at length.
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, len(os.sched_getaffinity(0)) // processes)))
    options = ["--nproc-per-node", str(processes), "--shutdown-timeout", str(max(1, int(grace_s)))]
    where = ["--standalone"]
    if machines is not None:
        host, _, port = machines.meet.rpartition(":")
        where = ["--master-addr", host, "--master-port", port]
        where += ["--nnodes", str(machines.count), "--node-rank", str(machines.rank)]
    try:
        run(parse_args([*where, *options, "--no-python", *command(*arguments)]))
    except ChildFailedError as error:
        # The ranks have said why; a wrong configuration is wrong for all of them.
        codes = [failure.exitcode for failure in error.failures.values()]
        return next((code for code in codes if code in HOPELESS | {UNFINISHED_EXIT}), ERROR_EXIT)
    except SignalException:
        return OK_EXIT
    return OK_EXIT
