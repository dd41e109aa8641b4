"""Prompts and answers as token ids, exactly as generators encode them.

What is trained here is sampled from there: a <bos> or a chat template that only one of the two adds makes prompts that
the other has never seen.
"""

from collections.abc import Callable, Container, Sequence
from pathlib import Path
from typing import NamedTuple, Protocol, TypeAlias

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from schemas.errors import DataError
from schemas.images import ImageSettings, prepare_image
from schemas.messages import ChatMessage, Image, PlacedImage, Sampling, Task

Prompt: TypeAlias = str | Sequence[ChatMessage]
"""Plain text, or the messages of a chat."""


class PolicyTokenizer(Protocol):
    """The part of the generators' tokenizer that is used here; producers/tokenizer.py documents its methods."""

    @property
    def eos_id(self) -> int: ...

    @property
    def pad_id(self) -> int | None: ...

    def prompt_ids(self, task: Task) -> list[int]: ...

    def encode(self, text: str) -> list[int]: ...

    def closing_id(self, messages: Sequence[ChatMessage]) -> int: ...

    def save(self, folder: Path) -> None: ...


class Placeholders(Protocol):
    """The part of the generators' image placeholders that is used here; see producers/images/placeholders.py."""

    @property
    def settings(self) -> ImageSettings: ...

    def expand(self, ids: Sequence[int], images: Sequence[Image]) -> tuple[list[int], list[PlacedImage]]: ...


class Demonstration(NamedTuple):
    """A prompt with the text of its answer. images: files of the prompt's images, in their order."""

    prompt: Prompt
    answer: str
    images: Sequence[bytes] = ()


class DemonstrationIds(NamedTuple):
    """A demonstration as token ids. images: those that tokens of the prompt stand for; files: theirs by digest."""

    prompt: list[int]
    answer: list[int]
    images: list[PlacedImage]
    files: dict[str, bytes]

    @property
    def ids(self) -> list[int]:
        """Ids of the prompt, then of the answer."""
        return self.prompt + self.answer


LoadTokenizer: TypeAlias = Callable[[str], PolicyTokenizer]
"""Loads the tokenizer of a model folder or hub id."""


def encode_demonstration(
    tokenizer: PolicyTokenizer,
    given: Demonstration,
    max_length: int,
    places: Placeholders | None = None,
    allowed: Container[int] | None = None,
    may_be_empty: bool = False,
) -> DemonstrationIds:
    """Encode a demonstration. places: of a model that reads images. allowed: tokens of an answer, None for all.

    may_be_empty: whether its answer may. DataError if its prompt is empty or its answer otherwise, both are too long,
    or the answer has a token that is not allowed.
    """
    where, placed = f"the example of prompt {given.prompt!r:.80}", list[PlacedImage]()
    if places is None and given.images:
        raise DataError(f"{where} has images: set model.kind to vision")
    prepared = [] if places is None else [prepare_image(file, places.settings) for file in given.images]
    images = [image for image, _ in prepared]
    text, messages = (given.prompt, None) if isinstance(given.prompt, str) else (None, list(given.prompt))
    shown = [] if messages is None else images
    task = Task(task_id=0, kind="train", n=1, sampling=Sampling(), text=text, messages=messages, images=shown)
    try:
        prompt = tokenizer.prompt_ids(task)
    except DataError as error:
        raise DataError(f"prompt {given.prompt!r:.80} cannot be encoded: {error}") from error
    if places is not None:
        prompt, placed = places.expand(prompt, images)
    answer = tokenizer.encode(given.answer)
    if not answer and not may_be_empty:
        raise DataError(f"{where} has an empty answer")
    if allowed is not None and (wrong := [token for token in answer if token not in allowed]):
        raise DataError(f"answer {given.answer!r:.80} has token {wrong[0]}, which model.output_tokens does not match")
    # The chat template closes an answer to messages. If model.output_tokens rules that token out, none is added.
    end = tokenizer.eos_id if messages is None else tokenizer.closing_id(messages)
    answer += [end] if allowed is None or end in allowed else []
    if (tokens := len(prompt) + len(answer)) > max_length:
        raise DataError(f"{where} has {tokens} tokens, more than model.max_length {max_length}")
    return DemonstrationIds(prompt, answer, placed, {image.digest: body for image, body in prepared})


def pad(rows: Sequence[Sequence[int]], filler: int) -> tuple[Tensor, Tensor]:
    """Pad rows of token ids on the right: int64 [R, T], and a mask of the rows' own tokens, bool [R, T].

    Without rows, the result is one short row of fillers, so that a rank without work takes part in the collectives.
    """
    found = [torch.tensor(row, dtype=torch.int64) for row in rows or [[filler] * 2]]
    own = [torch.ones_like(row, dtype=torch.bool) for row in found]
    return pad_sequence(found, batch_first=True, padding_value=filler), pad_sequence(own, batch_first=True)
