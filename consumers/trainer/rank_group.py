"""All ranks of one trainer as one object: rank 0 calls, the others follow its commands.

All ranks compute with, gather, save and load a sharded model at once. Rank 0 alone knows the broker and what comes
next; it sends every other rank a command with all that the rank needs, and takes part itself.
"""

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from functools import partial
from pathlib import Path
from typing import Any, Literal, TypeAlias

import msgspec
import numpy as np
import numpy.typing as npt
import structlog

from consumers.trainer.checkpoint.compare import Comparison, compare
from consumers.trainer.checkpoint.store import CheckpointStore, Restored
from consumers.trainer.data.collate import collate
from consumers.trainer.data.groups import Group
from consumers.trainer.data.plan import StepBatch
from consumers.trainer.data.rows import TrainRow
from consumers.trainer.distributed.device_turns import DeviceTurns
from consumers.trainer.distributed.offload import StateOffload
from consumers.trainer.distributed.ranks import reshard
from consumers.trainer.metrics.timing import StepTimer, traced
from consumers.trainer.model.hf_weights import save_model
from consumers.trainer.model.probe import reference_logprobs
from consumers.trainer.model.snapshot import Snapshot, Snapshots
from consumers.trainer.step.learner import Learner, StepResult
from schemas.config import TidemillConfig
from schemas.errors import InfraError

SAVE_DEADLINE_S = 3600.0
"""Seconds that the writing of a checkpoint may take."""

log = structlog.get_logger()


class Train(msgspec.Struct, tag="train"):
    """Take an optimizer step over this rank's micro-batches; trace: folder for a profile of it, or nothing.

    lr, steps: as in ``RankGroup.train``. images: bytes by digest. updates: how many micro-batches each minibatch has.
    """

    version: int
    micro_batches: list[list[TrainRow]]
    trace: str
    lr: float
    steps: int
    images: dict[str, bytes] = {}
    updates: Sequence[int] = ()


class Gather(msgspec.Struct, tag="gather"):
    """Write the weights into a file, and score the probe's tokens with them. mark: see Snapshots.create."""

    tokens: list[int]
    file: str
    mark: str


class Save(msgspec.Struct, tag="save"):
    """Write a checkpoint."""

    step: int
    version: int
    leader_term: int


class Act(msgspec.Struct, tag="act"):
    """Call the method of RankGroup of this name. path: of a checkpoint that rank 0 has found whole, or a folder."""

    name: Literal["load", "export", "compare", "offload", "onload"]
    path: str = ""


class Dismiss(msgspec.Struct, tag="dismiss"):
    """End. finished: whether the run is; else the trainer ends, and is started again to resume it."""

    finished: bool


Command: TypeAlias = Train | Gather | Save | Act | Dismiss
_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[Command] = msgspec.msgpack.Decoder(Command)


