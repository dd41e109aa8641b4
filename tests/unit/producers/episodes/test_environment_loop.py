"""The workflow ``environment``: episodes in anything with reset and step, played by the generator itself."""

from pathlib import Path
from typing import Any, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from broker.queues.tasks import EVAL_BASE, eval_task_id
from producers.episodes.environments.environment import begin, describe_task, read_step, read_turn
from producers.tokenizer import HfTokenizer
from producers.workflows.base import FailedSample, find_workflow
from producers.workflows.trajectory_builder import SampledCompletion
from schemas.errors import ConfigError, DataError
from schemas.messages import Partial, Task
from tests.support.producers.played_episodes import (
    END,
    Says,
    SpeakingEngine,
    chat_task,
    chat_tokenizer,
    loop_config,
    play,
)

GAMES = '''
import asyncio, random, time

OPEN = []

class Guess:
    """A number to guess; half a point for each answer that is one, and one for the right one."""

    def __init__(self, largest=9):
        self.largest = largest
        OPEN.append(self)

    async def reset(self, task):
        self.task = task
        self.number = random.Random(task["seed"]).randint(1, self.largest)
        task["data"]["touched"] = True
        return f"Guess a number up to {self.largest}."

    async def step(self, text):
        guess = int(text.strip())
        if guess == self.number:
            return None, 1.0, True
        return "higher" if guess < self.number else "lower", 0.5, False

    def close(self):
        OPEN.remove(self)

class Sync:
    def reset(self, task):
        return [{"role": "system", "content": "You play."}, {"role": "user", "content": "Begin."}]
    def step(self, text):
        return "more", None, text == "end"

class Bad(Sync):
    def __init__(self, how):
        self.how = how
    def step(self, text):
        if self.how == "raise":
            raise OSError("the game is gone")
        if self.how == "hang":
            time.sleep(30)
        if self.how == "nan":
            return "", float("nan"), True
        return "two things", 1.0

class NoStep:
    def reset(self, task): ...
'''

NIM = """
class Nim:
    def reset(self, task):
        self.left, self.turn = 5, 0
        return {"player": "first", "text": "5 left"}

    def step(self, text):
        self.left -= int(text)
        mover, other = ("first", "second") if self.turn == 0 else ("second", "first")
        if self.left <= 0:
            return {"rewards": {mover: 1.0, other: -1.0}, "done": True}
        self.turn = 1 - self.turn
        return {"player": other, "text": f"{self.left} left"}
"""


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("games")
    (folder / "games.py").write_text(GAMES + NIM, encoding="utf-8")
    return folder


@pytest.fixture(scope="module")
def tokenizer(base: Path) -> HfTokenizer:
    return chat_tokenizer(base)


def config(base: Path, name: str, agents: dict[str, Any] | None = None, **args: Any) -> Any:
    return loop_config(base, "environment", {"environment": f"games.py:{name}", **args}, **(agents or {}))


async def one(
    base: Path, tokenizer: HfTokenizer, says: Says, name: str, task: Task | None = None, **args: Any
) -> SampledCompletion | FailedSample:
    engine = SpeakingEngine(tokenizer, says)
    (sample,) = await play(config(base, name, **args), engine, tokenizer, task or chat_task("Let us play."))
    return sample


