"""Environments in processes of their own: another interpreter, packages, and what goes wrong there."""

import asyncio
import importlib.util
import json
import random
import sys
import threading
from pathlib import Path
from typing import Any

import psutil
import pytest

from producers.episodes.environments import ENVIRONMENTS
from producers.episodes.environments.worker import EnvironmentWorker
from producers.workflows.base import FailedSample, find_workflow
from producers.workflows.trajectory_builder import SampledCompletion
from schemas.errors import ConfigError, DataError
from schemas.system.worker_process import WorkerProcess
from tests.support.producers.played_episodes import SpeakingEngine, chat_task, chat_tokenizer, loop_config, play

GAMES = """
import os, sys, time

class Count:
    def __init__(self, until=2):
        self.left = until

    async def reset(self, task):
        return f"Say anything {self.left} times, {os.path.basename(sys.executable)}."

    def step(self, text):
        if text == "die":
            os._exit(3)
        if text == "hang":
            time.sleep(1000)
        if text == "raise":
            raise ConnectionError("the game's server is down")
        if text == "long":
            return "x" * 64_000_000, 0.5, False
        self.left -= 1
        return str(self.left), 0.5, self.left == 0
"""
GYMNASIUM = """
class Discrete:
    n = 3
    def contains(self, number): return 0 <= number < 3
class Text: ...
class spaces: Discrete = Discrete
class Env:
    def __init__(self, id, target=2): self.action_space, self.target = Discrete() if id == "Numbers" else Text(), target
    def reset(self, seed): self.seed = seed; return "Which?", {}
    def step(self, action):
        right = action in (self.target, str(self.target))
        return "no", float(right), right, False, {}
    def close(self): pass
make = lambda id, **args: Env(id, **args)
"""
TEXTARENA = """
class Game:
    def reset(self, num_players, seed): self.log, self.tries = [(-1, "Guess.", 1)], 0
    def get_observation(self):
        new, self.log = self.log, []
        return 0, new
    def step(self, action):
        self.tries += 1
        self.log += [(0, action, 2), (-1, "Colder.", 3)]
        return action == "7", {}
    def close(self): return {0: 1.0 / self.tries}, {0: {"reason": "Won."}}
make = lambda env_id, **args: {"Guess-v0-raw": Game}[env_id]()
"""
# Another thread has its turn between seed and draw.
DRAWING = """
import random, threading
class Game:
    def reset(self, num_players, seed):
        random.seed(seed)
        threading.Event().wait(0.05)
        self.number = random.random()
    def get_observation(self): return 0, str(self.number)
make = lambda env_id, **args: Game()
"""


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("games")
    (folder / "games.py").write_text(GAMES, encoding="utf-8")
    return folder


async def test_an_environment_plays_in_another_interpreter(base: Path) -> None:
    tokenizer = chat_tokenizer(base)
    args = {"environment": "games.py:Count", "args": {"until": 3}, "python": sys.executable}
    engine = SpeakingEngine(tokenizer, lambda prompt: "well")
    samples = await play(loop_config(base, "environment", args), engine, tokenizer, chat_task("Play.", n=2))
    for sample in samples:
        assert isinstance(sample, SampledCompletion)
        assert sample.reward == 1.5
    assert any("Say anything 3 times, python" in prompt for prompt in engine.prompts)


@pytest.mark.parametrize("loads", [False, True], ids=["while its process starts", "while it loads the environment"])
async def test_a_start_that_is_cancelled_leaves_no_process(
    tmp_path: Path, loads: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "slow.py").write_text(
        "import pathlib, time\npathlib.Path(__file__).with_name('loads').touch()\ntime.sleep(60)\n", encoding="utf-8"
    )
    entered, go_on, made = threading.Event(), threading.Event(), threading.Event()

    def start_late(*arguments: Any) -> WorkerProcess:
        entered.set()
        assert go_on.wait(20)
        process = WorkerProcess(*arguments)
        made.set()
        return process

    monkeypatch.setattr("producers.episodes.environments.worker.WorkerProcess", start_late)
    before = {*psutil.Process().children(recursive=True)}
    starting = asyncio.create_task(EnvironmentWorker("slow.py:Count", tmp_path, sys.executable, ()).start())
    assert await asyncio.to_thread(entered.wait, 20)
    if loads:
        go_on.set()
        async with asyncio.timeout(20):
            while not (tmp_path / "loads").exists():  # noqa: ASYNC110 - another process makes it
                await asyncio.sleep(0.01)
    starting.cancel()
    await asyncio.sleep(0)
    go_on.set()
    await asyncio.wait({starting}, timeout=20)
    assert starting.cancelled()
    assert await asyncio.to_thread(made.wait, 20), "another thread makes it, whatever becomes of the start"
    assert {*psutil.Process().children(recursive=True)} <= before


