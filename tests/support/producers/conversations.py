"""Played conversations: a policy that writes what a template shows, clients with habits, and what must hold."""

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from producers.conversation.chat_template import ChatTemplate
from producers.conversation.conversation import Conversation, NextPrompt
from producers.engines.base import Completion
from schemas.errors import DataError
from schemas.messages import Sampling, Task, Trajectory
from tests.support.models.chat_templates import TOOL, sampled

Message = dict[str, Any]


def policy_text(template: ChatTemplate, before: Sequence[Message], answer: Message, tools: list[Any] | None) -> str:
    """What the policy samples to be read as this answer: as the template shows it, with the token that ends it."""
    prompt = template.render(before, tools)
    whole = template.render([*before, answer], tools, generation_prompt=False)
    text = whole.removeprefix(prompt)
    if text == whole or not shows(answer, text):
        calls = json.dumps([call["function"] for call in answer.get("tool_calls", ())])
        text = (answer.get("content") or "") + (f"<tool_call>{calls}</tool_call>" if answer.get("tool_calls") else "")
    ends = [at for stop in template.stop_texts if (at := text.rfind(stop)) >= 0]
    return text[: min(ends)] if ends else text


def shows(answer: Message, text: str) -> bool:
    calls = answer.get("tool_calls") or [{"function": {"name": ""}}]
    return (answer.get("content") or "").strip() in text and calls[-1]["function"]["name"] in text


def cut_ids(template: ChatTemplate, text: str, chance: float, rng: random.Random) -> list[int]:
    """Ids of a text; with some chance at each character a token ends there, as a policy samples it at times."""
    pieces = [""]
    for letter in text:
        pieces[-1] += letter
        if rng.random() < chance and letter.isascii() and letter.isalpha():
            pieces.append("")
    ids = [token for piece in pieces for token in template.ids(piece)]
    return ids if template._tokenizer.decode_all(ids) == text else template.ids(text)


def replay(message: Message, habits: frozenset[str]) -> Message:
    """An answer as a client of these habits sends it back."""
    message = dict(message)
    if "reasoning dropped" in habits:
        message.pop("reasoning_content", None)
    if "spaces stripped" in habits and message.get("content"):
        message["content"] = message["content"].strip()
    if "arguments re-encoded" in habits and message.get("tool_calls"):
        message["tool_calls"] = [
            {**call, "id": f"new{k}", "function": {**call["function"], "arguments": _anew(call)}}
            for k, call in enumerate(message["tool_calls"])
        ]
    return message


def _anew(call: dict[str, Any]) -> str:
    return json.dumps(json.loads(call["function"]["arguments"]), indent=1, sort_keys=True)


@dataclass
class Turn:
    """One turn: the answer, how it ended, and the messages that follow. choices: answers of the request (n)."""

    answer: Message
    new: list[Message]
    end: str = "closed"
    choices: int = 1


@dataclass
class Played:
    """A conversation that was played to its end."""

    conversation: Conversation
    prompts: list[NextPrompt] = field(default_factory=list)
    completions: dict[int, Completion] = field(default_factory=dict)
    asked: dict[int, NextPrompt] = field(default_factory=dict)
    dropped: set[int] = field(default_factory=set)
    messages: list[Message] = field(default_factory=list)


def play(
    template: ChatTemplate,
    opening: list[Message],
    turns: Sequence[Turn],
    *,
    habits: frozenset[str] = frozenset(),
    history: Any = "held",
    tools: list[Any] | None = None,
    chance: float = 0.0,
    seed: int = 0,
) -> Played:
    """Play a conversation turn by turn, the last turn's new messages unanswered."""
    rng = random.Random(seed)
    played = Played(Conversation(template, history))
    sent, true = list(opening), list(opening)
    for number, turn in enumerate(turns):
        prompt = played.conversation.prompt(sent, tools)
        played.prompts.append(prompt)
        taken = rng.randrange(turn.choices)
        for choice in range(turn.choices):
            answer = turn.answer if choice == taken else {"role": "assistant", "content": f"Other {number} {choice}"}
            ids, finish = _sample(template, policy_text(template, true, answer, tools), turn, chance, rng)
            completion = sampled(ids, finish, version=number)
            call = played.conversation.add(prompt, completion, answer)
            played.completions[call], played.asked[call] = completion, prompt
            if choice != taken:
                played.dropped.add(call)
        sent += [replay(turn.answer, habits), *turn.new]
        true += [turn.answer, *turn.new]
    if turns[-1].choices > 1:
        # The last request's answers are all that is known of it; the first stays.
        last = [call for call, prompt in played.asked.items() if prompt is played.prompts[-1]]
        played.dropped = (played.dropped - set(last)) | set(last[1:])
    played.messages = true
    return played


def _sample(template: ChatTemplate, text: str, turn: Turn, chance: float, rng: random.Random) -> tuple[list[int], Any]:
    if turn.end == "length":
        ids = cut_ids(template, text, chance, rng)
        return ids[: max(1, len(ids) * 2 // 3)], "length"
    if turn.end == "stop string":
        return cut_ids(template, text + " Observation", chance, rng), "stop"
    return cut_ids(template, text, chance, rng) + template.ids(
        turn.end if turn.end != "closed" else stop(template, turn)
    ), "stop"


def stop(template: ChatTemplate, turn: Turn) -> str:
    """The token with which the policy ends this answer: where several end one, the last is that of tool calls."""
    stops = getattr(template, "stops", template.stop_texts)
    return stops[-1] if turn.answer.get("tool_calls") else stops[0]


def check_exact(played: Played) -> Trajectory:
    """Every sampled token of a kept call is trained once, after the very ids and with the log-probability it had."""
    sample = played.conversation.sample(0, "stop")
    task = Task(task_id=1, kind="train", text="x", n=1, sampling=Sampling())
    found = sample.to_trajectory(task, "run", "generator")
    tokens, mask, logprobs = found.tokens.numpy(), found.loss_mask.numpy(), found.logprobs.numpy()
    versions, rows = found.versions(), found.rows()
    answers = [turn for turn in found.turns if turn.role == "assistant"]
    kept = sorted(set(played.completions) - played.dropped)
    assert sorted(turn.call for turn in answers) == kept
    trained = np.zeros(len(tokens), np.uint8)
    for turn in answers:
        completion, prompt = played.completions[turn.call], played.asked[turn.call]
        segment = next(k for k, s in enumerate(found.segments) if s.start <= turn.start < s.end)
        place = found.segments[segment].shared + turn.start - found.segments[segment].start
        row = tokens[rows[segment].places]
        assert row[:place].tolist() == prompt.ids
        assert row[place : place + len(completion.tokens)].tolist() == completion.tokens
        np.testing.assert_array_equal(logprobs[turn.start : turn.end], completion.logprobs)
        assert set(versions[turn.start : turn.end]) == {completion.spans[0].version}
        trained[turn.start : turn.end] += 1
    np.testing.assert_array_equal(trained, mask)
    return found


def can_show(
    template: ChatTemplate, messages: Sequence[Message], tools: list[Any] | None, words: Sequence[str]
) -> bool:
    """Whether the template takes a conversation and shows all of these words of it."""
    try:
        text = template.render(messages, tools)
    except DataError:
        return False
    return all(word in text for word in words)


__all__ = ["TOOL", "Played", "Turn", "can_show", "check_exact", "play", "policy_text"]
