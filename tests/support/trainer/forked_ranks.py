"""The ranks of a trainer as real processes, without torchrun.

They are forked from a process that has loaded PyTorch and the trainer already, so that each takes a second and not ten.
"""

import multiprocessing
import os
from collections.abc import Callable, Sequence
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

import torch

from tests.support.runs.programs import free_port
from tools.turns.walk import PRELOAD

DEADLINE_S = 300

_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(
    [
        "pytest",
        "peft",
        "tests.support.trainer.initial_weights",
        "tests.support.trainer.killed_trainers",
        "tests.support.trainer.parallel_layouts",
        "tests.support.trainer.parallel_steps",
        "tests.support.trainer.sharded_steps",
        "tests.support.trainer.sharded_algorithms",
        "tests.support.trainer.sized_steps",
        *PRELOAD,
    ]
)


def start_ranks(count: int, main: Callable[..., object], *arguments: Any, output: Path) -> list[ForkServerProcess]:
    """Start ``main(*arguments)`` in ``count`` processes; what they print is appended to the file ``output``.

    Two and more have the environment that torchrun gives to ranks on the CPU of one machine; a single one has none.
    """
    port = free_port()
    ranks = [
        _context.Process(target=_run_rank, args=(rank, count, port, output, main, arguments)) for rank in range(count)
    ]
    for process in ranks:
        process.start()
    return ranks


def wait_for_exit_codes(ranks: Sequence[ForkServerProcess]) -> list[int | None]:
    """Wait until all have ended; None for one that had to be killed, because it did not."""
    codes: list[int | None] = []
    for process in ranks:
        process.join(DEADLINE_S)
        codes.append(process.exitcode)
        if process.exitcode is None:
            process.kill()
            process.join()
    return codes


def run_in_ranks(count: int, main: Callable[..., object], *arguments: Any, output: Path) -> None:
    """``start_ranks``, and wait; fails with the end of what they printed unless all end well."""
    codes = wait_for_exit_codes(start_ranks(count, main, *arguments, output=output))
    assert codes == [0] * count, f"{codes}: {output.read_text()[-3000:]}"


def _run_rank(
    rank: int, count: int, port: int, output: Path, main: Callable[..., object], arguments: Sequence[Any]
) -> None:
    stream = os.open(output, os.O_CREAT | os.O_WRONLY | os.O_APPEND)
    os.dup2(stream, 1)
    os.dup2(stream, 2)
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    if count > 1:
        names = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": count, "LOCAL_WORLD_SIZE": count, "MASTER_PORT": port}
        os.environ.update({name: str(value) for name, value in names.items()}, MASTER_ADDR="127.0.0.1")
        torch.set_num_threads(1)
    main(*arguments)
