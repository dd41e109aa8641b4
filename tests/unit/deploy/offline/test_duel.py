"""Two models on the same prompts: counts, the lead in Elo, and its interval."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deploy.offline.evaluate import Duel

counts = st.integers(0, 1000)


def test_prompts_that_one_model_did_not_answer_do_not_count() -> None:
    assert Duel.of([1.0, 0.5, None, 0.0], [0.0, 0.5, 1.0, None]) == Duel(1, 1, 0)


def test_a_known_lead() -> None:
    """Of 1,000 prompts 640 and half of 240 won are 76 %: about 200 points."""
    lead, low, high = Duel(640, 240, 120).elo()
    share = (640 + 120 + 0.5) / 1001
    assert lead == pytest.approx(400 * math.log10(share / (1 - share)))
    assert low < 200 < high
    assert str(Duel(640, 240, 120)).startswith("640 won, 240 tied, 120 lost: Elo +200 (")


@given(counts, counts, counts)
def test_the_other_model_is_behind_by_as_much(wins: int, ties: int, losses: int) -> None:
    lead, low, high = Duel(wins, ties, losses).elo()
    assert low <= lead <= high
    assert Duel(losses, ties, wins).elo() == pytest.approx((-lead, -high, -low))


def test_a_model_that_wins_everything_leads_by_a_finite_number() -> None:
    assert Duel(100, 0, 0).as_json()["elo"] == pytest.approx(921.3, abs=0.1)
