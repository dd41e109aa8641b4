"""Judges a run by the logs of its processes alone. Pure functions; the ledger that is judged is never asked."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from tools.chaos.judging.evidence import Line, Log
from tools.chaos.judging.surviving_steps import Sample, Step, Violation, surviving_steps, term_number

SLACK_S = 0.5
"""How much later than an answer its line of evidence may be."""
TAKEOVER_S = 60.0
"""Within this time after the server forgot something the trainer has taken the run over again."""


@dataclass(frozen=True)
class Loss:
    """A fault that made the server forget what came after ``back_to``; what was published until ``at`` may be gone."""

    kind: str
    back_to: float
    at: float


@dataclass(frozen=True)
class Rules:
    """The promises. cursor: every task below it must have ended. samples: n of a group. staleness: the bound."""

    cursor: int
    samples: int
    staleness: int


@dataclass
class Judgement:
    """Contents of the logs. Counts are of samples, except skipped (tasks) and dropped (groups, by reason)."""

    violations: list[Violation] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)
    dropped: Counter[str] = field(default_factory=Counter)
    max_staleness: int = 0
    steps: int = 0

    def broken(self, promise: str, text: str) -> None:
        self.violations.append(Violation(promise, text))
        self.counts[promise] += 1


@dataclass
class Facts:
    """The logs, by what they are about. attempts: marks of what generators tried to publish. accepted: when and with
    which digest a sample was acknowledged as ``ok``. known: samples that were acknowledged as ``ok`` or as there."""

    attempts: set[int] = field(default_factory=set)
    accepted: dict[Sample, list[tuple[float, int]]] = field(default_factory=lambda: defaultdict(list))
    known: set[Sample] = field(default_factory=set)
    ended: dict[int, str] = field(default_factory=dict)
    excluded: dict[Sample, str] = field(default_factory=dict)
    refusals: Counter[str] = field(default_factory=Counter)


def gather(logs: Iterable[Log]) -> Facts:
    """Read every log once."""
    facts = Facts()
    admitted: dict[int, list[float]] = defaultdict(list)
    scored: dict[Sample, list[float]] = defaultdict(list)
    asked_again: list[tuple[int, int, float, str]] = []
    scored_again: list[tuple[int, int, float, str]] = []
    for log in logs:
        begun: dict[tuple[int, int], str] = {}
        scoring: dict[Sample, str] = {}
        for line in log.lines:
            data = line.data
            if line.kind == "publish?":
                for task, sample, digest in data["x"]:
                    facts.attempts.add(_mark(task, sample, digest))
            elif line.kind == "publish":
                for task, sample, digest, answer in data["x"]:
                    if answer in ("ok", "dup"):
                        facts.known.add((task, sample))
                    if answer == "ok":
                        facts.accepted[task, sample].append((line.at, digest))
                    else:
                        facts.refusals[answer] += 1
            elif line.kind == "score?":
                scoring.update({(task, sample): status for task, sample, status in data["x"]})
            elif line.kind == "score":
                for task, sample, status, answer in data["x"]:
                    scoring.pop((task, sample), None)
                    if status == "ok" and answer in ("ok", "dup"):
                        scored[task, sample].append(line.at)
                    elif status == "ok":
                        continue
                    elif answer == "ok":
                        facts.excluded[task, sample] = f"reward: {status}"
                    elif answer == "dup":
                        scored_again.append((task, sample, line.at, f"reward: {status}"))
            elif line.kind == "end?":
                begun[data["t"], data.get("s", -1)] = f"{data['how']}: {data['reason']}"
            elif line.kind == "end":
                reason = begun.pop((data["t"], data.get("s", -1)), "")
                if data["a"] == "ok":
                    _end(facts, data["t"], data.get("s", -1), reason)
                elif data["a"] == "dup" and "s" in data:
                    asked_again.append((data["t"], data["s"], line.at, reason))
            elif line.kind == "admit" and data["a"] == "ok":
                admitted[data["t"]].append(line.at)
        # A process that was killed before the answer came may have ended the group all the same.
        for (task, sample), reason in begun.items():
            _end(facts, task, sample, f"{reason} (unanswered)")
        for (task, sample), status in scoring.items():
            if status != "ok":
                _end(facts, task, sample, f"reward: {status} (unanswered)")
    # The first answer may be lost on its way: then the sample has failed, unless it was published or scored before.
    published = {sample: [at for at, _ in times] for sample, times in facts.accepted.items()}
    for again, known in ((asked_again, published), (scored_again, scored)):
        for task, sample, at, reason in again:
            since = max((time for time in admitted[task] if time <= at), default=0.0)
            if not any(since <= time <= at for time in known.get((task, sample), ())):
                _end(facts, task, sample, f"{reason} (asked again)")
    return facts


def _mark(task: int, sample: int, digest: int) -> int:
    """One number for a sample and its contents: an hour's attempts must fit into memory."""
    return hash((task, sample, digest))


def _end(facts: Facts, task: int, sample: int, reason: str) -> None:
    if sample < 0:
        facts.ended[task] = reason
    else:
        facts.excluded[task, sample] = reason


def cursor(logs: Iterable[Log], until: float = float("inf")) -> int:
    """The highest prompt cursor that a feeder had read by then: every task id below it was admitted."""
    return max(
        (line.data["c"] for log in logs for line in log.lines if line.kind == "admit" and line.at <= until), default=0
    )


