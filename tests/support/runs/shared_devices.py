"""Devices that are imitated: an engine and an advantage that note when they use theirs, and what those notes must say.

The clock of the notes is one for all processes of a machine.
"""

import json
import os
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from consumers.trainer.algorithms.advantages import Floats, Ints
from producers.engines.base import EngineSettings, PromptImage
from producers.engines.scripted import ScriptedEngine
from producers.generator.device_turns import shares_gpus
from schemas.messages import WeightSource
from schemas.system.device_lock import DeviceLock, SharedGpus, generator_lock

GPUS = "#!/bin/sh\nfor i in {}; do echo $i, GPU-$i, [N/A]; done\n"
GROUPS = 4
"""Groups of a batch."""
PARITY = '''
def parity(prompt, completion, prompt_ids, completion_ids, **data):
    """Some reward that follows from the sample alone."""
    return float(sum(completion_ids) % 2)
'''
Note = dict[str, Any]


def in_turns(folder: Path, trainer: str, generators: str, steps: int) -> dict[str, Any]:
    """Settings of a run that notes in ``folder`` when it uses its devices, of which each side has these."""
    # Services load this file by its path, and know no tests.
    from tests.support.models.tiny_model import make_tiny_model

    (folder / "rewards.py").write_text(PARITY)
    code, notes = __file__, str(folder / "notes")
    return {
        "model": {"path": str(make_tiny_model(folder / "model", hidden=32)), "dtype": "float32", "max_length": 64},
        "train": {"name": "arithmetic"},
        "sampling": {"n": 2, "max_tokens": 8},
        "reward": {"terms": [{"name": "rewards.py:parity"}], "workers": 1},
        "placement": {"trainer": trainer, "generator": generators},
        "generator": {
            "engine": f"{code}:NotingEngine",
            "args": {"tokens": 200, "token_s": 0.01, "notes": notes},
            "probe_tolerance": 1e3,
            "max_samples": 16,
            "lease_s": 5,
        },
        "trainer": {
            "threads": 1,
            "steps": steps,
            "batch_groups": GROUPS,
            "advantage": {"name": f"{code}:noting", "args": {"notes": notes}},
            "checkpoint": {"every": 4},
        },
        "supervisor": {"max_restarts": 20, "backoff_s": 0.2},
    }


def imitate_gpus(folder: Path, count: int) -> None:
    """Make a program nvidia-smi in ``folder`` that lists ``count`` GPUs."""
    folder.mkdir(exist_ok=True)
    program = folder / "nvidia-smi"
    program.write_text(GPUS.format(" ".join(map(str, range(count)))))
    program.chmod(0o755)


class Notes:
    """The file of one process, a line for each note."""

    def __init__(self, folder: Path, who: str) -> None:
        folder.mkdir(exist_ok=True)
        self._who = who
        self._file = (folder / f"{who}-{os.getpid()}.jsonl").open("a", buffering=1)

    def add(self, what: str, **more: Any) -> None:
        line = {"time": time.monotonic(), "who": self._who, "pid": os.getpid(), "what": what, **more}
        self._file.write(json.dumps(line) + "\n")


def read_notes(folder: Path) -> list[Note]:
    """All notes in the order of their time."""
    lines = [line for file in folder.glob("*.jsonl") for line in file.read_text().splitlines()]
    return sorted((json.loads(line) for line in lines if line.endswith("}")), key=lambda note: note["time"])


class NotingEngine(ScriptedEngine):
    """Notes when it has its device, and what it does there. ``args.notes``: the folder of the notes."""

    def __init__(self, settings: EngineSettings) -> None:
        args = dict(settings.args)
        folder = Path(args.pop("notes"))
        super().__init__(replace(settings, args=args))
        name = sys.argv[sys.argv.index("--name") + 1]
        self._lock = generator_lock(devices, name) if (devices := shares_gpus(name)) else None
        self._notes = Notes(folder, name)
        self._awake = False

    def _note(self, what: str, **more: Any) -> None:
        held = self._lock is None or not self._lock.is_free(shared=True)
        self._notes.add(what, held=held, **more)
        self._awake = what != "asleep" and (self._awake or what == "awake")

    async def start(self) -> None:
        self._note("awake")
        await super().start()

    async def wake(self) -> None:
        self._note("awake")
        await super().wake()

    async def sleep(self) -> None:
        await super().sleep()
        self._note("asleep")

    async def close(self) -> None:
        await super().close()
        # An engine that sleeps has given its device already.
        if self._awake:
            self._note("asleep")

    async def load(self, source: WeightSource, version: int) -> None:
        await super().load(source, version)
        self._note("load", version=version)

    async def logprobs(self, token_ids: Sequence[int], images: Sequence[PromptImage] = ()) -> Any:
        self._note("probe", version=self.version)
        return await super().logprobs(token_ids, images)

    def _step(self, samples: Any, progress: Any) -> None:
        self._note("token", version=self.version)
        super()._step(samples, progress)


_notes: list[Notes] = []


def noting(rewards: Floats, groups: Ints, notes: str = "") -> Floats:
    """The rewards themselves; notes that the trainer computes, and whether it has all its devices."""
    shared = SharedGpus.from_environment()
    assert shared is not None
    if not _notes:
        _notes.append(Notes(Path(notes), "trainer"))
    locks: list[DeviceLock] = [generator_lock(shared.folder, name) for name in shared.generators]
    held = all(not lock.is_free() and lock.is_free(shared=True) for lock in locks)
    _notes[0].add("compute", held=held)
    return np.asarray(rewards, dtype=np.float64).copy()


def awake_intervals(notes: list[Note], who: str) -> Iterator[tuple[float, float]]:
    """From when to when an engine had its device; one that was killed had it up to its last note."""
    for pid in {note["pid"] for note in notes if note["who"] == who}:
        own = [note for note in notes if note["pid"] == pid]
        began = None
        for note in own:
            if note["what"] == "awake":
                began = note["time"]
            elif note["what"] == "asleep" and began is not None:
                yield began, note["time"]
                began = None
        if began is not None:
            yield began, own[-1]["time"]


def check_notes(notes: list[Note], sharing: Sequence[str]) -> int:
    """Check that each device had one user at a time, and each token came after a probe; return the number of wakes."""
    assert all(note["held"] for note in notes), [note for note in notes if not note["held"]][:3]
    computed = [note["time"] for note in notes if note["what"] == "compute"]
    assert computed
    woken = 0
    for who in sharing:
        intervals = list(awake_intervals(notes, who))
        woken += len(intervals)
        assert not [(at, one) for one in intervals for at in computed if one[0] <= at <= one[1]]
        checked: dict[int, bool] = {}
        for note in (note for note in notes if note["who"] == who):
            if note["what"] in ("awake", "asleep"):
                checked[note["pid"]] = False
            elif note["what"] == "probe":
                checked[note["pid"]] = True
            elif note["what"] == "token":
                assert checked[note["pid"]], f"{who} sampled before its probe"
    return woken
