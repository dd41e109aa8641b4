"""A trainer on the real server, made as often as a test asks for one."""

from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from broker.client import Broker
from consumers.trainer.loop import Trainer
from tests.support.models.tiny_model import make_tiny_model
from tests.support.trainer.trainer_loop import make_trainer


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model of one layer, which no test changes."""
    return make_tiny_model(tmp_path_factory.mktemp("tiny"), hidden=32, layers=1)


@pytest.fixture
def new_trainer(model: Path, tmp_path: Path, broker: Broker, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Trainer]:
    """``make_trainer`` for this test's run, whose folder is ``run`` in the present one."""
    monkeypatch.chdir(tmp_path)
    return partial(make_trainer, broker, model, tmp_path)


@pytest.fixture
def trainer(new_trainer: Callable[..., Trainer]) -> Callable[..., Trainer]:
    """The same with a checkpoint every three steps."""
    return partial(new_trainer, checkpoint={"every": 3, "deadline_s": 30}, advantage={"name": "raw"})
