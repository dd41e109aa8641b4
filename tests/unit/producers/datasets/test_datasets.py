"""Datasets: the same index is always the same example; every mistake is one clear line before the run."""

import codecs
import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from producers.datasets import DATASETS
from producers.datasets.arithmetic import Arithmetic
from producers.datasets.base import Example
from producers.datasets.gsm8k import Gsm8k, gold_answer
from producers.datasets.jsonl import Jsonl
from producers.datasets.loading import build_dataset
from schemas.config import DatasetConfig
from schemas.errors import ConfigError, DataError, InfraError
from schemas.messages import ChatMessage

GSM8K = Path(__file__).parents[4].parent / "shared" / "data" / "gsm8k"
needs_gsm8k = pytest.mark.skipif(not GSM8K.is_dir(), reason=f"the published GSM8K is not in {GSM8K}")


def build(dataset: str, folder: Path, limit: int | None = None, **args: object):
    return build_dataset(DatasetConfig(name=dataset, args=args, limit=limit), folder)


def write_lines(file: Path, *rows: object) -> Path:
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return file


# arithmetic


def test_arithmetic_holds_every_sum_once_in_two_disjoint_splits():
    train, heldout = Arithmetic(max=20), Arithmetic(max=20, split="heldout")
    texts = [ds[i].text for ds in (train, heldout) for i in range(len(ds))]
    assert len(texts) == len(set(texts)) == 21 * 21
    assert 0.05 < len(heldout) / len(texts) < 0.2
    example = train[0]
    a, b = str(example.text).removesuffix("=").split("+")
    assert example.data == {"answer": str(int(a) + int(b))}


def test_arithmetic_is_the_same_on_every_machine():
    assert [Arithmetic()[i].text for i in range(3)] == ["29+60=", "87+16=", "97+61="]


@given(st.integers(1, 60), st.floats(0.05, 0.95), st.integers(0, 1000))
def test_arithmetic_splits_are_complementary_for_any_settings(top: int, fraction: float, seed: int):
    lengths = []
    for split in ("train", "heldout"):
        try:
            lengths.append(len(Arithmetic(max=top, split=split, heldout_fraction=fraction, seed=seed)))
        except ConfigError:  # a split that would be empty is refused
            lengths.append(0)
    assert sum(lengths) == (top + 1) ** 2


# jsonl


def test_jsonl_reads_several_files_in_sorted_order_and_skips_blank_lines(tmp_path: Path):
    write_lines(tmp_path / "b.jsonl", {"prompt": "three", "answer": 3})
    (tmp_path / "a.jsonl").write_text('{"prompt": "one", "answer": 1, "level": "é"}\n\n{"prompt":"two","answer":2}')
    dataset = Jsonl(tmp_path, "*.jsonl")
    assert [dataset[i].text for i in range(len(dataset))] == ["one", "two", "three"]
    assert dataset[0].data == {"answer": 1, "level": "é"}
    assert dataset[1].data == {"answer": 2}


def test_jsonl_takes_conversations_templates_and_system_prompts(tmp_path: Path):
    conversation = [{"role": "user", "content": "hi"}]
    file = write_lines(tmp_path / "d.jsonl", {"q": conversation, "a": "x", "topic": "t"})
    asked = [{"role": "system", "content": "Be kind."}, *conversation]
    assert Jsonl(tmp_path, str(file), prompt="q", answer="a", system="Be kind.")[0] == Example(
        messages=[ChatMessage("system", "Be kind."), ChatMessage("user", "hi")],
        data={"answer": "x", "topic": "t", "prompt": asked},
    )
    templated = Jsonl(tmp_path, "d.jsonl", prompt="q", answer=None, template="On {topic}: {{a}}", fields=["topic"])[0]
    assert templated == Example(text="On t: {a}", data={"topic": "t"})