def judge(logs: Sequence[Log], rules: Rules, losses: Sequence[Loss] = ()) -> Judgement:
    """Compare the logs of a finished run with the promises."""
    trainers = [log for log in logs if log.role == "trainer"]
    facts = gather(logs)
    steps, broken = surviving_steps(trainers)
    judgement = Judgement(violations=list(broken), counts=Counter(violation.promise for violation in broken))
    judgement.steps = len(steps)
    judgement.counts["published"] = sum(len(times) for times in facts.accepted.values())
    judgement.counts.update({f"refused as {word}": count for word, count in facts.refusals.items()})
    judgement.dropped.update(reason for task, reason in facts.ended.items() if task < rules.cursor)
    trained = _trained(steps, facts, rules, judgement)
    _skipped(trained, facts, rules, judgement)
    _lost(trained, facts, rules, windows(losses, trainers), judgement)
    _zombies(trainers, judgement)
    return judgement


def _trained(steps: Sequence[Step], facts: Facts, rules: Rules, judgement: Judgement) -> dict[Sample, int]:
    """Return the digest of each trained sample; find samples trained twice, never made, or too old."""
    trained: dict[Sample, int] = {}
    where: dict[Sample, Step] = {}
    for step in steps:
        for task, sample, digest, oldest in step.samples:
            here = f"sample {task}:{sample} in step {step.step} of {step.process}"
            if (task, sample) in trained:
                first = where[task, sample]
                judgement.broken("trained twice", f"{here} and in step {first.step} of {first.process}")
            if _mark(task, sample, digest) not in facts.attempts:
                judgement.broken("phantom", f"{here}: no generator ever tried to publish what it was trained on")
            age = step.version - oldest if oldest >= 0 else 0
            judgement.max_staleness = max(judgement.max_staleness, age)
            if age > rules.staleness:
                judgement.broken("staleness", f"{here} was {age} versions old, {rules.staleness} is the bound")
            trained[task, sample], where[task, sample] = digest, step
        for task, sample in step.wrong:
            judgement.broken("wrong reward", f"sample {task}:{sample} in step {step.step} of {step.process}")
    judgement.counts["trained"] = len(trained)
    return trained


def _skipped(trained: dict[Sample, int], facts: Facts, rules: Rules, judgement: Judgement) -> None:
    tasks = {task for task, _ in trained}
    for task in range(rules.cursor):
        if task not in tasks and task not in facts.ended:
            have = sum((task, sample) in facts.known for sample in range(rules.samples))
            judgement.broken(
                "skipped", f"task {task} was neither trained nor given up; {have} samples of it were published"
            )


def _lost(
    trained: dict[Sample, int],
    facts: Facts,
    rules: Rules,
    forgotten: Sequence[tuple[float, float]],
    judgement: Judgement,
) -> None:
    """Samples whose publication was acknowledged and that are not in the weights.

    Of a group that is trained every sample must be, but for those that failed with a reason. What the server
    forgot by a loss of memory or power and was made again is counted apart.
    """
    tasks = {task for task, _ in trained}
    for task in tasks:
        for sample in range(rules.samples):
            if (task, sample) not in trained and (task, sample) not in facts.excluded:
                known = "acknowledged" if (task, sample) in facts.known else "never acknowledged"
                judgement.broken("lost", f"sample {task}:{sample}, {known}, is missing in its trained group")
    for (task, sample), times in facts.accepted.items():
        digest = trained.get((task, sample))
        if digest is None:
            continue
        for at, accepted in times:
            if accepted == digest:
                continue
            if any(start <= at <= end for start, end in forgotten):
                judgement.counts["made again after a loss"] += 1
            else:
                judgement.broken(
                    "lost", f"sample {task}:{sample} was acknowledged at {at:.2f}, another one was trained"
                )


def windows(losses: Sequence[Loss], trainers: Sequence[Log]) -> list[tuple[float, float]]:
    """Times between which an acknowledged publication may be forgotten: from the state that the server went back to,
    until a trainer has taken the run over after it."""
    begins = sorted(line.at for log in trainers for line in log.lines if line.kind == "begin")
    found = []
    for loss in losses:
        taken_over = next((at for at in begins if loss.at < at <= loss.at + TAKEOVER_S), loss.at)
        found.append((loss.back_to - SLACK_S, taken_over + SLACK_S))
    return found


def _zombies(trainers: Sequence[Log], judgement: Judgement) -> None:
    """After a newer trainer began, an older one may at most still write down what was answered before."""
    begins = sorted(
        (line.at, term_number(line.data["leader_term"]), log.process)
        for log in trainers
        for line in log.lines
        if line.kind == "begin"
    )
    for log in trainers:
        own = max((number for _, number, process in begins if process == log.process), default=0)
        newer = next((at for at, number, process in begins if number > own and process != log.process), None)
        if newer is None or not own:
            continue
        late = [line for line in log.lines if line.at > newer + SLACK_S and _changes(line)]
        if len(late) > 1:
            judgement.broken(
                "zombie", f"{log.process} continued after a newer trainer began: {late[1].kind} {late[1].data}"
            )


def _changes(line: Line) -> bool:
    return line.kind == "step" or (line.kind == "end" and line.data["a"] == "ok")
