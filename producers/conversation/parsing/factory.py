"""The parser of a run's answers, built from the names in ``generator.agents``: ours, vLLM's, or one of each."""

import difflib
import json
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Self

from producers.conversation.parsing.answers import ParsedAnswer, ToolCall, call_id
from producers.conversation.parsing.own import THINK, read_tool_calls, split_reasoning
from producers.conversation.parsing.vllm_parsers import VllmParsers, vllm_names
from producers.engines.factory import engine_name
from producers.tokenizer import HfTokenizer
from schemas.config import GeneratorConfig
from schemas.errors import ConfigError

OWN = {"tool_parser": ["hermes"], "reasoning_parser": ["qwen3"]}
"""Formats that our own parsers read, with every engine, even if vLLM has one of that name."""


def check_parsers(tool_parser: str, reasoning_parser: str | None, vllm: bool) -> None:
    """Raise ConfigError, one line, for an unknown name. vllm: the engine is vllm. Imports nothing."""
    for setting, name in (("tool_parser", tool_parser), ("reasoning_parser", reasoning_parser)):
        if name is None or name in OWN[setting]:
            continue
        own, theirs = ", ".join(OWN[setting]), vllm_names(setting)
        names = sorted({*OWN[setting], *(theirs or [])})
        if vllm and (theirs is None or name in names):
            continue
        if name in names:
            raise ConfigError(
                f"generator.agents.{setting} {name} is one of vLLM's and needs generator.engine vllm: {own}"
            )
        close = difflib.get_close_matches(name, names, n=1)
        hint = f" (did you mean {close[0]!r}?)" if close else ""
        allowed = ", ".join(names) if vllm else f"{own}, and with generator.engine vllm those of vLLM"
        raise ConfigError(f"unknown generator.agents.{setting} {name!r}{hint}: one of {allowed}")


class AnswerParser:
    """A parser that splits off the reasoning, then the tool calls; each by our code or vLLM's.

    It has no state: calls may overlap in threads, and the same ids give the same answer. vllm: whether the engine is
    vllm, so that its parsers may be loaded, which takes seconds. ConfigError if a parser is unknown, or if vLLM can't
    use it with this tokenizer.
    """

    def __init__(self, tool_parser: str, reasoning_parser: str | None, tokenizer: HfTokenizer, vllm: bool) -> None:
        check_parsers(tool_parser, reasoning_parser, vllm)
        self._tokenizer = tokenizer
        self._own_calls = tool_parser in OWN["tool_parser"]
        self._own_reasoning = reasoning_parser in OWN["reasoning_parser"]
        tools = None if self._own_calls else tool_parser
        reasoning = None if self._own_reasoning else reasoning_parser
        self._vllm = VllmParsers(tokenizer.hf, tools, reasoning) if tools or reasoning else None

    @classmethod
    def of(cls, settings: GeneratorConfig, tokenizer: HfTokenizer) -> Self:
        """Build the parser of a generator's settings."""
        agents, vllm = settings.agents, engine_name(settings.engine) == "vllm"
        return cls(agents.tool_parser, agents.reasoning_parser, tokenizer, vllm)

    def parse(
        self,
        ids: Sequence[int],
        tools: Sequence[Mapping[str, Any]] | None,
        *,
        prompt_ids: Sequence[int] = (),
        cut: bool = False,
        check_names: bool = True,
        template_args: Mapping[str, Any] | None = None,
    ) -> ParsedAnswer:
        """Parse the answer that was sampled after ``prompt_ids``. Never raises, whatever was sampled.

        tools: those of the request, in the form of chat completions; without tools, text that looks like a tool call is
        text. prompt_ids: tell whether the prompt has opened the reasoning, and keep ids of calls distinct between
        turns. cut: the answer ended by its length, so it has no tool calls. check_names: a call of a tool that is not
        in ``tools`` is a failure. template_args: those of the prompt's template.
        """
        ids = list(ids)
        text = self._tokenizer.decode_all(ids[:-1] if ids[-1:] and ids[-1] in self._tokenizer.stop_ids else ids)
        names = {str(tool.get("function", {}).get("name")) for tool in tools or []} if check_names else None
        reasoning, content = None, text or None
        if self._own_reasoning:
            opened = self._tokenizer.decode_all(prompt_ids[-8:]).rstrip().endswith(THINK)
            reasoning, content = split_reasoning(text, opened)
        readable: list[tuple[str, str, str | None]] = []
        failures = 0
        may_call = bool(tools) and not cut
        if self._vllm is not None and content is not None:
            parts = self._vllm.parse(content, ids, tools or [], prompt_ids, template_args or {}, may_call)
            reasoning = parts.reasoning if reasoning is None else reasoning
            readable = [call for call in parts.calls if _is_readable(call[0], call[1], names)]
            failures = parts.failures + len(parts.calls) - len(readable)
            # The position of a call in the text is unknown: if no call can be read, the whole text is kept.
            if readable or not parts.calls:
                content = parts.content
        if self._own_calls and may_call and content is not None:
            parts = read_tool_calls(content, names)
            content, readable, failures = parts.content or None, parts.calls, failures + parts.failures
        # Some policies, as Kimi K2, write the ids themselves; other ids from vLLM are random.
        calls = [
            ToolCall(own if own and own in text else call_id(prompt_ids, ids, number), name, arguments)
            for number, (name, arguments, own) in enumerate(readable)
        ]
        if calls and content is not None and not content.strip():
            content = None
        return ParsedAnswer(content, reasoning, calls, text, failures)


def _is_readable(name: str, arguments: str, names: Collection[str] | None) -> bool:
    try:
        return (names is None or name in names) and isinstance(json.loads(arguments), dict)
    except (ValueError, RecursionError):
        return False
