"""Reward functions name what they need, and those written for AReaL, verl, TRL and RLinf run as they are."""

from pathlib import Path
from typing import Any

import pytest

from consumers.reward.rewards.signatures import RewardInput
from consumers.reward.rewards.terms import Term, resolve
from consumers.reward.scorer import check_reward, reward_input
from producers.datasets.rows import RowReader
from schemas.config import RewardTerm
from schemas.errors import ConfigError
from schemas.messages import Score, Span
from tests.support.user_code.user_rewards import score, terms, trajectory

FUNCTIONS = '''
import re
from typing import List


def two(completion, answer):
    return float(completion == answer)


def swapped(answer, completion, finish="none"):
    return float(completion == answer) + (finish == "stop")

def only_ids(completion_ids: List[int], answer) -> float:
    return float(len(completion_ids))

def given(*args, **data):
    prompt, completion, prompt_ids, completion_ids = args
    return float(len(prompt_ids) + 10 * len(completion_ids) + 100 * (completion == data["answer"]))


def areal(prompt, completions, prompt_ids, completion_ids, answer, **kwargs):
    """AReaL: one sample, whose text is called completions."""
    found = re.findall(r"[0-9]+", completions)
    return int(bool(found) and found[-1] == answer) + len(prompt_ids)


def verl(data_source, solution_str, ground_truth, extra_info=None):
    return {"score": float(solution_str == ground_truth), "acc": solution_str == ground_truth, "pred": solution_str}


def trl_ids(completion_ids, **kwargs):
    return [float(len(ids)) for ids in completion_ids]

def trl_chat(completions, **kwargs):
    return [float(len(completion[0]["content"])) for completion in completions]

def trl_text(completions: List[str], **kwargs):
    return [float(len(completion)) for completion in completions]

def trl_prompts(prompts, completions, **kwargs):
    return [float(len(asked)) for asked in prompts]

def trl_state(completions, trainer_state, log_metric, log_extra, answer, **kwargs):
    log_metric("accuracy", sum(said == wanted for said, wanted in zip(completions, answer)) / len(answer))
    log_extra("extracted", list(completions))
    log_extra("length", [len(said) for said in completions])
    return [float(trainer_state.global_step)] * len(completions)

def trl_kwargs(completions, **kwargs):
    kwargs["log_metric"]("seen", 1.0)
    return [float("prompt" not in kwargs)] * len(completions)

def no_list(completion_ids, **data):
    return 1.0


class Rlinf:
    """RLinf: a class with a config, scoring lists."""

    def __init__(self, config):
        self.scale = config.get("reward_scale", 1.0)
        self.weights = config.weights.right if "weights" in config else 1.0

    def get_reward(self, completions: list[str], answers: list[str], **kwargs) -> list[float]:
        return [self.scale * self.weights * (said == wanted) for said, wanted in zip(completions, answers)]


class RlinfMath:
    def __init__(self, config):
        pass

    def get_reward(self, response: List[str], reference: List[List[str]]) -> List[float]:
        return [5.0 if said in wanted else -5.0 for said, wanted in zip(response, reference)]
'''


@pytest.fixture
def base(tmp_path: Path) -> Path:
    (tmp_path / "mine.py").write_text(FUNCTIONS)
    return tmp_path


def term(base: Path, name: str, **settings: Any) -> Term:
    (found,) = resolve([RewardTerm(name=f"mine.py:{name}", **settings)], base)
    return found


def value(base: Path, name: str, completion: str = "46", args: dict[str, Any] | None = None, **data: Any) -> float:
    sample = reward_input(trajectory(completion, **data))
    found = term(base, name, args=args or {})
    (result,) = found.call_batch([sample]) if found.form == "lists" else [found.call(sample)]
    assert result.status == "ok", result.reason
    return result.value


def scored(base: Path, name: str, *completions: str, **data: Any) -> list[Score]:
    return score(terms(f"mine.py:{name}"), base, *(trajectory(one, **data) for one in completions))


