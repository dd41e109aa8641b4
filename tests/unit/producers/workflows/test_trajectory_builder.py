"""Trajectories that are built turn by turn: positions, masks, spans, and parts that other generators resume."""

import asyncio
from collections.abc import Sequence
from dataclasses import replace

import msgspec
import numpy as np
import pytest

from producers.engines.base import Completion, EngineSettings
from producers.engines.scripted import ScriptedEngine
from producers.workflows.base import RolloutContext
from producers.workflows.trajectory_builder import SampledCompletion, TrajectoryBuilder
from schemas.messages import FinishReason, Sampling, Span, Task, Turn


class Letters:
    """A tokenizer with one token a letter."""

    def prompt_ids(self, task: Task) -> list[int]:
        return self.encode(task.text or "")

    def encode(self, text: str) -> list[int]:
        return [ord(letter) for letter in text]

    def decode(self, ids: Sequence[int]) -> str:
        return "".join(map(chr, ids))


TASK = Task(
    task_id=3,
    kind="train",
    n=2,
    sampling=Sampling(max_tokens=4, temperature=0.7),
    text="ab",
    data={"answer": 1, "kept": 2},
)


def sampled(text: str, spans: list[Span], finish: FinishReason = "stop") -> Completion:
    logprobs = -np.arange(1, len(text) + 1, dtype=np.float32)
    return Completion(Letters().encode(text), logprobs, spans, finish)


def read(length: int, first: int = 0) -> np.ndarray:
    """Experts of tokens in one layer, which are the places of the tokens, counted from ``first``."""
    return np.arange(first, first + length, dtype=np.uint8).reshape(-1, 1, 1)


def test_a_token_has_the_experts_of_the_completion_that_read_it_first() -> None:
    first = replace(sampled("cde", [Span(4, 0, 3)]), routed_experts=read(4))
    again = replace(sampled("f", [Span(4, 0, 1)]), routed_experts=read(7, first=100))
    sample = begun().generated(first).observed(Letters().encode("??")).generated(again).finish()
    routed = sample.to_trajectory(TASK, run="r", generator="g").routed_experts
    assert routed is not None
    assert (routed.layers, routed.k) == (1, 1)
    assert routed.numpy().ravel().tolist() == [0, 1, 2, 3, 104, 105, 106, 255]
    evaluated = sample.to_trajectory(msgspec.structs.replace(TASK, kind="eval"), run="r", generator="g")
    assert evaluated.routed_experts is None


def test_of_another_row_or_without_a_word_of_the_engine_nothing_is_known() -> None:
    other = replace(sampled("cde", [Span(4, 0, 3)]), routed_experts=read(9))
    silent = begun().generated(other).finish().to_trajectory(TASK, run="r", generator="g")
    assert silent.routed_experts is None


def begun() -> TrajectoryBuilder:
    return TrajectoryBuilder(1, Letters()).prompt(Letters().encode("ab"))


def test_turns_follow_each_other_and_only_what_was_sampled_is_trained() -> None:
    trajectory = begun().generated(sampled("cde", [Span(4, 0, 1), Span(5, 1, 3)]))
    trajectory.observed(Letters().encode("??")).observed([]).observed(Letters().encode("!"), role="tool")
    sample = trajectory.generated(sampled("f", [Span(5, 0, 1)], "length")).finish(data={"answer": 9})
    assert Letters().decode(sample.tokens) == "abcde??!f"
    assert sample.loss_mask == [0, 0, 1, 1, 1, 0, 0, 0, 1]
    assert sample.logprobs == [0.0, 0.0, -1.0, -2.0, -3.0, 0.0, 0.0, 0.0, -1.0]
    assert sample.spans == [Span(4, 2, 3), Span(5, 3, 5), Span(5, 8, 9)]
    assert sample.turns == [
        Turn("prompt", 0, 2),
        Turn("assistant", 2, 5),
        Turn("user", 5, 7),
        Turn("tool", 7, 8),
        Turn("assistant", 8, 9),
    ]
    assert (sample.index, sample.prompt, sample.completion, sample.finish) == (1, "ab", "f", "length")
    message = sample.to_trajectory(TASK, run="r", generator="g", seconds=2.0)
    assert (message.run, message.task_id, message.sample, message.kind) == ("r", 3, 1, "train")
    assert message.data == {"answer": 9, "kept": 2}
    assert message.temperature == 0.7, "that of the task"
    assert message.oldest_version == 4


def test_a_turn_that_is_sampled_in_two_pieces_is_one_turn() -> None:
    trajectory = begun().generated(sampled("c", [Span(4, 0, 1)], "abort"))
    sample = trajectory.generated(sampled("de", [Span(4, 0, 1), Span(5, 1, 2)])).finish()
    assert sample.turns == [Turn("prompt", 0, 2), Turn("assistant", 2, 5)]
    assert sample.spans == [Span(4, 2, 4), Span(5, 4, 5)]
    assert sample.completion == "cde"


def test_a_partial_counts_from_the_first_generated_token_and_is_resumed_without_a_seam() -> None:
    first = begun().generated(sampled("c", [Span(4, 0, 1)], "abort"))
    partial = first.partial(sampled("de", [Span(4, 0, 1), Span(5, 1, 2)], "abort"))
    assert Letters().decode(partial.tokens.numpy().tolist()) == "cde"
    assert partial.logprobs.numpy().tolist() == [-1.0, -1.0, -2.0]
    assert partial.spans == [Span(4, 0, 2), Span(5, 2, 3)]
    assert Letters().decode(first.tokens) == "abc", "a partial adds nothing to its trajectory"
    whole = begun().resumed(partial).generated(sampled("f", [Span(5, 0, 1)])).finish()
    assert Letters().decode(whole.tokens) == "abcdef"
    assert whole.spans == [Span(4, 2, 4), Span(5, 4, 6)]
    assert whole.to_partial(4).spans == [Span(4, 0, 2)]
    assert Letters().decode(whole.to_partial(4).tokens.numpy().tolist()) == "cd"
    assert len(begun().partial().tokens) == 0


def test_a_prompt_comes_first_and_once_and_a_sample_needs_an_end() -> None:
    with pytest.raises(ValueError, match="one prompt"):
        begun().prompt([1])
    with pytest.raises(ValueError, match="one prompt"):
        TrajectoryBuilder(0, Letters()).observed([1]).prompt([1])
    with pytest.raises(ValueError, match="finish reason"):
        begun().finish()
    assert begun().finish("length").turns == [Turn("prompt", 0, 2)]


async def test_each_yields_samples_as_they_come_and_leaves_nothing_running() -> None:
    engine = ScriptedEngine(EngineSettings("none", "float32", 20, 4, args={"token_s": 0.001}))
    late = asyncio.Event()
    cancelled: list[int] = []

    async def sample(rollout: RolloutContext, trajectory: TrajectoryBuilder) -> SampledCompletion:
        trajectory.prompt(rollout.prompt_ids)
        await rollout.generate(trajectory)
        if trajectory.index == 0:
            try:
                await late.wait()
            except asyncio.CancelledError:
                cancelled.append(trajectory.index)
                raise
        return trajectory.finish()

    await engine.start()
    results = RolloutContext(engine, Letters(), TASK, [0, 1]).each(sample)
    async with asyncio.timeout(10):
        assert (await anext(results)).index == 1
        await results.aclose()
        await asyncio.sleep(0)
    assert cancelled == [0]
