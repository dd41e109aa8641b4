"""A trainer is killed at any point of a step or of a save: the next one ends with the weights of an undisturbed run.

They are equal to the bit, the optimizer's state included, and nothing is left behind.
"""

import signal
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from broker.client import Broker
from broker.connection.connection import Connection
from broker.connection.embedded import EmbeddedServer
from broker.connection.keys import Keys
from consumers.trainer.checkpoint.compare import compare
from consumers.trainer.checkpoint.store import CheckpointStore
from consumers.trainer.step.build import build_train_step
from consumers.trainer.step.train_step import TrainStep
from schemas.config import BrokerConfig, parse_config
from schemas.run_folder import read_lines, surviving_lines
from tests.support.trainer.deterministic_run import STEPS, Pipeline, make_config
from tests.support.trainer.killed_trainers import POINTS, TURNS, run_trainer_to_its_end
from tests.support.trainer.trainer_loop import SharingGenerator


@pytest.fixture(scope="module")
def undisturbed(server: EmbeddedServer, model: Path, tmp_path_factory: pytest.TempPathFactory) -> TrainStep:
    return end_of_run("undisturbed", server, model, tmp_path_factory.mktemp("undisturbed"))


def end_of_run(name: str, server: EmbeddedServer, model: Path, folder: Path, **trainer: Any) -> TrainStep:
    """The state of training at the end of a run that nothing happened to."""
    broker = Broker(Connection(server.url, Keys("tidemill", name), 30), BrokerConfig())
    data = make_config(folder / "run", model, broker, record=True, **trainer)
    with Pipeline(broker):
        assert train(data, folder) == [0]
    config = parse_config(data)
    step = build_train_step(config)
    checkpoints = CheckpointStore(folder / "run/checkpoints")
    assert checkpoints.load(checkpoints.at(), step).step == STEPS
    return step


def train(
    data: dict[str, Any], folder: Path, point: str | None = None, devices: Path | None = None
) -> list[int | None]:
    return run_trainer_to_its_end(data, folder / "output.txt", point, devices=devices)


def assert_as_undisturbed(folder: Path, undisturbed: TrainStep) -> None:
    checkpoints = CheckpointStore(folder / "run/checkpoints")
    newest = checkpoints.at()
    assert newest.name.startswith(f"step-{STEPS:08d}-")
    found = compare(undisturbed, newest)
    assert found.equal, found.differs
    left = [file.name for file in checkpoints.folder.iterdir() if file.name.startswith(".")]
    assert not left, "what a killed save leaves is removed by the next trainer"
    lines = list(surviving_lines(read_lines(folder / "run/trained.jsonl")))
    assert Counter(task for line in lines for task, _ in line["samples"]) == dict.fromkeys(range(2 * STEPS), 2)


BESIDE = {
    *("forward", "backward", "batch recorded", "weights written, not sent", "slots not returned"),
    *("before the tensors of the checkpoint", "tensors written", "state written, no marker", "not committed"),
    *("forward, while a checkpoint is written", "weights published, while a checkpoint is written"),
    "slots returned, while a checkpoint is written",
}
"""Points at which broker and disk are as at one before or after."""
MORE = pytest.mark.matrix("broker and disk are as at a point before or after it, which make test has")


@pytest.mark.parametrize(
    "point", [pytest.param(point, marks=MORE if point in BESIDE else ()) for point in POINTS if point != "replayed"]
)
def test_after_a_kill_the_weights_are_those_of_an_undisturbed_run(
    point: str, model: Path, undisturbed: TrainStep, make_broker: Callable[..., Broker], tmp_path: Path
) -> None:
    broker = make_broker()
    data = make_config(tmp_path / "run", model, broker, record=True)
    with Pipeline(broker):
        assert train(data, tmp_path, point) == [-signal.SIGKILL]
        assert train(data, tmp_path) == [0], (tmp_path / "output.txt").read_text()[-3000:]
    assert_as_undisturbed(tmp_path, undisturbed)


@pytest.mark.parametrize("point", TURNS)
def test_after_a_kill_in_any_state_of_a_turn_too(
    point: str, model: Path, undisturbed: TrainStep, make_broker: Callable[..., Broker], tmp_path: Path
) -> None:
    """The generator that shares the device gets it each time, and its samples are trained once."""
    broker, devices = make_broker(), tmp_path / "devices"
    data = make_config(tmp_path / "run", model, broker, record=True)
    generator = SharingGenerator(devices)
    with Pipeline(broker, generator.generate):
        assert train(data, tmp_path, point, devices) == [-signal.SIGKILL]
        assert train(data, tmp_path, devices=devices) == [0], (tmp_path / "output.txt").read_text()[-3000:]
    assert_as_undisturbed(tmp_path, undisturbed)


@pytest.mark.parametrize(
    ("point", "victim"), [("state in main memory, device not given", 0), ("device taken, state in main memory", 1)]
)
def test_the_death_of_one_rank_in_a_turn_ends_the_other_and_leaves_the_device(
    point: str, victim: int, model: Path, make_broker: Callable[..., Broker], tmp_path: Path
) -> None:
    broker, devices = make_broker(), tmp_path / "devices"
    data = make_config(tmp_path / "run", model, broker, processes=2)
    output = tmp_path / "output.txt"
    with Pipeline(broker, SharingGenerator(devices).generate):
        codes = run_trainer_to_its_end(data, output, point, victim, devices=devices)
        assert codes[victim] == -signal.SIGKILL
        assert codes[1 - victim] not in (0, None), "ended by itself, and not well"
        assert run_trainer_to_its_end(data, output, devices=devices) == [0, 0], output.read_text()[-3000:]
    lines = list(surviving_lines(read_lines(tmp_path / "run/trained.jsonl")))
    assert Counter(task for line in lines for task, _ in line["samples"]) == dict.fromkeys(range(2 * STEPS), 2)


def test_after_kills_of_every_trainer_too(
    model: Path, undisturbed: TrainStep, make_broker: Callable[..., Broker], tmp_path: Path
) -> None:
    broker = make_broker()
    data = make_config(tmp_path / "run", model, broker, record=True)
    with Pipeline(broker):
        for point in ("half of the tensors written", "replayed", "replayed", "renamed", "all trained, not finished"):
            codes = train(data, tmp_path, point)
            assert codes == [-signal.SIGKILL], (point, (tmp_path / "output.txt").read_text()[-3000:])
        assert train(data, tmp_path) == [0]
    assert_as_undisturbed(tmp_path, undisturbed)


def test_an_adapter_too(
    server: EmbeddedServer, model: Path, make_broker: Callable[..., Broker], tmp_path: Path
) -> None:
    lora: dict[str, Any] = {"lora": {"rank": 4, "alpha": 8.0}, "kl": {"coef": 0.1, "reference": "lora_off"}}
    for name in ("undisturbed", "killed"):
        (tmp_path / name).mkdir()
    undisturbed = end_of_run("adapter", server, model, tmp_path / "undisturbed", **lora)
    broker = make_broker()
    data = make_config(tmp_path / "killed/run", model, broker, record=True, **lora)
    with Pipeline(broker):
        for point in ("weights published", "replayed", "tensors written"):
            codes = train(data, tmp_path / "killed", point)
            assert codes == [-signal.SIGKILL], (point, (tmp_path / "killed/output.txt").read_text()[-3000:])
        assert train(data, tmp_path / "killed") == [0]
    assert_as_undisturbed(tmp_path / "killed", undisturbed)