def search(prompt: str) -> str:
    """Guess by halving what is left."""
    low, high = 1, 9
    for turn in prompt.split("<|im_start|>")[1:]:
        role, _, text = turn.partition("\n")
        text = text.partition(END)[0]
        if role == "assistant" and text:
            last = int(text)
        elif text == "higher":
            low = last + 1
        elif text == "lower":
            high = last - 1
    return str((low + high) // 2)


async def test_an_episode_is_one_row_with_a_reward_at_each_turn(base: Path, tokenizer: HfTokenizer):
    task = chat_task("Let us play.")
    sample = await one(base, tokenizer, search, "Guess", task)
    assert isinstance(sample, SampledCompletion)
    trajectory = sample.to_trajectory(task, "run", "generator")
    answers = [turn for turn in trajectory.turns if turn.role == "assistant"]
    assert [turn.reward for turn in answers] == [0.5] * (len(answers) - 1) + [1.0]
    assert trajectory.reward == 0.5 * (len(answers) - 1) + 1.0
    assert (trajectory.finish, trajectory.calls, len(trajectory.rows())) == ("stop", len(answers), 1)
    assert sample.data["messages"][0]["content"] == "Let us play.\n\nGuess a number up to 9."
    assert task.data == {}


async def test_samples_have_environments_and_seeds_of_their_own_and_all_are_closed(base: Path, tokenizer: HfTokenizer):
    engine = SpeakingEngine(tokenizer, search)
    samples = await play(config(base, "Guess"), engine, tokenizer, chat_task("Let us play.", n=6))
    answers = {sample.completion for sample in samples if isinstance(sample, SampledCompletion)}
    assert len(samples) == 6
    assert len(answers) > 1
    from schemas.plugins import load

    assert load("games.py:OPEN", "list", base) == []
    assert [describe_task(chat_task("x", n=2, task_id=12), k)["seed"] for k in range(2)] == [12000, 12001]


def seed_of(task_id: int, sample: int, kind: Literal["train", "eval"]) -> int:
    seed = describe_task(chat_task("x", task_id=task_id, kind=kind), sample)["seed"]
    assert isinstance(seed, int)
    return seed


@given(st.integers(0, EVAL_BASE - 1), st.integers(0, 10_000), st.integers(0, 999), st.integers(0, 999))
def test_no_game_of_an_evaluation_is_one_of_training(trained: int, held_out: int, sample: int, other: int):
    training = seed_of(trained, sample, "train")
    evaluation = seed_of(eval_task_id(0, held_out), other, "eval")
    assert 0 <= training < 1 << 30 <= evaluation < 1 << 31
    assert seed_of(eval_task_id(7, held_out), other, "eval") == evaluation, "each evaluation has the same games"


def test_games_are_different_ones():
    for kind, first in (("train", 0), ("eval", eval_task_id(3, 0))):
        seeds = {seed_of(first + index, sample, kind) for index in range(300) for sample in range(16)}
        assert len(seeds) == 300 * 16


async def test_what_another_generator_began_is_played_again_from_its_record(base: Path, tokenizer: HfTokenizer):
    saved: list[Partial] = []
    await play(
        config(base, "Guess"), SpeakingEngine(tokenizer, search), tokenizer, chat_task("Let us play."), saved=saved
    )
    again = SpeakingEngine(tokenizer, search)
    task = chat_task("Let us play.", partials=[saved[-1]])
    (sample,) = await play(config(base, "Guess"), again, tokenizer, task)
    assert isinstance(sample, SampledCompletion)
    assert again.prompts == []
    assert sample.reward is not None


async def test_an_environment_may_be_synchronous_and_begin_the_conversation_itself(base: Path, tokenizer: HfTokenizer):
    answers = iter(["go", "go", "end"])
    sample = await one(base, tokenizer, lambda prompt: next(answers), "Sync")
    assert isinstance(sample, SampledCompletion)
    assert [message["content"] for message in sample.data["messages"]] == [
        "You play.", "Begin.", "go", "more", "go", "more", "end",
    ]  # fmt: skip
    assert sample.reward is None


@pytest.mark.parametrize(
    ("how", "reason"),
    [
        ("raise", "OSError: the game is gone"),
        ("hang", "step of games.py:Bad took longer than 0.2 s"),
        (
            "nan",
            "step must return (text or images, reward, done), a reward from -1e+30 to 1e+30 or None; it returned"
            " ('', nan, True)",
        ),
        ("short", "step must return (text or images, reward, done)"),
    ],
)
async def test_an_environment_that_fails_fails_its_sample(base: Path, tokenizer: HfTokenizer, how: str, reason: str):
    sample = await one(base, tokenizer, lambda prompt: "go", "Bad", args={"how": how}, timeout_s=0.2)
    assert isinstance(sample, FailedSample)
    assert reason in sample.reason


async def test_an_episode_ends_at_its_limit_of_turns_with_the_rewards_so_far(base: Path, tokenizer: HfTokenizer):
    sample = await one(base, tokenizer, lambda prompt: "0", "Guess", max_turns=3)
    assert isinstance(sample, SampledCompletion)
    assert (sample.finish, sample.reward) == ("calls", 1.5)


async def test_an_answer_that_was_cut_is_not_stepped_on(base: Path, tokenizer: HfTokenizer):
    sample = await one(base, tokenizer, lambda prompt: "1 " * 50, "Guess", chat_task("Play.", max_tokens=10))
    assert isinstance(sample, SampledCompletion)
    assert (sample.finish, sample.reward) == ("length", 0.0)


def test_what_an_environment_returns_is_read_with_care():
    assert read_step(["text", 1, 0]) == ("text", 1.0, False)
    assert read_step((None, None, True)) == ("", None, True)
    assert read_step(("half \ud800", True, True)) == ("half \\ud800", 1.0, True)
    for wrong in (None, "abc", (1, 1.0, False), ("text", "many", True), ("text", float("inf"), True)):
        with pytest.raises(DataError, match="step must return"):
            read_step(wrong)
    user = {"role": "user", "content": "a"}
    assert begin([user], None) == [user]
    assert begin([{"role": "system", "content": "a"}], "b")[-1] == {"role": "user", "content": "b"}
    with pytest.raises(DataError, match="reset must return text, images, None, or a list of messages"):
        begin([user], [1])


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ({"environment": "Guess"}, r"environment 'Guess': name a class as file\.py:Name"),
        ({"environment": "games.py:NoStep"}, r"NoStep has no method step\(text\)"),
        ({"environment": "games.py:Guess", "args": {"smallest": 1}}, "unexpected keyword argument 'smallest'"),
        ({"environment": "games.py:Guess", "max_turns": 0}, r"'max_turns': 0 is not allowed, must be"),
        ({}, r"missing a required argument|environment None: name a class"),
    ],
)
def test_wrong_arguments_are_told_before_any_model_loads(base: Path, args: dict[str, Any], message: str):
    with pytest.raises(ConfigError, match=message):
        find_workflow("environment", args, base)