async def test_an_interpreter_is_looked_for_beside_the_configuration(base: Path) -> None:
    (base / "own").symlink_to(sys.executable)
    tokenizer = chat_tokenizer(base)
    args = {"environment": "games.py:Count", "args": {"until": 3}, "python": "./own"}
    config = loop_config(base, "environment", args)
    (sample,) = await play(config, SpeakingEngine(tokenizer, lambda prompt: "well"), tokenizer, chat_task("Go."))
    assert isinstance(sample, SampledCompletion)


@pytest.mark.parametrize(
    ("word", "reason"),
    [
        ("raise", "ConnectionError: the game's server is down"),
        ("die", "the environment's process has ended"),
        ("hang", "took longer than 5 s"),
    ],
)
async def test_what_goes_wrong_fails_its_sample_and_the_next_one_plays(base: Path, word: str, reason: str) -> None:
    tokenizer = chat_tokenizer(base)
    args = {"environment": "games.py:Count", "python": sys.executable, "timeout_s": 5 if word == "hang" else 60}
    config = loop_config(base, "environment", args)
    said = [word, "well", "well"]
    workflow = find_workflow("environment", args, base)

    engine = SpeakingEngine(tokenizer, lambda prompt: said.pop(0))
    from producers.workflows.base import RolloutContext, WorkflowServices, running

    made, found = workflow(), []
    async with running(made, WorkflowServices(engine, tokenizer, config)):
        for _ in range(2):
            task = chat_task("Play.")
            found += [one async for one in made.run(RolloutContext(engine, tokenizer, task, range(1)))]
    failed, played = found
    assert isinstance(failed, FailedSample)
    assert reason in failed.reason
    assert isinstance(played, SampledCompletion)
    assert played.reward == 1.0


async def test_an_observation_that_is_too_long_fails_its_own_step_alone(base: Path) -> None:
    worker = EnvironmentWorker("games.py:Count", base)
    try:
        one, other = await worker.open({}), await worker.open({})
        with pytest.raises(DataError, match=r"a result has 64\d{6} bytes as JSON, at most 62914560 are allowed"):
            await one.step("long")
        assert await other.step("well") == ["1", 0.5, False]
    finally:
        await worker.close()


async def steps(folder: Path, name: str, args: dict[str, Any], *texts: str, task: Any = None) -> list[Any]:
    """What reset and the steps return."""
    worker = EnvironmentWorker(ENVIRONMENTS[name], folder)
    try:
        made = await worker.open(args)
        found = [await made.reset({"seed": 7000, "data": {}, **(task or {})})]
        found += [await made.step(text) for text in texts]
        await made.close()
        return found
    finally:
        await worker.close()


async def test_actions_of_gymnasium_are_read_from_answers(tmp_path: Path) -> None:
    (tmp_path / "gymnasium.py").write_text(GYMNASIUM, encoding="utf-8")
    found = await steps(tmp_path, "gymnasium", {"id": "Numbers"}, "none", "9", "I take 1", "2.")
    assert [one[1:] for one in found[1:]] == [[0.0, False], [0.0, False], [0.0, False], [1.0, True]]
    assert found[1][0].startswith("Your action must be one of ")
    found = await steps(
        tmp_path, "gymnasium", {"id": "Words", "tag": "a", "args": {"target": "x"}}, "x", "<a>y</a> <a> x </a>"
    )
    assert found == ["Which?", ["Write your action as <a>...</a>.", 0.0, False], ["no", 1.0, True]]


