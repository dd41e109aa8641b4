"""The images of one episode: those of its task, and those that an agent, a tool or an environment shows the policy.

An agent sends images as ``data:`` URLs, again with every request that repeats the history. Each image is prepared for
the model once and replaced by its digest: messages hold ``{"type": "image", "digest": ...}`` in its place.
"""

import json
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

from producers.conversation.messages import Message, image_digests
from producers.engines.base import PromptImage
from producers.images.placeholders import ImagePlaceholders
from producers.images.prepare import read_data_url
from producers.runner.environments import is_pillow_image, make_data_url, png_file
from producers.workflows.base import RolloutContext
from schemas.config import TidemillConfig
from schemas.digests import digest
from schemas.errors import DataError, printable
from schemas.images import prepare_image
from schemas.messages import Image, PlacedImage, Task

_decoding = threading.Semaphore(2)
"""Limits how many images are decoded at once: a large one takes hundreds of megabytes meanwhile."""
Content = str | list[dict[str, Any]]
"""The content of a message: a text, or parts of texts and images in order."""


@dataclass(frozen=True)
class ImageLimits:
    """Limits of an episode's images.

    count: images of one prompt, and different images of an episode, each in addition to its task's. file_bytes: of a
    received image. stored_bytes: of an image prepared for the model.
    """

    count: int
    file_bytes: int
    stored_bytes: int

    @classmethod
    def of(cls, config: TidemillConfig) -> Self:
        """Return the limits that a configuration sets."""
        agents = config.generator.agents
        return cls(agents.max_images, agents.max_image_bytes, config.broker.max_message_bytes)


class EpisodeImages:
    """Images by digest, and their positions in prompts.

    placeholders: None with a text model. task, files: the task's images, and their bytes by digest. Without limits
    no other images are accepted.
    """

    def __init__(
        self,
        placeholders: ImagePlaceholders | None = None,
        limits: ImageLimits | None = None,
        task: Sequence[Image] = (),
        files: Mapping[str, bytes] | None = None,
    ) -> None:
        self._placeholders = placeholders
        self._limits = limits
        self._task = {image.digest: image for image in task}
        self._images = dict(self._task)
        self._files = dict(files or {})
        self._read: dict[str, str] = {}

    @property
    def can_be_shown(self) -> bool:
        """Whether the policy reads images."""
        return self._placeholders is not None

    def resolve(self, messages: Sequence[Message]) -> list[Message]:
        """Return messages with each image replaced by its digest; DataError names an image that can't be used."""
        resolved = [
            {**message, "content": self.resolve_content(message["content"], f"messages[{at}]")}
            if isinstance(message.get("content"), list)
            else message
            for at, message in enumerate(messages)
        ]
        count = sum(name not in self._task for name in image_digests(resolved))
        if self._limits is not None and count > self._limits.count:
            raise DataError(
                f"the request has {count} images, generator.agents.max_images allows {self._limits.count} in a prompt"
            )
        return resolved

    def expand(
        self, ids: Sequence[int], messages: Sequence[Message], start: int = 0
    ) -> tuple[list[int], list[PlacedImage]]:
        """Replace the placeholder of each image of ``messages`` by its tokens; returns ids and the images' positions.

        start: tokens before ``ids``. DataError unless there are as many placeholders as images.
        """
        if self._placeholders is None:
            return list(ids), []
        expanded, placed = self._placeholders.expand(ids, [self._images[name] for name in image_digests(messages)])
        return expanded, [PlacedImage(image.digest, start + image.start, start + image.end) for image in placed]

    def for_engine(self, placed: Sequence[PlacedImage]) -> dict[str, Any]:
        """Return the engine's arguments in addition to a prompt's ids: empty without images."""
        images = [PromptImage(image.digest, image.start, image.end, self._files[image.digest]) for image in placed]
        return {"images": images} if images else {}

    def files_beside_the_task(self, placed: Sequence[PlacedImage]) -> dict[str, bytes]:
        """Return the bytes of those images, by digest, that the task does not have."""
        return {image.digest: self._files[image.digest] for image in placed if image.digest not in self._task}

    def resolve_content(self, content: Content, where: str) -> Content:
        """Return content with each image replaced by its digest. The text of a DataError starts with ``where``."""
        if not isinstance(content, list):
            return content
        return [
            part if (url := _url(part)) is None else {"type": "image", "digest": self._prepare(url, where)}
            for part in content
        ]

    def _prepare(self, url: str, where: str) -> str:
        """Return the digest of the image in a URL, and prepare it for the model if it is new."""
        if self._placeholders is None or self._limits is None:
            raise DataError(f"{where} has an image, and this policy reads text only (model.kind)")
        if not url.startswith("data:"):
            raise DataError(
                f"{where}: the image {url[:100]} is not fetched from anywhere: send it as a data: URL in base64"
            )
        # A quarter of base64, and a head that no kind of image is longer than.
        if len(url) > self._limits.file_bytes * 4 / 3 + 256:
            raise DataError(
                f"{where}: an image has more than the {self._limits.file_bytes} bytes that"
                " generator.agents.max_image_bytes allows"
            )
        key = digest(url.encode())
        if key in self._read:
            return self._read[key]
        data = read_data_url(url, where)
        with _decoding:
            image, body = prepare_image(data, self._placeholders.settings, f"{where}: an image")
        if image.digest not in self._images:
            if image.size > self._limits.stored_bytes:
                raise DataError(
                    f"{where}: an image of {image.width} x {image.height} pixels has {image.size} bytes as it is"
                    f" stored, broker.max_message_bytes is {self._limits.stored_bytes}: lower model.max_pixels"
                )
            if len(self._images) - len(self._task) >= self._limits.count:
                raise DataError(
                    f"{where}: this would be image {self._limits.count + 1} of the episode,"
                    f" generator.agents.max_images is {self._limits.count}"
                )
            self._images[image.digest], self._files[image.digest] = image, body
        self._read[key] = image.digest
        return image.digest


