"""The check of the bridge on the model's own chat template, before training starts."""

import asyncio
import json
from dataclasses import replace
from typing import Literal

import structlog

from producers.conversation.bridge import NewTurn, find_suffix, shorten
from producers.conversation.chat_template import EXAMPLE_TOOL, ChatTemplate
from producers.conversation.messages import Message
from producers.workflows.base import WorkflowServices
from schemas.errors import DataError

log = structlog.get_logger()

_Outcome = Literal["joined", "wrong", "not found", "not closed", "refused"]

_USER: Message = {"role": "user", "content": "Multiply seven by eight"}
_NEXT: Message = {"role": "user", "content": "Multiply nine by three"}
_SYSTEM: Message = {"role": "system", "content": "Calculate carefully"}
_WORD = "Fiftysix"
_ANSWER: Message = {"role": "assistant", "content": _WORD}
_EARLIER: Message = {"role": "assistant", "content": "Twentyseven"}


def _calls(*ids: str, word: str = _WORD) -> Message:
    function = {"name": "multiply", "arguments": json.dumps({"numbers": word})}
    calls = [{"id": id, "type": "function", "function": function} for id in ids]
    return {"role": "assistant", "content": None, "tool_calls": calls}


def _result(id: str, text: str) -> Message:
    return {"role": "tool", "tool_call_id": id, "name": "multiply", "content": text}


_PRODUCT, _TOOLS = _result("call00001", "product"), [EXAMPLE_TOOL]
_CASES = {
    "a user's turn": NewTurn([_USER], _ANSWER, [_NEXT], tools=[]),
    "a user's turn under a system prompt": NewTurn([_SYSTEM, _USER], _ANSWER, [_NEXT], tools=[]),
    "a user's second turn": NewTurn([_USER, _EARLIER, _NEXT], _ANSWER, [_USER], tools=[]),
    "a tool's result": NewTurn([_USER], _calls("call00001"), [_PRODUCT], tools=_TOOLS),
    "the results of two tool calls": NewTurn(
        [_SYSTEM, _USER],
        _calls("call00001", "call00002"),
        [_PRODUCT, _result("call00002", "quotient")],
        tools=_TOOLS,
    ),
    "a later tool's result": NewTurn(
        [_SYSTEM, _USER, _EARLIER, _NEXT, _calls("call00001", word="Nine"), _PRODUCT],
        _calls("call00003"),
        [_result("call00003", "quotient")],
        tools=_TOOLS,
    ),
}


async def open_template(services: WorkflowServices) -> ChatTemplate:
    """Return the template of a workflow's tokenizer, checked; logs a warning if turns can't be joined with it."""
    template = ChatTemplate(services.tokenizer)
    if problem := await asyncio.to_thread(check_bridge, template):
        text = f"turns are not joined, each model call is a row of its own: {problem}"
        log.warning(text)
        services.report("turns_not_joined", text)
    return template


def check_bridge(template: ChatTemplate) -> str | None:
    """Try the bridge on short conversations in the template, and switch it off if it fails.

    If the template does not change old turns, the join must have the ids of the template's own text. Returned and
    stored in ``template.bridge_off``: None, or one line that says why each model call becomes a row of its own.
    """
    template.short_history = False
    if not template.exists:
        template.bridge_off = "the tokenizer has no chat template"
        return template.bridge_off
    outcomes = {name: _try(template, case) for name, case in _CASES.items()}
    template.bridge_off = _explain(template, outcomes)
    template.short_history = all(
        find_suffix(template, case) == find_suffix(template, replace(case, before=shorten(case.before)))
        for case in _CASES.values()
    )
    return template.bridge_off


def _explain(template: ChatTemplate, outcomes: dict[str, _Outcome]) -> str | None:
    wrong = [name for name, outcome in outcomes.items() if outcome == "wrong"]
    if wrong:
        return f"before {wrong[0]} the join differs from the chat template's own text"
    if "joined" in outcomes.values():
        return None
    if "not closed" in outcomes.values():
        stops = ", ".join(template.stop_texts) or "none"
        return f"the chat template closes answers with no token that ends generation ({stops})"
    if "not found" in outcomes.values():
        return "what the chat template writes after an answer is not to be found"
    return "the chat template refuses a conversation of two turns"


def _try(template: ChatTemplate, case: NewTurn) -> _Outcome:
    try:
        whole = template.render([*case.before, case.answer], case.tools, generation_prompt=False)
        longer = template.render([*case.before, case.answer, *case.new], case.tools)
    except DataError:
        return "refused"
    if _WORD not in whole or _WORD not in longer:
        return "refused"
    sampled, closing = _sampled_text(template, whole, longer)
    if closing is None:
        return "not closed"
    suffix = find_suffix(template, replace(case, closing=closing))
    if suffix is None:
        return "not found"
    if not longer.startswith(sampled):
        return "joined"
    (after,) = template.ids(closing)
    ids, full = template.ids(suffix, after=after), template.ids(longer)
    return "joined" if suffix == longer[len(sampled) :] and full[-len(ids) :] == ids else "wrong"


def _sampled_text(template: ChatTemplate, whole: str, longer: str) -> tuple[str, str | None]:
    """Return a conversation up to the token that ends its last answer, and that token's text; None without one.

    If the template does not close turns, it is the header of the next one.
    """
    for text in (whole, longer):
        begin = text.rfind(_WORD) + len(_WORD)
        ends = [(at, stop) for stop in template.stop_texts if (at := text.find(stop, begin)) >= 0]
        if ends:
            at, stop = min(ends)
            return text[:at] + stop, stop
    return whole, None
