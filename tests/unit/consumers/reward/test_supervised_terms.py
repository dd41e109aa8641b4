"""The term ``supervised``: what a configuration may say with it, and what becomes of its samples before training."""

import asyncio
from pathlib import Path
from typing import Any

import msgspec
import pytest

from consumers.offline.encoding import Demonstration, encode_demonstration
from consumers.reward.scorer import Scorer, check_reward
from producers.engines.base import EngineSettings
from producers.engines.scripted import ScriptedEngine
from producers.tokenizer import HfTokenizer
from producers.workflows.base import RolloutContext
from producers.workflows.given_answer import give_answer
from producers.workflows.trajectory_builder import SampledCompletion
from schemas.config import RewardConfig, RewardTerm, TidemillConfig
from schemas.errors import ConfigError, DataError
from schemas.messages import ChatMessage, Sampling, Span, Task
from tests.support.configurations import minimal_config
from tests.support.models.tiny_model import make_tokenizer
from tests.support.trainer.trajectories import make_trajectory

SUPERVISED: dict[str, Any] = {"name": "supervised", "datasets": ["b"]}
EXACT: dict[str, Any] = {"name": "exact", "datasets": ["a"]}


def config(*terms: Any, **sections: Any) -> TidemillConfig:
    train = [{"name": "arithmetic", "label": label} for label in "ab"]
    return minimal_config(**{"train": train, "reward": {"terms": [*terms]}, **sections})


def test_each_dataset_has_a_component() -> None:
    found = config(EXACT, {**SUPERVISED, "weight": 0.5, "args": {"field": "solution"}})
    assert (found.supervised_weights, found.unrewarded) == ({"b": 0.5}, {"b"})
    assert (found.answer_field("a"), found.answer_field("b")) == (None, "solution")
    assert config({"name": "supervised"}).unrewarded == {"a", "b"}


@pytest.mark.parametrize(
    ("terms", "sections", "reason"),
    [
        ([{"name": "exact"}, SUPERVISED], {}, "supervised and exact both apply to the dataset 'b'"),
        ([EXACT, SUPERVISED, SUPERVISED], {}, "supervised and another supervised both apply to the dataset 'b'"),
        ([EXACT, {**SUPERVISED, "weight": 0.0}], {}, "the weight of supervised must be above 0"),
        ([EXACT, SUPERVISED], {"model": {"path": "m", "output_tokens": "[0-9]"}}, "output_tokens is not supported"),
        (
            [EXACT, SUPERVISED],
            {"eval": {"dataset": {"name": "arithmetic", "label": "b"}}},
            "no term applies to the dataset 'b', so its samples would have no reward",
        ),
        (
            [EXACT, SUPERVISED],
            {"eval": {"dataset": {"name": "arithmetic", "label": "b"}, "terms": [{"name": "supervised"}]}},
            "eval terms name supervised, which gives no reward",
        ),
        (
            [EXACT, SUPERVISED],
            {
                "train": [
                    {"name": "arithmetic", "label": "a"},
                    {"name": "arithmetic", "label": "b", "curriculum": {"name": "learnable"}},
                ]
            },
            "train.curriculum.name of 'b' must be uniform, is 'learnable'",
        ),
    ],
)
def test_settings_that_do_not_fit_given_answers_are_refused(terms: Any, sections: dict[str, Any], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        config(*terms, **sections)


def test_the_name_of_the_field_is_checked(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="argument 'field': '' is not allowed"):
        check_reward([RewardTerm(name="supervised", args={"field": ""})], tmp_path)


def test_a_given_answer_has_a_score_without_a_reward_and_evaluations_do_not_ask(tmp_path: Path) -> None:
    terms = [RewardTerm(name="supervised"), RewardTerm(name="exact", datasets=["held-out"])]
    given = msgspec.structs.replace(make_trajectory(), dataset="b")
    held_out = msgspec.structs.replace(given, kind="eval", dataset="held-out", data={"answer": "7"}, completion="7")

    async def score() -> Any:
        async with Scorer(RewardConfig(terms=terms, workers=1), tmp_path) as scorer:
            return await scorer.score_all([given, held_out])

    trained, evaluated = asyncio.run(score())
    assert (trained.status, trained.reward, trained.components) == ("ok", 0.0, {"supervised": 0.0})
    assert (evaluated.reward, evaluated.components) == (1.0, {"exact": 1.0})


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> HfTokenizer:
    folder = tmp_path_factory.mktemp("tokenizer")
    make_tokenizer().save_pretrained(folder)
    return HfTokenizer(str(folder))


def given(tokenizer: HfTokenizer, max_length: int = 64, **task: Any) -> SampledCompletion:
    made = Task(task_id=3, kind="train", n=1, sampling=Sampling(), **task)
    engine = ScriptedEngine(EngineSettings("none", "float32", 200, 8, version=7))

    async def first() -> SampledCompletion:
        rollout = RolloutContext(engine, tokenizer, made, [0])
        (sample,) = [sample async for sample in give_answer(rollout, tokenizer, "answer", max_length)]
        return sample

    return asyncio.run(first())


@pytest.mark.parametrize("prompt", ["12+3=", [ChatMessage("system", "Add."), ChatMessage("user", "12+3")]])
def test_the_tokens_are_those_of_supervised_fine_tuning(tokenizer: HfTokenizer, prompt: Any) -> None:
    how = {"text": prompt} if isinstance(prompt, str) else {"messages": prompt}
    sample = given(tokenizer, **how, data={"answer": "15"})
    want = encode_demonstration(tokenizer, Demonstration(prompt, "15"), 64)
    assert sample.tokens == want.prompt + want.answer
    assert sample.loss_mask == [0] * len(want.prompt) + [1] * len(want.answer)
    assert sample.spans == [Span(7, len(want.prompt), len(sample.tokens))]
    assert (sample.completion, sample.finish) == ("15", "stop")


@pytest.mark.parametrize(
    ("data", "longest", "reason"),
    [
        ({}, 64, "the row has no text in 'answer'"),
        ({"answer": 15}, 64, "the row has no text in 'answer'"),
        ({"answer": "15"}, 5, "more than model.max_length 5"),
    ],
)
def test_a_row_needs_a_fitting_answer(tokenizer: HfTokenizer, data: dict[str, Any], longest: int, reason: str) -> None:
    with pytest.raises(DataError, match=reason):
        given(tokenizer, longest, text="12+3=", data=data)
