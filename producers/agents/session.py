"""A session: the running episode of one agent, as the endpoint sees it.

It joins each request to the conversation so far, samples the answer, parses and records it. What another generator had
recorded of the same episode is answered from that record, as long as the agent asks for the very same tokens. An agent
never sees an aborted request: the episode is handed over then, and the request waits until its agent is ended.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import secrets
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field

import msgspec

from producers.agents.capacity import EngineCapacity
from producers.agents.protocol import AnswerFinish, CallRequest, SampledAnswer, SessionError
from producers.agents.workers.notes import Notes
from producers.conversation.calls import continued_completion, digest_key, recorded_completion
from producers.conversation.conversation import Conversation, NextPrompt
from producers.conversation.parsing.answers import AnswerParser, ParsedAnswer
from producers.engines.base import Completion, Engine
from schemas.errors import DataError
from schemas.messages import FinishReason, Partial, Sampling

ENDED = "the episode is over: its sample is finished, or another process has it"


@dataclass(frozen=True)
class PolicyHandle:
    """What all sessions of a generator share. max_length: tokens of the model, prompt and answer.

    encode: token ids of plain text, for prompts that are no messages. longest_token: characters of one at most.
    """

    engine: Engine
    parser: AnswerParser
    capacity: EngineCapacity
    max_length: int
    max_calls: int
    encode: Callable[[str], list[int]]
    longest_token: int


@dataclass
class Counts:
    """What happened in an episode, for metrics: numbers, and seconds.

    tools_s: from an answer that called tools to the next request.
    """

    requests: int = 0
    replayed: int = 0
    parse_failures: int = 0
    ignored: int = 0
    prompt_tokens: int = 0
    queue_s: float = 0.0
    engine_s: float = 0.0
    tools_s: float = 0.0
    begun: Counter[str] = field(default_factory=Counter)


class Session:
    """One running episode. Requests may come at the same time, from agents that work side by side.

    limit: which limit the agent has reached, so that its end is an outcome and no failure; None: none.
    interrupted: set when a request was aborted; the episode has to be handed over then. finished: set when the agent
    itself said that it is over. notes: results of its side effects, for its next attempt. busy_s: seconds in which a
    request was under way.
    """

    def __init__(
        self,
        policy: PolicyHandle,
        conversation: Conversation,
        sampling: Sampling,
        saved: Partial | None = None,
        save: Callable[[Partial], Awaitable[None]] | None = None,
        sample: int = 0,
    ) -> None:
        """saved: what another generator had of this sample. save: keeps it for the next one, see RolloutContext."""
        self.token = secrets.token_urlsafe(24)
        self.notes = Notes(saved.notes if saved else None, self._keep)
        self.finish_of_last: FinishReason = "stop"
        self.conversation = conversation
        self.counts = Counts()
        self.limit: FinishReason | None = None
        self.interrupted = asyncio.Event()
        self.reward: float | None = None
        self.metrics: dict[str, float] = {}
        self.finished = asyncio.Event()
        self._policy = policy
        self._sampling = sampling
        self._sample = sample
        self._save = save
        self._saved = {call.key: call for call in saved.calls} if saved else {}
        self._asked: Counter[bytes] = Counter()
        self._numbers: dict[str, int] = {}
        self._digests: dict[int, bytes] = {}
        self._lock = asyncio.Lock()
        self._tasks: set[asyncio.Task[object]] = set()
        self._sampling_now = 0
        self._settled = asyncio.Event()
        self._settled.set()
        self._ended = False
        self._open = 0
        self._busy_since = self._idle_since = 0.0
        self._calls_tools = False
        self.busy_s = 0.0

    def partial(self) -> Partial:
        """What there is of the episode, for whoever goes on with it."""
        found = self.conversation.partial(self._sample)
        return msgspec.structs.replace(found, notes=dict(self.notes))

    def end(self) -> None:
        """Refuse every further request, and cancel those under way: nothing of them is recorded."""
        self._ended = True
        for task in self._tasks:
            task.cancel()

    async def settle(self, seconds: float) -> None:
        """Wait, at most so long, until what was being sampled is recorded."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._settled.wait()

    async def complete(self, request: CallRequest) -> list[SampledAnswer]:
        """Answer a model call with ``request.n`` choices; SessionError tells the agent what is wrong."""
        self._begin(request)
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        try:
            least = self._least_tokens(request)
            if least > self._policy.max_length:
                self.limit = "length"
                raise self._too_long(f"at least {least}")
            async with self._lock:
                prompt = await asyncio.to_thread(self._prompt, request)
            room = self._policy.max_length - len(prompt.ids)
            if room < 1:
                self.limit = "length"
                raise self._too_long(str(len(prompt.ids)))
            answers = await self._answer(request, prompt, room)
            try:
                # No agent may go on with an answer that is lost if this process dies now.
                await self._keep()
            except asyncio.CancelledError:
                for answer in answers:
                    self.forget(answer.call)
                raise
            return answers
        except DataError as error:
            raise SessionError(400, "invalid_request_error", str(error)) from error
        except asyncio.CancelledError:
            # Nobody heard an answer, so it was no call.
            self.counts.requests -= 1
            raise
        finally:
            self._tasks.discard(task)
            self._open -= 1
            if not self._open:
                self._idle_since = time.monotonic()
                self.busy_s += self._idle_since - self._busy_since

    def forget(self, call: int) -> None:
        """Take an answer out of the record, because nobody received it.

        Not when the session has ended: who goes on with the episode will ask for it again.
        """
        if self._ended:
            return
        self.conversation.remove(call)
        self._asked[self._digests.pop(call)] -= 1

    def set_reward(self, value: float, completion_id: str | None = None) -> None:
        """Set the reward of the episode, or that of one answer. SessionError if there is no such answer."""
        if completion_id is None:
            self.reward = value
        elif completion_id not in self._numbers:
            raise SessionError(404, "not_found", f"no completion {completion_id!r} in this episode")
        else:
            self.conversation.set_reward(self._numbers[completion_id], value)

    def add_metrics(self, metrics: dict[str, float]) -> None:
        """Keep numbers of the agent about its episode."""
        self.metrics.update(metrics)

    async def count_tokens(self, request: CallRequest) -> int:
        """Number of tokens of the prompt that the request would have; at least so many of one that is far too long."""
        self._check_open()
        least = self._least_tokens(request)
        if least > self._policy.max_length:
            return least
        async with self._lock:
            return len((await asyncio.to_thread(self._prompt, request)).ids)

    def finish(self) -> None:
        """The agent says that its episode is over."""
        self.finished.set()

    def _begin(self, request: CallRequest) -> None:
        self._check_open()
        if self.counts.requests >= self._policy.max_calls:
            self.limit = "calls"
            raise SessionError(
                400, "max_calls_reached", f"generator.agents.max_calls {self._policy.max_calls} calls are used up"
            )
        self.counts.requests += 1
        self.counts.ignored += len(request.ignored)
        if not self._open:
            self._busy_since = time.monotonic()
            if self._calls_tools:
                self.counts.tools_s += self._busy_since - self._idle_since
        self._open += 1

    def _check_open(self) -> None:
        if self._ended:
            raise SessionError(410, "session_ended", ENDED)

    def _least_tokens(self, request: CallRequest) -> int:
        """How many tokens its text has at least: to cut one that is far too long into tokens takes minutes itself."""
        return request.characters // self._policy.longest_token

    def _too_long(self, tokens: str) -> SessionError:
        return SessionError(
            400,
            "context_length_exceeded",
            f"This model's maximum context length is {self._policy.max_length} tokens, the prompt has {tokens}.",
        )

    def _prompt(self, request: CallRequest) -> NextPrompt:
        if request.messages is not None:
            messages = self.conversation.images.resolve(request.messages)
            return self.conversation.prompt(messages, request.tools, request.name, request.template_args)
        if request.prompt_ids is not None:
            return self.conversation.raw_prompt(request.prompt_ids, request.name)
        return self.conversation.raw_prompt(self._policy.encode(request.prompt_text or ""), request.name)

    async def _answer(self, request: CallRequest, prompt: NextPrompt, room: int) -> list[SampledAnswer]:
        """Sample every choice, parse and record it; where one is aborted, the episode is handed over instead."""
        self._sampling_now += 1
        self._settled.clear()
        try:
            completions = await self._sample_all(request, prompt, room)
            if not any(completion.finish == "abort" for completion in completions):
                async with self._lock:
                    self._check_open()
                    parsed = await asyncio.to_thread(self._parse, request, prompt, completions)
                    return self._record(prompt, completions, parsed)
            await self._keep_aborted(prompt, completions)
        finally:
            self._sampling_now -= 1
            if not self._sampling_now:
                self._settled.set()
        # Until the agent is ended: it never sees that its request was aborted.
        await asyncio.Event().wait()
        return []

    async def _sample_all(self, request: CallRequest, prompt: NextPrompt, room: int) -> list[Completion]:
        """Sample every choice: from the record where the same tokens were asked before, else by the engine."""
        self._asked[prompt.digest] += request.n
        try:
            return await self._sample_keys(request, prompt, room, prompt.digest)
        except BaseException:
            self._asked[prompt.digest] -= request.n
            raise

    async def _sample_keys(
        self, request: CallRequest, prompt: NextPrompt, room: int, digest: bytes
    ) -> list[Completion]:
        first = self._asked[digest] - request.n
        keys = [digest_key(digest, first + k) for k in range(request.n)]
        limit = min(self._sampling.max_tokens, room, request.max_tokens or room)
        sampling = msgspec.structs.replace(
            self._sampling, max_tokens=limit, stop=[*self._sampling.stop, *request.stop], seed=self._seed()
        )
        found = {k: self._saved[key] for k, key in enumerate(keys) if key in self._saved}
        fresh = [k for k in range(request.n) if k not in found]
        growing = [k for k, call in found.items() if call.finish == "abort"]
        waited = time.monotonic()
        answers = {k: recorded_completion(call) for k, call in found.items() if call.finish != "abort"}
        self.counts.replayed += len(answers)
        if fresh or growing:
            async with self._policy.capacity.take(len(fresh) + len(growing)):
                begun = time.monotonic()
                self.counts.queue_s += begun - waited
                self._check_open()
                generate = functools.partial(
                    self._policy.engine.generate,
                    prompt.ids,
                    sampling,
                    **self.conversation.images.for_engine(prompt.images),
                )
                jobs = [generate(n=len(fresh))] if fresh else []
                jobs += [generate(prefix=found[k].tokens.numpy().tolist()) for k in growing]
                results = [completion for part in await asyncio.gather(*jobs) for completion in part]
                self.counts.engine_s += time.monotonic() - begun
            for k, completion in zip([*fresh, *growing], results, strict=True):
                answers[k] = continued_completion(found[k], completion) if k in found else completion
        return [answers[k] for k in range(request.n)]

    async def _keep_aborted(self, prompt: NextPrompt, completions: Sequence[Completion]) -> None:
        """Keep what there is of aborted answers, and have the episode handed over."""
        async with self._lock:
            if not self._ended:
                for completion in completions:
                    self.conversation.add(prompt, completion, {"role": "assistant", "content": None})
        self.interrupted.set()

    def _seed(self) -> int | None:
        """A seed of this call, so that calls of an episode, and episodes of a group, don't draw the same."""
        if self._sampling.seed is None:
            return None
        return self._sampling.seed + (self._sample << 16) + (self.counts.requests << 4)

    def _parse(self, request: CallRequest, prompt: NextPrompt, completions: Sequence[Completion]) -> list[ParsedAnswer]:
        return [
            self._policy.parser.parse(
                completion.tokens,
                request.tools,
                prompt_ids=prompt.ids,
                cut=completion.finish == "length",
                template_args=request.template_args,
            )
            for completion in completions
        ]

    def _record(
        self, prompt: NextPrompt, completions: Sequence[Completion], parsed: Sequence[ParsedAnswer]
    ) -> list[SampledAnswer]:
        if self.limit == "length":
            # The agent has shortened its history, and goes on.
            self.limit = None
        self.counts.begun[prompt.why] += 1
        self.counts.prompt_tokens += len(prompt.ids)
        self._calls_tools = any(answer.tool_calls for answer in parsed)
        answers: list[SampledAnswer] = []
        for completion, answer in zip(completions, parsed, strict=True):
            self.counts.parse_failures += answer.failures
            number = self.conversation.add(prompt, completion, answer.message())
            answers.append(_answer(number, answer, prompt, completion))
            self._numbers[answers[-1].id] = number
            self._digests[number] = prompt.digest
            self.finish_of_last = completion.finish
        return answers

    async def _keep(self) -> None:
        """Return when whoever goes on with the episode would find it as it is."""
        if self._save is not None:
            await self._save(self.partial())


def _answer(number: int, parsed: ParsedAnswer, prompt: NextPrompt, completion: Completion) -> SampledAnswer:
    finish: AnswerFinish = "tool_calls" if parsed.tool_calls else "length" if completion.finish == "length" else "stop"
    return SampledAnswer(
        call=number,
        id=f"chatcmpl-{secrets.token_hex(12)}",
        parsed=parsed,
        text=parsed.text,
        finish=finish,
        prompt_ids=prompt.ids,
        ids=completion.tokens,
        logprobs=completion.logprobs.tolist(),
    )
