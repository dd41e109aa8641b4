"""From a row with named fields, as files and tables have them, to an Example.

One place for the choices that all row datasets share: which field is the prompt, which the
reference answer, and how text becomes a prompt or a conversation.
"""

import string
from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import Any

from producers.datasets.base import Example
from producers.images.prepare import load_image, place_images, repeat_places, take_frames
from schemas.errors import ConfigError, DataError
from schemas.messages import ChatMessage, ContentPart


@dataclass(eq=False)
class RowReader:
    """Makes an Example of a row.

    prompt: field with text or a list of {role, content}. A name with dots, as ``reward_model.ground_truth``, is a
    field of a field where the row has none of that name; so are the names of answer and fields.
    answer: field with the reference, handed on as ``data["answer"]``; None if there is none.
    template: text with {field} placeholders, used in place of the prompt field.
    system: system prompt; makes a conversation of a text prompt.
    chat: a text prompt becomes one user message.
    fields: other fields handed on in ``data``, as a list, or as a mapping of the name that the reward function knows
    to the row's; all of them by default.
    where: rows to take, by the values that fields must have, one or a list of those allowed.
    image: field, or list of fields, with the row's images, one or a list of them in each. They stand at the marks
    ``<image>`` of a text, or at the image parts of messages, else before the user's text; such a row is a conversation.
    frames: most frames that a moving picture gives, evenly spaced, each an image; by default the first alone.
    """

    _: KW_ONLY
    prompt: str = "prompt"
    answer: str | None = "answer"
    template: str | None = None
    system: str | None = None
    chat: bool = False
    fields: list[str] | dict[str, str] | None = None
    where: dict[str, Any] | None = None
    image: str | list[str] | None = None
    frames: int | None = None

    def __post_init__(self) -> None:
        if self.frames is not None and self.frames < 1:
            raise ConfigError(f"frames {self.frames} must be 1 or more")
        self._images = [self.image] if isinstance(self.image, str) else self.image or []
        self._named = {name: name for name in self.fields} if isinstance(self.fields, list) else self.fields
        self._wanted = {name: few if isinstance(few, list) else [few] for name, few in (self.where or {}).items()}
        self._placeholders = _placeholders(self.template) if self.template is not None else set()

    def takes(self, row: Any, where: str) -> bool:
        """Return whether the row matches ``where``; DataError if it has no such field."""
        return not isinstance(row, Mapping) or all(
            _field(row, name, where) in few for name, few in self._wanted.items()
        )

    def read(self, row: Any, where: str, folder: Path = Path(), load: bool = True) -> Example:
        """Read the example of a row. DataError names ``where`` (file and line) and what is wrong.

        folder: what paths of images start from. load: else images are only looked for, and the example has empty ones.
        """
        if not isinstance(row, Mapping):
            raise DataError(f"{where}: must be an object with fields, is {type(row).__name__}")
        data = self._data(row, where)
        if self.template is not None:
            for name in self._placeholders:
                _field(row, name, where)
            try:
                prompt: Any = self.template.format_map(row)
            except (ValueError, TypeError) as error:
                raise DataError(f"{where}: template {self.template!r} does not fit the row: {error}") from error
        else:
            prompt = _field(row, self.prompt, where)
        values: list[Any] = []
        for name in self._images:
            value = _field(row, name, where)
            values += value if isinstance(value, list) else [] if value is None else [value]
        if isinstance(prompt, str) and not (self.chat or self.system is not None or values):
            return Example(text=prompt, data=data)
        if isinstance(prompt, str):
            messages = [ChatMessage("user", prompt)]
        else:
            field, own = f"{where}: field {self.prompt!r}", list[Any]()
            messages = _read_messages(prompt, field, own)
            if own and values:
                raise DataError(
                    f"{field}: images stand in its messages and in a field of the row, which must be one of them"
                )
            values += own
        if self.system is not None and messages[0].role != "system":
            messages = [ChatMessage("system", self.system), *messages]
        if isinstance(prompt, list) and all(isinstance(message.content, str) for message in messages):
            # Reward functions of TRL get messages where the row's own prompt is messages.
            data["prompt"] = [{"role": message.role, "content": message.content} for message in messages]
        messages = place_images(messages, len(values), where)
        files = [load_image(value, where, folder, load) for value in values]
        if self.frames is not None and load:
            taken = [take_frames(file, self.frames, where) for file in files]
            messages = repeat_places(messages, [len(frames) for frames in taken])
            files = [frame for frames in taken for frame in frames]
        return Example(messages=messages, data=data, images=files)

    def _data(self, row: Mapping[str, Any], where: str) -> dict[str, Any]:
        if self._named is None:
            apart = (self.prompt, self.answer, *self._images)
            data = {name: value for name, value in row.items() if name not in apart}
        else:
            data = {name: _field(row, column, where) for name, column in self._named.items()}
        if self.answer is not None:
            try:
                data["answer"] = _field(row, self.answer, where)
            except DataError as error:
                raise DataError(f"{error}; if rows have no answer, set the dataset's argument answer to null") from None
        return data


