"""The policy's tokenizer: from messages and text to token ids and back."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from schemas.errors import ConfigError, DataError, first_line
from schemas.messages import ChatMessage, Task
from schemas.model_folder import read_json, resolve_folder

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_ANSWER = "An answer."
_GENERIC = ("TokenizersBackend", "PreTrainedTokenizerFast")


class HfTokenizer:
    """The tokenizer of a folder (or hub id). ConfigError if it has none, DataError for chats without a template."""

    def __init__(self, path: str, trust_remote_code: bool = False) -> None:
        self._path = path
        self._folder = resolve_folder(path)
        self.hf = _load(self._folder, trust_remote_code)
        """The library's own object, for libraries that need it."""

    @property
    def eos_id(self) -> int:
        """Return the id of the end of sequence. ConfigError if there is none."""
        if self.hf.eos_token_id is None:
            raise ConfigError(f"the tokenizer in {self._path} has no end-of-sequence token")
        return int(self.hf.eos_token_id)

    @cached_property
    def stop_ids(self) -> frozenset[int]:
        """Ids that end an answer: the tokenizer's end of sequence, and those that the model's files name."""
        found = {self.hf.eos_token_id}
        for name in ("generation_config.json", "config.json"):
            file = self._folder / name
            config = read_json(file) if file.is_file() else {}
            for part in (config, config.get("text_config")):
                value = part.get("eos_token_id") if isinstance(part, dict) else None
                found |= set(value) if isinstance(value, list) else {value}
        return frozenset(int(value) for value in found if isinstance(value, int))

    @property
    def pad_id(self) -> int | None:
        return None if self.hf.pad_token_id is None else int(self.hf.pad_token_id)

    @cached_property
    def special_ids(self) -> frozenset[int]:
        """Ids of the special tokens, which text splits at."""
        added = self.hf.added_tokens_decoder.items()
        return frozenset(self.hf.all_special_ids) | {id for id, token in added if token.special}

    @cached_property
    def longest_token(self) -> int:
        """Characters of the longest token: no text has fewer tokens than its length by this."""
        return max(map(len, self.hf.get_vocab()), default=1)

    @property
    def chat_template(self) -> str:
        """Return the source of the chat template, or of all of them; '' if there is none."""
        found = self.hf.chat_template or ""
        return found if isinstance(found, str) else "\n".join(found.values())

    def save(self, folder: Path) -> None:
        """Write its files beside a model's."""
        self.hf.save_pretrained(folder)

    def prompt_ids(self, task: Task) -> list[int]:
        """Return the token ids of the prompt. Text gets the tokens that the tokenizer adds (such as <bos>).

        A prompt whose last message is the assistant's is the beginning of the answer, and has no header after it.
        """
        if task.token_ids is not None:
            ids = list(task.token_ids)
        elif task.messages is not None:
            messages = [{"role": m.role, "content": m.plain} for m in task.messages]
            begun = is_begun(task.messages)
            settings = {"add_generation_prompt": not begun, "continue_final_message": begun}
            ids = list(self._apply_template(messages, tokenize=True, **settings))
        else:
            ids = list(self.hf(task.text or "")["input_ids"])
        if not ids:
            raise DataError(f"task {task.task_id} has an empty prompt")
        return ids

    def closing_id(self, messages: Sequence[ChatMessage]) -> int:
        """Return the special token with which the chat template closes an answer; the end of sequence without one."""
        turns = [{"role": m.role, "content": m.plain} for m in messages[: -1 if is_begun(messages) else None]]
        try:
            text = self.chat_text([*turns, {"role": "assistant", "content": _ANSWER}], generation_prompt=False)
        except DataError:
            return self.eos_id
        _, answered, after = text.rpartition(_ANSWER)
        first = self.encode(after)[:1] if answered else []
        return first[0] if first and first[0] in self.special_ids else self.eos_id

    def chat_text(
        self,
        messages: Sequence[dict[str, Any]],
        tools: Sequence[dict[str, Any]] | None = None,
        *,
        generation_prompt: bool = True,
        args: dict[str, Any] | None = None,
    ) -> str:
        """Render a conversation as text. DataError if the template rejects it.

        generation_prompt: whether the header of the next answer stands at its end. args: the template's own.
        """
        if args and (wrong := sorted(args.keys() & self._own_arguments)):
            raise DataError(f"a chat template has no argument {wrong[0]}")
        settings = {"add_generation_prompt": generation_prompt, "tools": list(tools) if tools else None}
        return str(self._apply_template(list(messages), tokenize=False, **settings, **(args or {})))

    @cached_property
    def _own_arguments(self) -> frozenset[str]:
        """Names that the library's call itself takes, so that a template can't have them."""
        return frozenset(inspect.signature(self.hf.apply_chat_template).parameters) | {"messages", "self"}

    def _apply_template(self, messages: list[dict[str, Any]], **settings: Any) -> Any:
        if not (self.hf.chat_template or settings.get("chat_template")):
            raise DataError(
                f"there are chat messages, but the tokenizer in {self._path} has no chat template:"
                " use a chat model, or a dataset of plain text"
            )
        from jinja2 import TemplateError

        try:
            return self.hf.apply_chat_template(messages, return_dict=False, **settings)
        except (TemplateError, TypeError, ValueError, LookupError, AttributeError) as error:
            raise DataError(f"the chat template refuses the messages: {error}") from error

    def encode(self, text: str) -> list[int]:
        """Return the token ids of a piece of text, nothing added."""
        return list(self.hf(text, add_special_tokens=False)["input_ids"])

    def decode(self, ids: Sequence[int]) -> str:
        """Return text without special tokens, spaces as they are."""
        return self._decode(ids, skip_special_tokens=True)

    def decode_all(self, ids: Sequence[int]) -> str:
        """Return text with special tokens, spaces as they are."""
        return self._decode(ids, skip_special_tokens=False)

    def _decode(self, ids: Sequence[int], skip_special_tokens: bool) -> str:
        settings = {"skip_special_tokens": skip_special_tokens, "clean_up_tokenization_spaces": False}
        if self._own_decode is not None:
            return str(self._own_decode(list(ids), **settings))
        # An array: of a list the library looks at the type of each element, which takes longer than the decoding.
        return str(self.hf.decode(np.asarray(ids, dtype=np.int64), **settings))

    @cached_property
    def _own_decode(self) -> Callable[..., str] | None:
        """Return what the library's ``decode`` calls, which is four times as fast; None if it is overridden."""
        from transformers import PreTrainedTokenizerBase

        plain = type(self.hf).decode is PreTrainedTokenizerBase.decode
        return getattr(self.hf, "_decode", None) if plain else None


