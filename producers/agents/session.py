"""A session: the running episode of one agent, as the endpoint sees it.

It joins each request to the conversation so far, then samples, parses and records the answer. If another generator has
already answered the same call of the episode, the recorded answer is returned, provided that the prompt's tokens are
equal. An agent never sees an aborted request: the episode is handed over, and the request waits until its agent ends.
"""

import asyncio
import contextlib
import functools
import itertools
import secrets
import time
from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

import msgspec

from producers.agents.capacity import EngineCapacity
from producers.agents.protocol import NOT_SAVED, AnswerFinish, CallRequest, SampledAnswer, SessionError
from producers.agents.requests import Requests
from producers.agents.workers.notes import Notes
from producers.conversation.calls import continued_completion, digest_key, recorded_completion
from producers.conversation.conversation import Conversation, NextPrompt
from producers.conversation.messages import content_text
from producers.conversation.parsing.answers import ParsedAnswer, without_stop
from producers.conversation.parsing.factory import AnswerParser
from producers.engines.base import Completion, Engine
from producers.tokenizer import HfTokenizer
from schemas.errors import DataError, InfraError
from schemas.messages import FinishReason, Partial, Sampling

ENDED = "the episode is over: its sample is finished, or another process has it"
MOST_NAMES = 1 << 16
"""Characters of the names of an episode's metrics."""


@dataclass(frozen=True)
class PolicyHandle:
    """The policy that all sessions of a generator share. max_length: tokens of prompt and answer together."""

    engine: Engine
    parser: AnswerParser
    capacity: EngineCapacity
    max_length: int
    max_calls: int
    tokenizer: HfTokenizer


@dataclass
class Counts:
    """Metrics of an episode: counts, and seconds. tools_s: from an answer that called tools to the next request."""

    calls: int = 0
    replayed: int = 0
    parse_failures: int = 0
    ignored_settings: int = 0
    prompt_tokens: int = 0
    queue_s: float = 0.0
    engine_s: float = 0.0
    tools_s: float = 0.0


