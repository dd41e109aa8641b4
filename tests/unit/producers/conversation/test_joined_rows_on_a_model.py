"""Rows of joined calls are trained as they were sampled: a model gives each sampled token the recorded probability."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from deploy.offline.tiny_model import write_tiny_model
from producers.conversation.conversation import Conversation
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

CALL = tool_call(a=1, b=2)
NEW: list[list[dict[str, Any]]] = [
    [{"role": "user", "content": "And then?"}],
    [{"role": "tool", "tool_call_id": "call00001", "name": "add", "content": "three"}],
    [{"role": "user", "content": "Sure?"}],
]


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