def episode_images(rollout: RolloutContext, limits: ImageLimits) -> EpisodeImages:
    """Return the images of a new episode, which are those of its task."""
    return EpisodeImages(rollout.placeholders, limits, rollout.task.images, rollout.files)


def image_part(url: str) -> dict[str, Any]:
    """Return an image as a part of a message's content, in the form of OpenAI's chat."""
    return {"type": "image_url", "image_url": {"url": url}}


def task_messages(task: Task, files: Mapping[str, bytes]) -> list[Message]:
    """Return a task's prompt as a client would send it, images as ``data:`` URLs; no messages if it is token ids."""
    if task.messages is None:
        return [] if task.text is None else [{"role": "user", "content": task.text}]
    images = iter(task.images)
    messages: list[Message] = []
    for message in task.messages:
        content: Any = message.content
        if not isinstance(content, str):
            content = [
                image_part(make_data_url(files[next(images).digest]))
                if part.type == "image"
                else {"type": "text", "text": part.text}
                for part in content
            ]
        messages.append({"role": message.role, "content": content})
    return messages


def content_of(value: Any) -> Content | None:
    """Return a value of a tool or an environment as content; None if it is neither text nor image, nor a list of those.

    An image is one of Pillow, or a part of OpenAI's form. Beside images in a list, other values are written as JSON.
    """
    if isinstance(value, str):
        return printable(value)
    if (part := _part(value)) is not None:
        return [part]
    if not isinstance(value, list | tuple) or not value:
        return None
    parts = [_part(item) for item in value]
    if any(part is not None and part["type"] == "image_url" for part in parts):
        pairs = zip(parts, value, strict=True)
        return [_text_part(json.dumps(item, default=str)) if part is None else part for part, item in pairs]
    readable = [part for part in parts if part is not None]
    return readable if len(readable) == len(parts) else None


def join_content(first: Content, second: Content) -> Content:
    """Return content with other content in a new paragraph after it."""
    if isinstance(first, str) and isinstance(second, str):
        return f"{first}\n\n{second}"
    return [*_parts(first), _text_part("\n\n"), *_parts(second)]


def map_texts(content: Content, change: Callable[[str], str]) -> Content:
    """Return content with each of its texts changed."""
    if isinstance(content, str):
        return change(content)
    return [{**part, "text": change(part["text"])} if part["type"] == "text" else part for part in content]


def name_images(content: Content) -> Content:
    """Return content for a text model: a line for each part, which names an image; unchanged without texts."""
    if isinstance(content, str) or not any(part["type"] == "text" for part in content):
        return content
    return "\n".join(part["text"] if part["type"] == "text" else "[image, which is no text]" for part in content)


def _parts(content: Content) -> list[dict[str, Any]]:
    return [_text_part(content)] if isinstance(content, str) else content


def _part(value: Any) -> dict[str, Any] | None:
    """Return a value as a part of content; None if it is neither text nor image."""
    if isinstance(value, str):
        return _text_part(value)
    if isinstance(value, dict):
        if value.get("type") == "text" and isinstance(value.get("text"), str):
            return _text_part(value["text"])
        url = _url(value)
        return None if url is None else image_part(printable(url))
    return image_part(make_data_url(png_file(value))) if is_pillow_image(value) else None


def _text_part(text: str) -> dict[str, Any]:
    return {"type": "text", "text": printable(text)}


def _url(part: Any) -> str | None:
    """Return the URL of an image part in the form of OpenAI's chat; None for any other part."""
    if not isinstance(part, dict) or part.get("type") != "image_url":
        return None
    image = part.get("image_url")
    url = image.get("url") if isinstance(image, dict) else image
    return url if isinstance(url, str) else None
