"""Python objects in a configuration: functions and data become names and files in the run's folder."""

import functools
from pathlib import Path
from typing import Any

import datasets
import pytest
import yaml

from deploy.python.objects import settle_objects
from producers.datasets.loading import build_dataset
from schemas.config import parse_config
from schemas.errors import ConfigError

ROWS = [{"prompt": f"{n}+1=", "answer": str(n + 1)} for n in range(4)]


def brevity(completion: str, length: int) -> float:
    return -len(completion) / length


def tree(folder: Path, **sections: Any) -> dict[str, Any]:
    return {"run": {"name": "mine", "folder": str(folder / "run")}, "model": {"path": "org/model"}, **sections}


def test_functions_and_rows_take_their_places(tmp_path: Path) -> None:
    terms = [functools.partial(brevity, length=9), "format", {"name": brevity, "weight": 0.5, "args": {"length": 3}}]
    config = settle_objects(tree(tmp_path, eval={"every": 7}), rewards=terms, train=ROWS, held_out=ROWS[:2])
    assert config.eval is not None
    first, second, third = config.reward.terms
    assert (first.args, second.name, third.weight) == ({"length": 9}, "format", 0.5)
    assert first.name == third.name
    assert first.name.endswith(":brevity")
    assert len(build_dataset(config.train[0], config.base)) == 4
    assert build_dataset(config.train[0], config.base)[3].data == {"answer": "4"}
    assert (config.eval.every, len(build_dataset(config.eval.dataset[0], config.base))) == (7, 2)
    assert Path(config.train[0].args["path"]).parent == tmp_path / "run/python"


def test_the_only_term_needs_no_list(tmp_path: Path) -> None:
    plain = tree(tmp_path, train={"name": "arithmetic"})
    partial = functools.partial(brevity, length=9)
    for one in (partial, "exact", {"name": "exact"}):
        assert settle_objects(plain, rewards=one).reward == settle_objects(plain, rewards=[one]).reward


def test_a_dataset_keeps_how_the_configuration_reads_rows(tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    old = {"name": "jsonl", "limit": 3, "args": {"path": "gone.jsonl", "prompt": "question", "chat": True}}
    file.write_text(yaml.safe_dump(tree(tmp_path, train=old, reward={"terms": [{"name": "exact"}]})))
    table = datasets.Dataset.from_list([{"question": row["prompt"]} for row in ROWS])
    configs = [settle_objects(file, ["trainer.steps=3"], train=table) for _ in range(2)]
    assert configs[0].train == configs[1].train
    assert configs[0].trainer.steps == 3
    found = build_dataset(configs[0].train[0], configs[0].base)
    assert len(found) == 3
    assert found[2].messages is not None
    assert found[2].messages[0].content == "2+1="


def test_a_function_may_be_anywhere_a_name_is(tmp_path: Path) -> None:
    plain = tree(tmp_path, train={"name": "arithmetic"}, reward={"terms": [{"name": "exact"}]})
    sections = {"trainer": {"aggregation": brevity, "advantage": {"name": brevity}}}
    found = settle_objects({**plain, **sections}).trainer
    assert found.aggregation == found.advantage.name
    config = parse_config(plain, tmp_path)
    assert settle_objects(config).model_dump(exclude={"run"}) == config.model_dump(exclude={"run"})
    assert settle_objects(config).base == tmp_path


@pytest.mark.parametrize(
    ("train", "problem"),
    [
        ([{"prompt": "a", "image": object()}], "train: rows must hold plain values, or be a datasets.Dataset"),
        ([], "train: it has no rows, must have one or more, such as {'prompt': '1+1=', 'answer': '2'}"),
        (datasets.Dataset.from_list([]), "train: it has no rows, must have one or more"),
        ([{"prompt": "a"}, "b"], "train: row 1 is str, must be a mapping, such as {'prompt': '1+1=', 'answer': '2'}"),
        (3, "train: data must be a list of rows or a datasets.Dataset, is int"),
        (datasets.DatasetDict(first=datasets.Dataset.from_list(ROWS)), "datasets.Dataset, one split of it: first"),
        (datasets.Dataset.from_list(ROWS).to_iterable_dataset(), "is IterableDataset; of a stream, take a part"),
    ],
)
def test_data_that_cannot_be_carried_is_refused(tmp_path: Path, train: Any, problem: str) -> None:
    with pytest.raises(ConfigError) as refused:
        settle_objects(tree(tmp_path), rewards=["exact"], train=train)
    assert problem in str(refused.value)


@pytest.mark.parametrize("wrong", [3, [None], ["exact", 3]])
def test_a_reward_is_a_function_a_name_or_a_section(tmp_path: Path, wrong: Any) -> None:
    with pytest.raises(ConfigError, match=r"rewards: (3|None) is not allowed, must be functions, names or sections"):
        settle_objects(tree(tmp_path), rewards=wrong, train=ROWS)


def test_overrides_of_what_is_no_file_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"overrides: only a YAML file takes them: set trainer\.steps=3 in"):
        settle_objects(tree(tmp_path), ["trainer.steps=3"], rewards=["exact"], train=ROWS)


def test_a_positional_argument_of_a_partial_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"reward\.terms\.0: give the arguments of functools.partial by name"):
        settle_objects(tree(tmp_path), rewards=[functools.partial(brevity, "x")], train="arithmetic")


def test_other_mistakes_are_those_of_the_configuration(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"run\.name: 'A B' is not allowed"):
        settle_objects({**tree(tmp_path), "run": {"name": "A B"}}, rewards=[brevity], train=ROWS)
