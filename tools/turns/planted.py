"""Faults planted in the product: a piece of a method's text is replaced in each process of a walk before it begins."""

from __future__ import annotations

import importlib
import inspect
import os
import textwrap
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import structlog

from schemas.system import device_lock, guard

TOUCH_S, SILENT_S, LOOK_S = 0.2, 2.0, 0.4
"""As the product's, for a walk of seconds."""


@dataclass(frozen=True)
class Planted:
    """A fault: in ``where``, a method as module:Class.name, ``old`` becomes ``new``."""

    where: str
    old: str
    new: str

    def write(self) -> tuple[type, ModuleType, str, str]:
        """Return the method's class, module, name and new text; AssertionError if its text has no such piece."""
        module_name, _, path = self.where.partition(":")
        class_name, _, name = path.partition(".")
        module = importlib.import_module(module_name)
        owner = getattr(module, class_name)
        text = textwrap.dedent(inspect.getsource(inspect.getattr_static(owner, name)))
        assert text.count(self.old) == 1, f"{self.where} has {self.old!r} {text.count(self.old)} times"
        return owner, module, name, text.replace(self.old, self.new)

    def apply(self) -> None:
        """Replace the method."""
        owner, module, name, text = self.write()
        found: dict[str, object] = {}
        exec(compile(text, f"planted {name}", "exec"), vars(module), found)
        setattr(owner, name, found[name])


TURNS, LOCKS = "producers.generator.device_turns:EngineTurns", "schemas.system.device_lock:DeviceLock"
RANKS, TRAINER = "consumers.trainer.rank_group:RankGroup", "consumers.trainer.distributed.device_turns:DeviceTurns"
UPDATES, SILENT = (
    "producers.generator.weight_updates:WeightUpdater",
    "deploy.supervisor.silent_holders:SilentHolders",
)
PLANTED = {
    "a lock is granted that another process holds": Planted(
        f"{LOCKS}.try_hold", "os.close(descriptor)\n        return False", "pass"
    ),
    "a generator starts without its lock": Planted(
        f"{TURNS}.take", "return await _until(stop, self._try_take)", "return True"
    ),
    "a generator wakes without its lock": Planted(f"{TURNS}._try_take", "or not self._lock.try_hold()", ""),
    "a generator frees its lock before its memory": Planted(
        f"{TURNS}.run",
        "await self._sleep()\n        self.close()",
        "self.close()\n            await self._sleep()",
    ),
    "a generator sleeps without a pause": Planted(f"{TURNS}.run", "await self._orders.lend_device(True)", "pass"),
    "no probe after a wake": Planted(f"{TURNS}.run", "await self._updates.check_woken(stop)", "pass"),
    "tokens before the probe": Planted(
        f"{TURNS}.run",
        "await self._updates.check_woken(stop)",
        "await self._orders.lend_device(False)\n            await self._updates.check_woken(stop)",
    ),
    "new weights are not loaded after a wake": Planted(
        f"{UPDATES}.check_woken", "chosen = await self._choose(newest)", "pass"
    ),
    "the same weights are not probed after a wake": Planted(
        f"{UPDATES}.check_woken", "problem = await self._probe(self._manifest)", "problem = None"
    ),
    "an update continues while its engine sleeps": Planted(
        f"{UPDATES}._update", "if opened and wakes == self._wakes:", "if True:"
    ),
    "the trainer frees its locks before its memory": Planted(
        f"{RANKS}.offload",
        "self.state.offload()\n        turns.give()",
        "turns.give()\n            self.state.offload()",
    ),
    "the trainer takes memory before its locks": Planted(
        f"{RANKS}.onload",
        'turns.hold()\n        with turns.clock.measure("onload"):\n            self.state.onload()',
        "self.state.onload()\n            turns.hold()",
    ),
    "only rank 0 holds the GPUs": Planted(
        f"{TRAINER}.__init__", "for name in shared.generators]", "for name in shared.generators if main]"
    ),
    "the trainer doesn't say that it wants the GPUs": Planted(
        f"{TRAINER}.__init__", "if main else []", "if False else []"
    ),
    "the trainer never gives": Planted(f"{RANKS}.give_if_due", "turns.rule.due(time.monotonic())", "False"),
    "a stopped holder is not killed": Planted(f"{SILENT}.look", "return overdue", "return set()"),
    "a stopped holder loses its lock and lives": Planted(
        f"{SILENT}.look",
        "return overdue",
        "[self._locks[name].file.unlink() for name in overdue]\n    return set()",
    ),
    # For as long as a process may be descheduled on a busy machine: those who ask keep the lock from the trainer.
    "a question takes the lock": Planted(
        f"{LOCKS}.is_free",
        "try:\n        found",
        "asking = DeviceLock(self.file)\n    free = asking.try_hold(shared)\n    time.sleep(0.5)\n"
        "    asking.release()\n    return free\n    try:\n        found",
    ),
}


def begin(log: Path, plant: str | None) -> None:
    """Set up a process of the walk: its log, the times of a walk, and the planted fault."""
    guard.prctl(guard.PR_SET_PDEATHSIG, 9)
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(output, 1)
    os.dup2(output, 2)
    structlog.configure(logger_factory=structlog.PrintLoggerFactory())
    device_lock.TOUCH_S = TOUCH_S
    if plant is not None:
        PLANTED[plant].apply()