async def test_a_game_against_itself_is_a_row_for_each_player_with_its_rewards(base: Path, tokenizer: HfTokenizer):
    task = chat_task("You play Nim.")
    sample = await one(base, tokenizer, lambda prompt: "2" if "5 left" in prompt else "1", "Nim", task)
    assert isinstance(sample, SampledCompletion)
    trajectory = sample.to_trajectory(task, "run", "generator")
    rows = {row.name: row for row in trajectory.rows()}
    assert sorted(rows) == ["first", "second"]
    answers = [turn for turn in trajectory.turns if turn.role == "assistant"]
    assert [turn.reward for turn in answers if turn.reward is not None] == [1.0, -1.0]
    assert trajectory.reward == 0.0
    engine = SpeakingEngine(tokenizer, lambda prompt: "1")
    await play(config(base, "Nim"), engine, tokenizer, task)
    assert "You play Nim.\n\n5 left" in engine.prompts[0]
    assert "4 left" not in engine.prompts[2], "a player reads nothing of what the other one reads"


async def test_only_the_players_that_are_named_are_trained_and_rewarded(base: Path, tokenizer: HfTokenizer):
    task = chat_task("You play Nim.")
    settings = config(base, "Nim", {"train": ["first"]})
    engine = SpeakingEngine(tokenizer, lambda prompt: "2" if "5 left" in prompt else "1")
    (sample,) = await play(settings, engine, tokenizer, task)
    assert isinstance(sample, SampledCompletion)
    assert [row.name for row in sample.to_trajectory(task, "run", "generator").rows()] == ["first"]
    assert sample.reward in (1.0, -1.0)


def test_a_turn_that_an_environment_gives_is_read_with_care():
    assert read_turn({"player": "a", "text": "Go."}, "reset").player == "a"
    assert read_turn({"done": True, "rewards": {"a": 1}}, "step").rewards == {"a": 1.0}
    for wrong in ({"text": "Go."}, {"player": "a b"}, {"player": "a", "rewards": {"a": float("nan")}}, {"player": 3}):
        with pytest.raises(DataError, match="must return player, text, rewards and done"):
            read_turn(wrong, "reset")
