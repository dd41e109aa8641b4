"""Whatever is said in a conversation: the join is the template's own text, and each sampled token is trained once."""

from __future__ import annotations

import os
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from producers.conversation.chat_template import BREAK
from producers.conversation.template_check import check_bridge
from producers.tokenizer import HfTokenizer
from tests.support.models.chat_templates import (
    SOURCES,
    TOOL,
    StoppingTemplate,
    named_template,
    tool_call,
    write_tokenizer,
)
from tests.support.producers.conversations import Turn, check_exact, play

CONVERSATIONS = int(os.environ.get("CONVERSATIONS", "150"))
"""How many are played; by hand once with 10,000."""

APPEND_ONLY = ["append only", "answers trimmed", "two closing tokens", "no closing token", "space before answers"]
HABITS = ["reasoning dropped", "spaces stripped", "arguments re-encoded"]

PIECES = [
    "user",
    "assistant",
    "im_end",
    "e",
    "the",
    "answer",
    "\n",
    "  ",
    '"',
    "\\",
    "{",
    "}",
    "ü",
    "…",
    "漢字",
    "tool",
    "1",
]
TOKENS = [
    "<|im_end|>",
    "</s>",
    "[INST]",
    "<|observation|>",
    "<|user|>",
    "<|end|>",
    "<think>",
    "</think>",
    "<tool_call>",
]
"""Text that reads as special tokens: users and tools may say it, a policy that does has ended its answer."""

texts = st.lists(st.sampled_from(PIECES + TOKENS), max_size=6).map("".join)
said = st.lists(st.sampled_from(PIECES), max_size=6).map(lambda pieces: f"It{''.join(pieces)}is")
calls = st.lists(st.tuples(said, st.integers(0, 99)), min_size=1, max_size=2)


@st.composite
def turns(draw: Any, ends: list[str]) -> Turn:
    number = draw(st.integers(0, 999))
    thought = {"reasoning_content": draw(said)} if draw(st.booleans()) else {}
    choices = draw(st.sampled_from([1, 1, 1, 2, 3]))
    end = draw(st.sampled_from(ends))
    if draw(st.booleans()):
        new = [{"role": "user", "content": draw(texts)}]
        return Turn({"role": "assistant", "content": f"{number}: {draw(said)}", **thought}, new, end, choices)
    made = [tool_call(f"call{k:05}", text=text, b=b) for k, (text, b) in enumerate(draw(calls))]
    made = [{**call, "function": {**call["function"], "name": f"add{number}"}} for call in made]
    results = [{"role": "tool", "tool_call_id": call["id"], "name": "add", "content": draw(texts)} for call in made]
    return Turn(
        {"role": "assistant", "content": draw(st.sampled_from(["", "It"])), "tool_calls": made, **thought},
        results,
        end,
        choices,
    )


@pytest.fixture(scope="module")
def templates(tmp_path_factory: pytest.TempPathFactory) -> dict[str, StoppingTemplate]:
    tokenizer = HfTokenizer(str(write_tokenizer(tmp_path_factory.mktemp("tokenizer"))))
    found = {name: named_template(tokenizer, name) for name in SOURCES}
    assert [check_bridge(template) for template in found.values()] == [None] * len(found)
    return found


@settings(max_examples=CONVERSATIONS, deadline=None)
@given(name=st.sampled_from(APPEND_ONLY), opening=texts, plan=st.lists(turns(["closed"]), min_size=1, max_size=4))
def test_the_join_is_what_the_template_writes_where_it_only_appends(
    templates: dict[str, StoppingTemplate], name: str, opening: str, plan: list[Turn]
) -> None:
    template = templates[name]
    played = play(template, [{"role": "user", "content": opening}], plan, tools=[TOOL])
    true = [{"role": "user", "content": opening}]
    for turn, prompt in zip(plan, played.prompts, strict=True):
        whole = template.render(true, [TOOL])
        assert template._tokenizer.decode_all(prompt.ids) == whole.replace(BREAK, "")
        assert prompt.why == ("joined" if len(true) > 1 else "first")
        if prompt.parent is not None:
            suffix = prompt.ids[prompt.held :]
            assert template.ids(whole)[-len(suffix) :] == suffix
        true += [turn.answer, *turn.new]
    check_exact(played)


@settings(max_examples=CONVERSATIONS, deadline=None)
@given(
    name=st.sampled_from([*APPEND_ONLY, "old reasoning dropped"]),
    plan=st.lists(turns(["closed"]), min_size=1, max_size=4),
    habits=st.sets(st.sampled_from(HABITS)),
)
def test_history_of_the_template_is_what_it_writes_whatever_the_client_sends_back(
    templates: dict[str, StoppingTemplate], name: str, plan: list[Turn], habits: set[str]
) -> None:
    template = templates[name]
    true = [{"role": "user", "content": "What?"}]
    played = play(template, true, plan, habits=frozenset(habits), history="template", tools=[TOOL])
    for turn, prompt in zip(plan, played.prompts, strict=True):
        assert template._tokenizer.decode_all(prompt.ids) == template.render(true, [TOOL]).replace(BREAK, "")
        assert prompt.why in ("joined", "first", "template")
        true = [*true, turn.answer, *turn.new]
    check_exact(played)


@settings(max_examples=CONVERSATIONS, deadline=None)
@given(
    name=st.sampled_from(sorted(SOURCES)),
    opening=texts,
    plan=st.lists(turns(["closed", "closed", "length", "stop string", "<|endoftext|>"]), min_size=1, max_size=4),
    habits=st.sets(st.sampled_from(HABITS)),
    history=st.sampled_from(["held", "template"]),
    chance=st.sampled_from([0.0, 0.05, 0.5]),
    seed=st.integers(0, 99),
)
def test_each_sampled_token_is_trained_once_after_the_very_ids_that_it_was_sampled_after(
    templates: dict[str, StoppingTemplate],
    name: str,
    opening: str,
    plan: list[Turn],
    habits: set[str],
    history: str,
    chance: float,
    seed: int,
) -> None:
    begin = [{"role": "system", "content": "Be kind"}, {"role": "user", "content": opening}]
    played = play(
        templates[name], begin, plan, habits=frozenset(habits), history=history, tools=[TOOL], chance=chance, seed=seed
    )
    found = check_exact(played)
    if history == "held":
        assert {prompt.why for prompt in played.prompts[1:]} <= {"joined"}
        assert len(found.segments) == 1
