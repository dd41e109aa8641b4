"""An episode that the generator plays itself: model calls over one conversation, up to its end or its limits.

A generator that resumes it plays it again from the beginning; calls with exactly the same prompt are then answered
from the record, tokens, log-probabilities and versions included.
"""

import asyncio
import json
import time
from collections.abc import Awaitable, Sequence
from dataclasses import dataclass
from typing import Any, Self, TypeVar

from producers.conversation.calls import continued_completion, recorded_completion
from producers.conversation.chat_template import ChatTemplate
from producers.conversation.conversation import MAIN, Conversation, NextPrompt
from producers.conversation.images import ImageLimits, episode_images, task_messages
from producers.conversation.messages import Message
from producers.conversation.parsing.answers import ParsedAnswer
from producers.conversation.parsing.factory import AnswerParser
from producers.conversation.template_check import open_template
from producers.engines.base import Completion
from producers.workflows.base import FailedSample, RolloutContext, WorkflowServices
from producers.workflows.trajectory_builder import SampledCompletion, size_metrics
from schemas.config import AgentsConfig
from schemas.errors import ConfigError, DataError
from schemas.messages import Call, FinishReason
from schemas.model_folder import find_tokens

T = TypeVar("T")


@dataclass(frozen=True)
class LoopParts:
    """The parts that all episodes of a workflow share. max_length: context length of the engine, in tokens.

    images: what tools and environments may show. endless: whether no token can end an answer, which then ends at
    ``sampling.max_tokens``.
    """

    template: ChatTemplate
    parser: AnswerParser
    settings: AgentsConfig
    max_length: int
    images: ImageLimits
    endless: bool = False

    @classmethod
    async def create(cls, services: WorkflowServices) -> Self:
        """Load the parts. ConfigError if the tokenizer can't chat, or a parser is missing. vLLM's take seconds."""
        config, tokenizer = services.config, services.tokenizer
        template = await open_template(services)
        try:
            template.render([{"role": "user", "content": "Hello"}])
        except DataError as error:
            raise ConfigError(f"generator.workflow {config.generator.workflow.name}: {error}") from error
        parser = await asyncio.to_thread(AnswerParser.of, config.generator, tokenizer)
        only = find_tokens(config.model.path, config.model.output_tokens)
        endless = only is not None and tokenizer.stop_ids.isdisjoint(only)
        return cls(template, parser, config.generator.agents, config.model.max_length, ImageLimits.of(config), endless)


class EpisodeEnded(Exception):
    """The episode can't continue: a limit was reached, or the generator ends."""

    def __init__(self, finish: FinishReason) -> None:
        super().__init__(finish)
        self.finish = finish


