"""Durable checkpoints: a folder ``step-00000100-t0003`` appears whole, and is checked before it is trusted.

The newest checkpoint is that of the highest leader term, then of the highest step: what a replaced trainer still writes
never wins.

A checkpoint is written aside, from a copy of the state during training, flushed, completed by a marker with the
size and digest of every file, and then renamed. Model and optimizer go through torch.distributed.checkpoint, sharded or
not; the rest is JSON. Every rank writes its part, so all of them need the same folder. Loading ends in the same state
bit for bit: the next step is that of ranks which never stopped.
"""

import json
import pickle
import re
import shutil
import warnings
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeAlias

from torch.distributed import is_initialized
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.api import CheckpointException

from consumers.trainer.checkpoint.blocks import LoadPlanner, SavePlanner
from consumers.trainer.checkpoint.files import complete, damage, note_digests, refuse_older_names, write_json
from consumers.trainer.checkpoint.reader import SafeReader
from consumers.trainer.checkpoint.state import copy_tensors, put_tensors, random_states, set_random_states, tensors_of
from consumers.trainer.distributed.channel import Channel
from consumers.trainer.distributed.ranks import Ranks, reason
from consumers.trainer.model.lora import check_same, describe
from consumers.trainer.records.evaluation_log import best_versions, read_evaluations
from consumers.trainer.step.gradient_update import LossScale
from consumers.trainer.step.learner import Learner
from schemas.errors import ConfigError, InfraError
from schemas.run_folder import EVALUATIONS
from schemas.system.files import make_folder

_STATE = "state.json"
_FORMAT = 1
MOST_PENDING = 2
"""Checkpoints of versions whose evaluation has not ended that are kept with trainer.checkpoint.keep_best."""
_ASIDE = re.compile(r"\.step-\d{8,}-t(\d{4,})\.(?:writing|removing)")
_NAME = re.compile(r"step-(\d{8,})-t(\d{4,})")


WantedStep: TypeAlias = int | Literal["best"] | None
"""Which checkpoint: of a step, of the version with the best evaluation, or the newest."""


@dataclass(frozen=True)
class Taken:
    """The training state of a moment on a rank, and the folder that its checkpoint gets."""

    path: Path
    tensors: dict[str, Any]
    random: dict[str, Any]
    state: dict[str, Any]
    ranks: Ranks
    channel: Channel | None


@dataclass(frozen=True)
class Restored:
    """What a checkpoint has beside tensors. difference: a line if only it, or only the configuration, has a critic."""

    step: int
    version: int
    extra: dict[str, Any]
    difference: str = ""


