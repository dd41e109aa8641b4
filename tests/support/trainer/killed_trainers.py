"""Trainers as real processes that kill themselves (SIGKILL) at a named point of the step or of the save."""

import os
import shutil
import signal
import sys
import time
from collections.abc import Callable
from functools import wraps
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

import msgspec

from broker.connection.connection import Connection
from broker.flow.trainer_session import TrainerSession
from broker.weights.publication import WeightPublication
from consumers.trainer.checkpoint import store as checkpoint_store
from consumers.trainer.checkpoint.batch_files import BatchFiles
from consumers.trainer.distributed.device_turns import DeviceTurns
from consumers.trainer.distributed.offload import StateOffload
from consumers.trainer.distributed.ranks import Ranks
from consumers.trainer.rank_group import RankGroup
from consumers.trainer.service import run_trainer
from consumers.trainer.step.gradient_update import GradientUpdate
from consumers.trainer.step_log import StepLog
from deploy.export.checkpoints import replay_steps
from schemas.config import parse_config
from schemas.system.device_lock import VARIABLE, SharedGpus
from tests.support.trainer.forked_ranks import DEADLINE_S, run_in_ranks, start_ranks, wait_for_exit_codes


def _named(ending: str) -> Callable[..., bool]:
    return lambda path, *_: Path(path).name.endswith(ending)


def _committing(_: Connection, script: str, *__: Any) -> bool:
    return script == "commit_step"