def test_a_function_of_one_sample_names_only_what_it_needs_in_any_order(base: Path):
    assert value(base, "two", answer="46", other=1) == 1.0
    assert value(base, "swapped", answer="46") == 2.0
    assert value(base, "only_ids", answer="46") == 2.0
    assert value(base, "given", answer="46") == 122.0, "one with *args gets all four, in their order"


def test_a_function_of_areal_scores_one_text(base: Path):
    assert term(base, "areal").form == "areal"
    assert value(base, "areal", "it is 46", answer="46", prompt="of the data") == 3.0
    assert value(base, "areal", "it is 47", answer="46") == 2.0


def test_numbers_beside_the_score_of_verl_are_components(base: Path):
    (right,) = scored(base, "verl", "46", ground_truth="46")
    assert (right.reward, right.components) == (1.0, {"mine.py:verl": 1.0, "mine.py:verl/acc": 1.0})


def test_a_function_of_trl_may_name_the_ids_alone(base: Path):
    assert value(base, "trl_ids") == 2.0
    (failed,) = scored(base, "no_list", "46")
    assert "returned float for 1 completions, must be a list of as many floats" in failed.reason


def test_a_function_of_trl_gets_messages_where_the_rows_prompt_is_messages(base: Path):
    talk = [{"role": "system", "content": "Add."}, {"role": "user", "content": "40+6"}]
    data = RowReader(answer=None).read({"prompt": talk}, "row 1").data
    assert (value(base, "trl_chat", **data), value(base, "trl_prompts", **data)) == (2.0, 2.0)
    assert value(base, "trl_text", **data) == 2.0, "a type hint asks for texts"
    texts = RowReader(answer=None, chat=True).read({"prompt": "40+6"}, "row 1").data
    assert texts == {}
    assert value(base, "trl_prompts") == len("12+34=")
    asked = RewardInput("40+6", "46", [], [], data)
    (forced,) = term(base, "trl_prompts", chat=False).call_batch([asked])
    assert forced.value == len("40+6")


def test_what_a_function_of_trl_records_is_shown_beside_its_reward(base: Path):
    samples = [trajectory(said, answer="46") for said in ("46", "7")]
    for one in samples:
        one.spans = [Span(7, 0, 2), Span(9, 2, 4)]
    calls = {"name": "mine.py:trl_state", "batch": 2, "wait_ms": 2000}
    right, wrong = score(terms(calls), base, *samples)
    name = "mine.py:trl_state"
    assert right.components == {name: 9.0, f"{name}/accuracy": 0.5, f"{name}/length": 2.0}
    assert wrong.components == {name: 9.0, f"{name}/accuracy": 0.5, f"{name}/length": 1.0}
    (all_,) = scored(base, "trl_kwargs", "46", prompt=[{"role": "user", "content": "?"}])
    assert all_.components == {"mine.py:trl_kwargs": 1.0, "mine.py:trl_kwargs/seen": 1.0}


def test_a_class_of_rlinf_is_made_once_with_the_terms_args(base: Path):
    scale = {"reward_scale": 3.0, "weights": {"right": 2.0}}
    assert value(base, "Rlinf", answer="46") == 1.0
    assert value(base, "Rlinf", answer="46", args=scale) == 6.0
    assert value(base, "RlinfMath", answer=["46", "46.0"]) == 5.0
    assert value(base, "RlinfMath", answer="", reference=["47"]) == -5.0
    (right,) = scored(base, "Rlinf", "46", answer="46")
    assert right.reward == 1.0


def test_a_function_that_names_nothing_of_the_sample_is_refused(base: Path):
    (base / "mine.py").write_text("def f(environments, **kwargs):\n    return []\n")
    with pytest.raises(ConfigError, match="must name what it scores"):
        check_reward(terms("mine.py:f"), base)