async def test_a_game_of_textarena_shows_what_is_new_and_pays_at_its_end(tmp_path: Path) -> None:
    (tmp_path / "textarena.py").write_text(TEXTARENA, encoding="utf-8")
    found = await steps(tmp_path, "textarena", {"id": "Guess-v0"}, "3", "7")
    assert found == ["Guess.", ["Colder.", None, False], ["Won.", 0.5, True]]


async def test_games_of_textarena_that_begin_at_once_are_those_of_their_seeds(tmp_path: Path) -> None:
    (tmp_path / "textarena.py").write_text(DRAWING, encoding="utf-8")

    async def drawn(count: int) -> list[Any]:
        worker = EnvironmentWorker(ENVIRONMENTS["textarena"], tmp_path)
        try:
            games = [await worker.open({"id": "Draw-v0"}) for _ in range(count)]
            return await asyncio.gather(*(game.reset({"seed": place % 2}) for place, game in enumerate(games)))
        finally:
            await worker.close()

    expected = [str(random.Random(seed).random()) for seed in (0, 1)]
    assert await drawn(8) == expected * 4


async def test_a_session_of_an_openenv_server_is_played() -> None:
    serve = pytest.importorskip("websockets.sync.server").serve
    heard: list[Any] = []

    def session(connection: Any) -> None:
        for line in connection:
            message = json.loads(line)
            heard.append(message)
            data = message.get("data", {})
            if message["type"] == "close":
                return
            if data.get("message") == "break":
                connection.send(json.dumps({"type": "error", "data": {"message": "no", "code": "EXECUTION_ERROR"}}))
            else:
                seen = {"echoed": data.get("message", "Begin."), "length": 1}
                done = message["type"] == "step"
                answer = {"observation": seen, "reward": 0.5 if done else None, "done": done}
                connection.send(json.dumps({"type": "observation", "data": answer}))

    with serve(session, "127.0.0.1", 0) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.socket.getsockname()[1]}"
        args = {"url": url, "observation": "echoed", "reset": {"level": 2}}
        assert await steps(Path(), "openenv", args, "hello") == ["Begin.", ["hello", 0.5, True]]
        assert heard[:2] == [
            {"type": "reset", "data": {"seed": 7000, "level": 2}},
            {"type": "step", "data": {"message": "hello"}},
        ]
        with pytest.raises(DataError, match=r"ConnectionError: the server says: no \(EXECUTION_ERROR\)"):
            await steps(Path(), "openenv", {"url": url}, "break")
        server.shutdown()
    with pytest.raises(DataError, match="ConnectionRefusedError"):
        await steps(Path(), "openenv", {"url": url})


@pytest.mark.skipif(importlib.util.find_spec("reasoning_gym") is None, reason="reasoning-gym is not installed")
async def test_a_task_of_reasoning_gym_is_tried_several_times(tmp_path: Path) -> None:
    import reasoning_gym

    entry = reasoning_gym.create_dataset("basic_arithmetic", size=5, seed=3)[2]
    recipe = {"task": "basic_arithmetic", "size": 5, "seed": 3, "index": 2, "params": {}}
    task = {"data": {"reasoning_gym": recipe}}
    right = f"<answer>{entry['answer']}</answer>"
    found = await steps(tmp_path, "retry", {"tries": 3}, "no idea", right, task=task)
    assert found[1][0].startswith("That scores 0.0")
    assert found[2] == ["", 0.9, True]


async def test_an_environment_that_cannot_be_had_is_found_at_the_start(tmp_path: Path) -> None:
    worker = EnvironmentWorker("games.py:Count", tmp_path)
    with pytest.raises(ConfigError, match=r"the environment games.py:Count can't be loaded .*: no file"):
        await worker.start()
    with pytest.raises(ConfigError, match="python '/nowhere/python' must be an interpreter"):
        find_workflow("environment", {"environment": "a.py:A", "python": "/nowhere/python"}, tmp_path)
    (tmp_path / "gymnasium.py").write_text("raise ImportError('not for this Python')", encoding="utf-8")
    with pytest.raises(DataError, match="ImportError: not for this Python"):
        await steps(tmp_path, "gymnasium", {"id": "Numbers"})