class Session:
    """One running episode, an OpenSession. Requests may overlap if agents work side by side.

    limit: the limit that the agent has reached, so that its end is an outcome and not a failure; None: no limit. note:
    RolloutContext's ``note``, for this sample. interrupted: set when a request was aborted, so the episode must be
    handed over. broken: the engine's failure, if it has failed. finished: set when the agent declared the end. notes:
    results of its side effects, for its next attempt. busy_s: seconds in which a request was under way. begun: how many
    calls began or extended a row, by reason.
    """

    def __init__(
        self,
        policy: PolicyHandle,
        conversation: Conversation,
        sampling: Sampling,
        saved: Partial | None = None,
        save: Callable[[Partial], Awaitable[bool]] | None = None,
        sample: int = 0,
        keep_requests: bool = False,
    ) -> None:
        """saved: the sample's state from another generator. save: stores the state, see RolloutContext.

        keep_requests: store the requests, too, for an agent that doesn't make them again in the next generator.
        """
        self.token = secrets.token_urlsafe(24)
        self.notes = Notes(saved.notes if saved else None, self._keep)
        self.note: Callable[..., None] = lambda *_: None
        self.finish_of_last: FinishReason = "stop"
        self.conversation = conversation
        self.counts = Counts()
        self.begun: Counter[str] = Counter()
        self.limit: FinishReason | None = None
        self.interrupted = asyncio.Event()
        self.broken: InfraError | None = None
        self.reward: float | None = None
        self.metrics: dict[str, float] = {}
        self.finished = asyncio.Event()
        self._policy = policy
        self._sampling = sampling
        self._sample = sample
        self._save = save
        self._saved = {call.key: call for call in saved.calls} if saved else {}
        self._requests = Requests(self.notes) if keep_requests else None
        self._asked: defaultdict[bytes, set[int]] = defaultdict(set)
        self._call_numbers = itertools.count(1)
        self._numbers: dict[str, int] = {}
        self._places: dict[int, tuple[bytes, int]] = {}
        self._lock = asyncio.Lock()
        self._repeating = asyncio.Lock()
        self._tasks: set[asyncio.Task[object]] = set()
        self._sampling_now = 0
        self._settled = asyncio.Event()
        self._settled.set()
        self._ended = False
        self._unreceived: Callable[[], list[int]] = list
        self._open = 0
        self._busy_since = self._idle_since = 0.0
        self._calls_tools = ""
        self.busy_s = 0.0

    def partial(self) -> Partial:
        """Return the state of the episode, for the generator that resumes it."""
        partial = self.conversation.partial(self._sample)
        return msgspec.structs.replace(partial, notes=dict(self.notes))

    def end(self) -> None:
        """Reject every further request, and cancel those under way without recording them."""
        self._ended = True
        for task in self._tasks:
            task.cancel()

    async def settle(self, seconds: float) -> None:
        """Wait, at most so long, until running samples are recorded."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._settled.wait(), seconds)

    async def complete(self, request: CallRequest) -> list[SampledAnswer]:
        """Answer a request; stored requests of a resumed episode are repeated before it."""
        if self._requests is not None:
            await self.repeat_requests(before=request)
        return await self._complete(request)

    async def repeat_requests(self, before: CallRequest | None = None) -> None:
        """Make the stored calls again, with the recorded answers, so that they are a part of this conversation.

        before: a request that may be the last of them: its client has not received the answer, and gets it now.
        """
        async with self._repeating:
            while self._requests is not None and (request := self._requests.next(before)) is not None:
                prompt = await asyncio.to_thread(self._prompt, request)
                keys = [digest_key(prompt.digest, place) for place in self._free_places(prompt.digest, request.n)]
                if all(key in self._saved and self._saved[key].finish != "abort" for key in keys):
                    await self._complete(request, again=True)

    async def _complete(self, request: CallRequest, again: bool = False) -> list[SampledAnswer]:
        number = self._begin(request)
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        try:
            least = self._least_tokens(request)
            if least > self._policy.max_length:
                raise self._too_long(f"at least {least}")
            async with self._lock:
                prompt = await asyncio.to_thread(self._prompt, request)
            room = self._policy.max_length - len(prompt.ids)
            if room < 1:
                raise self._too_long(str(len(prompt.ids)))
            if self._requests is not None and not again:
                self._requests.check(request)
            answers = await self._answer(request, prompt, room, number)
            if self._requests is not None and not again:
                self._requests.note(request)
            try:
                # No agent may use an answer that would be lost if this process died now.
                if not await self._keep() and self._requests is not None:
                    # The agent is elsewhere, and would continue with an answer that the next generator does not know.
                    self.counts.calls -= 1
                    raise SessionError(503, NOT_SAVED, "another generator holds this conversation: try again")
            except BaseException:
                for answer in answers:
                    self.forget(answer.call)
                raise
            return answers
        except DataError as error:
            raise SessionError(400, "invalid_request_error", str(error)) from error
        except (asyncio.CancelledError, InfraError):
            # The agent received no answer, so the call does not count.
            self.counts.calls -= 1
            raise
        finally:
            self._tasks.discard(task)
            self._open -= 1
            if not self._open:
                self._idle_since = time.monotonic()
                self.busy_s += self._idle_since - self._busy_since

    def forget(self, call: int) -> None:
        """See OpenSession. Does nothing if the session has ended: the next attempt will ask for the answer again."""
        if not self._ended:
            self._remove(call)

    def watch(self, unreceived: Callable[[], list[int]]) -> None:
        """See OpenSession."""
        self._unreceived = unreceived

    def forget_unreceived(self) -> None:
        """Remove the answers that no client received, because the agent is done and won't ask for them again."""
        for call in self._unreceived():
            self._remove(call)

    def _remove(self, call: int) -> None:
        self.conversation.remove(call)
        digest, place = self._places.pop(call)
        self._asked[digest].discard(place)

    def set_reward(self, value: float, completion_id: str | None = None) -> None:
        """Set the episode's reward, or that of one completion. SessionError 404 if there is no such completion."""
        self._refuse_users()
        if completion_id is None:
            self.reward = value
            return
        # An answer has one id, which each protocol shows with a beginning of its own.
        number = self._numbers.get("chatcmpl-" + completion_id.rpartition("-" if "-" in completion_id else "_")[2])
        if number is None:
            raise SessionError(404, "not_found", f"no completion {completion_id!r} in this episode")
        self.conversation.set_reward(number, value)

    def add_metrics(self, metrics: dict[str, float]) -> None:
        """Add metrics to the episode; a name given again is replaced. SessionError 413 if the names become too long."""
        self._refuse_users()
        all_metrics = self.metrics | metrics
        if sum(map(len, all_metrics)) > MOST_NAMES:
            raise SessionError(413, "too_many_metrics", f"the names of metrics have more than {MOST_NAMES} characters")
        self.metrics = all_metrics

    async def count_tokens(self, request: CallRequest) -> int:
        """Return the number of tokens of a prompt, or a lower bound that already exceeds the model's length."""
        self._check_open()
        least = self._least_tokens(request)
        if least > self._policy.max_length:
            return least
        async with self._lock:
            return len((await asyncio.to_thread(self._prompt, request)).ids)

    def finish(self) -> None:
        """End the episode at the agent's request. SessionError 403 if a user asks."""
        self._refuse_users()
        self.finished.set()

    def _refuse_users(self) -> None:
        """Raise SessionError if the client is a user's: it holds a conversation and does not reward it."""
        if self._requests is not None:
            raise SessionError(403, "not_allowed", "a conversation is rewarded with the key of its tenant")

    def _begin(self, request: CallRequest) -> int:
        """Count a call; return its number, which no other call of this session has."""
        self._check_open()
        if self.counts.calls >= self._policy.max_calls:
            self.limit = "calls"
            raise SessionError(
                400, "max_calls_reached", f"generator.agents.max_calls {self._policy.max_calls} calls are used up"
            )
        self.counts.calls += 1
        self.counts.ignored_settings += len(request.ignored)
        if not self._open:
            self._busy_since = time.monotonic()
            if self._calls_tools:
                self.counts.tools_s += self._busy_since - self._idle_since
                self.note("tool", self._calls_tools, self._idle_since)
        self._open += 1
        return next(self._call_numbers)

    def _check_open(self) -> None:
        if self._ended:
            raise SessionError(410, "session_ended", ENDED)

    def _least_tokens(self, request: CallRequest) -> int:
        """Return a lower bound of its tokens: encoding a text that is far too long would take minutes."""
        texts = [request.prompt_text, *(content_text(message.get("content")) for message in request.messages or ())]
        return sum(len(text or "") for text in texts) // self._policy.tokenizer.longest_token

    def _too_long(self, tokens: str) -> SessionError:
        self.limit = "length"
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
        return self.conversation.raw_prompt(self._policy.tokenizer.encode(request.prompt_text or ""), request.name)

    async def _answer(self, request: CallRequest, prompt: NextPrompt, room: int, number: int) -> list[SampledAnswer]:
        """Sample, parse and record every choice; if one is aborted, hand the episode over instead."""
        places = self._free_places(prompt.digest, request.n)
        self._asked[prompt.digest].update(places)
        self._sampling_now += 1
        self._settled.clear()
        try:
            completions = await self._sample_all(request, prompt, room, places, number)
            if not any(completion.finish == "abort" for completion in completions):
                async with self._lock:
                    self._check_open()
                    parsed = await asyncio.to_thread(self._parse, request, prompt.ids, completions)
                    return self._record(prompt, places, completions, parsed)
            async with self._lock:
                if not self._ended:
                    for completion in completions:
                        self.conversation.add(prompt, completion, {"role": "assistant", "content": None})
            self.interrupted.set()
        except BaseException:
            self._asked[prompt.digest].difference_update(places)
            raise
        finally:
            self._sampling_now -= 1
            if not self._sampling_now:
                self._settled.set()
        # Wait until the agent is ended: it must not see that its request was aborted.
        await asyncio.Event().wait()
        return []

    def _free_places(self, digest: bytes, n: int) -> list[int]:
        """Return the first free numbers of requests for equal tokens: one whose answer was lost is used again."""
        taken = self._asked[digest]
        return list(itertools.islice((k for k in itertools.count() if k not in taken), n))

    async def _sample_all(
        self, request: CallRequest, prompt: NextPrompt, room: int, places: Sequence[int], number: int
    ) -> list[Completion]:
        """Sample every choice: from the record if the same tokens were asked before, else by the engine."""
        keys = [digest_key(prompt.digest, place) for place in places]
        limit = min(self._sampling.max_tokens, room, request.max_tokens or room)
        seed = self._sampling.seed
        if seed is not None:
            # Calls of an episode, and episodes of a group, differ.
            seed += (self._sample << 16) + (number << 4)
        stop = [*self._sampling.stop, *request.stop]
        sampling = msgspec.structs.replace(self._sampling, max_tokens=limit, stop=stop, seed=seed)
        recorded = {k: self._saved[key] for k, key in enumerate(keys) if key in self._saved}
        fresh = [k for k in range(request.n) if k not in recorded]
        growing = [k for k, call in recorded.items() if call.finish == "abort"]
        waited = time.monotonic()
        answers = {k: recorded_completion(call) for k, call in recorded.items() if call.finish != "abort"}
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
                jobs += [generate(prefix=recorded[k].tokens.numpy().tolist()) for k in growing]
                try:
                    results = [completion for part in await asyncio.gather(*jobs) for completion in part]
                except InfraError as error:
                    self.broken = error
                    self.interrupted.set()
                    raise
                self.counts.engine_s += time.monotonic() - begun
                self.note("chat", "", begun, sum(len(completion.tokens) for completion in results))
            for k, completion in zip([*fresh, *growing], results, strict=True):
                answers[k] = continued_completion(recorded[k], completion) if k in recorded else completion
        return [answers[k] for k in range(request.n)]

    def _parse(
        self, request: CallRequest, prompt_ids: Sequence[int], completions: Sequence[Completion]
    ) -> list[tuple[ParsedAnswer, str | None]]:
        """Parse each answer, and cut off the client's stop string if one has ended it; returned beside the answer."""
        parse = functools.partial(
            self._policy.parser.parse, tools=request.tools, prompt_ids=prompt_ids, template_args=request.template_args
        )
        stop_ids = self._policy.tokenizer.stop_ids
        parsed: list[tuple[ParsedAnswer, str | None]] = []
        for completion in completions:
            answer = parse(completion.tokens, cut=completion.finish == "length")
            stopped = completion.finish == "stop" and stop_ids.isdisjoint(completion.tokens[-1:])
            parsed.append(without_stop(answer, request.stop if stopped else ()))
        return parsed

    def _record(
        self,
        prompt: NextPrompt,
        places: list[int],
        completions: list[Completion],
        parsed: list[tuple[ParsedAnswer, str | None]],
    ) -> list[SampledAnswer]:
        if self.limit == "length":
            # The agent has shortened its history, so it continues.
            self.limit = None
        self.begun[prompt.why] += 1
        self.counts.prompt_tokens += len(prompt.ids)
        self._calls_tools = ", ".join(call.name for answer, _ in parsed for call in answer.tool_calls)
        answers: list[SampledAnswer] = []
        for place, completion, (answer, stop) in zip(places, completions, parsed, strict=True):
            self.counts.parse_failures += answer.failures
            number = self.conversation.add(prompt, completion, answer.message())
            id = f"chatcmpl-{secrets.token_hex(12)}"
            finish: AnswerFinish = "length" if completion.finish == "length" else "stop"
            finish = "tool_calls" if answer.tool_calls else finish
            logprobs = completion.logprobs.tolist()
            answers.append(
                SampledAnswer(number, id, answer, answer.text, finish, prompt.ids, completion.tokens, logprobs, stop)
            )
            self._numbers[id] = number
            self._places[number] = (prompt.digest, place)
            self.finish_of_last = completion.finish
        return answers

    async def _keep(self) -> bool:
        """Store the state of the episode; return whether another generator could resume it."""
        return self._save is None or await self._save(self.partial())