def test_a_name_with_dots_is_a_field_of_a_field(tmp_path: Path):
    """As rows have them that were made for verl."""
    row = {"prompt": "2+2=", "reward_model": {"ground_truth": "4"}, "a.b": "whole"}
    (tmp_path / "a.jsonl").write_text(json.dumps(row) + "\n")
    example = Jsonl(tmp_path, "a.jsonl", answer="reward_model.ground_truth", fields=["a.b"])[0]
    assert example.data == {"answer": "4", "a.b": "whole"}
    with pytest.raises(ConfigError, match=r"no field 'reward_model.truth', it has 'prompt', 'reward_model', 'a.b'"):
        Jsonl(tmp_path, "a.jsonl", answer="reward_model.truth")


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("{not json", "not JSON"),
        ("[1]", "must be an object"),
        ('{"answer": "1"}', "no field 'prompt', it has 'answer'"),
        (
            '{"prompt": "x"}',
            "no field 'answer', it has 'prompt'; if rows have no answer, set the dataset's argument answer",
        ),
        ('{"prompt": 3, "answer": "1"}', "must be text or a list of role and content, is int"),
        ('{"prompt": [{"role": "user"}], "answer": "1"}', "needs a role and a content"),
        (
            '{"prompt": [{"role": "assistant", "content": "", "tool_calls": [{"id": "a"}]}], "answer": "1"}',
            "a prompt's message cannot have tool_calls: write them into its content",
        ),
        (
            '{"prompt": [{"role": "tool", "content": "3", "tool_call_id": "a"}], "answer": "1"}',
            "a prompt's message cannot have tool_call_id: write calls into the content, and remove it",
        ),
        ('{"prompt": "x", "answer": 123456789012345678901234567890}', "cannot be sent"),
    ],
)
def test_a_bad_line_is_named_by_file_and_line_when_the_dataset_is_opened(tmp_path: Path, line: str, reason: str):
    file = tmp_path / "d.jsonl"
    file.write_text('{"prompt": "fine", "answer": "1"}\n\n' + line + "\n")
    with pytest.raises(ConfigError) as caught:
        Jsonl(tmp_path, "d.jsonl")
    assert f"{file}:3: " in str(caught.value)
    assert reason in str(caught.value)
    assert "\n" not in str(caught.value)


def test_jsonl_names_a_missing_file_and_a_wrong_template(tmp_path: Path):
    with pytest.raises(ConfigError, match=r"dataset 'jsonl': path 'nothing.jsonl': no file .*nothing\.jsonl"):
        Jsonl(tmp_path, "nothing.jsonl")
    write_lines(tmp_path / "d.jsonl", {"prompt": "x", "answer": 1})
    with pytest.raises(ConfigError, match=r"write \{\{ and \}\} for braces"):
        Jsonl(tmp_path, "d.jsonl", template="{")
    with pytest.raises(ConfigError, match="is not a field name"):
        Jsonl(tmp_path, "d.jsonl", template="{prompt.__class__}")
    with pytest.raises(
        ConfigError, match=r"d\.jsonl:1: template '\{prompt:d\}' does not fit the row: Unknown format code"
    ):
        Jsonl(tmp_path, "d.jsonl", template="{prompt:d}")


def test_jsonl_may_begin_with_the_mark_of_an_editor(tmp_path: Path):
    rows = b'{"prompt": "a", "answer": "1"}\n{"prompt": "b", "answer": "2"}\n'
    (tmp_path / "d.jsonl").write_bytes(codecs.BOM_UTF8 + rows)
    marked = Jsonl(tmp_path, "d.jsonl")
    assert [marked[index].text for index in range(len(marked))] == ["a", "b"]


def test_jsonl_without_a_row_is_named_with_what_was_to_be_taken(tmp_path: Path):
    (tmp_path / "d.jsonl").write_text("\n\n")
    with pytest.raises(ConfigError, match=r"dataset 'jsonl': there is no row in .*d\.jsonl"):
        Jsonl(tmp_path, "d.jsonl")
    write_lines(tmp_path / "d.jsonl", {"prompt": "x", "answer": 1, "level": 3})
    with pytest.raises(ConfigError, match=r"there is no row that where \{'level': '3'\} takes in .*d\.jsonl"):
        Jsonl(tmp_path, "d.jsonl", where={"level": "3"})


# gsm8k


def test_gsm8k_gold_answers_lose_their_commas():
    assert gold_answer("so 1 + 1\n#### 1,234") == "1234"
    with pytest.raises(DataError, match="must end in ####"):
        gold_answer("no marker")


def test_gsm8k_reads_a_folder_of_published_files(tmp_path: Path):
    write_lines(tmp_path / "train.jsonl", {"question": "How many?", "answer": "Two.\n#### 2"})
    dataset = Gsm8k(tmp_path, ".", system="Be exact.")
    messages = dataset[0].messages
    assert messages is not None
    assert [m.role for m in messages] == ["system", "user"]
    assert messages[1].content.startswith("How many?\n\n")
    assert dataset[0].data == {"answer": "2"}
    assert Gsm8k(tmp_path, ".", instruction="", chat=False)[0].text == "How many?\n"
    with pytest.raises(ConfigError, match=r"has no test\.jsonl"):
        Gsm8k(tmp_path, ".", split="test")
    with pytest.raises(ConfigError, match="no dataset folder"):
        Gsm8k(tmp_path, "./elsewhere")


