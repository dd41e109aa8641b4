"""Prompts and answers as token ids, exactly as generators encode them.

What is trained here is sampled from there: a <bos> or a chat template that only one of the two adds makes prompts that
the other has never seen.
"""

from collections.abc import Callable, Container, Sequence
from pathlib import Path
from typing import NamedTuple, Protocol, TypeAlias

import torch
from torch import Tensor

from schemas.errors import DataError
from schemas.images import ImageSettings, prepare_image
from schemas.messages import ChatMessage, Image, PlacedImage, Sampling, Task

Prompt: TypeAlias = str | Sequence[ChatMessage]
"""Plain text, or the messages of a chat."""


class PolicyTokenizer(Protocol):
    """The generators' tokenizer, producers/tokenizer.py, as far as it is used here."""

    @property
    def eos_id(self) -> int:
        """Id of the end of sequence."""

    @property
    def pad_id(self) -> int | None:
        """Id of padding, None if the tokenizer has none."""

    def prompt_ids(self, task: Task) -> list[int]:
        """Encode a task's prompt as token ids; messages go through the chat template."""

    def encode(self, text: str) -> list[int]:
        """Encode a piece of text as token ids, with nothing added."""

    def closing_id(self, messages: Sequence[ChatMessage]) -> int:
        """Id of the token with which the chat template closes an answer; the end of sequence if it has none."""

    def save(self, folder: Path) -> None:
        """Write its files beside a model's."""


class Placeholders(Protocol):
    """The generators' places of images, producers/images/placeholders.py, as far as they are used here."""

    @property
    def settings(self) -> ImageSettings:
        """How the model wants its images."""

    def expand(self, ids: Sequence[int], images: Sequence[Image]) -> tuple[list[int], list[PlacedImage]]:
        """Return ids with the tokens of each image in the place of its one, and where these are."""


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


LoadTokenizer: TypeAlias = Callable[[str], PolicyTokenizer]
"""Loads the tokenizer of a model folder or hub id."""


def encode_prompt(tokenizer: PolicyTokenizer, prompt: Prompt, images: Sequence[Image] = ()) -> list[int]:
    """Encode a prompt as token ids, with one for each of its images; DataError if it is empty."""
    if isinstance(prompt, str):
        task = Task(task_id=0, kind="train", n=1, sampling=Sampling(), text=prompt)
    else:
        task = Task(task_id=0, kind="train", n=1, sampling=Sampling(), messages=list(prompt), images=list(images))
    try:
        return tokenizer.prompt_ids(task)
    except DataError as error:
        raise DataError(f"prompt {prompt!r:.80} cannot be encoded: {error}") from error


def encode_answer(tokenizer: PolicyTokenizer, prompt: Prompt, answer: str) -> list[int]:
    """Encode an answer to a prompt as token ids, with the token that ends a sampled one.

    After messages it is the one with which the chat template closes an answer, after text the end of sequence.
    """
    end = tokenizer.eos_id if isinstance(prompt, str) else tokenizer.closing_id(prompt)
    return [*tokenizer.encode(answer), end]


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
    placed: list[PlacedImage] = []
    if places is None and given.images:
        raise DataError(f"the example of prompt {given.prompt!r:.80} has images: set model.kind to vision")
    prepared = [] if places is None else [prepare_image(file, places.settings) for file in given.images]
    images = [image for image, _ in prepared]
    prompt = encode_prompt(tokenizer, given.prompt, images)
    if places is not None:
        prompt, placed = places.expand(prompt, images)
    *answer, end = encode_answer(tokenizer, given.prompt, given.answer)
    if not answer and not may_be_empty:
        raise DataError(f"the example of prompt {given.prompt!r:.80} has an empty answer")
    if allowed is not None and (wrong := [token for token in answer if token not in allowed]):
        raise DataError(f"answer {given.answer!r:.80} has token {wrong[0]}, which model.output_tokens does not match")
    # Where no token can end an answer, it ends at sampling.max_tokens.
    answer += [end] if allowed is None or end in allowed else []
    check_length(given.prompt, len(prompt) + len(answer), max_length)
    return DemonstrationIds(prompt, answer, placed, {image.digest: body for image, body in prepared})


def check_length(prompt: Prompt, tokens: int, max_length: int) -> None:
    """Raise DataError if an example has more tokens than ``max_length``, prompt and answer together."""
    if tokens > max_length:
        raise DataError(
            f"the example of prompt {prompt!r:.80} has {tokens} tokens, more than model.max_length {max_length}"
        )


def pad(rows: Sequence[Sequence[int]], filler: int) -> tuple[Tensor, Tensor]:
    """Pad rows of token ids on the right: int64 [R, T], and their lengths, int64 [R].

    Without rows it is a short one of fillers: a rank that has nothing to do takes part in what the others do.
    """
    lengths = torch.tensor([len(row) for row in rows] or [2])
    tokens = torch.full((len(lengths), int(lengths.max())), filler, dtype=torch.int64)
    for number, row in enumerate(rows):
        tokens[number, : len(row)] = torch.tensor(row)
    return tokens, lengths
