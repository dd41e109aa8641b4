"""What the end of an agent means, and when people are told that too many episodes fail."""

from __future__ import annotations

from typing import Any

import pytest

from producers.agents.outcomes import WINDOW, Failure, FailureAlarm, Outcome, judge
from producers.agents.workers.protocol import AgentResult
from schemas.config import AgentsConfig

RAISED = AgentResult("raised", error="KeyError: 'x'", error_type="builtins.KeyError")


@pytest.mark.parametrize(
    ("result", "limit", "settings", "found"),
    [
        (AgentResult("returned", reward=0.5), None, {}, Outcome(None, 0.5)),
        (AgentResult("returned"), None, {}, Outcome(None, None)),
        (AgentResult("returned", reward=0.5), "length", {}, Outcome("length", 0.5, "length")),
        (AgentResult("deadline"), None, {}, Outcome("deadline", None, "deadline")),
        (AgentResult("deadline", reward=0.2), "calls", {}, Outcome("deadline", 0.2, "deadline")),
        (RAISED, "calls", {}, Outcome("calls", None, "calls")),
        (RAISED, None, {}, Failure("raised", "KeyError: 'x'")),
        (RAISED, None, {"outcomes": {"builtins.KeyError": -1.0}}, Outcome(None, -1.0, "declared")),
        (AgentResult("died", error="SIGKILL"), None, {}, Failure("died", "SIGKILL", again=True)),
        (AgentResult("died", error="SIGKILL"), "length", {}, Failure("died", "SIGKILL", again=True)),
        (AgentResult("neighbour", error="n"), None, {}, Failure("neighbour", "n", again=True)),
    ],
)
def test_an_outcome_is_what_the_policy_did_a_failure_what_happened_to_it(
    result: AgentResult, limit: Any, settings: dict[str, Any], found: Outcome | Failure
) -> None:
    assert judge(result, limit, AgentsConfig(**settings)) == found


@pytest.mark.parametrize(("result", "limit"), [(AgentResult("deadline"), None), (AgentResult("returned"), "calls")])
def test_episodes_that_reach_a_limit_are_excluded_where_that_is_asked_for(result: AgentResult, limit: Any) -> None:
    found = judge(result, limit, AgentsConfig(late="exclude"))
    assert isinstance(found, Failure)
    assert not found.again
    assert "generator.agents.late is exclude" in found.reason


def test_an_alarm_comes_once_until_it_has_become_better() -> None:
    alarm = FailureAlarm(0.2)
    failure, outcome = Failure("raised", "KeyError: 'x'"), Outcome(None, 1.0)
    assert [alarm.add(failure) for _ in range(20)] == [None] * 20
    text = alarm.add(failure)
    assert text == "21 of the last 21 episodes failed (21 raised), last: KeyError: 'x'"
    assert [alarm.add(failure) for _ in range(5)] == [None] * 5
    assert [alarm.add(outcome) for _ in range(WINDOW)] == [None] * WINDOW
    assert [alarm.add(failure) for _ in range(20)] == [None] * 20
    assert alarm.add(failure) is not None