class CheckpointStore:
    """The checkpoints in ``folder``; every rank makes the same calls.

    keep: how many of the newest are kept; keep_best: how many others of versions with the best evaluations.
    """

    def __init__(self, folder: Path, keep: int = 2, keep_best: int = 0) -> None:
        self.folder = folder
        self.keep, self.keep_best = keep, keep_best
        self._whole: Path | None = None
        """The checkpoint whose files were last found as they were written: reading them takes minutes."""

    def save(self, train: Learner, **state: Any) -> Path:
        """Take the state with the arguments of ``take``, and write it; see both."""
        return self.write(self.take(train, copy=False, **state))

    def take(
        self,
        train: Learner,
        *,
        step: int,
        version: int,
        leader_term: int,
        extra: dict[str, Any],
        copy: bool = True,
        evaluated: bool = False,
    ) -> Taken:
        """Take everything that the next step depends on; with ``copy`` training may continue before it is written.

        extra: JSON. evaluated: an evaluation of this version is expected.
        """
        state = {
            "format": _FORMAT,
            "step": step,
            "version": version,
            "evaluated": evaluated,
            "world": train.ranks.world,
            "schedule": train.schedule.done,
            "loss_scale": [scale.state() for scale in _loss_scales(train)],
            "adapter": describe(train.policy.adapter),
            "critic": "critic" in train.parts(),
            "optimizers": _optimizers(train),
            "learner": train.state(),
            "extra": extra,
        }
        tensors = tensors_of(train)
        return Taken(
            self.folder / f"step-{step:08d}-t{leader_term:04d}",
            copy_tensors(tensors) if copy else tensors,
            random_states(),
            state,
            train.ranks,
            train.ranks.background_channel if train.ranks.world > 1 else None,
        )

    def write(self, taken: Taken) -> Path:
        """Write a state as the newest checkpoint; may run in another thread, on all ranks in the same order.

        DiskError if the folder can't be written. A checkpoint of the same step and term is replaced.
        """
        path, ranks, channel = taken.path, taken.ranks, taken.channel
        aside = self.folder / f".{path.name}.writing"

        def part() -> AbstractContextManager[None]:
            return ranks.on_all_ranks(f"cannot write the checkpoint {path}", channel=channel)

        with part():
            if ranks.is_main:
                shutil.rmtree(aside, ignore_errors=True)
                make_folder(aside)
        with part():
            with _quiet():
                state_dict_saver.save(
                    taken.tensors,
                    checkpoint_id=aside / "tensors",
                    planner=SavePlanner(),
                    process_group=channel.group if channel else None,
                    no_dist=channel is None,
                )
            write_json(aside / f"rng-{ranks.rank}.json", taken.random)
            # Each rank reads its own files, which its machine still has in memory.
            note_digests(aside, ranks.rank, list((aside / "tensors").glob(f"__{ranks.rank}_*")))
        with part():
            if ranks.is_main:
                write_json(aside / _STATE, taken.state)
                complete(aside, path)
                self._remove_old()
        return path

    def newest(self) -> tuple[Path | None, list[str]]:
        """Find the newest checkpoint whose files are as they were written, with a line on each damaged newer one."""
        refused: list[str] = []
        for path in self._all():
            problem = damage(path)
            if problem is None:
                self._whole = path
                return path, refused
            refused.append(f"{path.name}: {problem}")
        return None, refused

    def at(self, step: WantedStep = None) -> Path:
        """Find the checkpoint of a step, the newest whole one by default; ConfigError says what there is instead.

        best: the one whose version has the best evaluation. A step may have one of several terms: only the last of
        them counts, even if it is damaged.
        """
        if step is None:
            newest, refused = self.newest()
            if newest is None:
                raise ConfigError(f"no whole checkpoint in {self.folder}{''.join(f'; {line}' for line in refused)}")
            return newest
        paths = self._best(self._all()) if step == "best" else [path for path in self._all() if step_of(path) == step]
        if not paths and step == "best":
            raise ConfigError(
                f"no checkpoint in {self.folder} is of an evaluated version: trainer.checkpoint.keep_best keeps them"
            )
        if not paths:
            there = ", ".join(str(number) for number in self.steps()) or "none"
            raise ConfigError(f"no checkpoint of step {step} in {self.folder}; there is {there}")
        if problem := damage(paths[0]):
            raise ConfigError(f"checkpoint {paths[0].name} is damaged: {problem}")
        return paths[0]

    def sweep(self, leader_term: int) -> None:
        """Remove half-written checkpoints of terms up to ``leader_term``; for the trainer that takes over."""
        for path in self.folder.iterdir() if self.folder.is_dir() else ():
            match = _ASIDE.fullmatch(path.name)
            if match and int(match[1]) <= leader_term:
                shutil.rmtree(path, ignore_errors=True)

    def steps(self) -> list[int]:
        """Return the steps that have a checkpoint, damaged or not, in order."""
        return sorted({step_of(path) for path in self._all()})

    def oldest_step(self) -> int:
        """Return the step of the oldest of the newest checkpoints; 0 if there are fewer than are kept."""
        steps = [step_of(path) for path in self._all()[: self.keep]]
        return min(steps) if len(steps) == self.keep else 0

    def load(self, path: Path, train: Learner) -> Restored:
        """Load ``path`` on any number of ranks; InfraError if it is damaged, ConfigError if it is of another model."""
        with train.ranks.on_all_ranks(f"checkpoint {path} is damaged", InfraError):
            whole, self._whole = self._whole, None
            if train.ranks.is_main and path != whole and (problem := damage(path)):
                raise OSError(problem)
        state = read_state(path)
        check_same(path.name, state.get("adapter"), train.policy.adapter)
        # Earlier versions did not say.
        has_critic = "critic" in train.parts()
        had_critic = state.get("critic", has_critic)
        for part, ours in _optimizers(train).items():
            if (theirs := state.get("optimizers", {}).get(part, ours)) != ours:
                raise ConfigError(
                    f"checkpoint {path.name} has for the {part} the state of {theirs}, and trainer.optimizer.name makes"
                    f" {ours}: set that of the checkpoint"
                )
        tensors = tensors_of(train, critic=had_critic)
        load_tensors(path, tensors)
        put_tensors(train, tensors)
        train.restore(state.get("learner", {}))
        train.schedule.done = state["schedule"]
        # Earlier versions saved none.
        for scale, saved in zip(_loss_scales(train), state.get("loss_scale", ()), strict=False):
            scale.restore(saved)
        rng = path / f"rng-{train.ranks.rank}.json"
        # More ranks than there were: the new ones keep the random state they started with.
        if rng.exists():
            set_random_states(json.loads(rng.read_text(encoding="utf-8")))
        difference = ""
        if has_critic and not had_critic:
            difference = f"checkpoint {path.name} has no critic: that of trainer.critic starts untrained"
        elif had_critic and not has_critic:
            difference = f"the critic in checkpoint {path.name} is left out: the configuration has no trainer.critic"
        return Restored(state["step"], state["version"], state["extra"], difference)

    def _all(self) -> list[Path]:
        """List finished folders, newest first; ConfigError as in ``refuse_older_names``."""
        if not self.folder.is_dir():
            return []
        refuse_older_names(self.folder)
        found = [(match, path) for path in self.folder.iterdir() if (match := _NAME.fullmatch(path.name))]
        return [path for _, path in sorted(found, key=lambda pair: (int(pair[0][2]), int(pair[0][1])), reverse=True)]

    def _best(self, paths: list[Path]) -> list[Path]:
        of_version = {state["version"]: path for path, state in reversed(_read_states(paths))}
        return [of_version[version] for version in best_versions(self._evaluations()) if version in of_version]

    def _evaluations(self) -> dict[int, dict[str, Any]]:
        return read_evaluations(self.folder.parent / EVALUATIONS)

    def _worth_keeping(self, paths: list[Path]) -> list[Path]:
        """Return those with the best evaluations, and the newest whose evaluation has not ended."""
        known = self._evaluations()
        pending = [
            path
            for path, state in _read_states(paths[self.keep :])
            if state.get("evaluated") and state["version"] not in known
        ]
        return self._best(paths)[: self.keep_best] + pending[:MOST_PENDING]

    def _remove_old(self) -> None:
        paths = self._all()
        kept = paths[: self.keep] + (self._worth_keeping(paths) if self.keep_best else [])
        for path in paths:
            if path in kept:
                continue
            # Renamed first: a half-removed folder must not look like a checkpoint.
            gone = path.with_name(f".{path.name}.removing")
            shutil.rmtree(gone, ignore_errors=True)
            path.rename(gone)
            shutil.rmtree(gone, ignore_errors=True)


