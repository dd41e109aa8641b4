"""The configuration of several datasets: one stands for a list of one, labels tell them apart, terms name them."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from schemas.config import dump_config, load_config, parse_config
from schemas.errors import ConfigError

MINIMAL: dict[str, Any] = {"model": {"path": "m"}, "reward": {"terms": [{"name": "exact"}]}}
OWN = {"advantage": {"name": "raw"}, "datasets": {"easy": {"advantage": {"name": "grpo"}}}}
TWO = [{"name": "jsonl", "label": "easy", "weight": 3}, {"name": "a.py:My Task"}]


def test_a_dataset_alone_is_a_list_of_one_and_is_written_as_it_was() -> None:
    config = parse_config({**MINIMAL, "train": {"name": "jsonl"}, "eval": {"dataset": {"name": "gsm8k"}}})
    assert [(one.label, one.weight) for one in config.train] == [("jsonl", 1.0)]
    dumped = dump_config(config)
    assert (dumped["train"], dumped["eval"]) == ({"name": "jsonl"}, {"dataset": {"name": "gsm8k"}})


def test_a_list_of_datasets_survives_a_dump() -> None:
    config = parse_config({**MINIMAL, "train": TWO})
    assert [(one.label, one.weight) for one in config.train] == [("easy", 3.0), ("My_Task", 1.0)]
    assert parse_config(dump_config(config)).train == config.train


def test_one_dataset_of_several_is_overridden_by_its_index(tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    file.write_text(yaml.safe_dump({**MINIMAL, "train": TWO}))
    assert load_config(file, ["train.1.weight=5"], {}).train[1].weight == 5.0
    file.write_text(yaml.safe_dump({**MINIMAL, "train": TWO[0]}))
    assert load_config(file, ["train.limit=5"], {}).train[0].limit == 5


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"train": {"nme": "x"}}, "train.name: required and missing; train.nme: unknown key, did you mean 'name'?"),
        ({"train": [{"nme": "x"}]}, "train.0.name: required and missing"),
        ({"train": []}, r"train: \[\] is not allowed"),
        ({"train": {"name": "jsonl", "weight": 0}}, "train.weight: 0 is not allowed, must be greater than 0"),
        ({"train": {"name": "jsonl", "label": "a/b"}}, "train.label: 'a/b' is not allowed"),
        ({"train": [{"name": "jsonl"}, {"name": "jsonl"}]}, "train has two datasets with the label 'jsonl'"),
        (
            {"train": TWO, "eval": {"dataset": [TWO[1], TWO[1]]}},
            "eval.dataset has two datasets with the label 'My_Task'",
        ),
        (
            {"train": TWO, "reward": {"terms": [{"name": "exact", "datasets": ["hard"]}]}},
            "the term 'exact' names an unknown dataset 'hard', must be one of My_Task, easy",
        ),
        (
            {"train": TWO, "reward": {"terms": [{"name": "exact", "datasets": ["easy"]}]}},
            "no term applies to the dataset 'My_Task', so its samples would have no reward",
        ),
        (
            {"train": TWO, "trainer": {"datasets": {"hard": {"weight": 2}}}},
            "trainer.datasets.hard must be a training dataset with a reward, one of My_Task, easy",
        ),
        (
            {"train": TWO, "sampling": {"n": 1}, "trainer": OWN},
            "trainer.datasets.easy.advantage.name 'grpo' compares the samples of a group, but sampling.n is 1",
        ),
        (
            {"train": TWO, "trainer": {"advantage": {"compare": "tenant"}}},
            "compare tenant needs generator.workflow live",
        ),
        (
            {"train": TWO, "trainer": {"advantage": {"compare": "tenant", "name": "raw"}}},
            "trainer.advantage.compare requires an advantage that compares a group's samples: raw does not",
        ),
        (
            {"train": TWO, "eval": {"dataset": {"name": "x", "sampling": {"n": 4}, "pass_at": [8]}}},
            "eval.dataset 'x': pass_at 8 exceeds its samples per prompt, sampling.n 4",
        ),
        (
            {"train": TWO, "eval": {"dataset": {"name": "x", "sampling": {"max_tokens": 9999}}}},
            "eval.dataset 'x': sampling.max_tokens 9999 leaves no room for a prompt",
        ),
        (
            {"train": TWO, "reward": {"terms": [{"name": "exact"}], "correct_term": "math"}},
            "reward.correct_term 'math' is not the name of a reward term",
        ),
    ],
)
def test_a_mistake_is_one_clear_line(sections: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as error:
        parse_config({**MINIMAL, **sections})
    assert "\n" not in str(error.value)


def test_pass_at_k_goes_up_to_the_samples_that_there_are() -> None:
    evaluation = parse_config(
        {
            **MINIMAL,
            "train": TWO,
            "eval": {"dataset": [{"name": "x"}, {"name": "y", "sampling": {"n": 10}}], "sampling": {"n": 1}},
        }
    ).eval
    assert evaluation is not None
    assert [one.passes(evaluation.sampling_of(one).n) for one in evaluation.dataset] == [[1], [1, 2, 4, 8]]


def test_what_an_evaluation_leaves_out_is_one_greedy_sample_of_the_lengths_of_training() -> None:
    training = {"n": 16, "max_tokens": 40, "stop": ["\n"], "temperature": 0.7}
    datasets = [{"name": "x"}, {"name": "y", "sampling": {"n": 10, "max_tokens": 50}}]

    def samplings(**evaluation: object) -> list[tuple[int, float, int, list[str]]]:
        found = parse_config({**MINIMAL, "train": TWO, "sampling": training, "eval": evaluation}).eval
        assert found is not None
        return [(s.n, s.temperature, s.max_tokens, s.stop) for s in map(found.sampling_of, found.dataset)]

    assert samplings(dataset=datasets) == [(1, 0.0, 40, ["\n"]), (10, 0.0, 50, ["\n"])]
    assert samplings(dataset=datasets[0], sampling={"max_tokens": 9}) == [(1, 0.0, 9, ["\n"])]
    assert samplings(dataset=datasets, sampling={"temperature": 1.0, "stop": []}) == [
        (1, 1.0, 40, []),
        (10, 1.0, 50, []),
    ]


@pytest.mark.parametrize("sampling", [3, "greedy", {"n": "x"}])
def test_a_sampling_that_is_none_is_refused_by_name(sampling: object) -> None:
    for sections in ({"sampling": sampling, "eval": {"dataset": {"name": "x"}}}, {"eval": {"sampling": sampling}}):
        with pytest.raises(ConfigError, match="sampling"):
            parse_config({**MINIMAL, "train": TWO, **sections})


DIGITS = {"name": "rewards.py:digits"}


@pytest.mark.parametrize(
    ("reward", "held_out", "expected"),
    [
        ({"terms": [{"name": "exact"}]}, {"name": "jsonl"}, True),
        ({"terms": [DIGITS]}, {"name": "jsonl"}, False),
        ({"terms": [{"name": "exact", "weight": 2}]}, {"name": "jsonl"}, False),
        ({"terms": [{"name": "exact"}, DIGITS]}, {"name": "jsonl"}, False),
        ({"terms": [{"name": "code"}]}, {"name": "jsonl"}, False),
        ({"terms": [{"name": "code", "args": {"partial": False}}]}, {"name": "jsonl"}, True),
        ({"terms": [DIGITS], "correct_from": 1.0}, {"name": "jsonl"}, True),
        ({"terms": [{"name": "exact"}, DIGITS], "correct_term": "exact"}, {"name": "jsonl"}, True),
        ({"terms": [DIGITS]}, {"name": "jsonl", "terms": [{"name": "math"}]}, True),
        ({"terms": [{"name": "exact"}]}, {"name": "jsonl", "terms": [DIGITS]}, False),
        ({"terms": [{"name": "exact", "datasets": ["sums", "jsonl"]}, DIGITS]}, {"name": "jsonl"}, False),
        ({"terms": [{"name": "exact"}, {**DIGITS, "datasets": ["sums"]}]}, {"name": "jsonl"}, True),
    ],
)
def test_a_share_of_correct_samples_is_an_accuracy_if_the_configuration_says_what_is_correct(
    reward: dict[str, Any], held_out: dict[str, Any], expected: bool
) -> None:
    train = {"name": "arithmetic", "label": "sums"}
    config = parse_config({"model": {"path": "m"}, "train": train, "reward": reward, "eval": {"dataset": held_out}})
    assert config.has_accuracy is expected
    assert parse_config(dump_config(config)).has_accuracy is expected, "services read what was written"


def test_without_held_out_prompts_there_is_no_accuracy() -> None:
    assert not parse_config({**MINIMAL, "train": {"name": "jsonl"}}).has_accuracy


def test_a_term_of_a_file_with_an_absolute_path_is_named_by_its_path_or_its_function() -> None:
    reward = {"terms": [{"name": "/home/me/rewards.py:digits"}, {"name": "length"}]}
    for name in ("/home/me/rewards.py:digits", "digits"):
        sections = {"reward": {**reward, "correct_term": name}, "trainer": {"advantage": {"filter_term": name}}}
        config = parse_config({**MINIMAL, "train": {"name": "jsonl"}, **sections})
        assert (config.reward.correct_term, config.trainer.advantage.filter_term) == ("digits", "digits")
        assert config.reward.terms[0].label == "digits"
