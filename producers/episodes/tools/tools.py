"""The workflow ``tools``: what the policy may call until it answers without a call."""

import asyncio
import time
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import structlog
from pydantic import Field

from producers.conversation.images import Content, map_texts, name_images
from producers.conversation.messages import Message
from producers.conversation.parsing.answers import ParsedAnswer, ToolCall
from producers.episodes.episode import Episode, EpisodeEnded, LoopParts
from producers.episodes.tools.functions import Tool, ToolError, ToolLost
from producers.episodes.tools.sources import ToolBox
from producers.workflows.base import FailedSample, RolloutContext, WorkflowServices, is_service_error, play_each
from producers.workflows.trajectory_builder import SampledCompletion
from schemas.errors import ConfigError, DataError, describe_error
from schemas.messages import FinishReason

log = structlog.get_logger()

UNREADABLE = (
    "error: a tool call could not be read: it must be one JSON object with the name of the tool and its arguments"
)


@dataclass
class Tools:
    """Plays each sample as a conversation with tools.

    tools: functions, as file.py:name; ``python: {...}``, an interpreter in the sandbox; ``mcp: {...}``, a server.
    parallel: calls of one answer at once. timeout_s: longest time of one call. longest_result: characters of a result,
    each text of which is cut in its middle; images may be in it, if the policy reads them. max_calls: most model calls
    of an episode, ``agents.max_calls`` where None; one that reaches it ends with finish ``calls``.

    The policy reads what goes wrong with a call as its result: an unknown tool, arguments that can't be
    read, whatever the function raises.
    """

    tools: list[Any]
    parallel: Annotated[int, Field(ge=1)] = 4
    timeout_s: Annotated[float, Field(gt=0)] = 30.0
    longest_result: Annotated[int, Field(ge=1)] = 4000
    max_calls: Annotated[int, Field(ge=1)] | None = None

    def __post_init__(self) -> None:
        self._tools: ToolBox | None = None
        self._schemas: list[dict[str, Any]] = []
        self._parts: LoopParts | None = None

    @staticmethod
    def check(base: Path, tools: Any = None, **_: Any) -> None:
        """Raise ConfigError unless the tools can be described to the policy."""
        ToolBox(tools, base)

    async def start(self, services: WorkflowServices) -> None:
        self._tools = ToolBox(self.tools, services.config.base)
        await self._tools.start()
        self._schemas = list(self._tools.schemas.values())
        self._parts = parts = await LoopParts.create(services)
        hello = [{"role": "user", "content": "Hello"}]
        if parts.template.render(hello) == parts.template.render(hello, self._schemas):
            log.warning("the chat template does not show tools: the policy has to know them from its training")

    async def close(self) -> None:
        if self._tools is not None:
            await self._tools.close()

    def run(self, rollout: RolloutContext) -> AsyncIterator[SampledCompletion | FailedSample]:
        return play_each(lambda index: self._play(rollout, index), rollout.indices)

    async def _play(self, rollout: RolloutContext, index: int) -> SampledCompletion | FailedSample:
        if self._parts is None or self._tools is None:
            raise ConfigError("the workflow tools was not started")
        episode = Episode(self._parts, rollout, index, self.max_calls or self._parts.settings.max_calls)
        finish: FinishReason = "stop"
        try:
            async with self._tools.open() as tools:
                await self._talk(episode, tools)
        except EpisodeEnded as ended:
            finish = ended.finish
        return episode.finish(finish)

    async def _talk(self, episode: Episode, tools: Mapping[str, Tool]) -> None:
        messages = episode.first_messages()
        if messages[-1]["role"] == "assistant":
            raise DataError(
                "the last message of the prompt is the assistant's, which the workflow tools does not continue: end the"
                " prompt with another role, or take the workflow single_turn"
            )
        while True:
            answer, message = await episode.ask(messages, self._schemas)
            episode.count("unreadable_tool_calls", answer.failures)
            if not answer.tool_calls and not answer.failures:
                return
            messages += [message, *await self._results(episode, tools, answer)]

    async def _results(self, episode: Episode, tools: Mapping[str, Tool], answer: ParsedAnswer) -> list[Message]:
        """Return the results of the answer's calls, in order."""
        if not answer.tool_calls:
            # There is no call that this could be the result of, and templates insist on one.
            return [{"role": "user", "content": UNREADABLE}]
        places = asyncio.Semaphore(self.parallel)

        async def result(call: ToolCall) -> Content:
            async with places:
                began = time.monotonic()
                try:
                    return await self._call(episode, tools, call)
                finally:
                    episode.note_tool(call.name, began)

        results = await episode.until_interrupted(asyncio.gather(*map(result, answer.tool_calls)))
        if answer.failures:
            *_, last = results
            extra = f"\n{UNREADABLE}"
            results[-1] = last + extra if isinstance(last, str) else [*last, {"type": "text", "text": extra}]
        return [
            {"role": "tool", "tool_call_id": call.id, "name": call.name, "content": content}
            for call, content in zip(answer.tool_calls, results, strict=True)
        ]

    async def _call(self, episode: Episode, tools: Mapping[str, Tool], call: ToolCall) -> Content:
        episode.count("tool_calls")
        tool = tools.get(call.name)
        try:
            if tool is None:
                raise ToolError(f"there is no tool {call.name}; there are: {', '.join(tools)}")
            found, images = await tool.call(call.arguments, self.timeout_s), episode.conversation.images
            shown = found if images.can_be_shown else name_images(found)
            try:
                shown = await asyncio.to_thread(images.resolve_content, shown, f"the result of {call.name}")
            except DataError as error:
                raise ToolError(str(error)) from error
            return map_texts(shown, lambda text: shorten(text, self.longest_result))
        except ToolError as error:
            reason = str(error)
        except ToolLost:
            raise
        except Exception as error:  # user code: whatever it raises is the result that the policy sees
            if is_service_error(error):
                raise
            reason = describe_error(error)
        episode.count("tool_errors")
        return shorten(f"error: {reason}", self.longest_result)


def shorten(text: str, longest: int) -> str:
    """Return the text, without its middle if it has more than ``longest`` characters."""
    if len(text) <= longest:
        return text
    head = (longest + 1) // 2
    return f"{text[:head]}\n[{len(text) - longest} characters left out]\n{text[len(text) - longest // 2 :]}"
