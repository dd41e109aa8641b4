"""Demonstrations of supervised training are read one by one, and an answer that is no text is named."""

import json
import tracemalloc
from pathlib import Path
from typing import Any

import pytest

from deploy.offline.preference import preferences
from deploy.offline.warm_start import Demonstrations
from schemas.config import DatasetConfig
from schemas.errors import ConfigError
from tidemill import Example

COUNT, SIZE = 20, 1 << 20


class Pictures:
    """Examples with an image of a mebibyte each."""

    def __init__(self, base: Path) -> None:
        pass

    def __len__(self) -> int:
        return COUNT

    def __getitem__(self, index: int) -> Example:
        return Example(text="look", images=[bytes([index]) * SIZE], data={"answer": index} if index < 5 else {})


def test_images_of_all_examples_are_never_in_memory_together() -> None:
    shown = Demonstrations(DatasetConfig(name=f"{__name__}:Pictures"), Path())
    assert len(shown) == COUNT
    assert shown[0].answer == "0", "what that imports is not measured"
    tracemalloc.start()
    try:
        answers = [(example.answer, example.images[0][:1]) for example in (shown[index] for index in range(5))]
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert answers == [(str(index), bytes([index])) for index in range(5)]
    assert peak < 3 * SIZE
    with pytest.raises(ConfigError, match=r"^warm_start: example 5 of dataset .* needs a prompt, and an answer"):
        list(shown)


class Broken(Pictures):
    """Examples of which the third cannot be read."""

    def __getitem__(self, index: int) -> Example:
        return Example(text="look", data={"answer": ["a#b", "c#d", "e"][index % 3].split("#")[1]})


def test_an_index_error_of_a_dataset_is_not_its_end() -> None:
    with pytest.raises(IndexError):
        list(Demonstrations(DatasetConfig(name=f"{__name__}:Broken"), Path()))


SAID = {"role": "assistant", "content": "seven"}


@pytest.mark.parametrize(
    ("answer", "text"),
    [
        ("7", "7"),
        (7, "7"),
        ([SAID], "seven"),
        ([SAID, SAID], None),
        ([{**SAID, "role": "user"}], None),
        (SAID, None),
        (None, None),
    ],
)
def test_an_answer_is_text_or_one_message_of_the_assistant(tmp_path: Path, answer: Any, text: str | None) -> None:
    rows = {"prompt": [{"role": "user", "content": "3+4="}], "answer": answer, "chosen": answer, "rejected": "8"}
    (tmp_path / "rows.jsonl").write_text(json.dumps(rows))
    dataset = DatasetConfig(name="jsonl", args={"path": "rows.jsonl"})
    if text is None:
        with pytest.raises(ConfigError, match=r"that is text or a list of one message of the assistant$"):
            list(Demonstrations(dataset, tmp_path))
    else:
        assert [one.answer for one in Demonstrations(dataset, tmp_path)] == [text]
    if text is None or answer == 7:
        with pytest.raises(ConfigError, match=r"the texts chosen and rejected$"):
            preferences(dataset, tmp_path)
    else:
        assert [(one.chosen, one.rejected) for one in preferences(dataset, tmp_path)] == [(text, "8")]
