"""Functions of a script of TRL's come into a file of their own, with what they need, and without the training."""

from pathlib import Path
from typing import Any

from deploy.migrate.convert import convert_file
from deploy.migrate.trl_script import copy_functions, move_functions

SCRIPT = """
import os, re
import torch.nn.functional as F
from collections.abc import (
    Sequence,
)
from transformers import AutoTokenizer
from trl import GRPOConfig, GRPOTrainer

NUMBER = re.compile(r"\\d+")
LIMIT, FACTOR = 3, 2
tokenizer = AutoTokenizer.from_pretrained("m")


def numbers(text):
    return NUMBER.findall(text)[:LIMIT]


def main():
    scale = 0.5

    def right(completions, answer, **kwargs):
        # As many points as there are numbers.
        return [scale * (numbers(text)[-1:] == [one]) for text, one in zip(completions, answer)]

    def long(completions, **kwargs):
        '''Longer,
better.'''
        return [len(tokenizer(text)) for text in completions]

    trainer = GRPOTrainer(model="m", reward_funcs=[right, long], args=GRPOConfig(), train_dataset=None)
    trainer.train()


main()
"""


def run(text: str) -> dict[str, Any]:
    scope: dict[str, Any] = {}
    exec(compile(text, "moved", "exec"), scope)
    return scope


def test_a_function_comes_with_what_it_needs_and_nothing_else() -> None:
    text, lacks = copy_functions(SCRIPT, ["right"])
    assert run(text)["right"](["1 and 5", "none"], ["5", "7"]) == [0.5, 0.0]
    assert lacks == []
    assert "# As many points" in text
    assert not [word for word in ("import os", "torch", "Sequence", "trl", "AutoTokenizer", "long") if word in text]


def test_a_value_that_a_run_makes_is_named_and_not_made_again() -> None:
    text, lacks = copy_functions(SCRIPT, ["long"])
    assert lacks == ["tokenizer"]
    assert "from_pretrained" not in text
    assert run(text)["long"].__doc__ == "Longer,\nbetter."


def test_what_is_no_function_of_the_script_is_left_to_the_user() -> None:
    assert copy_functions(SCRIPT, ["LIMIT"]) == ("", [])
    assert copy_functions(SCRIPT, ["right", "missing"]) == ("", [])


def test_the_notes_name_what_is_left_and_a_file_that_exists_stays(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    _, done = convert_file(script)
    asked = [note for note in done.to_do if "move the reward function" in note]
    assert len(asked) == 2
    assert move_functions(script, done, tmp_path) == [tmp_path / "train_rewards.py"]
    assert not [note for note in done.to_do if "move the" in note]
    assert "train_rewards.py: add tokenizer, which only a run of train.py makes" in done.to_do
    assert run((tmp_path / "train_rewards.py").read_text())["right"](["4"], ["4"]) == [0.5]

    (tmp_path / "train_rewards.py").write_text("mine")
    _, again = convert_file(script)
    assert move_functions(script, again, tmp_path) == []
    assert (tmp_path / "train_rewards.py").read_text() == "mine"
    assert [note for note in again.to_do if "move the reward function" in note] == asked
