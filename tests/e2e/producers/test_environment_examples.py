"""The examples verifiers, openenv and textarena with the packages themselves, in interpreters of their own."""

import asyncio
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from transformers import AutoTokenizer

from producers.episodes.environments import ENVIRONMENTS
from producers.episodes.environments.worker import EnvironmentWorker, RemoteEnvironment
from schemas.config import load_config
from schemas.plugins import load
from tests.support.runs.programs import environment_python, free_port, serve
from tests.support.runs.up_runs import UpRun

pytestmark = pytest.mark.timeout(900)

EXAMPLES = Path(__file__).parents[3] / "examples"
START_S = 300.0


@pytest.fixture
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One with a short path: the broker's socket is in a folder below it."""
    return tmp_path_factory.mktemp("run")


@pytest.fixture
def server(folder: Path) -> Iterator[str]:
    """The address of the example's OpenEnv server."""
    python = environment_python("openenv")
    port = free_port()
    command = [str(python), str(EXAMPLES / "openenv" / "server.py"), "--port", str(port)]
    with serve(command, port, folder / "server.log", START_S) as url:
        yield url


def train(folder: Path, config: dict[str, Any]) -> list[dict[str, Any]]:
    """Two steps of an example, without what takes its time; its metrics."""
    config["model"]["path"] = str(folder / "model")
    config["warm_start"].update(stop_accuracy=0.2, eval_every=20)
    config["generator"].update(engine="transformers")
    config["trainer"].update(steps=2, batch_groups=2)
    config["sampling"].update(n=8)
    config["flow"].update(staleness=0)
    config.pop("eval", None)
    run = UpRun(folder, config)
    summary = run.finish_whole(600.0)
    assert summary["logprob_gap_mean"] < 1e-4
    return run.lines("metrics.jsonl")


@pytest.mark.matrix("a training with the package itself; make test plays episodes of one, and trains in others")
def test_the_policy_is_trained_in_an_environment_of_verifiers(folder: Path) -> None:
    python, example = environment_python("verifiers"), folder / "verifiers"
    shutil.copytree(EXAMPLES / "verifiers", example, ignore=shutil.ignore_patterns(".venv"))
    (example / ".venv").symlink_to(python.parents[1])
    lines = train(example, yaml.safe_load((example / "config.yaml").read_text()))
    assert {line["step"] for line in lines} == {1, 2}
    assert any(0 < line["reward/mean"] < 1 for line in lines)


@pytest.mark.matrix("one more framework's environment, as that of verifiers")
def test_the_policy_is_trained_in_sessions_of_an_openenv_server(folder: Path, server: str) -> None:
    for name in ("openenv", "number_guessing"):
        shutil.copytree(EXAMPLES / name, folder / name, ignore=shutil.ignore_patterns(".venv"))
    config = yaml.safe_load((folder / "openenv" / "config.yaml").read_text())
    config["generator"]["workflow"]["args"]["args"]["url"] = server
    lines = train(folder / "openenv", config)
    assert {line["step"] for line in lines} == {1, 2}
    assert any(line["reward/mean"] > 0 for line in lines), "a number was found"


@pytest.mark.matrix("one more framework's environment, as that of verifiers")
def test_the_policy_is_trained_in_a_game_of_textarena(folder: Path) -> None:
    python, example = environment_python("textarena"), folder / "textarena"
    shutil.copytree(EXAMPLES / "textarena", example, ignore=shutil.ignore_patterns(".venv"))
    (example / ".venv").symlink_to(python.parents[1])
    lines = train(example, yaml.safe_load((example / "config.yaml").read_text()))
    assert {line["step"] for line in lines} == {1, 2}
    assert any(0 < line["reward/mean"] < 1 for line in lines)


def test_who_reads_a_game_of_textarena_as_the_model_does_can_win_it(folder: Path) -> None:
    python = environment_python("textarena")
    config = load_config(EXAMPLES / "textarena" / "config.yaml", [], {})
    load("model.py:build", "warm_start.model", config.base)(folder / "model", 0)
    tokenizer = AutoTokenizer.from_pretrained(folder / "model")

    async def open_game(worker: EnvironmentWorker, seed: int) -> tuple[RemoteEnvironment, list[dict[str, str]]]:
        game = await worker.open(config.generator.workflow.args["args"])
        return game, [{"role": "user", "content": await game.reset({"seed": seed})}]

    async def guess(game: RemoteEnvironment, messages: list[dict[str, str]], number: int) -> tuple[str, float | None]:
        """What the model reads of the answer, and the reward at the end."""
        said, reward, _ = await game.step(f"[{number}]")
        messages += [{"role": "assistant", "content": f"[{number}]"}, {"role": "user", "content": said}]
        ids = tokenizer.apply_chat_template(messages, return_dict=False)
        assert len(ids) == 2 * len(messages) - 1, "each guess and each answer is one token"
        return str(tokenizer.convert_ids_to_tokens(ids)[-1]), reward

    async def halve(worker: EnvironmentWorker, seed: int) -> float:
        game, messages = await open_game(worker, seed)
        low, high, reward = 1, 20, None
        while reward is None:
            number = (low + high) // 2
            read, reward = await guess(game, messages, number)
            low, high = (number + 1, high) if read == ">" else (low, number - 1)
        await game.close()
        return reward

    async def run() -> None:
        worker = EnvironmentWorker(ENVIRONMENTS["textarena"], config.base, str(python))
        try:
            assert {await halve(worker, seed) for seed in range(20)} == {1.0}
            game, messages = await open_game(worker, 1)
            first, again = [(await guess(game, messages, 10))[0] for _ in range(2)]
            assert first in "<>"
            assert again == "!"
        finally:
            await worker.close()

    asyncio.run(run())
