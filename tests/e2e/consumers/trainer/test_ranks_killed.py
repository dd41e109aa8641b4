"""One of several ranks is killed, in a step or a save: the next ones end with the weights of an undisturbed run."""

import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from broker.client import Broker
from broker.connection.connection import Connection
from broker.connection.embedded import EmbeddedServer
from broker.connection.keys import Keys
from consumers.trainer.checkpoint.convert import export_checkpoint
from schemas.config import BrokerConfig, parse_config
from tests.support.models.tiny_model import make_tiny_model
from tests.support.trainer.deterministic_run import EVERY, STEPS, Pipeline, make_config
from tests.support.trainer.killed_trainers import replay_in_ranks, run_trainer_to_its_end
from tests.support.trainer.parallel_steps import make_divisible_model


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("tiny"), hidden=32, layers=1)


def settings(folder: Path, model: Path, broker: Broker, **trainer: Any) -> dict[str, Any]:
    return make_config(folder / "run", model, broker, **{"processes": 2, "record": True, **trainer})


def train(data: dict[str, Any], folder: Path, point: str | None = None, victim: int = 0) -> list[int | None]:
    return run_trainer_to_its_end(data, folder / "output.txt", point, victim)


def weights(data: dict[str, Any]) -> bytes:
    """The last checkpoint as a model of one process."""
    path = export_checkpoint(parse_config(data), None, None, lambda _: None)[1]
    return (path / "model.safetensors").read_bytes()


@pytest.fixture(scope="module")
def undisturbed(server: EmbeddedServer, model: Path, tmp_path_factory: pytest.TempPathFactory) -> bytes:
    return of_a_quiet_run(server, "undisturbed-ranks", model, tmp_path_factory.mktemp("undisturbed"))


def of_a_quiet_run(server: EmbeddedServer, name: str, model: Path, folder: Path, **trainer: Any) -> bytes:
    """The weights at its end."""
    broker = Broker(Connection(server.url, Keys("tidemill", name), 30), BrokerConfig())
    data = settings(folder, model, broker, **trainer)
    with Pipeline(broker):
        assert set(train(data, folder)) == {0}, (folder / "output.txt").read_text()[-3000:]
    exported = weights(data)
    assert exported == (folder / "run/model/model.safetensors").read_bytes()
    return exported


@pytest.mark.matrix("every moment of a step; test_killed kills one rank at each, test_ranks_e2e several ranks")
@pytest.mark.parametrize(
    ("point", "victim"),
    [
        ("forward", 1),
        ("optimizer step", 0),
        ("half of the tensors written", 1),
        ("forward, while a checkpoint is written", 1),
        ("slots returned, while a checkpoint is written", 0),
        ("marker written, not renamed", 0),
        ("renamed", 0),
        ("half committed", 0),
    ],
)
def test_the_weights_are_those_of_an_undisturbed_run(
    point: str, victim: int, model: Path, undisturbed: bytes, make_broker: Callable[..., Broker], tmp_path: Path
) -> None:
    broker = make_broker()
    data = settings(tmp_path, model, broker)
    with Pipeline(broker):
        codes = train(data, tmp_path, point, victim)
        assert codes[victim] == -signal.SIGKILL
        assert codes[1 - victim] not in (0, None), "the other one ends too"
        assert train(data, tmp_path) == [0, 0], (tmp_path / "output.txt").read_text()[-3000:]
    assert weights(data) == undisturbed


PARTS: dict[str, Any] = {
    "processes": 4,
    "parallel": {"tensor": 2},
    "checkpoint": {"every": EVERY, "keep": 9},
    "advantage": {"name": "gae"},
    "critic": {"optimizer": {"lr": 1e-3}},
}
"""Each layer cut in two, and each part sharded over two ranks; of a critic too, whose values the policy learns from."""


@pytest.fixture(scope="module")
def divisible(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_divisible_model(tmp_path_factory.mktemp("divisible") / "model")


@pytest.fixture(scope="module")
def quiet(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("quiet")


@pytest.fixture(scope="module")
def undisturbed_parts(server: EmbeddedServer, divisible: Path, quiet: Path) -> bytes:
    return of_a_quiet_run(server, "undisturbed-parts", divisible, quiet, **PARTS)


@pytest.mark.matrix("a replay under a second layout")
def test_recorded_steps_of_ranks_that_share_layers_come_out_equal(
    undisturbed_parts: bytes, make_broker: Callable[..., Broker], divisible: Path, quiet: Path
) -> None:
    data = settings(quiet, divisible, make_broker("undisturbed-parts"), **PARTS)
    told = replay_in_ranks(data, EVERY, quiet / "replay.txt")
    assert f"equal: steps {EVERY} to {STEPS - 1} of run undisturbed-parts, trained again from" in told
    assert "to the bit" in told


@pytest.mark.matrix("kills under a second layout")
def test_ranks_that_share_layers_too(
    undisturbed_parts: bytes, make_broker: Callable[..., Broker], divisible: Path, tmp_path: Path
) -> None:
    data = settings(tmp_path, divisible, (broker := make_broker()), **PARTS)
    with Pipeline(broker):
        for point, victim in (("optimizer step", 3), ("half of the tensors written", 2)):
            codes = train(data, tmp_path, point, victim)
            assert codes[victim] == -signal.SIGKILL
            assert None not in codes, "the others end too"
            assert codes[0] != 0, "and rank 0 says that something was wrong"
        assert train(data, tmp_path) == [0] * 4, (tmp_path / "output.txt").read_text()[-3000:]
    assert weights(data) == undisturbed_parts
