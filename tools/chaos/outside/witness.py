"""What services write about conversations, teachers and generators at fault, and how a generator comes to be at fault.

Lines of evidence, by kind:
  seat: id (of a conversation), t, s · wrong: process (its log-probabilities are not the policy's)
  planned: untaught=[t, s] without the teacher's answer to their tokens, wrong={generator: samples of one at fault},
  right: samples of others · quarantine: g, process (the trainer orders that it takes no more tasks)
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from broker.flow.run_control import RunControl
from broker.queues.live_episodes import LiveEpisodes
from schemas.messages import Trajectory
from schemas.system.processes import identify_process
from tools.chaos.judging.evidence import EvidenceWriter
from tools.chaos.outside.teacher import is_taught

WRONG = "wrong-generator"
"""A file in the suite's folder with the id of the process that samples wrongly, until its end."""
OFF = 40.0
"""How much too low its log-probabilities are; those of the scripted engine are above -1."""


def watch_generator(evidence: EvidenceWriter, folder: Path) -> None:
    """Write which sample each conversation is, and sample wrongly while a file says so."""
    from producers.engines import scripted

    register, add = LiveEpisodes.register, scripted._Running.add
    flag, own, wrong = folder / WRONG, str(os.getpid()), False

    def registering(self: LiveEpisodes, seat: str, url: str) -> Any:
        found = register(self, seat, url)
        task, sample = seat.replace("-", ":").split(":")
        evidence.write("seat", id=found[0], t=int(task), s=int(sample))
        return found

    def adding(self: Any, *args: Any) -> None:
        nonlocal wrong
        add(self, *args)
        if not wrong and flag.exists() and flag.read_text() == own:
            wrong = True
            evidence.write("wrong", process=identify_process())
        if wrong:
            self.logprobs[-1] -= OFF

    for owner, method, new in ((LiveEpisodes, "register", registering), (scripted._Running, "add", adding)):
        setattr(owner, method, new)


def watch_trainer(evidence: EvidenceWriter, folder: Path) -> None:
    """Write what each step is planned of, and which generators are quarantined."""
    from consumers.trainer.data.plan import StepPlanner

    taught = "teacher_server" in (folder / "config.yaml").read_text()
    plan: Callable[..., Any] = StepPlanner.plan
    quarantine = RunControl.quarantine

    def planning(self: StepPlanner, groups: Any) -> Any:
        samples = [body for group in groups for body, _ in group.samples]
        wrong = Counter(body.generator for body in samples if is_wrong(body))
        untaught = [[body.task_id, body.sample] for body in samples if taught and not is_taught(body)]
        evidence.write("planned", untaught=untaught, wrong=wrong, right=len(samples) - wrong.total())
        return plan(self, groups)

    def quarantining(self: RunControl, generator: str, process: str, by: str) -> bool:
        evidence.write("quarantine", g=generator, process=process)
        return quarantine(self, generator, process, by)

    for owner, method, new in ((StepPlanner, "plan", planning), (RunControl, "quarantine", quarantining)):
        setattr(owner, method, new)


def is_wrong(sample: Trajectory) -> bool:
    """Whether a token of a sample was sampled by a generator at fault."""
    return float(sample.logprobs.numpy().min(initial=0.0)) < -OFF / 2
