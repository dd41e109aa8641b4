"""One process or many: accelerate around the policy, and the few sums that ranks share.

A single process needs no launcher. Under torchrun (``WORLD_SIZE`` over 1) every rank holds a shard of
each parameter (FSDP2), on GPUs over nccl and on CPUs over gloo.

Every rank calls collectives in the same order. A rank that never comes fails them after ``RANK_DEADLINE_S``; one
that dies is noticed earlier, by lifeline.py.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import timedelta
from functools import cached_property
from typing import TypeVar, cast

import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.utils import InitProcessGroupKwargs
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from consumers.trainer.distributed.channel import Channel
from consumers.trainer.distributed.watchdog import RankWatchdog
from consumers.trainer.model.policy import DTYPES
from schemas.errors import DiskError, InfraError

M = TypeVar("M", bound=nn.Module)
T = TypeVar("T")

RANK_DEADLINE_S = 1800.0
"""How long a rank waits in a collective of a step for the others, which do the same amount of work."""


class Ranks:
    """Collectives that are the identity in a single process. deadline_s: of one collective."""

    def __init__(self, deadline_s: float = RANK_DEADLINE_S) -> None:
        patience = InitProcessGroupKwargs(timeout=timedelta(seconds=deadline_s))
        self.accelerator = Accelerator(cpu=not torch.cuda.is_available(), kwargs_handlers=[patience])
        self.world: int = self.accelerator.num_processes
        self.rank: int = self.accelerator.process_index

    @property
    def is_main(self) -> bool:
        """Whether this rank talks to the broker and writes files that are not sharded."""
        return self.rank == 0

    def lifeline(self) -> AbstractContextManager[object]:
        """Around all that ranks do together, so that none outlives another; nothing in a single process."""
        if self.world == 1:
            return nullcontext()
        # Where the launcher says that rank 0 can be reached.
        return RankWatchdog(self.rank, self.world, self.channel, os.environ.get("MASTER_ADDR", "localhost"))

    @cached_property
    def channel(self) -> Channel:
        """For commands. Every rank must come here first at the same point."""
        return Channel()

    @cached_property
    def aside(self) -> Channel:
        """For what the ranks do together in another thread, while they train. Used like ``channel``."""
        return Channel()

    @contextmanager
    def together(self, what: str, kind: type[InfraError] = DiskError, channel: Channel | None = None) -> Iterator[None]:
        """A part that every rank does: when the disk fails it on one, ``what`` is an error of this kind on all.

        channel: ``aside`` when this is done there.
        """
        problem, cause = "", None
        try:
            yield
        except (OSError, CheckpointException) as error:
            problem, cause = reason(error), error
        if self.world > 1:
            problem = self._share(problem, channel or self.channel)
        if problem:
            raise kind(f"{what}: {problem}") from cause

    def _share(self, problem: str, channel: Channel) -> str:
        """All ranks' problems, each once; "" when there is none."""
        if not self.is_main:
            channel.send(0, problem.encode())
            return channel.receive(0).decode()
        others = [channel.receive(rank).decode() for rank in range(1, self.world)]
        shared = "; ".join(dict.fromkeys(text for text in (problem, *others) if text))
        for rank in range(1, self.world):
            channel.send(rank, shared.encode())
        return shared

    def agree(self, text: str = "") -> str:
        """What rank 0 says, on every rank."""
        if not self.is_main:
            return self.channel.receive(0).decode()
        for rank in range(1, self.world):
            self.channel.send(rank, text.encode())
        return text

    def share(self, rows: Sequence[T]) -> tuple[list[T], list[float]]:
        """This rank's part of what all ranks have, and its weights. All parts are of the same length.

        What is missing for that is the first row again, with weight 0: every rank has as much to compute.
        """
        places = range(self.rank, -(-len(rows) // self.world) * self.world, self.world)
        return [rows[i] if i < len(rows) else rows[0] for i in places], [float(i < len(rows)) for i in places]

    def prepare(self, model: M, dtype: str = "float32") -> M:
        """Move a model to its device, sharded layer by layer over the ranks, computing in ``dtype``.

        Its parameters stay in the type they have; gradients are reduced in float32. A single rank shards over
        itself when it computes in another type, so that it computes what several do.
        """
        if self.world == 1 and dtype == "float32":
            return cast(M, self.accelerator.prepare(model))
        if not dist.is_initialized():
            backend = "nccl" if self.accelerator.device.type == "cuda" else "gloo"
            dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]
        # PyTorch's own call and not accelerate's: that takes the optimizer too, and on the CPU it picks
        # plain data parallelism whatever plugin it is given.
        model = model.to(self.accelerator.device)
        mesh = init_device_mesh(self.accelerator.device.type, (self.world,))
        precision = MixedPrecisionPolicy(param_dtype=DTYPES[dtype], reduce_dtype=torch.float32)
        layers = {name for module in model.modules() for name in getattr(module, "_no_split_modules", None) or ()}
        for module in model.modules():
            if module is not model and type(module).__name__ in layers:
                fully_shard(module, mesh=mesh, mp_policy=precision)
        fully_shard(model, mesh=mesh, mp_policy=precision)
        return model

    def backward(self, loss: Tensor) -> None:
        """Backward of this rank's part of a sum over ranks: sharding averages gradients, so undo that."""
        self.accelerator.backward(loss * self.world if self.world > 1 else loss)

    def clip_grad_norm(self, parameters: Iterable[nn.Parameter], limit: float) -> float:
        """Scale all gradients so that their global norm is at most ``limit``; returns the norm before."""
        norm = torch.nn.utils.clip_grad_norm_(list(parameters), limit)
        return float(norm.full_tensor() if isinstance(norm, DTensor) else norm)

    def add(self, values: Sequence[float]) -> list[float]:
        """Element-wise sum over ranks."""
        return self._reduce(values, dist.ReduceOp.SUM)

    def most(self, values: Sequence[float]) -> list[float]:
        """Element-wise maximum over ranks."""
        return self._reduce(values, dist.ReduceOp.MAX)

    def _reduce(self, values: Sequence[float], operation: dist.ReduceOp.RedOpType) -> list[float]:
        if self.world == 1:
            return [float(v) for v in values]
        packed = torch.tensor(values, dtype=torch.float64, device=self.accelerator.device)
        dist.all_reduce(packed, operation)
        return [float(v) for v in packed.tolist()]


def reason(error: BaseException) -> str:
    """What went wrong, in one line; a distributed checkpoint hides it under a failure per rank."""
    if isinstance(error, CheckpointException):
        return "; ".join(dict.fromkeys(str(failure[0]) for failure in error.failures.values()))
    return str(error)
