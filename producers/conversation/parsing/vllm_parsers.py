"""vLLM's parsers of tool calls and reasoning, called as its server calls them. No other module depends on their code.

Importing them takes seconds, so only a generator with the vllm engine does it. Their names are read from vLLM's source,
for checks that must be quick.
"""

import ast
import json
import logging
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from producers.conversation.parsing.answers import AnswerParts
from producers.engines.vllm.arguments import parse_source, vllm_file
from schemas.errors import ConfigError, describe_error

log = logging.getLogger(__name__)

_HARMONY = {"openai", "openai_gptoss"}
_FOLDERS = {"tool_parser": "tool_parsers", "reasoning_parser": "reasoning"}


def vllm_names(setting: str) -> list[str] | None:
    """Return vLLM's names for ``tool_parser`` or ``reasoning_parser`` without importing it; None if they are unknown.

    If vLLM is not installed, or another release keeps them elsewhere, vLLM itself reports a wrong name at its start.
    """
    return read_parser_names(vllm_file(_FOLDERS[setting], "__init__.py"))


def read_parser_names(file: Path | None) -> list[str] | None:
    """Return the keys of the registry that this file of vLLM declares; None if it declares none."""
    for node in parse_source(file):
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Dict):
            target = node.targets[0]
            if isinstance(target, ast.Name) and target.id.endswith("_PARSERS_TO_REGISTER"):
                return sorted(str(key.value) for key in node.value.keys if isinstance(key, ast.Constant))
    return None


class VllmParsers:
    """A tool parser and a reasoning parser of vLLM, or one of them. ConfigError if they can't be used together.

    tokenizer: transformers' own object, ``HfTokenizer.hf``.
    vLLM's parser objects have state, so each answer gets a new one.
    """

    def __init__(self, tokenizer: Any, tool_parser: str | None, reasoning_parser: str | None):
        from vllm.parser import ParserManager

        self._tokenizer = tokenizer
        names = " and ".join(name for name in (tool_parser, reasoning_parser) if name)
        try:
            parser = ParserManager.get_parser(
                tool_parser,
                reasoning_parser,
                enable_auto_tools=tool_parser is not None,
                is_harmony=bool({tool_parser, reasoning_parser} & _HARMONY),
                tokenizer=tokenizer,
            )
        except (TypeError, ValueError, RuntimeError, KeyError, ImportError) as error:
            raise ConfigError(f"vllm cannot parse with {names}: {describe_error(error.__cause__ or error)}") from error
        if parser is None:
            raise ConfigError(f"vllm has no parser for {names}")
        self._parser: Any = parser
        parts = [getattr(parser, part, None) for part in ("tool_parser_cls", "reasoning_parser_cls")]
        for module in {base.__module__ for part in parts if part for base in part.__mro__}:
            if module.startswith("vllm."):
                logging.getLogger(module).addFilter(_ERRORS)

    def parse(
        self,
        text: str,
        ids: Sequence[int],
        tools: Sequence[Mapping[str, Any]],
        prompt_ids: Sequence[int],
        template_args: Mapping[str, Any],
        may_call: bool,
    ) -> AnswerParts:
        """Parse one answer, which has tool calls only if it ``may_call``.

        An exception of the parser, or an error that it only logs, counts as a failure.
        """
        from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest

        _ERRORS.heard.count = 0
        try:
            request = ChatCompletionRequest.model_validate(
                {"messages": [], "tools": list(tools) or None, "tool_choice": "auto" if may_call else "none"}
            )
            parser = self._parser(self._tokenizer, request.tools, chat_template_kwargs=dict(template_args))
            parser.set_prompt_token_ids(list(prompt_ids))
            reasoning, content, calls = parser.parse(
                text, request, enable_auto_tools=True, model_output_token_ids=list(ids)
            )
            plain_calls = [(call.name, _plain(call.arguments), call.id) for call in calls or []]
        except Exception as error:  # noqa: BLE001 - their code: each parser has its own way to fail on odd text
            log.warning("a parser of vllm's failed: %s", describe_error(error))
            return AnswerParts(text or None, [], 1)
        return AnswerParts(content or None, plain_calls, _ERRORS.heard.count, reasoning or None)


def _plain(arguments: Any) -> str:
    return arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)


class _Heard(threading.local):
    count = 0


class _CountErrors(logging.Filter):
    """Counts the errors that parsers log, instead of a traceback for each malformed answer of a policy in training."""

    def __init__(self) -> None:
        super().__init__()
        self.heard = _Heard()

    def filter(self, record: logging.LogRecord) -> bool:
        if record.levelno < logging.ERROR:
            return True
        self.heard.count += 1
        return False


_ERRORS = _CountErrors()
