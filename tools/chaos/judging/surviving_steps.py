"""Which steps are inside the surviving weights, and in which order. Pure functions over the trainers' logs.

They are found by walking back from the newest trainer process: its own steps, before them the checkpoint that
it loaded, the process that had saved that, and so on to the untrained model.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from tools.chaos.judging.evidence import Line, Log

Sample = tuple[int, int]
"""Task id and sample index."""


@dataclass(frozen=True)
class Step:
    """One optimizer step. samples: task id, sample, digest, oldest version; version: of the weights before it.

    wrong: samples that were trained with another reward than their own.
    """

    step: int
    leader_term: str
    version: int
    samples: list[tuple[int, int, int, int]]
    process: str
    wrong: Sequence[Sample] = ()


@dataclass(frozen=True)
class Violation:
    """A broken promise, with the few facts that tell where to look."""

    promise: str
    text: str


def term_number(leader_term: str) -> int:
    """``3-a1b2c3d4`` is leader term 3."""
    return int(leader_term.partition("-")[0])


def surviving_steps(trainers: Sequence[Log]) -> tuple[list[Step], list[Violation]]:
    """The steps inside the weights of the newest trainer, in order, and what is wrong with their chain."""
    begun = [
        (term_number(line.data["leader_term"]), log) for log in trainers for line in log.lines if line.kind == "begin"
    ]
    if not begun:
        return [], []
    log = max(begun, key=lambda pair: pair[0])[1]
    lines: Sequence[Line] = log.lines
    steps: list[Step] = []
    while True:
        source: Line | None = None
        for line in reversed(lines):
            if line.kind == "loaded":
                source = line
                break
            if line.kind == "step":
                steps.append(_step(line, log.process))
        if source is None:
            break
        saved = _saved(trainers, source)
        if saved is None:
            text = f"{log.process} loaded a checkpoint of step {source.data['step']} that no trainer saved"
            return steps[::-1], [Violation("surviving_steps", text)]
        log, lines = saved
    steps.reverse()
    broken = [
        Violation(
            "surviving_steps", f"step {after.step} of {after.process} follows step {before.step} of {before.process}"
        )
        for before, after in pairwise(steps)
        if after.step != before.step + 1
    ]
    if steps and steps[0].step != 0:
        broken.append(Violation("surviving_steps", f"the first step is {steps[0].step} of {steps[0].process}"))
    return steps, broken


def _step(line: Line, process: str) -> Step:
    data = line.data
    samples = [(task, sample, digest, oldest) for task, sample, digest, oldest in data["x"]]
    wrong = [(task, sample) for task, sample in data.get("wrong", ())]
    return Step(data["step"], data["leader_term"], data["version"], samples, process, wrong)


def _saved(trainers: Sequence[Log], loaded: Line) -> tuple[Log, Sequence[Line]] | None:
    """The process that wrote the checkpoint which was loaded, and its lines until then."""
    found: tuple[float, Log, int] | None = None
    for log in trainers:
        for index, line in enumerate(log.lines):
            same = line.kind == "saving" and line.data == loaded.data
            if same and line.at <= loaded.at and (found is None or line.at > found[0]):
                found = (line.at, log, index)
    if found is None:
        return None
    _, log, index = found
    return log, log.lines[:index]


def trained_log(lines: Iterable[dict[str, Any]]) -> list[tuple[int, Sample]]:
    """(step, sample) of the surviving weights as the product's own trained.jsonl tells them.

    A line ``resumed`` voids the steps from there on that were written before, and whatever an older term still
    writes after it.
    """
    newest = 0
    steps: dict[int, list[Sample]] = {}
    for line in lines:
        leader_term = term_number(line["leader_term"])
        if "resumed" in line:
            newest = max(newest, leader_term)
            steps = {step: samples for step, samples in steps.items() if step < line["resumed"]}
        elif leader_term >= newest:
            steps[line["step"]] = [(task, sample) for task, sample in line["samples"]]
    return [(step, sample) for step, samples in sorted(steps.items()) for sample in samples]
