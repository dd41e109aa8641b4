"""A joined conversation is the template's own text, and each sampled token is trained once, as it was sampled."""

import asyncio
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from deploy.offline.tiny_model import write_tiny_model
from producers.conversation.chat_template import BREAK
from producers.conversation.conversation import Conversation
from producers.conversation.template_check import check_bridge
from producers.engines.base import EngineSettings
from producers.engines.transformers.engine import TransformersEngine
from producers.tokenizer import HfTokenizer
from schemas.messages import Sampling, Task, Trajectory
from tests.support.models.chat_templates import (
    SOURCES,
    TOOL,
    StoppingTemplate,
    named_template,
    tool_call,
    write_tokenizer,
)
from tests.support.models.tiny_mixture import choices, make_mixture
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
CALL = tool_call(a=1, b=2)
NEW: list[list[dict[str, Any]]] = [
    [{"role": "user", "content": "And then?"}],
    [{"role": "tool", "tool_call_id": "call00001", "name": "add", "content": "three"}],
    [{"role": "user", "content": "Sure?"}],
]


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


@settings(max_examples=CONVERSATIONS)
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


@settings(max_examples=CONVERSATIONS)
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


@settings(max_examples=CONVERSATIONS)
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


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    write_tokenizer(folder, stops=["<|im_end|>", "<|end|>"])
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
    shape = {"hidden": 64, "intermediate": 128, "layers": 2, "heads": 2, "max_length": 2048}
    write_tiny_model(folder, tokenizer, 0, **shape, initializer_range=0.1)
    return folder


async def episode(engine: TransformersEngine, template: StoppingTemplate, history: Any, seed: int) -> Trajectory:
    """Four calls of two choices each, whose random answers are read as text, or as a tool call."""
    conversation = Conversation(template, history)
    messages: list[dict[str, Any]] = [{"role": "user", "content": "What is 1 + 2?"}]
    for number in range(4):
        prompt = conversation.prompt(messages, [TOOL])
        sampling = Sampling(max_tokens=12, seed=seed + number)
        for choice, completion in enumerate(await engine.generate(prompt.ids, sampling, n=2)):
            answer: dict[str, Any] = {"role": "assistant", "content": template.decode(completion.tokens) + str(choice)}
            if number == 1:
                answer["tool_calls"] = [CALL]
            conversation.add(prompt, completion, answer)
            if choice:
                messages += [{**answer, "content": answer["content"].strip()}, *NEW[number % 3]]
    task = Task(task_id=1, kind="train", text="x", n=1, sampling=Sampling())
    return conversation.sample(0, "stop").to_trajectory(task, "run", "generator")


async def test_each_loss_token_of_each_row_has_the_probability_that_it_was_sampled_with(folder: Path) -> None:
    tokenizer = HfTokenizer(str(folder))

    async def play() -> list[tuple[str, Trajectory]]:
        engine = TransformersEngine(EngineSettings(str(folder), "float32", max_length=2048, max_samples=16))
        await engine.start()
        try:
            names = [(name, history) for name in SOURCES for history in ("held", "template")]
            found = await asyncio.gather(
                *(episode(engine, named_template(tokenizer, name), history, 10) for name, history in names)
            )
            return [(history, trajectory) for (_, history), trajectory in zip(names, found, strict=True)]
        finally:
            await engine.close()

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    for history, trajectory in await play():
        trained = 0
        for row in trajectory.rows():
            tokens = torch.tensor(trajectory.tokens.numpy()[row.places]).long()
            mask = trajectory.loss_mask.numpy()[row.places] == 1
            mask[: row.shared] = False
            with torch.no_grad():
                logprobs = torch.log_softmax(model(tokens[None]).logits[0, :-1], -1)
            expected = logprobs.gather(1, tokens[1:, None])[:, 0].numpy()[mask[1:]]
            recorded = trajectory.logprobs.numpy()[row.places][mask]
            assert abs(expected - recorded).max() < 1e-4
            trained += mask.sum()
        assert (
            trained
            == trajectory.loss_mask.numpy().sum()
            == sum(t.end - t.start for t in trajectory.turns if t.call >= 0)
        )
        assert history == "template" or len(trajectory.segments) == 1


async def test_each_row_of_a_mixture_comes_with_the_experts_that_its_tokens_were_sent_to(tmp_path: Path) -> None:
    write_tokenizer(tmp_path, stops=["<|im_end|>", "<|end|>"])
    folder = make_mixture(tmp_path, tokenizer=PreTrainedTokenizerFast.from_pretrained(tmp_path))
    tokenizer = HfTokenizer(str(folder))

    async def play() -> list[Trajectory]:
        settings = EngineSettings(str(folder), "float32", max_length=2048, max_samples=16, routed_experts=True)
        engine = TransformersEngine(settings)
        await engine.start()
        try:
            names = [(name, history) for name in list(SOURCES)[:2] for history in ("held", "template")]
            episodes = (episode(engine, named_template(tokenizer, name), history, 10) for name, history in names)
            return list(await asyncio.gather(*episodes))
        finally:
            await engine.close()

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    rows = 0
    for trajectory in await play():
        assert trajectory.routed_experts is not None
        for row in trajectory.rows():
            found = trajectory.routed_experts.numpy()[row.places]
            assert np.array_equal(np.sort(found[:-1], -1), choices(model, trajectory.tokens.numpy()[row.places][:-1]))
            assert (found[-1] == 255).all(), "no layer read the last token"
            rows += 1
    assert rows >= 4
