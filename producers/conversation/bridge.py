"""The join of two turns: the text that a chat template writes after an answer, so that the answer's own ids are kept.

The next prompt is then the ids so far and the ids of this text. To find it, a mark is rendered in place of the answer:
the text after the mark is the template's, however the template rewrites old answers. If a template drops the mark, the
text is found as the difference between the conversation with and without the new messages.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from producers.conversation.chat_template import MARK, ChatTemplate
from producers.conversation.messages import Message, arguments_value, image_digests, longest_word, part_text
from schemas.errors import DataError

_SYSTEM = ("system", "developer")


@dataclass(frozen=True)
class NewTurn:
    """Messages that follow an answer.

    before: the conversation that was answered. closing: text of the special token with which the policy ended the
    answer; None if the answer was cut, or ended at a stop string. tools, args: for the template.
    """

    before: Sequence[Message]
    answer: Message
    new: Sequence[Message]
    closing: str | None = None
    tools: Sequence[dict[str, Any]] | None = None
    args: dict[str, Any] | None = None


def find_suffix(template: ChatTemplate, turn: NewTurn) -> str | None:
    """Return the text after the answer's last token, up to the header of the next answer; None if it can't be found."""
    for find in (_by_mark, _by_difference):
        try:
            suffix = find(template, turn)
        except DataError:
            continue
        if suffix is not None and all(longest_word(message) in suffix.lower() for message in turn.new):
            return suffix
    return None


def find_kept_suffix(template: ChatTemplate, turn: NewTurn) -> str | None:
    """Return the same if the template does not change the text before the new messages, so the policy sees it all."""
    try:
        whole = template.render([*turn.before, turn.answer], turn.tools, generation_prompt=False, args=turn.args)
        marked = _render_marked(template, turn, new=False)
        longer = template.render([*turn.before, turn.answer, *turn.new], turn.tools, args=turn.args)
    except DataError:
        return None
    close = marked.rpartition(MARK)[2] if MARK in marked else ""
    # From its first special token on.
    at = min((at for special in template.special_texts if (at := close.find(special)) >= 0), default=0)
    stem = whole.removesuffix(close[at:])
    if not longer.startswith(stem):
        return None
    return find_suffix(template, turn)


def mark_answer(answer: Message) -> Message:
    """Return an answer with the mark as its content or, if it calls tools, as the value of its last argument."""
    if not answer.get("tool_calls"):
        return {"role": "assistant", "content": MARK}
    *calls, last = answer["tool_calls"]
    function = last.get("function", last)
    arguments = arguments_value(function.get("arguments"))
    names = list(arguments) if isinstance(arguments, dict) and arguments else ["value"]
    values = {**arguments, names[-1]: MARK} if isinstance(arguments, dict) else {names[-1]: MARK}
    marked = {**last, "function": {**function, "arguments": json.dumps(values)}}
    return {"role": "assistant", "content": answer.get("content"), "tool_calls": [*calls, marked]}


def shorten(before: Sequence[Message]) -> list[Message]:
    """Return the messages that most templates need to write the text after an answer: the system, the last user.

    A template visits each message, so rendering 70,000 tokens again would cost more than the rest of a join.
    """
    first = next((k for k, message in enumerate(before) if message.get("role") not in _SYSTEM), len(before))
    last = next((message for message in reversed(before[first:]) if message.get("role") == "user"), None)
    return [*before[:first], *([last] if last is not None else before[first:])]


def _render_marked(template: ChatTemplate, turn: NewTurn, new: bool) -> str:
    # Templates may number the images of a conversation.
    short = template.short_history and not image_digests(turn.before)
    before = shorten(turn.before) if short else turn.before
    messages = [*before, mark_answer(turn.answer), *(turn.new if new else ())]
    return template.render(messages, turn.tools, generation_prompt=new, args=turn.args)


def _by_mark(template: ChatTemplate, turn: NewTurn) -> str | None:
    text = _render_marked(template, turn, new=True)
    if text.count(MARK) != 1:
        return None
    tail = text.partition(MARK)[2]
    head = tail[: _place_of_new(template, tail, turn.new)]
    if turn.closing is not None:
        if (at := head.find(turn.closing)) >= 0:
            return tail[at + len(turn.closing) :]
        if (at := _replaced_closing(template, turn, head)) > 0:
            return tail[at:]
    if not turn.answer.get("tool_calls"):
        return tail
    # The call's own brackets were sampled, or are missing: they end at a closing token or, without one, at the text
    # that is rendered only if another message follows.
    at = min((at for stop in template.stop_texts if (at := head.find(stop)) >= 0), default=-1)
    if at < 0:
        at = _same_length(_render_marked(template, turn, new=False).partition(MARK)[2], head)
    return tail[at:]


def _place_of_new(template: ChatTemplate, tail: str, new: Sequence[Message]) -> int | None:
    """Return the position of the first new message after an answer; the search ends there."""
    content = new[0].get("content") if new else None
    parts = content if isinstance(content, list) else [content]
    text = next((text.strip() for text in map(part_text, parts) if text and text.strip()), None)
    position = tail.rfind(template.shield(text)) if text else -1
    return position if position >= 0 else None


def _replaced_closing(template: ChatTemplate, turn: NewTurn, head: str) -> int:
    """Return the end of the token that replaces the sampled one; 0 if no token does.

    A template may close the last answer with the token that the policy samples, and older answers with another.
    """
    if turn.closing is None:
        return 0
    end = _render_marked(template, turn, new=False).partition(MARK)[2]
    at = end.find(turn.closing)
    if at < 0 or not head.startswith(end[:at]) or _special_at(template, end[:at]):
        return 0
    other = next((text for text in template.special_texts if head.startswith(text, at)), None)
    if other is None or not _special_at(template, head[at + len(other) :]):
        return 0
    return at + len(other)


def _same_length(one: str, other: str) -> int:
    """Return the number of characters that two texts share at their beginning."""
    return next((k for k, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


def _special_at(template: ChatTemplate, text: str) -> bool:
    return any(special in text for special in template.special_texts)


def _by_difference(template: ChatTemplate, turn: NewTurn) -> str | None:
    prompt = template.render(turn.before, turn.tools, args=turn.args)
    whole = template.render([*turn.before, turn.answer], turn.tools, generation_prompt=False, args=turn.args)
    longer = template.render([*turn.before, turn.answer, *turn.new], turn.tools, args=turn.args)
    start = _same_length(prompt, whole)
    if turn.closing is not None and (at := whole.rfind(turn.closing, start)) >= 0:
        end = at + len(turn.closing)
    else:
        end = max((whole.rfind(stop, start) for stop in template.stop_texts), default=-1)
    if end < 0 or not longer.startswith(whole[:end]):
        return None
    word = longest_word(turn.answer)
    return longer[end:] if not word or word not in whole[end:].lower() else None
