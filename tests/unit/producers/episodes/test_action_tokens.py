"""The environment ``actions``: tokens become actions of gymnasium, and all samples of a task begin alike."""

import asyncio
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from producers.episodes.environments.action_tokens import ActionTokens
from producers.episodes.environments.environment import describe_task
from producers.workflows.trajectory_builder import SampledCompletion
from schemas.messages import Sampling, Task
from tests.support.producers.played_episodes import SpeakingEngine, chat_tokenizer, loop_config, play

gymnasium = pytest.importorskip("gymnasium")
spaces = gymnasium.spaces


class Arm(gymnasium.Env):
    """Ends with success when the sum of what it did is over 3."""

    action_space = spaces.Box(np.array([-1.0, 0.0]), np.array([1.0, 8.0]), dtype=np.float64)
    observation_space = spaces.Dict({"camera": spaces.Box(0, 255, (4, 6, 3), np.uint8)})
    word = "dot"

    metadata = {"render_modes": ["rgb_array"]}

    def __init__(self, render_mode: str | None = None) -> None:
        self.render_mode, self.done = render_mode, []

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.start = self.np_random.random()
        return self._seen(), {}

    def step(self, action):
        self.done.append(np.asarray(action).tolist())
        success = float(np.sum(self.done)) > 3
        return self._seen(), 0.25, False, False, {"success": success}

    def _seen(self):
        return {"camera": np.full((4, 6, 3), int(250 * self.start), np.uint8)}

    def render(self):
        return np.zeros((2, 2, 3), np.uint8)


gymnasium.register("Arm-v0", Arm)
gymnasium.register("Lever-v0", lambda render_mode=None: Lever())


class Lever(Arm):
    action_space = spaces.Discrete(3)


def task(number: int, sample: int, kind: Any = "train") -> dict[str, Any]:
    return describe_task(Task(task_id=number, kind=kind, n=16, sampling=Sampling(), text="go"), sample)


def test_tokens_are_the_middles_of_bins_and_a_chunk_is_several_actions() -> None:
    made = ActionTokens("Arm-v0", bins=4, chunk=2, picture="camera", instruction="Reach the {word}.")
    text, picture = made.reset(task(5, 0))
    assert text == "Reach the dot."
    assert picture.size == (6, 4)
    _, reward, done = made.step("<a0><a3> <a2><a0>")
    assert made._env.unwrapped.done == [[-0.75, 7.0], [0.25, 1.0]]
    assert (reward, done) == (0.5, False)
    with pytest.raises(ValueError, match=r"2 action tokens, must have 4.*sampling.max_tokens"):
        made.step("<a0><a3>")
    with pytest.raises(ValueError, match="token <a4>, but there are 4 bins"):
        made.step("<a0><a4><a0><a0>")


def test_success_pays_and_ends_the_episode_within_a_chunk() -> None:
    made = ActionTokens("Arm-v0", bins=4, chunk=2, success=True)
    assert len(made.reset(task(5, 0))) == 1, "without an instruction the picture alone"
    assert made.step("<a3><a3><a3><a3>")[1:] == (1.0, True)
    assert len(made._env.unwrapped.done) == 1


def test_a_discrete_space_has_a_token_for_each_action() -> None:
    made = ActionTokens("Lever-v0", picture="camera")
    made.reset(task(1, 0))
    made.step("<a2>")
    assert made._env.unwrapped.done == [2]


@pytest.mark.parametrize("kind", ["train", "eval"])
def test_samples_of_a_task_begin_in_the_same_state_and_tasks_do_not(kind: str) -> None:
    chance = random.Random(0)
    # The seeds of the last one run over SEEDS.
    numbers = [chance.randrange(2**31) for _ in range(20)] + [-pow(125, -1, 1 << 27) % (1 << 27)]
    made = ActionTokens("Arm-v0", picture="camera")
    starts = []
    for number in numbers:
        group = set()
        for sample in range(16):
            made.reset(task(number, sample, kind))
            group.add(made._env.unwrapped.start)
        assert len(group) == 1
        starts += group
    assert len(set(starts)) == len(numbers)


def test_spaces_and_bounds_that_have_no_bins_are_refused() -> None:
    with pytest.raises(ValueError, match="low and high must have 2 numbers"):
        ActionTokens("Arm-v0", low=[0.0])
    with pytest.raises(ValueError, match="no bounds: set low and high"):
        ActionTokens("Arm-v0", high=[1.0, float("inf")])


TURNS = """
class Turns:
    def reset(self, task): self.turn = 0; return "picture 0"
    def step(self, text):
        self.turn += 1
        return f"picture {self.turn} after {text}", 0.5, self.turn == 3
"""


async def test_without_history_each_prompt_has_the_newest_observation_alone(tmp_path: Path) -> None:
    (tmp_path / "turns.py").write_text(TURNS)
    args = {"environment": "turns.py:Turns", "history": False}
    engine = SpeakingEngine(chat_tokenizer(tmp_path), lambda prompt: prompt[-3:].strip() and "move")
    (sample,) = await play(
        loop_config(tmp_path, "environment", args),
        engine,
        chat_tokenizer(tmp_path),
        Task(task_id=0, kind="train", n=1, sampling=Sampling(max_tokens=64), text="Reach."),
    )
    assert isinstance(sample, SampledCompletion), sample
    assert ["picture" in prompt and prompt.count("move") for prompt in engine.prompts] == [0, 1, 1]
    assert len(sample.segments) == 3, "a row for each answer"
    assert sample.reward == 1.5
    assert asyncio.get_running_loop().is_running()
