"""The conversations of one episode: the token ids of each model call, and the sample that its calls become.

Sampled token ids are kept and never encoded again from text. If the messages of a request continue one of our answers,
its prompt is the ids so far and the ids of the new messages, and so it stays one row of training; any other request
starts a new row.
"""

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any, Literal, get_args

import msgspec

from producers.conversation.assembly import choose_calls, join_rows
from producers.conversation.bridge import NewTurn, find_kept_suffix, find_suffix
from producers.conversation.calls import (
    AnsweredCall,
    digest_key,
    ids_digest,
    record_completion,
    row_calls,
    row_ids,
    row_images,
)
from producers.conversation.chat_template import ChatTemplate
from producers.conversation.images import EpisodeImages
from producers.conversation.messages import Message, extend_chain, message_key, settings_key
from producers.engines.base import Completion
from producers.workflows.trajectory_builder import SampledCompletion
from schemas.codec import Array
from schemas.errors import DataError
from schemas.messages import Call, FinishReason, Partial, PlacedImage

History = Literal["held", "template"]
Why = Literal["joined", "first", "history rewritten", "tools changed", "template", "no bridge", "raw"]
BEGINNINGS = tuple(why for why in get_args(Why) if why != "joined")
"""The reasons why segments begin."""
MAIN = "main"


@dataclass(frozen=True)
class NextPrompt:
    """The prompt of the next call.

    ids: its token ids. why: the reason for a new row; ``first`` starts a conversation, ``template`` and ``no bridge``
    mean that its turns could not be joined, ``raw`` that the client sent ids. parent: number of the call whose row it
    extends, None if it starts a new one. images: those that some of the ids stand for. The other fields are internal to
    the conversation.
    """

    ids: list[int]
    why: Why
    name: str = MAIN
    parent: int | None = None
    held: int = 0
    new: list[Message] = field(default_factory=list, repr=False)
    chain: bytes | None = None
    settings: bytes = b""
    system: bytes | None = None
    repeated: tuple[int, ...] = ()
    asked: object = field(default_factory=object, repr=False)
    images: list[PlacedImage] = field(default_factory=list)

    @cached_property
    def digest(self) -> bytes:
        """The digest of the token ids and the images."""
        return ids_digest(self.ids, self.images)