class NoTokenizer(HfTokenizer):
    """The tokenizer of a policy without text; DataError for whatever is asked of it."""

    def __init__(self) -> None:
        pass

    def __getattr__(self, name: str) -> Any:
        raise DataError("the policy of model.kind mlp has no tokenizer, because it acts in numbers")


def is_begun(messages: Sequence[ChatMessage]) -> bool:
    """Tell whether messages end with the beginning of an answer, which the completion continues."""
    return bool(messages) and messages[-1].role == "assistant"


def _load(folder: Path, trust_remote_code: bool) -> PreTrainedTokenizerBase:
    # AutoTokenizer rebuilds some families (all of qwen2) from a class of its own, and with it the
    # splitting rules. A folder that says its tokenizer is generic is described by tokenizer.json alone.
    settings = folder / "tokenizer_config.json"
    described = read_json(settings) if settings.is_file() else {}
    generic = (folder / "tokenizer.json").is_file() and described.get("tokenizer_class") in _GENERIC
    try:
        if generic:
            from transformers import PreTrainedTokenizerFast

            return cast("PreTrainedTokenizerBase", PreTrainedTokenizerFast.from_pretrained(folder))
        # It imports PyTorch, which takes seconds.
        from transformers import AutoTokenizer

        return cast(
            "PreTrainedTokenizerBase", AutoTokenizer.from_pretrained(folder, trust_remote_code=trust_remote_code)
        )
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError(f"no usable tokenizer in {folder}: {first_line(error)}") from error