@needs_gsm8k
def test_gsm8k_as_published_has_a_number_for_every_problem():
    for split, count in (("train", 7473), ("test", 1319)):
        dataset = Gsm8k(Path.cwd(), str(GSM8K), split=split)
        assert len(dataset) == count
        for i in range(count):
            float(dataset[i].data["answer"])


# Hugging Face


def test_hf_reads_saved_datasets_and_data_files(tmp_path: Path):
    datasets = pytest.importorskip("datasets")
    table = datasets.Dataset.from_list([{"problem": "1+1", "solution": "2", "level": 1}])
    table.save_to_disk(str(tmp_path / "one"))
    datasets.DatasetDict(test=table).save_to_disk(str(tmp_path / "splits"))
    expected = Example(text="1+1", data={"answer": "2", "level": 1})
    args = {"prompt": "problem", "answer": "solution"}
    assert build("hf", tmp_path, path="one", **args)[0] == expected
    assert build("hf", tmp_path, path="splits", split="test", **args)[0] == expected
    with pytest.raises(ConfigError, match="has no split 'train': one of test"):
        build("hf", tmp_path, path="splits", **args)
    with pytest.raises(ConfigError, match="no field 'prompt', it has 'problem'"):
        build("hf", tmp_path, path="one", answer="solution")
    with pytest.raises(ConfigError, match="no dataset folder"):
        build("hf", tmp_path, path="./none")


def test_hf_reads_one_file_of_any_split(tmp_path: Path):
    datasets = pytest.importorskip("datasets")
    table = datasets.Dataset.from_list([{"prompt": "1+1", "answer": "2"}])
    table.to_parquet(tmp_path / "rows.parquet")
    table.to_csv(tmp_path / "rows.csv")
    table.to_json(tmp_path / "rows.json")
    for name, split in (("rows.parquet", "train"), ("rows.csv", "test"), ("rows.json", "train")):
        assert build("hf", tmp_path, path=name, split=split)[0].text == "1+1"
    (tmp_path / "rows.txt").touch()
    with pytest.raises(ConfigError, match=r"dataset 'rows.txt': a file must end with one of .parquet, "):
        build("hf", tmp_path, path="rows.txt")


def test_gsm8k_reads_a_saved_hugging_face_dataset(tmp_path: Path):
    datasets = pytest.importorskip("datasets")
    table = datasets.Dataset.from_list([{"question": "?", "answer": "#### 5"}])
    datasets.DatasetDict(train=table).save_to_disk(str(tmp_path / "saved"))
    assert build("gsm8k", tmp_path, path="saved")[0].data == {"answer": "5"}


# build


def test_every_registered_dataset_exists():
    for name in DATASETS.names:
        assert callable(DATASETS.get(name))


@pytest.mark.parametrize(
    ("name", "args", "reason"),
    [
        ("arithmtic", {}, "did you mean 'arithmetic'"),
        ("arithmetic", {"maximum": 3}, "dataset 'arithmetic': unknown argument 'maximum', did you mean 'max'?"),
        ("arithmetic", {"qqq": 3}, "unknown argument 'qqq': one of max, split, heldout_fraction, seed"),
        ("arithmetic", {"max": 0}, "dataset 'arithmetic': argument 'max': 0 is not allowed, must be greater than"),
        ("arithmetic", {"max": True}, "dataset 'arithmetic': argument 'max': True is not allowed, must be a number"),
        ("arithmetic", {"split": "test"}, "argument 'split': 'test' is not allowed, must be 'train' or 'heldout'"),
        ("arithmetic", {"base": "."}, "unknown argument 'base'"),
        ("jsonl", {}, "dataset 'jsonl': argument 'path' is required and missing"),
        ("jsonl", {"path": 3}, "argument 'path': 3 is not allowed, must be a valid string or a valid list"),
    ],
)
def test_a_wrong_argument_is_one_line_that_says_what_is_allowed(tmp_path: Path, name: str, args: dict, reason: str):
    with pytest.raises(ConfigError) as caught:
        build(name, tmp_path, **args)
    assert reason in str(caught.value)
    assert "\n" not in str(caught.value)


