"""What agents were answered is what is trained: real vLLM behind the real endpoint, and a real training step.

Of small chat templates; ``python -m tests.support.producers.sampled_episodes`` does the same with those of real models.
"""

import asyncio
import importlib.util
import itertools
from pathlib import Path

import pytest

from producers.conversation.template_check import check_bridge
from producers.engines.vllm.engine import VllmEngine
from producers.tokenizer import HfTokenizer
from schemas.messages import FileSource
from tests.support.models.chat_templates import SOURCES, StoppingTemplate
from tests.support.models.tiny_model import EOS
from tests.support.producers.sampled_episodes import (
    ANSWERS,
    CALLS,
    HABITS,
    HISTORIES,
    Episode,
    Stage,
    largest_gap,
    trained_policy,
    write_eager_stops,
)
from tests.support.producers.vllm_checks import Run

pytestmark = [
    pytest.mark.matrix("each way to join turns on real vLLM; the join's properties are unit tests"),
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed"),
]

TOOL = {"type": "function", "function": {"name": "add"}}


@pytest.mark.parametrize("name", ["append only", "old reasoning dropped"])
def test_each_loss_token_was_delivered_once_and_has_the_recorded_probability_in_training(
    engine: VllmEngine, folders: dict[int, Path], run: Run, tmp_path: Path, name: str
) -> None:
    tokenizer = HfTokenizer(str(folders[0]))
    source = SOURCES[name].replace("<|im_start|>", "<bos>").replace("<|im_end|>", "<eos>")
    template = StoppingTemplate(tokenizer, source, ["<eos>"])
    assert check_bridge(template) is None
    weights = write_eager_stops(folders[0], tmp_path / "weights.safetensors", [EOS])
    version = engine.version + 1
    cases = list(itertools.product([(ANSWERS, None), (CALLS[:3], [TOOL])], HISTORIES, [frozenset[str](), HABITS]))

    async def scene() -> list[Episode]:
        await engine.load(FileSource(weights), version)
        async with Stage(engine, tokenizer, max_length=512) as stage:
            return await asyncio.gather(
                *(stage.play(template, *plan, history=history, habits=habits) for plan, history, habits in cases)
            )

    episodes = run(scene())
    assert largest_gap(trained_policy(folders[0], weights), episodes, version) < 1e-3
    held = [episode for episode, (_, history, _) in zip(episodes, cases, strict=True) if history == "held"]
    assert {why for episode in held for why in episode.why} == {"first", "joined"}
    assert any("template" in episode.why for episode in episodes) == (name == "old reasoning dropped")
