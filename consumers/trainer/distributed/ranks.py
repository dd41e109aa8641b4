"""The processes of one trainer: sharded models, and the few collectives of numbers and errors between them.

A single process needs no launcher. Under torchrun (``WORLD_SIZE`` over 1) every rank holds a shard of
each parameter (FSDP2), on GPUs over nccl and on CPUs over gloo; with trainer.parallel it holds a shard of its part of
each layer, and computes its part of the tokens (layout.py).

Every rank calls collectives in the same order. A rank that never comes fails them after ``COLLECTIVE_TIMEOUT_S``; one
that dies is noticed earlier, by watchdog.py.
"""

import json
import math
import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import timedelta
from functools import cached_property, partial
from typing import Any, Self, TypeVar, cast

import structlog
import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.utils import InitProcessGroupKwargs
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from consumers.trainer.distributed.channel import Channel
from consumers.trainer.distributed.initial_weights import InitialWeights
from consumers.trainer.distributed.layout import Layout
from consumers.trainer.distributed.network import choose_interface
from consumers.trainer.distributed.parts import ParallelModule, Part
from consumers.trainer.distributed.precision import in_full_precision, is_quantised, language_model_of
from consumers.trainer.distributed.tensor_parallel import cut_layers
from consumers.trainer.distributed.watchdog import RankWatchdog
from schemas.config import ParallelConfig, TrainerConfig
from schemas.errors import ConfigError, DiskError, InfraError
from schemas.system.lifecycle import StopFlag

M = TypeVar("M", bound=nn.Module)
T = TypeVar("T")

COLLECTIVE_TIMEOUT_S = 1800.0
"""Seconds that a rank waits in a collective of a step for the others, which do the same amount of work."""

_NOT_OF_TRAINING = ("ACCELERATE_USE_CPU", "ACCELERATE_TORCH_DEVICE", "ACCELERATE_LOG_LEVEL")
"""Settings of accelerate that change no number, and may stay."""

log = structlog.get_logger()


