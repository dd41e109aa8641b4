"""Outcomes and failures of agents, and the alarm for too many failures."""

from __future__ import annotations

from typing import Any

import pytest

from producers.agents.outcomes import WINDOW, EpisodeFailure, EpisodeOutcome, FailureAlarm, judge
from producers.agents.workers.protocol import AgentResult
from schemas.config import AgentsConfig

RAISED = AgentResult("raised", error="KeyError: 'x'", error_type="builtins.KeyError")


@pytest.mark.parametrize(
    ("result", "limit", "settings", "found"),
    [
        (AgentResult("returned", reward=0.5), None, {}, EpisodeOutcome(None, 0.5)),
        (AgentResult("returned"), None, {}, EpisodeOutcome(None, None)),
        (AgentResult("returned", reward=0.5), "length", {}, EpisodeOutcome("length", 0.5, "length")),
        (AgentResult("deadline"), None, {}, EpisodeOutcome("deadline", None, "deadline")),
        (AgentResult("deadline", reward=0.2), "calls", {}, EpisodeOutcome("deadline", 0.2, "deadline")),
        (RAISED, "calls", {}, EpisodeOutcome("calls", None, "calls")),
        (RAISED, None, {}, EpisodeFailure("raised", "KeyError: 'x'")),
        (RAISED, None, {"outcomes": {"builtins.KeyError": -1.0}}, EpisodeOutcome(None, -1.0, "declared")),
        (AgentResult("died", error="SIGKILL"), None, {}, EpisodeFailure("died", "SIGKILL", again=True)),
        (AgentResult("died", error="SIGKILL"), "length", {}, EpisodeFailure("died", "SIGKILL", again=True)),
        (AgentResult("neighbour", error="n"), None, {}, EpisodeFailure("neighbour", "n", again=True)),
    ],
)
def test_an_outcome_is_what_the_policy_did_a_failure_what_happened_to_it(
    result: AgentResult, limit: Any, settings: dict[str, Any], found: EpisodeOutcome | EpisodeFailure
) -> None:
    assert judge(result, limit, AgentsConfig(**settings)) == found


@pytest.mark.parametrize(("result", "limit"), [(AgentResult("deadline"), None), (AgentResult("returned"), "calls")])
def test_episodes_that_reach_a_limit_are_excluded_where_that_is_asked_for(result: AgentResult, limit: Any) -> None:
    found = judge(result, limit, AgentsConfig(late="exclude"))
    assert isinstance(found, EpisodeFailure)
    assert not found.again
    assert "generator.agents.late is exclude" in found.reason


def test_an_alarm_comes_once_until_it_has_become_better() -> None:
    alarm = FailureAlarm(0.2)
    failure, outcome = EpisodeFailure("raised", "KeyError: 'x'"), EpisodeOutcome(None, 1.0)
    assert [alarm.add(failure) for _ in range(20)] == [None] * 20
    text = alarm.add(failure)
    assert text == "21 of the last 21 episodes failed (21 raised), last: KeyError: 'x'"
    assert [alarm.add(failure) for _ in range(5)] == [None] * 5
    assert [alarm.add(outcome) for _ in range(WINDOW)] == [None] * WINDOW
    assert [alarm.add(failure) for _ in range(20)] == [None] * 20
    assert alarm.add(failure) is not None