def read_state(path: Path) -> dict[str, Any]:
    """Read the part of a whole checkpoint beside tensors and random states."""
    state: dict[str, Any] = json.loads((path / _STATE).read_text(encoding="utf-8"))
    return state


def _read_states(paths: list[Path]) -> list[tuple[Path, dict[str, Any]]]:
    found = []
    for path in paths:
        with suppress(OSError, ValueError):
            found.append((path, read_state(path)))
    return found


def load_tensors(path: Path, into: dict[str, Any]) -> None:
    """Fill these tensors, a part of what ``tensors_of`` names, from a whole checkpoint of any number of ranks.

    ConfigError if it lacks one, or has one of another shape: it is another model's; and if its files name code that
    would run. InfraError if it can't be read.
    """
    reader = SafeReader(path / "tensors")
    try:
        with _quiet():
            # By itself first: the loader hides the reason for which it can't be read.
            reader.read_metadata()
            state_dict_loader.load(into, storage_reader=reader, planner=LoadPlanner(), no_dist=not is_initialized())
    except pickle.UnpicklingError as error:
        raise ConfigError(f"checkpoint {path.name} is not loaded: {error}") from error
    except OSError as error:
        raise InfraError(f"checkpoint {path.name} cannot be read: {error}") from error
    except CheckpointException as error:
        causes = [failure[0] for failure in error.failures.values()]
        for cause in causes:
            if isinstance(cause, pickle.UnpicklingError):
                raise ConfigError(f"checkpoint {path.name} is not loaded: {cause}") from error
        if any(isinstance(cause, OSError) for cause in causes):
            raise InfraError(f"checkpoint {path.name} cannot be read: {reason(error)}") from error
        raise ConfigError(
            f"checkpoint {path.name} is not one of model.path, or of a run with another critic: {reason(error)}"
        ) from error


def step_of(path: Path) -> int:
    """Return the number of steps in a finished checkpoint, by its name."""
    return int(path.name.split("-")[1])


def leader_term_of(path: Path) -> int:
    """Return the number of the leader term that wrote a finished checkpoint, by its name."""
    return int(path.name.rpartition("-t")[2])


def _optimizers(train: Learner) -> dict[str, str]:
    return {name: type(update.optimizer).__name__ for name, (_, update) in train.parts().items()}


def _loss_scales(train: Learner) -> list[LossScale]:
    return [update.loss_scale for _, update in train.parts().values() if update.loss_scale is not None]


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence the warning that a single process saves as a single process."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled", category=UserWarning)
        yield