def _field(row: Mapping[str, Any], name: str, where: str) -> Any:
    if name in row:
        return row[name]
    value: Any = row
    for part in name.split("."):
        if not isinstance(value, Mapping) or part not in value:
            raise DataError(f"{where}: no field {name!r}, it has {', '.join(map(repr, row)) or 'none'}")
        value = value[part]
    return value


def answer_text(value: Any) -> str | None:
    """Return the text of an answer, which is text or a list of one message of the assistant; None for another value."""
    if isinstance(value, list) and len(value) == 1 and isinstance(value[0], Mapping):
        value = value[0].get("content") if value[0].get("role") == "assistant" else None
    return value if isinstance(value, str) else None


def read_messages(value: Any, where: str) -> tuple[list[ChatMessage], list[bytes]]:
    """Read messages whose parts hold their images, and these images. DataError begins with ``where``."""
    values: list[Any] = []
    messages = _read_messages(value, where, values)
    return place_images(messages, len(values), where), [load_image(image, where, Path()) for image in values]


def _read_messages(value: Any, where: str, images: list[Any]) -> list[ChatMessage]:
    """Read messages, and append the images in their parts to ``images``. DataError begins with ``where``."""
    if not isinstance(value, list) or not value:
        raise DataError(f"{where} must be text or a list of role and content, is {type(value).__name__}")
    messages = []
    for item in value:
        item = item if isinstance(item, Mapping) else {}
        if item.get("tool_calls"):
            raise DataError(f"{where}: a prompt's message cannot have tool_calls: write them into its content")
        if item.get("tool_call_id"):
            # It would name none: without the calls a template has nothing to compare it with.
            raise DataError(
                f"{where}: a prompt's message cannot have tool_call_id: write calls into the content, and remove it"
            )
        role, content = item.get("role"), item.get("content")
        if not isinstance(role, str) or not isinstance(content, str | list):
            raise DataError(f"{where}: every message needs a role and a content, text or a list of parts")
        shown = content if isinstance(content, str) else [_part(part, where, images) for part in content]
        messages.append(ChatMessage(role, shown))
    return messages


def _part(part: Any, where: str, images: list[Any]) -> ContentPart:
    kind = part.get("type") if isinstance(part, Mapping) else None
    if kind == "text" and isinstance(part.get("text"), str):
        return ContentPart("text", part["text"])
    if kind not in ("image", "image_url"):
        raise DataError(f"{where}: a part of a message is a text or an image, not {kind!r}")
    value = part.get("image_url") if kind == "image_url" else part.get("image")
    value = value.get("url") if kind == "image_url" and isinstance(value, Mapping) else value
    if value is not None:
        images.append(value)
    return ContentPart("image")


def _placeholders(template: str) -> set[str]:
    try:
        names = {name for _, name, _, _ in string.Formatter().parse(template) if name is not None}
    except ValueError as error:
        raise ConfigError(f"template {template!r} is wrong: {error}; write {{{{ and }}}} for braces") from error
    wrong = sorted(name for name in names if not name.isidentifier())
    if wrong:
        raise ConfigError(f"template {template!r}: {{{wrong[0]}}} is not a field name; write {{{{ and }}}} for braces")
    return names