def test_limit_takes_the_first_examples(tmp_path: Path):
    limited = build("arithmetic", tmp_path, limit=7)
    assert len(limited) == 7
    assert limited[6] == Arithmetic()[6]
    with pytest.raises(IndexError):
        limited[7]
    assert len(build("arithmetic", tmp_path, limit=10**6)) == len(Arithmetic())


USERS_OWN = """
from producers.datasets.base import Example

class Squares:
    def __init__(self, size: int = 4):
        self.size = size
    def __len__(self):
        return self.size
    def __getitem__(self, index):
        return Example(text=f"{index}^2=", data={"answer": index**2})

def squares(base, size: int):
    return Squares(size)

def bad():
    return ["a string"]

def empty():
    return Squares(0)

def unsendable():
    return [Example(text="x", data={"o": object()})]
"""


def test_a_users_own_dataset_is_a_class_or_function_in_a_file(tmp_path: Path):
    (tmp_path / "mine.py").write_text(USERS_OWN)
    assert build("mine.py:Squares", tmp_path)[3].data == {"answer": 9}
    assert len(build("mine.py:squares", tmp_path, size=2)) == 2
    with pytest.raises(ConfigError, match="argument 'size': 'x' is not allowed"):
        build("mine.py:Squares", tmp_path, size="x")
    with pytest.raises(ConfigError, match=r"must hold .*Example, holds str"):
        build("mine.py:bad", tmp_path)
    with pytest.raises(ConfigError, match="has no examples"):
        build("mine.py:empty", tmp_path)
    with pytest.raises(ConfigError, match="plain values that MessagePack has"):
        build("mine.py:unsendable", tmp_path)


def test_an_example_that_raises_is_a_mistake_that_is_found_before_the_run(tmp_path: Path):
    (tmp_path / "mine.py").write_text(
        "class Mine:\n"
        "    def __len__(self):\n        return 3\n"
        "    def __getitem__(self, index):\n        return {}['prompt']\n"
    )
    with pytest.raises(ConfigError, match=r"dataset 'mine.py:Mine': example 0: KeyError: 'prompt'"):
        build("mine.py:Mine", tmp_path)


def test_a_file_that_can_not_be_read_for_a_while_is_no_mistake_of_its_examples(tmp_path: Path):
    file = write_lines(tmp_path / "a.jsonl", {"prompt": "1", "answer": "2"})
    dataset = Jsonl(tmp_path, "a.jsonl")
    file.unlink()
    with pytest.raises(InfraError, match="cannot read"):
        dataset[0]


def test_rows_are_taken_by_the_values_of_their_fields(tmp_path: Path) -> None:
    rows = [{"prompt": str(i), "answer": str(i), "level": i % 3} for i in range(9)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    some = build("jsonl", tmp_path, path="rows.jsonl", where={"level": [0, 2]})
    assert [some[i].text for i in range(len(some))] == ["0", "2", "3", "5", "6", "8"]
    assert len(build("jsonl", tmp_path, path="rows.jsonl", where={"level": 1})) == 3
    with pytest.raises(ConfigError, match=r"rows.jsonl:1: no field 'levels', it has 'prompt', 'answer', 'level'"):
        build("jsonl", tmp_path, path="rows.jsonl", where={"levels": 1})


def test_fields_reach_the_reward_under_other_names(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text('{"prompt": "a", "answer": "b", "test_list": ["t"], "more": 1}\n')
    (example,) = [build("jsonl", tmp_path, path="rows.jsonl", fields={"tests": "test_list"})[0]]
    assert example.data == {"tests": ["t"], "answer": "b"}


def test_rows_of_a_table_are_taken_by_the_values_of_their_columns(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    table = datasets.Dataset.from_dict({"prompt": list("abcd"), "answer": list("wxyz"), "level": [1, 2, 1, 3]})
    table.save_to_disk(str(tmp_path / "table"))
    some = build("hf", tmp_path, path="table", where={"level": [1, 3]}, fields={"difficulty": "level"})
    assert [some[i].text for i in range(len(some))] == ["a", "c", "d"]
    assert some[2].data == {"difficulty": 3, "answer": "z"}
    with pytest.raises(ConfigError, match="has no column 'levels', it has 'prompt', 'answer', 'level'"):
        build("hf", tmp_path, path="table", where={"levels": 1})
