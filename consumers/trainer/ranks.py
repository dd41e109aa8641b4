"""One process or many: accelerate around the policy, and the few sums that ranks share.

A single process needs no launcher. Under torchrun (``WORLD_SIZE`` over 1) every rank holds a shard of
each parameter (FSDP2), on GPUs over nccl and on CPUs over gloo.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import cast

import torch
import torch.distributed as dist
from accelerate import Accelerator
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from consumers.trainer.aggregation import Totals
from consumers.trainer.policy import Policy


class Ranks:
    """Collectives that are the identity in a single process. Every rank calls each in the same order."""

    def __init__(self) -> None:
        cpu = not torch.cuda.is_available()
        self.accelerator = Accelerator(cpu=cpu)
        self.world = self.accelerator.num_processes
        self.rank = self.accelerator.process_index

    @property
    def is_main(self) -> bool:
        """Whether this rank talks to the broker and writes files that are not sharded."""
        return self.rank == 0

    def prepare(self, policy: Policy) -> Policy:
        """Move the policy to its device, sharded layer by layer when there are several ranks."""
        if self.world == 1:
            return cast(Policy, self.accelerator.prepare(policy))
        # PyTorch's own call and not accelerate's: that takes the optimizer too, and on the CPU it picks
        # plain data parallelism whatever plugin it is given.
        policy = policy.to(self.accelerator.device)
        mesh = init_device_mesh(self.accelerator.device.type, (self.world,))
        layers = set(policy.causal_lm._no_split_modules or ())
        for module in policy.modules():
            if type(module).__name__ in layers:
                fully_shard(module, mesh=mesh)
        fully_shard(policy, mesh=mesh)
        return policy

    def wait(self) -> None:
        """Return when every rank has come here."""
        self.accelerator.wait_for_everyone()

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

    def totals(self, own: Totals) -> Totals:
        """Counts of the whole step from those of this rank."""
        tokens, sequences, groups = self.add([own.tokens, own.sequences, own.groups])
        return Totals(int(tokens), int(sequences), int(groups), own.max_tokens)

    def _reduce(self, values: Sequence[float], operation: dist.ReduceOp.RedOpType) -> list[float]:
        if self.world == 1:
            return [float(v) for v in values]
        packed = torch.tensor(values, dtype=torch.float64, device=self.accelerator.device)
        dist.all_reduce(packed, operation)
        return [float(v) for v in packed.tolist()]