def _halve(aside: Path) -> None:
    """As if the process had not got further with the files of this folder."""
    for file in aside.iterdir():
        with file.open("r+b") as stream:
            stream.truncate(file.stat().st_size // 2)


# Steps 0 to 4, checkpoints of steps 2, 4 and 5. A point of a step is that of step 3, whose predecessor is journaled and
# trained but in no checkpoint; one of a save is that of step 4.
POINTS: dict[str, tuple[Any, str, str, int, Callable[..., bool] | None]] = {
    "claimed, not in the journal": (TrainerSession, "journal_batch", "before", 4, None),
    "in the journal": (TrainerSession, "journal_batch", "after", 4, None),
    "forward": (Ranks, "backward", "before", 4, None),
    "backward": (Ranks, "backward", "after", 4, None),
    "optimizer step": (GradientUpdate, "run", "after", 4, None),
    "batch recorded": (BatchFiles, "write", "after", 4, None),
    "step in the run's log": (StepLog, "trained", "after", 4, None),
    "weights written, not sent": (RankGroup, "gather", "after", 5, None),
    "weights published": (WeightPublication, "publish", "after", 5, None),
    "slots not returned": (TrainerSession, "complete_step", "before", 4, None),
    "slots returned": (TrainerSession, "complete_step", "after", 4, None),
    "before the tensors of the checkpoint": (checkpoint_store.state_dict_saver, "save", "before", 2, None),
    "half of the tensors written": (checkpoint_store.state_dict_saver, "save", "half", 2, None),
    "tensors written": (checkpoint_store.state_dict_saver, "save", "after", 2, None),
    "state written, no marker": (checkpoint_store, "complete", "before", 2, None),
    "marker written, not renamed": (Path, "rename", "before", 2, _named(".writing")),
    "renamed": (Path, "rename", "after", 2, _named(".writing")),
    "not committed": (TrainerSession, "commit_steps", "before", 3, None),
    "half committed": (Connection, "run_script", "before", 4, _committing),
    "committed": (TrainerSession, "commit_steps", "after", 3, None),
    "old checkpoint renamed, not removed": (shutil, "rmtree", "before", 2, _named(".removing")),
    "all trained, not finished": (TrainerSession, "finish_run", "before", 1, None),
    "forward, while a checkpoint is written": (Ranks, "backward", "before", 5, None),
    "optimizer step, while a checkpoint is written": (GradientUpdate, "run", "after", 5, None),
    "weights published, while a checkpoint is written": (WeightPublication, "publish", "after", 6, None),
    "slots returned, while a checkpoint is written": (TrainerSession, "complete_step", "after", 5, None),
    "slots returned, checkpoint durable but not committed": (TrainerSession, "complete_step", "after", 5, None),
    "replayed": (GradientUpdate, "run", "after", 1, None),
}

# The first turn of a trainer that shares its device: before it gives it, there are no samples.
TURNS: dict[str, tuple[Any, str, str, int, Callable[..., bool] | None]] = {
    "state still on the device": (StateOffload, "offload", "before", 1, None),
    "state in main memory, device not given": (StateOffload, "offload", "after", 1, None),
    "device given": (DeviceTurns, "give", "after", 1, None),
    "device wanted": (DeviceTurns, "_take", "after", 3, None),
    "device taken, state in main memory": (StateOffload, "onload", "before", 1, None),
    "state on the device again": (StateOffload, "onload", "after", 1, None),
}

# A save that does not get further than this before the kill, so that a step is trained meanwhile.
HELD: dict[str, tuple[Any, str, str, int, Callable[..., bool] | None]] = {
    "forward, while a checkpoint is written": (checkpoint_store.state_dict_saver, "save", "before", 2, None),
    "optimizer step, while a checkpoint is written": (checkpoint_store.state_dict_saver, "save", "after", 2, None),
    "weights published, while a checkpoint is written": (checkpoint_store, "complete", "before", 2, None),
    "slots returned, while a checkpoint is written": (Path, "rename", "before", 2, _named(".writing")),
    "slots returned, checkpoint durable but not committed": (Path, "rename", "after", 2, _named(".writing")),
}


def start_trainer(
    data: dict[str, Any], output: Path, point: str | None = None, victim: int = 0, devices: Path | None = None
) -> list[ForkServerProcess]:
    """Start the trainer of this configuration in trainer.processes ranks, of which ``victim`` dies at ``point``.

    devices: folder of the locks, if it shares its devices with generator 0.
    """
    return start_ranks(data["trainer"].get("processes", 1), _train, data, point, victim, devices, output=output)


def run_trainer_to_its_end(
    data: dict[str, Any], output: Path, point: str | None = None, victim: int = 0, devices: Path | None = None
) -> list[int | None]:
    """``start_trainer``, and wait; the exit code of each rank, None for one that had to be killed."""
    return wait_for_exit_codes(start_trainer(data, output, point, victim, devices))


def replay_in_ranks(data: dict[str, Any], first: int, output: Path) -> str:
    """Replay a run's recorded steps in as many ranks as trained them; returns what they printed."""
    run_in_ranks(data["trainer"]["processes"], _replay, data, first, output=output)
    return output.read_text()


def _replay(data: dict[str, Any], first: int) -> None:
    sys.exit(replay_steps(parse_config(data), "", first, None))


def _train(data: dict[str, Any], point: str | None, victim: int, devices: Path | None) -> None:
    if devices is not None:
        os.environ[VARIABLE] = msgspec.json.encode(SharedGpus(str(devices), ["generator-0"])).decode()
    if point is not None and int(os.environ.get("RANK", 0)) == victim:
        _arm(*(POINTS | TURNS)[point])
        if point in HELD:
            _arm(*HELD[point], act=_stand_still)
    run_trainer(parse_config(data), "trainer")


def _die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _stand_still() -> None:
    """This thread; another one kills the process."""
    time.sleep(DEADLINE_S)


def _arm(
    owner: Any,
    name: str,
    when: str,
    times: int,
    meant: Callable[..., bool] | None,
    act: Callable[[], None] = _die,
) -> None:
    """The ``times``-th call that is ``meant`` kills this process ``before`` or ``after`` it, or with half its files."""
    real, left = getattr(owner, name), [times]

    @wraps(real)
    def kill_or_call(*args: Any, **kwargs: Any) -> Any:
        if meant is not None and not meant(*args):
            return real(*args, **kwargs)
        left[0] -= 1
        if left[0] == 0 and when == "before":
            act()
        result = real(*args, **kwargs)
        if left[0] == 0:
            if when == "half":
                _halve(Path(kwargs["checkpoint_id"]))
            act()
        return result

    setattr(owner, name, kill_or_call)