class RankGroup:
    """All ranks of one trainer, which make steps, snapshots and checkpoints together; all but rank 0 ``follow``."""

    def __init__(
        self, config: TidemillConfig, step: Learner, turns: DeviceTurns | None = None, timer: StepTimer | None = None
    ) -> None:
        """Join this rank. turns: on GPUs that generators share, held already. timer: of the step, for hand-overs."""
        self.step = step
        self.ranks = step.ranks
        checkpoint = config.trainer.checkpoint
        self.checkpoint_store = CheckpointStore(config.folder / "checkpoints", checkpoint.keep, checkpoint.keep_best)
        self._asynchronous = checkpoint.asynchronous
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._writing: Future[Path] | None = None
        self._profiles: dict[int | None, Path] = {
            step: config.folder / "profiles" / f"step-{step:08d}" for step in config.trainer.profile_steps
        }
        self._dtype = config.model.dtype
        self._snapshots = Snapshots(step.policy, self._dtype, self.ranks)
        self._publisher = ThreadPoolExecutor(1, thread_name_prefix="snapshot")
        self._snapshot: Snapshot | None = None
        parts = step.parts().values()
        models = [*(model for model, _ in parts), *step.frozen()]
        self.state = StateOffload(step.policy.device, models, [update.optimizer for _, update in parts])
        self._turns = turns
        self._timer = timer or StepTimer()
        step.update.optimizer.register_step_pre_hook(lambda *_: self._wait_copied())

    def train(
        self,
        groups: Sequence[Group],
        version: int,
        step: int | None = None,
        lr: float | None = None,
        steps: int | None = None,
    ) -> StepResult:
        """Take an optimizer step over groups, dealt to the ranks; ``version`` is that of the weights before it.

        step: its number, by which trainer.profile_steps names it. lr, steps: peak learning rate and steps of the run
        from now on; as before by default.
        """
        trace = self._profiles.get(step)
        schedule = self.step.schedule
        schedule.lr, schedule.steps = lr or schedule.lr, steps or schedule.steps
        self.hold()
        plan = self.step.planner.plan(groups)
        settings = (str(trace or ""), schedule.lr, schedule.steps)
        for rank in range(1, self.ranks.world):
            part = self.ranks.layout.dp_rank_of(rank)
            self._send(rank, Train(version, plan.share(part), *settings, plan.files(part), plan.deal.updates))
        return self._run_step(plan.batch(self.ranks.dp_rank), version, trace)

    def gather(self, tokens: Sequence[int], file: Path) -> tuple[Snapshot, npt.NDArray[np.float32]]:
        """Take the weights, which ``Snapshot.fill`` must still write into ``file``; OSError if the file can't be made.

        The array has the log-probabilities of all ``tokens`` but the first. The next optimizer step waits for ``fill``.
        """
        self.hold()
        mark = Snapshots.create(file)
        self._send_to_all(Gather(list(tokens), str(file), mark))
        return self._gather(tokens, file, mark)

    def _gather(self, tokens: Sequence[int], file: Path, mark: str) -> tuple[Snapshot, npt.NDArray[np.float32]]:
        self._snapshot = snapshot = self._snapshots.take(file, mark)
        logprobs = reference_logprobs(self.step.policy, tokens)
        reshard(self.step.policy)
        return snapshot, logprobs

    def save(
        self, *, step: int, version: int, leader_term: int, extra: dict[str, Any], evaluated: bool = False
    ) -> None:
        """Begin a checkpoint of the current state, see CheckpointStore; call ``wait_saved`` before the next one.

        With trainer.checkpoint.asynchronous, training continues meanwhile. evaluated: see ``CheckpointStore.take``.
        """
        self.hold()
        self._send_to_all(Save(step, version, leader_term))
        taken = self.checkpoint_store.take(
            self.step,
            step=step,
            version=version,
            leader_term=leader_term,
            extra=extra,
            copy=self._asynchronous,
            evaluated=evaluated,
        )
        self._writing = self._writer.submit(self.checkpoint_store.write, taken)
        if not self._asynchronous:
            wait([self._writing], SAVE_DEADLINE_S)

    @property
    def saving(self) -> bool:
        """Whether a checkpoint is being written."""
        return self._writing is not None and not self._writing.done()

    def wait_saved(self) -> None:
        """Wait until the checkpoint that was begun is durable; its error is raised here, once."""
        writing, self._writing = self._writing, None
        if writing is None:
            return
        try:
            writing.result(SAVE_DEADLINE_S)
        except TimeoutError as error:
            raise InfraError(f"a checkpoint was not written within {SAVE_DEADLINE_S:.0f} s") from error

    def load(self, path: Path) -> Restored:
        """Load a checkpoint on all ranks."""
        self.hold()
        self._send_to_all(Act("load", str(path)))
        self._wait_copied()
        return self.checkpoint_store.load(path, self.step)

    def export(self, folder: Path) -> None:
        """Write the policy as a Hugging Face model; all ranks take part."""
        self.hold()
        self._send_to_all(Act("export", str(folder)))
        with self.ranks.on_all_ranks(f"cannot write the model {folder}"):
            save_model(self.step.policy, folder, self._dtype, self.ranks)

    def compare(self, path: Path) -> Comparison:
        """Compare all ranks' state with a checkpoint."""
        self.hold()
        self._send_to_all(Act("compare", str(path)))
        return compare(self.step, path)

    def hold(self) -> None:
        """Take the shared GPUs, unless the trainer has them; whatever needs the state of training calls this first."""
        turns = self._turns
        if turns is None or not self.ranks.is_main:
            return
        turns.rule.compute()
        if not turns.holding:
            turns.rule.held(self._hand_over(self.onload))

    def give_if_due(self) -> None:
        """Give shared GPUs to generators if that is worth the hand-over; called again and again while rank 0 waits."""
        turns = self._turns
        if turns is not None and turns.holding and turns.rule.due(time.monotonic()):
            turns.rule.gave(self._hand_over(self.offload))

    def _hand_over(self, act: Callable[[], None]) -> float:
        started = time.monotonic()
        with self._timer.phase("hand_over"):
            act()
        return time.monotonic() - started

    def offload(self) -> None:
        """Move all ranks' state to main memory, and give shared GPUs away; until ``onload`` call nothing else."""
        self._send_to_all(Act("offload"))
        self._wait_copied()
        if self._writing is not None and not self._asynchronous:
            wait([self._writing], SAVE_DEADLINE_S)
        if (turns := self._turns) is not None:
            with turns.clock.measure("offload"):
                self.state.offload()
            turns.give()

    def onload(self) -> None:
        """Take shared GPUs from generators, and move the state back, on all ranks."""
        self._send_to_all(Act("onload"))
        if (turns := self._turns) is not None:
            with turns.clock.measure("wait"):
                turns.hold()
            with turns.clock.measure("onload"):
                self.state.onload()

    def dismiss(self, finished: bool = True) -> None:
        """End the work of the other ranks. finished: whether the run is."""
        self._send_to_all(Dismiss(finished))
        self._shut_down()

    def _shut_down(self) -> None:
        self._writer.shutdown()
        self._publisher.shutdown()

    def follow(self) -> bool:
        """Execute the commands of rank 0, until it dismisses this rank; returns whether the run is finished."""
        while True:
            command = _decoder.decode(self.ranks.channel.receive(0))
            if isinstance(command, Dismiss):
                self._shut_down()
                return command.finished
            if isinstance(command, Act) and not command.path:
                # A rank whose state is not where rank 0 believes it to be must end.
                self._execute(command)
                continue
            if isinstance(command, Save) or not self.saving:
                self._attempt(self.wait_saved)
            self._attempt(partial(self._execute, command))

    def _attempt(self, act: Callable[[], None]) -> None:
        try:
            act()
        except InfraError as error:
            # Every rank has the same error; rank 0 decides what comes next.
            log.warning("rank 0 decides", error=str(error))

    def _execute(self, command: Command) -> None:
        if isinstance(command, Train):
            self.step.schedule.lr, self.step.schedule.steps = command.lr, command.steps
            images = self.step.planner.files(command.images)
            batch = StepBatch([collate(rows, images) for rows in command.micro_batches], updates=command.updates)
            self._run_step(batch, command.version, Path(command.trace) if command.trace else None)
        elif isinstance(command, Gather):
            snapshot, _ = self._gather(command.tokens, Path(command.file), command.mark)
            self._publisher.submit(snapshot.fill)
        elif isinstance(command, Save):
            self.save(step=command.step, version=command.version, leader_term=command.leader_term, extra={})
        elif isinstance(command, Act):
            getattr(self, command.name)(*([Path(command.path)] if command.path else []))

    def _wait_copied(self) -> None:
        snapshot, self._snapshot = self._snapshot, None
        if snapshot is not None:
            snapshot.wait()

    def _run_step(self, batch: StepBatch, version: int, trace: Path | None) -> StepResult:
        with traced(trace / f"rank-{self.ranks.rank}.json" if trace else None):
            return self.step.run(batch, version=version)

    def _send_to_all(self, command: Command) -> None:
        for rank in range(1, self.ranks.world):
            self._send(rank, command)

    def _send(self, rank: int, command: Command) -> None:
        if self.ranks.is_main:
            self.ranks.channel.send(rank, _encoder.encode(command))
