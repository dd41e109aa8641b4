"""The datasets, mixtures and curricula in the documentation are what the text around them says."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from consumers.reward.rewards.programs.score import read_cases
from consumers.reward.rewards.terms import RewardInput, resolve
from consumers.reward.scorer import check_reward
from producers.datasets.loading import build_dataset
from producers.datasets.mixture import build_mixture
from schemas.config import DatasetConfig, parse_config
from tests.support.user_code.docs_code import SMALLEST, own_code_yaml


def test_the_dataset_is_one(snippets: Path) -> None:
    dataset = build_dataset(DatasetConfig(name="countdown.py:Countdown", args={"largest": 50}), snippets)
    assert len(dataset) == 50
    assert dataset[2].data["answer"] == "3 2 1 0"


def test_the_mixture_mixes_its_datasets(snippets: Path) -> None:
    (block,) = own_code_yaml("mixture.yaml")
    (snippets / "facts.jsonl").write_text('{"prompt": "capital of France?", "answer": "Paris"}\n')
    config = parse_config({**SMALLEST, **block}, base=snippets)
    mixture = build_mixture(config.train, config.base, seed=0)
    labels = [mixture.parts[mixture.at(position).part].label for position in range(8)]
    assert sorted(labels) == ["arithmetic"] * 6 + ["facts"] * 2
    assert config.eval is not None
    assert [len(build_dataset(one, config.base)) for one in config.eval.dataset] == [100, 1]
    check_reward(config.reward.terms, config.base)


ROWS = {
    "math.jsonl": [
        {"problem": "1+1", "level": "Level 1", "answer": "2"},
        {"problem": "half of 1", "level": "Level 5", "answer": "\\frac{1}{2}"},
    ],
    "aime.jsonl": [{"ID": "1", "Problem": "Find x.", "Answer": 25, "Solution": "..."}],
    "mbpp.jsonl": [
        {"text": "Write add.", "test_list": ["assert add(1, 2) == 3"], "test_setup_code": "", "code": "def add ..."}
    ],
    "humaneval.jsonl": [
        {
            "prompt": "def add(a, b):\n",
            "test": "def check(candidate):\n    assert candidate(1, 2) == 3",
            "entry_point": "add",
        }
    ],
    "hotpot.jsonl": [{"question": "Who?", "answer": "Ada", "supporting_facts": {"title": ["Ada"]}, "level": "hard"}],
}
"""A row or two of each collection, with the columns that it is published with."""


def test_the_collections_are_read_by_a_line_each(snippets: Path) -> None:
    (block,) = own_code_yaml("collections.yaml")
    for name, rows in ROWS.items():
        (snippets / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = parse_config({**SMALLEST, **block}, base=snippets)
    examples = {one.label: build_dataset(one, snippets)[0] for one in config.train}
    assert (examples["math"].text, examples["math"].data["answer"]) == ("half of 1", "\\frac{1}{2}")
    assert (examples["aime"].text, examples["aime"].data) == ("Find x.", {"answer": 25})
    assert read_cases(examples["mbpp"].data) == [{"test": "assert add(1, 2) == 3"}]
    (case,) = read_cases(examples["humaneval"].data)
    assert case["test"].endswith("check(add)")
    assert examples["humaneval"].data["prefix"] == examples["humaneval"].text
    assert examples["hotpotqa"].data == {"answer": "Ada", "facts": {"title": ["Ada"]}}
    scored = {name: resolve([term], snippets)[0] for term in config.reward.terms for name in term.datasets or []}
    for label, completion, value in (
        ("math", "It is \\boxed{0.5}", 1.0),
        ("aime", "\\boxed{025}", 1.0),
        ("aime", "26", 0.0),
    ):
        sample = RewardInput("", completion, [], [], examples[label].data)
        assert scored[label].call(sample).value == value


@pytest.mark.parametrize(("title", "statistics"), [("curriculum.yaml", 9000), ("levels.yaml", 3)])
def test_the_curricula_are_ones(snippets: Path, title: str, statistics: int) -> None:
    (block,) = own_code_yaml(title)
    config = parse_config({**SMALLEST, **block}, base=snippets)
    mixture = build_mixture(config.train, config.base, seed=0)
    assert mixture.parts[0].statistics == pytest.approx(statistics, rel=0.01)
    assert mixture.parts[0].curriculum.name != "uniform"
