"""The trainer, and whatever else trains, as several processes of this machine, when the configuration asks for them.

PyTorch's own launcher (torchrun), with exit codes that mean the same as those of one process. A rank that ends
badly takes the others along (consumers/trainer/distributed/watchdog.py); the parent of this process restarts all of
them again.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence

from deploy.services.main import command
from schemas.errors import ERROR_EXIT, HOPELESS, OK_EXIT


def is_rank() -> bool:
    """Return whether a launcher, this one or any other, has started this process as one of several."""
    return "LOCAL_RANK" in os.environ


def launch(processes: int, arguments: Sequence[str], grace_s: float) -> int:
    """Run ``tidemill ARGUMENTS`` in ``processes`` ranks until all have ended; returns the exit code.

    grace_s: when this process is asked to end it asks all ranks, and kills them after so long.
    """
    # Imported here: this takes as long as loading PyTorch.
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import parse_args, run

    # What it has to say is in the exit codes, and would hide what the ranks say.
    logging.disable(logging.ERROR)
    # Without it the launcher gives each rank one thread, and says so at length.
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // processes)))
    options = ["--standalone", "--nproc-per-node", str(processes), "--shutdown-timeout", str(max(1, int(grace_s)))]
    try:
        run(parse_args([*options, "--no-python", *command(*arguments)]))
    except ChildFailedError as error:
        # The ranks have said why; a wrong configuration is wrong for all of them.
        codes = [failure.exitcode for failure in error.failures.values()]
        return next((code for code in codes if code in HOPELESS), ERROR_EXIT)
    except SignalException:
        return OK_EXIT
    return OK_EXIT
