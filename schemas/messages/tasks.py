"""Tasks: prompt groups on their way from the feeder to a generator."""

from typing import Any, Literal

import msgspec

from schemas.codec import Message
from schemas.messages.partials import Partial
from schemas.messages.trajectories import Kind


class ContentPart(msgspec.Struct, frozen=True, gc=False):
    """A part of a message: a text, or a placeholder of the task's next image."""

    type: Literal["text", "image"]
    text: str = ""


class ChatMessage(msgspec.Struct, frozen=True, gc=False):
    """A message of a conversation: a text, or parts in order, so that images may stand between texts."""

    role: str
    content: str | list[ContentPart]

    @property
    def images(self) -> int:
        """Return the number of its images."""
        return 0 if isinstance(self.content, str) else sum(part.type == "image" for part in self.content)

    @property
    def plain(self) -> str | list[dict[str, str]]:
        """Return its content in the form of chat templates and OpenAI's protocol."""
        if isinstance(self.content, str):
            return self.content
        return [
            {"type": "image"} if part.type == "image" else {"type": "text", "text": part.text} for part in self.content
        ]

    @property
    def text(self) -> str:
        """Return its text for display, with ``<image>`` for each image."""
        if isinstance(self.content, str):
            return self.content
        return "".join("<image>" if part.type == "image" else part.text for part in self.content)


class Image(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """An image of a task, whose bytes the broker stores once (schemas/images/).

    digest: of the bytes, a PNG file. width, height: pixels, as the model reads them. size: bytes.
    """

    digest: str
    width: int
    height: int
    size: int


class Sampling(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """Settings for sampling a completion. ``max_tokens`` counts generated tokens; temperature 0 is greedy."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    max_tokens: int = 256
    stop: list[str] = []
    seed: int | None = None

    def __post_init__(self) -> None:
        if not self.temperature >= 0:
            raise ValueError(f"sampling.temperature {self.temperature} must be 0 or more")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"sampling.top_p {self.top_p} must be in (0, 1]")
        if self.max_tokens < 1:
            raise ValueError(f"sampling.max_tokens {self.max_tokens} must be 1 or more")


class Task(Message, kw_only=True, tag="task"):
    """A prompt group to generate: ``n`` samples of one prompt.

    task_id: position in the deterministic prompt order (train), or ``(version + 1) * 2**32 + index`` (eval).
    Exactly one of ``text``, ``messages``, ``token_ids`` is the prompt.
    data: reference answer and metadata, handed to the reward function as keywords.
    dataset: label of the dataset that the prompt is from. level: of difficulty, -1 if the dataset has no levels.
    images: of the messages, in their order.
    """

    task_id: int
    kind: Kind
    n: int
    sampling: Sampling
    text: str | None = None
    messages: list[ChatMessage] | None = None
    token_ids: list[int] | None = None
    data: dict[str, Any] = {}
    dataset: str = ""
    level: int = -1
    partials: list[Partial] = []
    images: list[Image] = []

    def __post_init__(self) -> None:
        given = sum(p is not None for p in (self.text, self.messages, self.token_ids))
        if given != 1:
            raise ValueError(f"a task needs exactly one of text, messages, token_ids, has {given}")
        if self.n < 1:
            raise ValueError(f"task n {self.n} must be 1 or more")
        if self.task_id < 0:
            raise ValueError(f"task_id {self.task_id} must be 0 or more")
        if self.messages is not None and not isinstance(self.messages, list):
            raise ValueError(f"a task's messages must be a list, are {type(self.messages).__name__}")
        placeholders = sum(message.images for message in self.messages or ())
        if placeholders != len(self.images):
            raise ValueError(f"a task has {len(self.images)} images, its messages have placeholders for {placeholders}")
