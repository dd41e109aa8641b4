"""Which version a generator loads next, and which of its weights are trusted."""

from typing import Any

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from producers.generator.eval_versions import is_served, next_version
from producers.generator.trusted_weights import TrustedWeights
from schemas.errors import DataError
from schemas.messages import Heartbeat, Span

TOKENS = 4
"""Tokens of each span."""


class GeneratorModel(RuleBasedStateMachine):
    """A generator that loads versions, and a sample that grows by a span of whatever weights the engine has."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = TrustedWeights()
        self.checked: set[int] = set()
        self.vouched: set[int] = set()
        self.rejected: set[int] = set()
        self.loading: int | None = None
        self.restoring = False
        self.engine = -1
        self.newest = -1
        self.spans: list[Span] = []

    @precondition(lambda self: self.loading is None)
    @rule(step=st.integers(1, 3))
    def load_a_newer_version(self, step: int) -> None:
        self.newest += step
        self.loading = self.engine = self.newest
        self.vouched.discard(self.newest)
        self.weights.loading(self.newest)

    @precondition(lambda self: self.engine >= 0 and not self.restoring)
    @rule()
    def sample(self) -> None:
        start = TOKENS * len(self.spans)
        self.spans.append(Span(self.engine, start, start + TOKENS))

    @rule(ahead=st.integers(-2, 3))
    def continue_what_another_generator_has_sampled(self, ahead: int) -> None:
        version = max(0, self.newest + ahead)
        self.weights.vouch([version])
        if version != self.loading:
            self.vouched.add(version)
        start = TOKENS * len(self.spans)
        self.spans.append(Span(version, start, start + TOKENS))

    @property
    def trusted(self) -> set[int]:
        """The versions whose probe passed here, and those of other generators that have not been loaded here."""
        return (self.checked | self.vouched) - self.rejected

    @precondition(lambda self: self.loading is not None)
    @rule()
    def pass_the_probe(self) -> None:
        assert self.loading is not None
        self.checked.add(self.loading)
        self.weights.passed(self.loading)
        self.loading, self.restoring = None, False

    @precondition(lambda self: self.loading is not None and not self.restoring and self.checked)
    @rule()
    def fail_the_probe(self) -> None:
        assert self.loading is not None
        self.rejected.add(self.loading)
        self.weights.rejected(self.loading)
        self.weights.restoring()
        self.loading = self.engine = max(self.checked)
        self.weights.loading(self.loading)
        self.restoring = True

    @precondition(lambda self: self.loading is None and self.checked)
    @rule()
    def reject_a_version_before_it_is_loaded(self) -> None:
        self.newest += 1
        self.rejected.add(self.newest)
        self.weights.rejected(self.newest)
        self.weights.passed(self.weights.version)

    @precondition(lambda self: self.restoring)
    @rule()
    def resume_from_the_trusted_tokens(self) -> None:
        self.pass_the_probe()
        self.spans = self.spans[: self.weights.trusted_length(self.spans, TOKENS * len(self.spans)) // TOKENS]
        assert all(span.version in self.trusted for span in self.spans)

    @invariant()
    def no_token_of_an_unchecked_version_leaves(self) -> None:
        length = self.weights.trusted_length(self.spans, TOKENS * len(self.spans))
        assert all(span.version in self.trusted for span in self.spans if span.start < length)

    @invariant()
    def nothing_is_trusted_while_the_old_version_is_restored(self) -> None:
        if self.restoring and self.spans:
            assert self.weights.trusted_length(self.spans, TOKENS * len(self.spans)) == 0

    @invariant()
    def a_task_begins_on_the_newest_checked_weights_alone(self) -> None:
        assert self.weights.may_begin(0) == (self.loading is None and bool(self.checked))
        assert not self.weights.may_begin(max(self.checked, default=-1) + 1)

    @invariant()
    def what_is_decided_leaves_or_is_rejected(self) -> None:
        if self.loading is None:
            assert self.weights.is_decided(self.spans)
            if not self.rejected.intersection(span.version for span in self.spans):
                assert self.weights.trusted_length(self.spans, TOKENS * len(self.spans)) == TOKENS * len(self.spans)


TestTrustedWeights = GeneratorModel.TestCase


def test_a_version_that_was_never_in_use_is_an_error_and_not_waited_for() -> None:
    weights = TrustedWeights()
    weights.loading(3)
    assert not weights.is_decided([Span(3, 0, 5)])
    with pytest.raises(DataError, match="weights version 4, which was never in use here"):
        weights.is_decided([Span(3, 0, 5), Span(4, 5, 8)])


def test_a_version_that_another_generator_has_checked_is_trusted_until_it_is_loaded_here() -> None:
    weights, spans = TrustedWeights(), [Span(4, 0, 5), Span(3, 5, 8)]
    weights.loading(3)
    weights.passed(3)
    weights.vouch([4])
    assert weights.is_decided(spans)
    assert weights.trusted_length(spans, 8) == 8
    weights.loading(4)
    weights.vouch([4])
    assert not weights.is_decided(spans)
    assert weights.trusted_length(spans, 8) == 0
    weights.rejected(4)
    assert weights.is_decided(spans)
    assert weights.trusted_length(spans, 8) == 0


def test_a_version_that_another_generator_has_checked_is_trusted_while_a_newer_one_is_not() -> None:
    weights, spans = TrustedWeights(), [Span(4, 0, 5)]
    weights.loading(3)
    weights.passed(3)
    weights.loading(5)
    weights.vouch([4])
    assert weights.is_decided(spans)
    weights.rejected(5)
    assert weights.trusted_length(spans, 5) == 5


def test_the_first_untrusted_span_cuts_a_sample_off() -> None:
    weights = TrustedWeights()
    weights.loading(1)
    weights.passed(1)
    weights.loading(2)
    spans = [Span(1, 0, 5), Span(2, 5, 8), Span(1, 8, 9)]
    assert weights.trusted_length(spans, 9) == 5
    assert not weights.is_decided(spans)
    weights.rejected(2)
    assert weights.is_decided(spans)
    assert weights.trusted_length(spans, 9) == 5


@pytest.mark.parametrize(
    ("current", "stored", "known", "expected"),
    [
        (3, [2, 3], {}, None),
        (3, [3, 4, 5], {}, 5),
        (-1, [10, 11, 12], {}, 12),
        (-1, [10, 11, 12], {"pending": 10}, 10),
        (8, [8, 9, 10, 11], {}, 10),
        (8, [8, 9, 11], {}, 11),
        (8, [8, 9, 10, 11], {"pending": 9}, 9),
        (8, [8, 9, 11], {"pending": 10}, 11),
        (10, [10, 11], {"pending": 10, "opened": True}, None),
        (10, [10, 11], {"busy": True, "opened": True}, None),
        (10, [10, 11], {"patient": True}, None),
        (10, [10, 11], {}, 11),
        (10, [10, 11], {"opened": True, "patient": True}, 11),
        (12, [12, 13], {"pending": 10}, 13),
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
def test_next_version(current: int, stored: list[int], known: dict[str, Any], expected: int | None) -> None:
    assert next_version(current, stored, 10, **known) == expected


def test_tasks_wait_for_generators_that_have_their_version_or_come_to_it() -> None:
    def beat(version: int, role: str = "generator", time: float = 100.0) -> Heartbeat:
        return Heartbeat(service=f"s{version}", role=role, host="h", pid=1, state="running", version=version, time=time)

    assert is_served(4, [beat(6), beat(4)])
    assert is_served(4, [beat(6), beat(2)])
    assert not is_served(4, [beat(6), beat(5)])
    assert not is_served(4, [beat(6), beat(-1)]), "one that has no weights yet will take the newest"
    assert not is_served(4, [beat(6), beat(4, role="trainer")])
    assert not is_served(4, [beat(6), beat(4, time=90.0)])