class Episode:
    """One sample while it is played. max_calls: most model calls."""

    def __init__(self, parts: LoopParts, rollout: RolloutContext, index: int, max_calls: int) -> None:
        self._parts = parts
        self._rollout = rollout
        self.index = index
        self._max_calls = max_calls
        images = episode_images(rollout, parts.images)
        self.conversation = Conversation(parts.template, parts.settings.history, images)
        saved = rollout.saved.get(index)
        self._recorded: dict[bytes, Call] = {call.key: call for call in saved.calls} if saved is not None else {}
        self._sampling = rollout.sampling_of(index)
        self.metrics: dict[str, float] = {"calls": 0.0, "engine_s": 0.0, "tools_s": 0.0, "replayed": 0.0}
        self.last_call = -1

    def first_messages(self) -> list[Message]:
        """Return the task's prompt as messages. DataError if it is given as token ids."""
        task = self._rollout.task
        messages = task_messages(task, self._rollout.files)
        if not messages:
            raise DataError(f"task {task.task_id} has a prompt of token ids; this workflow needs text or messages")
        return messages

    def count(self, name: str, amount: float = 1.0) -> None:
        """Add to one of the episode's metrics."""
        self.metrics[name] = self.metrics.get(name, 0.0) + amount

    async def ask(
        self, messages: Sequence[Message], tools: Sequence[dict[str, Any]] | None = None, name: str = MAIN
    ) -> tuple[ParsedAnswer, Message]:
        """Sample the next answer; returned with the message that it is in the conversation.

        name: of whom the messages are, where an episode has several conversations. EpisodeEnded when there won't be
        another one, or when this one was cut.
        """
        if self._rollout.interrupted.is_set():
            raise EpisodeEnded("abort")
        if self.conversation.calls >= self._max_calls:
            raise EpisodeEnded("calls")
        prompt = await asyncio.to_thread(self._prompt, messages, tools, name)
        if self.conversation.calls and len(prompt.ids) >= self._parts.max_length:
            raise EpisodeEnded("length")
        self.count("calls")
        completion = await self.sample_call(prompt)
        whole = self._parts.endless and len(completion.tokens) == self._sampling.max_tokens
        cut = completion.finish != "stop" and not whole
        answer = await asyncio.to_thread(
            self._parts.parser.parse, completion.tokens, tools, prompt_ids=prompt.ids, cut=cut, check_names=False
        )
        message = answer.message()
        self.last_call = self.conversation.add(prompt, completion, message)
        if completion.finish == "abort":
            raise EpisodeEnded("abort")
        await self._rollout.save(self.conversation.partial(self.index))
        if completion.finish == "length" and cut:
            raise EpisodeEnded("length")
        return answer, message

    def _prompt(self, messages: Sequence[Message], tools: Sequence[dict[str, Any]] | None, name: str) -> NextPrompt:
        return self.conversation.prompt(self.conversation.images.resolve(messages), tools, name)

    async def sample_call(self, prompt: NextPrompt) -> Completion:
        """Sample one answer from the engine, or take it, or its beginning, from the record of an earlier attempt."""
        call = self._recorded.get(self.conversation.key(prompt))
        if call is not None and call.finish != "abort":
            self.count("replayed")
            return recorded_completion(call)
        prefix = call.tokens.numpy().tolist() if call is not None else []
        began = time.monotonic()
        images = self.conversation.images.for_engine(prompt.images)
        (rest,) = await self._rollout.engine.generate(prompt.ids, self._sampling, prefix=prefix, **images)
        self.count("engine_s", time.monotonic() - began)
        self._rollout.note(self.index, "chat", "", began, len(rest.tokens))
        return rest if call is None else continued_completion(call, rest)

    def note_tool(self, name: str, began: float) -> None:
        """Note a call of a tool that ends now, for the trace. began: on the clock ``time.monotonic``."""
        self._rollout.note(self.index, "tool", name, began)

    async def until_interrupted(self, work: Awaitable[T]) -> T:
        """Await what is the tools' or the environment's. EpisodeEnded when the generator ends meanwhile."""
        began = time.monotonic()
        working = asyncio.ensure_future(work)
        stopping = asyncio.ensure_future(self._rollout.interrupted.wait())
        try:
            await asyncio.wait({working, stopping}, return_when=asyncio.FIRST_COMPLETED)
            if working.done():
                return working.result()
            raise EpisodeEnded("abort")
        finally:
            self.count("tools_s", time.monotonic() - began)
            working.cancel()
            stopping.cancel()

    def finish(self, finish: FinishReason, reward: float | None = None) -> SampledCompletion | FailedSample:
        """Return the episode as a sample; a failed one if it used up its calls and such samples are excluded."""
        settings = self._parts.settings
        if finish == "calls" and settings.late == "exclude":
            return FailedSample(self.index, f"its episode reached its limit of {self._max_calls} model calls", "late")
        data = {"messages": newest_messages(self.conversation.messages(), settings.keep_messages)}
        sample = self.conversation.sample(self.index, finish, reward=reward, data=data, train=settings.train)
        sample.metrics = {**size_metrics(sample), **self.metrics}
        return sample


def newest_messages(messages: Sequence[Message], limit: int) -> list[Message]:
    """Return the last messages that fit into ``limit`` bytes of JSON."""
    kept: list[Message] = []
    for message in reversed(messages):
        limit -= len(json.dumps(message, ensure_ascii=False).encode("utf-8", "backslashreplace"))
        if limit < 0:
            break
        kept.append(message)
    return kept[::-1]
