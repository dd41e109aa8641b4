"""The result of an episode: an outcome, which is scored and trained, or a failure, which is excluded and counted.

The policy causes an outcome; a failure has another cause. An agent that returns has an outcome. So has one that reached
a limit (deadline, calls, context), even if it raises then. An agent that raises for another reason has failed, and so
has one whose process died: a failure is never a reward of 0.
"""

from collections import Counter, deque
from dataclasses import dataclass

from producers.agents.workers.protocol import AgentResult
from schemas.config import AgentsConfig
from schemas.messages import UNREWARDED, FinishReason

OUTCOMES = ("returned", "declared", "deadline", "calls", "length")
"""Kinds: the agent returned, it raised an error in ``generator.agents.outcomes``, or it reached a limit."""
WINDOW = 100
"""The number of episodes over which the share of failures is measured."""


@dataclass(frozen=True)
class EpisodeOutcome:
    """An episode to be scored. finish: None takes that of its last answer. reward: None if the agent set none.

    kind: one of OUTCOMES.
    """

    finish: FinishReason | None
    reward: float | None
    kind: str = "returned"


@dataclass(frozen=True)
class EpisodeFailure:
    """An episode that is excluded. kind: a word for counting. reason: one line. again: a retry may succeed."""

    kind: str
    reason: str
    again: bool = False


def judge(result: AgentResult, limit: FinishReason | None, settings: AgentsConfig) -> EpisodeOutcome | EpisodeFailure:
    """Decide whether an agent's end is an outcome or a failure. limit: the limit that its session reached, if any."""
    if result.kind in ("died", "neighbour"):
        return EpisodeFailure(result.kind, result.error, again=True)
    if result.kind == "unrewarded":
        return EpisodeFailure(UNREWARDED, result.error)
    reached: FinishReason | None = "deadline" if result.kind == "deadline" else limit
    if reached is not None and settings.late == "exclude":
        return EpisodeFailure("late", f"it reached its limit ({reached}), and generator.agents.late is exclude")
    if reached is not None:
        return EpisodeOutcome(reached, result.reward, reached)
    if result.kind == "returned":
        return EpisodeOutcome(None, result.reward)
    if result.error_type in settings.outcomes:
        return EpisodeOutcome(None, settings.outcomes[result.error_type], "declared")
    return EpisodeFailure("raised", result.error)


class FailureAlarm:
    """Raises an alarm if too many of the last episodes failed; once, until the share has fallen again."""

    def __init__(self, share: float) -> None:
        self._share = share
        self._last: deque[str] = deque(maxlen=WINDOW)
        self._raised = False

    def add(self, verdict: EpisodeOutcome | EpisodeFailure) -> str | None:
        """Count an episode; returns the text of an alarm that starts with it. A missing reward is not one."""
        kind = verdict.kind if isinstance(verdict, EpisodeFailure) and verdict.kind != UNREWARDED else ""
        self._last.append(kind)
        failed = Counter(word for word in self._last if word)
        share = sum(failed.values()) / WINDOW
        if share <= self._share:
            self._raised = self._raised and share > self._share / 2
            return None
        if self._raised or not isinstance(verdict, EpisodeFailure):
            return None
        self._raised = True
        kinds = ", ".join(f"{count} {word}" for word, count in failed.most_common())
        return f"{sum(failed.values())} of the last {len(self._last)} episodes failed ({kinds}), last: {verdict.reason}"
