"""The scorer: rewards are weighted sums of terms, and a wrong term is reported before anything starts."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from consumers.reward.rewards import REWARDS
from consumers.reward.rewards.signatures import RewardInput
from consumers.reward.rewards.terms import Term, TermResult
from consumers.reward.scorer import check_reward, reward_input
from schemas.errors import ConfigError
from schemas.limits import LARGEST_REWARD
from schemas.messages import Turn
from tests.support.user_code.user_rewards import USERS_OWN, score, terms, trajectory


@pytest.fixture
def base(tmp_path: Path) -> Path:
    (tmp_path / "mine.py").write_text(USERS_OWN)
    return tmp_path


def test_the_reward_is_the_weighted_sum_and_components_have_names(base: Path):
    sum_ = terms(
        {"name": "exact", "weight": 2.0},
        {"name": "length", "weight": 0.5, "args": {"max_tokens": 2, "overlong_buffer": 1}},
        "exact",
    )
    right, wrong = score(sum_, base, trajectory("46", answer="46"), trajectory("47", answer="46"))
    assert right.reward == 2.0 - 0.5 + 1.0
    assert right.components == {"exact": 1.0, "length": -1.0, "exact#2": 1.0}
    assert (right.status, wrong.reward) == ("ok", -0.5)


def test_a_missing_reference_is_an_error_and_not_a_zero(base: Path):
    (result,) = score(terms("exact"), base, trajectory())
    assert (result.status, result.components) == ("error", {})
    assert result.reason == ("exact: TypeError: exact() missing 1 required keyword-only argument: 'answer'")


def test_what_a_function_sees_of_a_trajectory():
    sample = reward_input(trajectory("46", mask=(0, 1, 0, 1), answer="46"))
    assert sample == RewardInput("12+34=", "46", [0], [1, 2, 3], {"answer": "46"}, trajectory_id=sample.trajectory_id)
    assert sample.trajectory_id.startswith("r-0-0-")
    again = reward_input(trajectory("46", mask=(0, 1, 0, 1, 1), answer="46"))
    assert again.trajectory_id != sample.trajectory_id, "a task that is done again has other tokens"
    assert reward_input(trajectory("", mask=(0, 0))).completion_ids == []


def test_the_term_episode_hands_on_what_the_workflow_gave(base: Path):
    given, none = trajectory(reward=7.0), trajectory("46", answer="46", reward=7.0)
    given.reward = 0.25
    both = terms("episode", {"name": "exact", "weight": 0.5})
    (result,) = score(terms("episode"), base, given)
    assert (result.reward, result.components) == (0.25, {"episode": 0.25})
    (result,) = score(both, base, none)
    assert result.status == "error"
    assert "the workflow gave the sample no reward" in result.reason
    none.reward = -1.0
    assert score(both, base, none)[0].components == {"episode": -1.0, "exact": 1.0}
    with pytest.raises(ConfigError, match="unknown argument 'reward'"):
        check_reward(terms({"name": "episode", "args": {"reward": 1.0}}), base)


def test_a_function_gets_the_fields_of_a_sample_that_it_names(base: Path):
    whole = trajectory("46", messages=[{"role": "user", "content": "hello"}])
    whole.reward, whole.metrics, whole.calls, whole.finish = 2.0, {"tools": 0.5}, 3, "deadline"
    whole.turns = [Turn("prompt", 0, 2), Turn("assistant", 2, 4, 0, 10.0)]
    assert score(terms("mine.py:seen"), base, whole)[0].reward == 2.0 + 0.5 + 3 + 10.0 + len("hello")
    assert score(terms("mine.py:everything"), base, whole)[0].reward == 1.0, "data is the task's and nothing else"
    own = trajectory("46", messages=[{"role": "user", "content": ""}], calls=100)
    own.reward, own.turns = 0.0, whole.turns
    assert score(terms("mine.py:seen"), base, own)[0].reward == 110.0, "a field of the data comes before"


JSON_LIKE = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**63) | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
)


@given(
    st.text(),
    st.dictionaries(
        st.sampled_from(["answer", "prompt", "completion", "last_number", "regex", "tags", "x"]), JSON_LIKE
    ),
)
def test_the_scorer_never_raises_for_any_data(completion: str, data: dict):
    for name in ("exact", "gsm8k", "format"):
        (result,) = score(terms(name), Path.cwd(), trajectory(completion, **data))
        assert result.status == "ok" or result.reason


@given(JSON_LIKE | st.integers() | st.fractions() | st.just(10**400))
def test_whatever_a_function_returns_becomes_a_finite_value_or_an_error(returned: object):
    term = Term("t", 1.0, lambda *_, **__: returned, {}, None, True)
    outcome = term.call(RewardInput("", "", [], [], {}))
    if outcome.status == "ok":
        assert outcome.value == float(returned)
    else:
        assert outcome.reason.startswith("returned")


def returning(value: float, name: str, weight: float = 1.0) -> Term:
    return Term(name, weight, lambda *_, **__: value, {}, None, True)


@pytest.mark.parametrize(
    ("found", "reason"),
    [
        ([returning(1.0, "right"), returning(1e308, "long")], "long: returned 1e+308, must be from -1e+30 to 1e+30"),
        ([returning(-1e31, "long")], "long: returned -1e+31, must be from -1e+30 to 1e+30"),
        (
            [returning(9e29, "right"), returning(5e29, "long")],
            "right: 9e+29 by its weight 1 makes a sum of 1.4e+30, must be from -1e+30 to 1e+30",
        ),
        (
            [returning(1e30, "right", 1e300), returning(1e30, "long", -1e300)],
            "right: 1e+30 by its weight 1e+300 makes a sum of nan, must be from -1e+30 to 1e+30",
        ),
    ],
)
def test_a_reward_that_training_could_not_add_up_is_an_error_that_names_the_term(
    base: Path, monkeypatch: pytest.MonkeyPatch, found: list[Term], reason: str
):
    monkeypatch.setattr("consumers.reward.scorer.resolve", lambda *_: found)
    (result,) = score(terms("exact"), base, trajectory("1"))
    assert (result.status, result.reason, result.reward) == ("error", reason, 0.0)


def test_the_largest_reward_is_one(base: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("consumers.reward.scorer.resolve", lambda *_: [returning(LARGEST_REWARD, "right")])
    (result,) = score(terms("exact"), base, trajectory("1"))
    assert (result.status, result.reward) == ("ok", LARGEST_REWARD)


# configuration


@pytest.mark.parametrize(
    ("term", "reason"),
    [
        ({"name": "exct"}, "did you mean 'exact'"),
        ({"name": "length"}, "reward 'length': argument 'max_tokens' is required and missing"),
        (
            {"name": "length", "args": {"max_token": 5}},
            "reward 'length': unknown argument 'max_token', did you mean 'max_tokens'?",
        ),
        (
            {"name": "length", "args": {"max_tokens": 5, "overlong_buffer": 6}},
            "overlong_buffer 6 is larger than max_tokens 5",
        ),
        ({"name": "length", "args": {"max_tokens": "x", "overlong_buffer": 1}}, "'max_tokens': 'x' is not allowed"),
        ({"name": "exact", "args": {"answer": 1}}, "unknown argument 'answer': one of none"),
        ({"name": "format", "args": {"regex": "("}}, "reward 'format': regex '(' is wrong"),
        ({"name": "format", "args": {"regex": "a", "tags": ["b"]}}, "regex or tags, not both"),
        (
            {"name": "mine.py:of_both"},
            "completion is of one sample and completions of lists: name prompt and completion",
        ),
        ({"name": "mine.py:few"}, "must name what it scores: completion of one sample, completions of lists (TRL)"),
        ({"name": "mine.py:number"}, "must be a function, is int"),
        ({"name": "mine.py:strict", "args": {"scal": 1}}, "did you mean 'scale'"),
        ({"name": "mine.py:nothing"}, "has no 'nothing'"),
        ({"name": "nofile.py:f"}, "no file"),
    ],
)
def test_a_wrong_term_is_one_line_before_anything_starts(base: Path, term: dict, reason: str):
    with pytest.raises(ConfigError) as caught:
        check_reward(terms(term), base)
    assert reason in str(caught.value)
    assert "\n" not in str(caught.value)


def test_every_built_in_is_there_and_only_bounded_ones_run_inline(base: Path):
    from consumers.reward.rewards.terms import resolve

    args: dict[str, dict[str, object]] = {
        "length": {"max_tokens": 8, "overlong_buffer": 4},
        "judge": {
            "base_url": "http://127.0.0.1:9/v1",
            "model": "m",
            "template": "{completion}",
            "parse": {"regex": "(\\d)"},
        },
        "remote": {"url": "http://127.0.0.1:9/score"},
        "reward_model": {"path": "m"},
        "reward_model_server": {"base_url": "http://127.0.0.1:9", "model": "m"},
        "teacher": {"model": "m"},
        "teacher_self": {"system": "The answer is 7."},
        "teacher_server": {"base_url": "http://127.0.0.1:9/v1", "model": "m"},
    }
    resolved = resolve(terms(*({"name": n, "args": args.get(n, {})} for n in REWARDS.names)), base)
    assert {t.label for t in resolved if t.inline} == {
        *("clevr", "episode", "exact", "format", "gsm8k", "length", "searchr1", "supervised", "teacher_self", "vqa")
    }
    (backtracking,) = resolve(terms({"name": "format", "args": {"regex": "(a+)+$"}}), base)
    assert not backtracking.inline


def test_check_reward_can_score_one_example(base: Path):
    assert check_reward(terms("exact"), base) is None
    result = check_reward(terms("mine.py:by_data"), base, trajectory(do="fine"))
    assert result is not None
    assert result.reward == 0.5


def test_math_and_reasoning_gym_run_in_workers(base: Path):
    pytest.importorskip("math_verify")
    (result,) = score(terms("math"), base, trajectory("\\boxed{0.5}", answer="\\frac12"))
    assert result.reward == 1.0
    assert TermResult() == TermResult(0.0, "ok")


def test_a_term_counts_only_for_the_datasets_that_it_names(base: Path):
    both = terms("exact", {"name": "mine.py:pooled_bonus", "datasets": ["code"]}, {"name": "format", "datasets": ["x"]})
    sums, code = trajectory("46", answer="46"), trajectory("47", answer="46")
    sums.dataset, code.dataset = "sums", "code"
    first, second = score(both, base, sums, code)
    assert (first.components, first.dataset) == ({"exact": 1.0}, "sums")
    assert (second.components, second.dataset) == ({"exact": 0.0, "mine.py:pooled_bonus": 0.25}, "code")


def test_a_sample_is_correct_by_its_reward_or_by_the_term_that_decides(base: Path):
    sum_ = terms({"name": "exact", "weight": 0.7}, {"name": "mine.py:third", "weight": 0.9})
    right, wrong = trajectory("46", answer="46"), trajectory("47", answer="46")
    for least, expected in ((1.0, [True, False]), (0.3, [True, True])):
        assert [scored.correct for scored in score(sum_, base, right, wrong, correct_from=least)] == expected
    decided = score(sum_, base, right, wrong, correct_from=0.5, correct_term="exact")
    assert [scored.correct for scored in decided] == [True, False]
