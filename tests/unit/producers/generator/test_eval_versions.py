"""Which version a generator loads next."""

from __future__ import annotations

import pytest

from producers.generator.eval_versions import EvaluationState, is_served, next_version
from schemas.messages import Heartbeat


@pytest.mark.parametrize(
    ("current", "stored", "known", "patient", "expected"),
    [
        (3, [2, 3], EvaluationState(10), False, None),
        (3, [3, 4, 5], EvaluationState(10), False, 5),
        (-1, [10, 11, 12], EvaluationState(10), False, 12),
        (-1, [10, 11, 12], EvaluationState(10, pending=10), False, 10),
        (8, [8, 9, 10, 11], EvaluationState(10), False, 10),
        (8, [8, 9, 11], EvaluationState(10), False, 11),
        (8, [8, 9, 10, 11], EvaluationState(10, pending=9), False, 9),
        (8, [8, 9, 11], EvaluationState(10, pending=10), False, 11),
        (10, [10, 11], EvaluationState(10, pending=10, opened=True), False, None),
        (10, [10, 11], EvaluationState(10, busy=True, opened=True), False, None),
        (10, [10, 11], EvaluationState(10), True, None),
        (10, [10, 11], EvaluationState(10), False, 11),
        (10, [10, 11], EvaluationState(10, opened=True), True, 11),
        (12, [12, 13], EvaluationState(10, pending=10), False, 13),
    ],
    ids=[
        "nothing newer",
        "the newest",
        "the newest at the start",
        "at the start the one that is asked for",
        "one that will be evaluated is not passed over",
        "one that is gone is",
        "one that is asked for comes first",
        "one that is asked for and gone does not",
        "stays while tasks are left",
        "stays while it answers",
        "stays until its evaluation is opened",
        "not for ever",
        "continues when all is answered",
        "continues when it is beyond",
    ],
)
def test_next_version(
    current: int, stored: list[int], known: EvaluationState, patient: bool, expected: int | None
) -> None:
    assert next_version(current, stored, known, patient) == expected


def test_tasks_wait_for_generators_that_have_their_version_or_come_to_it() -> None:
    def beat(version: int, role: str = "generator", time: float = 100.0) -> Heartbeat:
        return Heartbeat(service=f"s{version}", role=role, host="h", pid=1, state="running", version=version, time=time)

    assert is_served(4, [beat(6), beat(4)])
    assert is_served(4, [beat(6), beat(2)])
    assert not is_served(4, [beat(6), beat(5)])
    assert not is_served(4, [beat(6), beat(-1)]), "one that has no weights yet will take the newest"
    assert not is_served(4, [beat(6), beat(4, role="trainer")])
    assert not is_served(4, [beat(6), beat(4, time=90.0)])
