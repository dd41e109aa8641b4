"""The promises about conversations, teachers and generators at fault, held against the logs. Pure functions."""

from __future__ import annotations

import base64
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

from tools.chaos.agents.agent import checksum
from tools.chaos.agents.calls import PAIR
from tools.chaos.judging.evidence import Log
from tools.chaos.judging.oracle import Judgement, Loss, Rules, gather, windows
from tools.chaos.judging.surviving_steps import Sample, surviving_steps
from tools.chaos.outside.users import ANOTHER

SMALLEST = 1e-6
MOST_WRONG = 200
"""Samples of a generator at fault that a trainer may train before its quarantine, in steps with samples of others."""
LEAST_RIGHT = 8


@dataclass
class Conversation:
    """begun, talked: when it began, and had its last answer. answers to its rewards: when, the reward that counts.
    refused: statuses of others."""

    begun: float = 0.0
    talked: float = 0.0
    answers: list[tuple[float, float]] = field(default_factory=list)
    refused: list[int] = field(default_factory=list)

    def lost(self, forgotten: Iterable[tuple[float, float]]) -> bool:
        """Whether the broker may have forgotten its begin, one of its answers or a reward."""
        parts = [(self.begun, self.talked or self.begun), *((at, at) for at, _ in self.answers)]
        return any(start <= last and first <= end for first, last in parts for start, end in forgotten)


def judge_conversations(
    logs: Sequence[Log], calls: Iterable[Log], rules: Rules, losses: Sequence[Loss], judgement: Judgement
) -> None:
    """Every reward that was answered with 200 is trained once, or its sample ended with a reason, or the broker has
    lost it by a fault that may lose it. A repeated reward changes nothing. A sample is trained with the reward of what
    its user was answered; if the broker has lost the first answers of a conversation, of those and the others."""
    trainers = [log for log in logs if log.role == "trainer"]
    facts, forgotten = gather(logs), windows(losses, trainers)
    conversations, seats = read_conversations(logs)
    surviving = {(task, sample) for step in surviving_steps(trainers)[0] for task, sample, *_ in step.samples}
    rewards = _trained_rewards(calls)
    excused: set[tuple[Sample, float]] = set()
    judgement.counts["conversations"] = len(conversations)
    for id, one in conversations.items():
        lost = one.lost(forgotten)
        counts, seat = {counted for _, counted in one.answers}, seats.get(id)
        if lost and seat is not None:
            excused |= {(seat, counted) for counted in counts}
        if len(counts) > 1 and not lost:
            judgement.broken("repeated reward", f"conversation {id} has the rewards {sorted(counts)}")
        if 404 in one.refused and not lost:
            judgement.broken("unknown conversation", f"the reward of conversation {id} was answered with 404")
        if not counts:
            continue
        judgement.counts["rewarded"] += 1
        judgement.counts["rewarded again"] += len(one.answers) > 1
        if seat in surviving and any(abs(a - b) < SMALLEST for a, _ in rewards[seat] for b in counts):
            judgement.counts["rewarded, trained"] += 1
        elif lost:
            judgement.counts["rewarded, lost with the broker"] += 1
        elif seat is not None and (seat[0] in facts.ended or seat in facts.excluded):
            judgement.counts["rewarded, ended with a reason"] += 1
        elif seat is not None and seat[0] >= rules.cursor:
            judgement.counts["rewarded, not trained yet"] += 1
        else:
            judgement.broken("reward lost", f"conversation {id}, sample {seat}, with the rewards {sorted(counts)}")
    for sample, pairs in rewards.items():
        for reward, own in pairs:
            is_own = any(abs(reward - known) < SMALLEST for known in (own, own + ANOTHER))
            if not is_own and (sample, reward) not in excused:
                judgement.broken("wrong reward", f"sample {sample} has {reward}, its answers have {own}")


def read_conversations(logs: Sequence[Log]) -> tuple[dict[str, Conversation], dict[str, Sample]]:
    """What users wrote of each conversation, and which sample generators said that it is."""
    conversations: dict[str, Conversation] = defaultdict(Conversation)
    seats: dict[str, Sample] = {}
    for log in logs:
        for line in log.lines:
            data = line.data
            if line.kind == "begun":
                conversations[data["id"]].begun = line.at
            elif line.kind == "talked":
                conversations[data["id"]].talked = line.at
            elif line.kind == "rewarded":
                conversations[data["id"]].answers.append((line.at, data["counts"]))
            elif line.kind == "refused":
                conversations[data["id"]].refused.append(data["status"])
            elif line.kind == "seat":
                seats[data["id"]] = data["t"], data["s"]
    return conversations, seats


def _trained_rewards(calls: Iterable[Log]) -> dict[Sample | None, set[tuple[float, float]]]:
    """The reward with which each sample was trained, and the checksum of its answers, replays included."""
    rewards: dict[Sample | None, set[tuple[float, float]]] = defaultdict(set)
    for log in calls:
        for line in log.lines:
            if line.kind == "trained":
                data = line.data
                answers = [np.frombuffer(base64.b64decode(packed), PAIR)["token"].tolist() for _, packed in data["x"]]
                rewards[data["t"], data["s"]].add((data["reward"], checksum(answers)))
    return rewards


def judge_sources(logs: Sequence[Log], judgement: Judgement) -> None:
    """Every sample is trained with its own teacher's answer. A generator at fault is quarantined, and no other one."""
    at_fault: dict[str, set[str]] = defaultdict(set)
    for log in logs:
        at_fault[log.name] |= {line.data["process"] for line in log.lines if line.kind == "wrong"}
    judgement.counts["generators at fault"] = sum(map(len, at_fault.values()))
    quarantined: set[str] = set()
    for log in logs:
        trained: Counter[str] = Counter()
        for line in log.lines:
            if line.kind == "quarantine":
                quarantined.add(line.data["process"])
                if line.data["process"] not in at_fault[line.data["g"]]:
                    judgement.broken("false alarm", f"{log.process}: {line.data['g']} was not at fault")
            elif line.kind == "planned":
                for task, sample in line.data["untaught"]:
                    judgement.broken("teacher", f"sample {task}:{sample} has not its own teacher's answer")
                judgement.counts["trained of generators at fault"] += sum(line.data["wrong"].values())
                if line.data["right"] >= LEAST_RIGHT:
                    trained.update(line.data["wrong"])
        # All together: a sample that another generator has finished has the name of that one.
        if sum(trained.values()) > MOST_WRONG * judgement.counts["generators at fault"]:
            judgement.broken("generator at fault", f"{log.process} trained {dict(trained)} samples")
    judgement.counts["quarantined"] = len(quarantined)
