"""A copy of the broker's data, taken during a run and restored later, beside an older or newer checkpoint."""

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from broker.client import Broker
from broker.connection.connection import Connection
from broker.connection.embedded import EmbeddedServer
from broker.connection.keys import Keys
from schemas.config import BrokerConfig
from schemas.messages import Score
from tests.support.broker.broker_loss import checkpoint, train_one
from tests.support.broker.prompt_groups import claim_batch, generate_and_score, make_task, train_record
from tests.support.broker.trainer_sessions import take_over, take_over_as

Start = Callable[[str], Broker]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Start the server of this folder, and connect to it."""
    servers: list[EmbeddedServer] = []

    def begin(name: str) -> Broker:
        servers.append(server := EmbeddedServer(tmp_path / name))
        config = BrokerConfig(deadline_s=10)
        return Broker(Connection(server.start(), Keys("tidemill", "backup"), config.deadline_s), config)

    yield begin
    for server in servers:
        server.stop()


def back_up(folder: Path) -> None:
    """Copy the data as docs/operations.md says, while the server runs."""
    (folder / "restored").mkdir()
    shutil.copytree(folder / "first" / "appendonlydir", folder / "restored" / "appendonlydir")


def admit_next(broker: Broker, count: int) -> list[int]:
    """Admit that many groups as a feeder does, from the first prompt on; return which the ledger took."""
    taken: list[int] = []
    following = 0
    while len(taken) < count:
        answer = broker.ledger.admit(make_task(following))
        if answer.answer == "ok":
            taken.append(following)
        following = answer.next
    return taken


def test_a_group_trained_after_the_backup_is_not_trained_again(start: Start, tmp_path: Path) -> None:
    broker = start("first")
    training = take_over(broker)
    train_one(broker, training, 0)
    broker.ledger.admit(make_task(1))
    generate_and_score(broker, 1, (Score(reward=1.0), Score(reward=0.0)))
    back_up(tmp_path)
    train_record(training, claim_batch(training, step=1))
    broker.ledger.admit(make_task(2))
    saved = checkpoint(training)

    restored = start("restored")
    assert restored.ledger.read_state().active == 1, "the backup has group 1 as it was, not yet trained"
    _, takeover = take_over_as(restored, saved)
    assert takeover.step == 2
    assert admit_next(restored, 2) == [2, 3], "the group admitted after the backup comes first"
    state = restored.ledger.read_state()
    assert (state.trained, state.active) == (2, 2)
    assert state.balanced


def test_an_older_checkpoint_trains_the_journal_of_the_backup_again(start: Start, tmp_path: Path) -> None:
    broker = start("first")
    training = take_over(broker)
    train_one(broker, training, 0)
    saved = checkpoint(training)
    train_one(broker, training, 1)
    broker.ledger.admit(make_task(2))
    back_up(tmp_path)
    broker.ledger.admit(make_task(3))

    restored = start("restored")
    training, takeover = take_over_as(restored, saved)
    assert (takeover.lost, takeover.step) == (False, 2)
    assert sorted(training.read_journal()) == [0, 1]
    assert admit_next(restored, 1) == [3]
    state = restored.ledger.read_state()
    assert (state.trained, state.active) == (2, 2)
    assert state.balanced


def test_a_backup_from_before_the_run_admits_what_was_unfinished(start: Start, tmp_path: Path) -> None:
    broker = start("first")
    broker.connection.client.ping()
    back_up(tmp_path)
    training = take_over(broker)
    train_one(broker, training, 0)
    for task_id in (1, 2):
        broker.ledger.admit(make_task(task_id))
    saved = checkpoint(training)

    restored = start("restored")
    assert take_over_as(restored, saved)[1].lost
    assert admit_next(restored, 3) == [1, 2, 3]
    assert restored.ledger.read_state().balanced