class Conversation:
    """The model calls of one episode, of all its agents::

        prompt = conversation.prompt(messages, tools)
        (completion,) = await engine.generate(prompt.ids, sampling)
        conversation.add(prompt, completion, answer)
        ...
        sample = conversation.sample(index, "stop", reward=1.0)

    history: ``held`` keeps all sampled tokens in the context; ``template`` starts a new row if the chat template
    rewrites earlier text. images: those of its messages, which refer to them by digest. Threads must not add at the
    same time. No I/O.
    """

    def __init__(self, template: ChatTemplate, history: History = "held", images: EpisodeImages | None = None) -> None:
        self.images = images or EpisodeImages()
        self._template = template
        self._history = history
        self._calls: dict[int, AnsweredCall] = {}
        self._ends: dict[bytes, list[int]] = {}
        self._answers: dict[bytes, int] = {}
        self._names: dict[bytes, str] = {}
        self._records: list[Call] = []
        """The calls in the order of time, in the form in which they are saved for another generator."""
        self._asked: Counter[bytes] = Counter()
        """How often each prompt has a record."""

    @property
    def calls(self) -> int:
        """The number of answered calls."""
        return len(self._delivered())

    def prompt(
        self,
        messages: Sequence[Message],
        tools: Sequence[dict[str, Any]] | None = None,
        name: str = MAIN,
        args: dict[str, Any] | None = None,
    ) -> NextPrompt:
        """Return the prompt of a request's call; records nothing.

        name: of the agent that asks. args: of the chat template. DataError if the template rejects the messages.
        """
        settings = settings_key(tools, args)
        matches, chain, repeated = self._match(messages, name, settings)
        make = partial(
            NextPrompt, name=name, chain=chain, settings=settings, system=_system_key(messages), repeated=repeated
        )
        restored = list(messages)
        for place, call in matches:
            restored[place] = call.answer
        place, parent = matches[-1] if matches else (-1, None)
        new, suffix = list(messages[place + 1 :]), None
        why: Why = "first"
        if self._calls and any(message.get("role") == "assistant" for message in new):
            why = "history rewritten"
        elif parent is not None and parent.settings != settings:
            why = "tools changed"
        elif parent is not None:
            suffix, why = self._suffix(NewTurn(restored[:place], parent.answer, new, None, tools, args), parent)
        if parent is None or suffix is None:
            text = self._template.render(restored, tools, args=args)
            ids, images = self.images.expand(self._template.ids(text), restored)
            return make(ids, why, new=list(messages), images=images)
        held = row_ids(self._calls, parent.number)
        more, images = self.images.expand(suffix, new, len(held))
        images = [*row_images(self._calls, parent.number), *images]
        return make(held + more, why, parent=parent.number, held=len(held), new=new, images=images)

    def raw_prompt(self, ids: Sequence[int], name: str = MAIN) -> NextPrompt:
        """Return the same for a prompt of ids: it is joined if it begins with all ids up to one of our answers."""
        ids = list(ids)
        best: AnsweredCall | None = None
        fitting: dict[int, int] = {}
        for call in self._delivered():
            start = 0 if call.parent is None else fitting.get(call.parent, -1)
            more = [*call.suffix, *call.completion.tokens]
            if start >= 0 and ids[start : start + len(more)] == more:
                fitting[call.number] = start + len(more)
                if call.name == name and (best is None or call.length > best.length) and call.length < len(ids):
                    best = call
        new = [{"role": "user", "content": self._template.decode(ids[best.length if best else 0 :])}]
        if best is None:
            return NextPrompt(ids, "raw", name, new=new)
        images = row_images(self._calls, best.number)
        return NextPrompt(ids, "raw", name, best.number, best.length, new, images=images)

    def key(self, prompt: NextPrompt) -> bytes:
        """Return the key under which a resumed episode finds the recorded answer to this prompt."""
        return digest_key(prompt.digest, self._asked[prompt.digest])

    def add(self, prompt: NextPrompt, completion: Completion, answer: Message) -> int:
        """Record the answer of a call, and return the call's number.

        answer: the assistant's message as the client got it. Choices of one request are added with the same prompt.
        """
        number = len(self._calls)
        parent = self._calls[prompt.parent] if prompt.parent is not None else None
        call = AnsweredCall(
            number=number,
            name=parent.name if parent is not None else self._agent(prompt),
            parent=prompt.parent,
            suffix=prompt.ids[prompt.held :],
            length=len(prompt.ids) + len(completion.tokens),
            completion=completion,
            answer=answer,
            new=prompt.new,
            chain=None,
            settings=prompt.settings,
            asked=prompt.asked,
            digest=prompt.digest,
            record=record_completion(completion),
            images=[image for image in prompt.images if image.start >= prompt.held],
        )
        if prompt.chain is not None:
            call.chain = extend_chain(prompt.chain, message_key(answer))
            without = extend_chain(prompt.chain, message_key(answer, reasoning=False))
            for chain in {call.chain, without}:
                self._ends.setdefault(chain, []).append(number)
            self._answers.setdefault(message_key(answer, reasoning=False), number)
        self._calls[number] = call
        self._add_record(call)
        again = False
        for used in {prompt.parent, *prompt.repeated} - {None}:
            earlier = self._calls[used]  # type: ignore[index]
            again = again or (earlier.removed and not earlier.used)
            earlier.used = True
        if again:
            self._make_records()
        return number

    def remove(self, call: int) -> None:
        """Remove an answer that no client received."""
        self._calls[call].removed = True
        self._make_records()

    def set_reward(self, call: int, reward: float) -> None:
        """Set the reward of one call, by its index."""
        self._calls[call].reward = reward

    def messages(self) -> list[Message]:
        """Return the conversation of the main agent with its last answer, to be shown to users."""
        last = self._last_call(self._delivered())
        row = row_calls(self._calls, last.number if last is not None else None)
        return [message for call in row for message in (*call.new, call.answer)]

    def _make_records(self) -> None:
        self._records, self._asked = [], Counter()
        for call in self._delivered():
            self._add_record(call)

    def _add_record(self, call: AnsweredCall) -> None:
        key = digest_key(call.digest, self._asked[call.digest])
        self._records.append(msgspec.structs.replace(call.record, key=key))
        self._asked[call.digest] += 1

    def partial(self, index: int) -> Partial:
        """Return the episode so far, to be saved as sample ``index``."""
        tokens, logprobs = Array.of([], "i4"), Array.of([], "f4")
        return Partial(sample=index, tokens=tokens, logprobs=logprobs, spans=[], calls=list(self._records))

    def sample(
        self,
        index: int,
        finish: FinishReason,
        *,
        reward: float | None = None,
        data: dict[str, Any] | None = None,
        train: Collection[str] | None = None,
    ) -> SampledCompletion:
        """Return the episode as sample ``index``, a segment for each row. DataError if there is nothing to train.

        With finish ``abort`` it may be empty, because another generator resumes it.
        train: names of the agents whose rows are kept; None: all. Prompt and completion are those of the main agent's
        last answer.
        """
        delivered = self._delivered()
        numbers = {call.number: k for k, call in enumerate(delivered)}
        kept = choose_calls(delivered)
        trained = [call for call in kept if train is None or call.name in train]
        arrays = join_rows(self._calls, trained, numbers)
        last = self._last_call(kept)
        if finish == "abort" and not arrays.tokens:
            return SampledCompletion(index, [], [], [], [], [], "abort", "", "", calls=list(self._records))
        if last is None:
            raise DataError("the episode has no model call that was answered")
        if not arrays.tokens:
            names = ", ".join(sorted({call.name for call in kept}))
            raise DataError(f"the episode has no token to train: its calls are of {names}")
        prompt = row_ids(self._calls, last.parent) + last.suffix
        return SampledCompletion(
            index=index,
            tokens=arrays.tokens,
            loss_mask=arrays.loss_mask,
            logprobs=arrays.logprobs,
            spans=arrays.spans,
            turns=arrays.turns,
            finish=finish,
            prompt=self._template.decode(prompt),
            completion=self._template.decode(last.completion.tokens),
            data=dict(data or {}),
            segments=arrays.segments,
            routed_experts=arrays.routed_experts(),
            reward=reward,
            calls=list(self._records),
            images=arrays.images,
            files=self.images.files_beside_the_task(arrays.images),
        )

    def _delivered(self) -> list[AnsweredCall]:
        return [call for call in list(self._calls.values()) if not call.removed or call.used]

    def _last_call(self, calls: Sequence[AnsweredCall]) -> AnsweredCall | None:
        last = calls[-1] if calls else None
        return next((call for call in reversed(calls) if call.name == MAIN), last)

    def _match(
        self, messages: Sequence[Message], name: str, settings: bytes
    ) -> tuple[list[tuple[int, AnsweredCall]], bytes, tuple[int, ...]]:
        """Find our answers that a request repeats after exactly the messages that they answered.

        Returns their positions and calls, the digest of the messages, and all calls whose answers occur in them.
        """
        matches: list[tuple[int, AnsweredCall]] = []
        repeated: list[int] = []
        chain = name.encode()
        for place, message in enumerate(messages):
            chain = extend_chain(chain, message_key(message))
            if message.get("role") != "assistant":
                continue
            if (number := self._answers.get(message_key(message, reasoning=False))) is not None:
                repeated.append(number)
            calls = [self._calls[number] for number in self._ends.get(chain, ()) if not self._calls[number].removed]
            if calls:
                call = next((call for call in calls if call.settings == settings), calls[0])
                matches.append((place, call))
                chain = call.chain or chain
        matched = {call.number for _, call in matches}
        return matches, chain, tuple(matched.union(repeated if not matched else ()))

    def _suffix(self, turn: NewTurn, parent: AnsweredCall) -> tuple[list[int] | None, Why]:
        template, tokens = self._template, parent.completion.tokens
        if template.bridge_off is not None:
            return None, "no bridge"
        closed = bool(tokens) and parent.completion.finish == "stop" and template.is_special(tokens[-1])
        turn = replace(turn, closing=template.token_text(tokens[-1]) if closed else None)
        find = find_suffix if self._history == "held" else find_kept_suffix
        text = find(template, turn)
        if text is None:
            return None, "no bridge" if self._history == "held" else "template"
        return template.ids(text, after=tokens[-1] if closed else None), "joined"

    def _agent(self, prompt: NextPrompt) -> str:
        """Name the agent that starts a row: by the given name or, without one, by its first system prompt."""
        if prompt.name != MAIN or prompt.system is None:
            return prompt.name
        repeated = next((self._calls[number].name for number in prompt.repeated), None)
        new = MAIN if MAIN not in self._names.values() else f"agent-{prompt.system.hex()[:6]}"
        return self._names.setdefault(prompt.system, repeated or new)


def _system_key(messages: Sequence[Message]) -> bytes:
    """Return the digest of the system messages at the beginning."""
    chain = b""
    for message in messages:
        if message.get("role") not in ("system", "developer"):
            break
        chain = extend_chain(chain, message_key(message))
    return chain or ids_digest([])