class Ranks:
    """All ranks of a trainer, seen from this rank; collectives are the identity in a single process.

    rank, world: this process in the process group, and how many there are. layout: how they share the model. dp_rank,
    dp_size: which part of a batch this rank trains, and in how many parts it is cut.
    """

    def __init__(self, timeout_s: float = COLLECTIVE_TIMEOUT_S, parallel: ParallelConfig | None = None) -> None:
        """Join the process group; ConfigError if ``parallel`` does not fit it. timeout_s: deadline of collectives."""
        choose_interface()
        process_group = InitProcessGroupKwargs(timeout=timedelta(seconds=timeout_s))
        with _own_settings():
            self.accelerator = Accelerator(cpu=not torch.cuda.is_available(), kwargs_handlers=[process_group])
        self.world: int = self.accelerator.num_processes
        self.rank: int = self.accelerator.process_index
        self.layout = Layout.of(self.world, parallel or ParallelConfig())
        self._gradient_parts = self.layout.gradient_parts
        self.dp_size = self.layout.dp_size
        self.dp_rank = self.layout.dp_rank_of(self.rank)

    @classmethod
    def of(cls, trainer: TrainerConfig) -> Self:
        """Join the ranks that the configuration names, computing with its ``threads``."""
        if trainer.threads:
            torch.set_num_threads(trainer.threads)
        return cls(trainer.rank_deadline_s, trainer.parallel)

    @cached_property
    def mesh(self) -> DeviceMesh:
        """The ranks as a mesh. Every rank must use this, and what is made of it, first at the same point."""
        layout, device = self.layout, self.accelerator.device.type
        sizes = (layout.replicate, layout.shard, layout.context, layout.tensor)
        return init_device_mesh(device, sizes, mesh_dim_names=("replicate", "shard", "context", "tensor"))

    @cached_property
    def _data_group(self) -> dist.ProcessGroup:
        """The ranks that have each another data part, one of every part."""
        return self.mesh["replicate", "shard"]._flatten("data").get_group()

    @cached_property
    def _sharding_mesh(self) -> DeviceMesh:
        """The ranks over which parameters are sharded; with copies, those beside them as the first dimension."""
        mesh, copies = self.mesh, self.layout.replicate > 1
        if self.layout.context == 1:
            return mesh["replicate", "shard"] if copies else mesh["shard"]
        flat = mesh["shard", "context"]._flatten("sharded")
        return mesh["replicate", "sharded"] if copies else flat

    def _part(self, name: str) -> Part | None:
        """Return this rank's place in a dimension of the mesh; None if the dimension has one rank."""
        mesh = self.mesh[name]
        return Part(mesh.get_group(), mesh.get_local_rank(), mesh.size()) if mesh.size() > 1 else None

    @property
    def is_main(self) -> bool:
        """True on the rank that talks to the broker and writes files that are not sharded."""
        return self.rank == 0

    def watchdog(self, stop: StopFlag | None = None) -> AbstractContextManager[object]:
        """Return a context in which no rank outlives another. stop: set on rank 0 once it is set on any rank."""
        if self.world == 1:
            return nullcontext()
        # The address of rank 0 that the launcher gives.
        return RankWatchdog(self.rank, self.world, self.channel, os.environ.get("MASTER_ADDR", "localhost"), stop)

    @cached_property
    def channel(self) -> Channel:
        """The channel for commands. Every rank must use it first at the same point."""
        return Channel()

    @cached_property
    def background_channel(self) -> Channel:
        """A second channel, for what the ranks do together in another thread while they train."""
        return Channel()

    @cached_property
    def snapshot_channel(self) -> Channel:
        """A third channel, for the weights that are written at the same time as a checkpoint."""
        return Channel()

    @contextmanager
    def on_all_ranks(
        self, what: str, kind: type[InfraError] = DiskError, channel: Channel | None = None
    ) -> Iterator[None]:
        """Enclose work on files that every rank does: if it fails on one, all raise ``kind`` with the text ``what``.

        channel: ``background_channel`` if this is done in another thread than training.
        """
        problem, cause = "", None
        try:
            yield
        except (OSError, CheckpointException) as error:
            problem, cause = reason(error), error
        if self.world > 1:
            problem = self._gather_problems(problem, channel or self.channel)
        if problem:
            raise kind(f"{what}: {problem}") from cause

    def _gather_problems(self, problem: str, channel: Channel) -> str:
        if self.is_main:
            others = [channel.receive(rank).decode() for rank in range(1, self.world)]
            problem = "; ".join(dict.fromkeys(text for text in (problem, *others) if text))
        else:
            channel.send(0, problem.encode())
        return self.broadcast_text(problem, channel)

    def broadcast_text(self, text: str, channel: Channel | None = None) -> str:
        """Send the ``text`` of rank 0 to every rank, and return it there."""
        if not self.is_main:
            return (channel or self.channel).receive(0).decode()
        for rank in range(1, self.world):
            (channel or self.channel).send(rank, text.encode())
        return text

    def local_share(self, rows: Sequence[T]) -> tuple[list[T], list[float]]:
        """Return this rank's part of rows, and weights: 1, or 0 for a first row that fills up a shorter part."""
        places = range(self.dp_rank, -(-len(rows) // self.dp_size) * self.dp_size, self.dp_size)
        return [rows[i] if i < len(rows) else rows[0] for i in places], [float(i < len(rows)) for i in places]

    def prepare(
        self, model: M, dtype: torch.dtype = torch.float32, kept: torch.dtype | None = None, reshard: bool = True
    ) -> M:
        """Move a model to its device, cut and sharded layer by layer over the ranks, computing in ``dtype``.

        The weights are those of rank 0; on the others it may have none (``load_model`` with ``empty``). Its parameters
        stay in the type they have, or get the type ``kept`` if several ranks share it; gradients are reduced in
        float32. A single rank shards over itself if it computes in another type, so that it computes what several do.
        reshard: whether a layer's gathered weights are freed between its forward and its backward pass. ConfigError if
        the model cannot be cut as trainer.parallel says.
        """
        if self.world == 1 and dtype == torch.float32:
            return model.to(self.accelerator.device)
        if not dist.is_initialized():
            on_gpu = self.accelerator.device.type == "cuda"
            if on_gpu:
                # Else PyTorch chooses one for the mesh, and warns.
                torch.accelerator.set_device_index(self.accelerator.device.index or 0)
            backend = "nccl" if on_gpu else "gloo"
            dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]
        # PyTorch's own call and not accelerate's: that takes the optimizer too, and on the CPU it picks
        # plain data parallelism with any plugin.
        weights = self._take_weights(model, kept) if self.world > 1 else None
        self._cut(model)
        mesh = self._sharding_mesh
        precision = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
        exact = set(in_full_precision(model)) if dtype != torch.float32 else set()
        # Weights in 4 bits, which are on the device, are read by their own kernels.
        share = partial(fully_shard, mesh=mesh, ignored_params={p for p in model.parameters() if is_quantised(p)})
        layers = {name for module in model.modules() for name in getattr(module, "_no_split_modules", None) or ()}
        for module in model.modules():
            if module is not model and type(module).__name__ in layers:
                if weights is not None:
                    weights.fill(module, self.accelerator.device)
                for inner in (each for each in module.modules() if each in exact):
                    in_full = MixedPrecisionPolicy(cast_forward_inputs=False)
                    share(inner, mp_policy=in_full, reshard_after_forward=reshard)
                share(module, mp_policy=precision, reshard_after_forward=reshard)
        if weights is not None:
            weights.fill(model, self.accelerator.device)
        share(model, mp_policy=precision)
        return model

    def _take_weights(self, model: nn.Module, kept: torch.dtype | None) -> InitialWeights:
        """Take the weights out of a model, and let all ranks know what rank 0 has found out about it with them."""
        weights = InitialWeights(model, self.is_main, kept)
        weights.agree(self.broadcast_text(weights.described))
        if isinstance(model, ParallelModule):
            tried = json.dumps(model.tried) if self.is_main else ""
            model.adopt(json.loads(self.broadcast_text(tried)))
        return weights

    def _cut(self, model: nn.Module) -> None:
        """Cut the layers of a model over the ranks of tensor, and tell it with which ranks it shares tokens."""
        if self.layout.tensor > 1:
            cut_layers(cast(Any, language_model_of(model)), self.mesh["tensor"], experts_whole=self.layout.expert > 1)
        if self.layout.context > 1 and not (isinstance(model, ParallelModule) and model.packed):
            raise ConfigError(
                f"trainer.parallel.context {self.layout.context}: {type(model).__name__} cannot be computed with packed"
                " sequences, whose tokens would be cut; set it to 1"
            )
        if isinstance(model, ParallelModule):
            model.context, model.tensor = self._part("context"), self._part("tensor")

    def backward(self, loss: Tensor) -> None:
        """Run backward from this rank's part of a sum over data parts, and undo that sharding averages gradients."""
        (loss * self._gradient_parts if self._gradient_parts > 1 else loss).backward()

    def clip_grad_norm(self, parameters: Iterable[nn.Parameter], limit: float) -> float:
        """Scale gradients to a global norm of at most ``limit``; return the norm before, bit-identical on all ranks."""
        gradients = [p.grad for p in parameters if p.grad is not None]
        local = [local_part(gradient) for gradient in gradients]
        squares = torch.stack(torch._foreach_norm(local)).double().square().tolist() if local else []
        # A piece that several ranks hold counts once.
        shares = (square / self._copies(gradient) for square, gradient in zip(squares, gradients, strict=True))
        norm = math.sqrt(self.sum_over_ranks([sum(shares)])[0])
        if not norm <= limit:
            torch._foreach_mul_(local, limit / (norm + 1e-6))
        return norm

    def _copies(self, tensor: Tensor) -> int:
        """Count the ranks that hold the same piece of a tensor as this one."""
        if not isinstance(tensor, DTensor):
            return self.world
        cut = (tensor.device_mesh.size(dim) for dim, how in enumerate(tensor.placements) if not how.is_replicate())
        return self.world // math.prod(cut)

    def all_reduce_sum(self, values: Sequence[float]) -> list[float]:
        """Sum element-wise over data parts; the ranks of a part hold the same values."""
        return self._all_reduce(values, dist.ReduceOp.SUM, data=True)

    def sum_over_ranks(self, values: Sequence[float]) -> list[float]:
        """Sum element-wise over all ranks, also those that train the same samples."""
        return self._all_reduce(values, dist.ReduceOp.SUM)

    def all_reduce_max(self, values: Sequence[float]) -> list[float]:
        """Return the element-wise maximum over all ranks. All of them call it, with equally many values."""
        return self._all_reduce(values, dist.ReduceOp.MAX)

    def any(self, this: bool) -> bool:
        """Return whether ``this`` is true on any rank. All ranks call it."""
        return bool(self.all_reduce_max([float(this)])[0])

    def _all_reduce(
        self, values: Sequence[float], operation: dist.ReduceOp.RedOpType, data: bool = False
    ) -> list[float]:
        if self.world == 1:
            return [float(v) for v in values]
        packed = torch.tensor(values, dtype=torch.float64, device=self.accelerator.device)
        dist.all_reduce(packed, operation, group=self._data_group if data else None)
        return [float(v) for v in packed.tolist()]


def reshard(model: nn.Module) -> None:
    """Free gathered weights that a forward pass without backward has left, before a step changes their parts."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def local_part(tensor: Tensor) -> Tensor:
    """Return this rank's part of a tensor, without a copy; all of one that is not sharded."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


@contextmanager
def _own_settings() -> Iterator[None]:
    """Keep from accelerate what ``accelerate launch`` or a user's shell has set: the configuration decides alone.

    Some of it would change gradients: a precision, a number of steps to accumulate, a compiler, a sharding.
    """
    names = [name for name in os.environ if name.startswith("ACCELERATE_") and name not in _NOT_OF_TRAINING]
    ignored = {name: os.environ.pop(name) for name in names}
    if ignored:
        log.warning("settings of accelerate are ignored", names=sorted(ignored))
    try:
        yield
    finally:
        os.environ.update(ignored)


def reason(error: BaseException) -> str:
    """Return the reason of an error in one line; a distributed checkpoint has one for each rank."""
    if isinstance(error, CheckpointException):
        return "; ".join(dict.fromkeys(str(failure[0]) for failure in error.failures.values()))
    return str(error)
