"""GSM8K as published: grade-school problems whose gold answer follows ``####``.

Cobbe et al. 2021, "Training Verifiers to Solve Math Word Problems" (arXiv 2110.14168), MIT licence.
"""

from pathlib import Path
from typing import Literal

from producers.datasets.base import Dataset, Example
from producers.datasets.hf import HuggingFace
from producers.datasets.jsonl import Jsonl
from schemas.errors import ConfigError, DataError
from schemas.messages import ChatMessage

INSTRUCTION = 'Solve the problem step by step, then write the final answer on a last line that starts with "####".'


class Gsm8k:
    """Problems as chat messages, ``data["answer"]`` the gold number without commas.

    path: a folder with train.jsonl and test.jsonl, relative to ``base``; or a Hugging Face dataset,
    by default the published one on the hub. instruction: added below each problem; empty for none.
    system: a system prompt. chat: false gives plain text, for models without a chat template.
    """

    def __init__(
        self,
        base: Path,
        path: str = "openai/gsm8k",
        split: Literal["train", "test"] = "train",
        instruction: str = INSTRUCTION,
        system: str | None = None,
        chat: bool = True,
    ) -> None:
        if not chat and system is not None:
            raise ConfigError("gsm8k: a system prompt needs chat: true")
        self._rows = _open(base, path, split)
        self._instruction = instruction
        self._system = system
        self._chat = chat

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> Example:
        row = self._rows[index]
        data = {"answer": gold_answer(str(row.data["answer"]))}
        prompt = f"{row.text}\n\n{self._instruction}" if self._instruction else str(row.text)
        if not self._chat:
            return Example(text=f"{prompt}\n", data=data)
        messages = [ChatMessage("user", prompt)]
        if self._system is not None:
            messages.insert(0, ChatMessage("system", self._system))
        return Example(messages=messages, data=data)


def gold_answer(solution: str) -> str:
    """Return the number after the last ``####``, commas removed; DataError if there is none."""
    _, marker, answer = solution.rpartition("####")
    if not marker or not answer.strip():
        raise DataError(f"a GSM8K answer must end in #### and a number, ends in {solution[-40:]!r}")
    return answer.strip().replace(",", "")


def _open(base: Path, path: str, split: str) -> Dataset:
    folder = base / Path(path).expanduser()
    file = folder / f"{split}.jsonl"
    if file.is_file():
        return Jsonl(folder, file.name, prompt="question", fields=[])
    saved = (folder / "dataset_dict.json").is_file() or (folder / "state.json").is_file()
    if folder.is_dir() and not saved:
        raise ConfigError(f"gsm8k: {folder} has no {split}.jsonl")
    return HuggingFace(base, path, split, None if saved else "main", prompt="question", fields=[])
