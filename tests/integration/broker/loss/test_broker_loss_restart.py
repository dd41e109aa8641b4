"""A server that was killed and lost its last writes, or none: what the trainer knows decides."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from broker.client import Broker
from broker.connection.connection import Connection
from broker.connection.embedded import EmbeddedServer
from broker.connection.keys import Keys
from schemas.config import BrokerConfig
from schemas.errors import BrokerLost
from schemas.messages import Score
from tests.support.broker.broker_loss import checkpoint, train_one
from tests.support.broker.prompt_groups import claim_batch, generate_and_score, make_batch_record, make_task
from tests.support.broker.trainer_sessions import change_request, take_over, take_over_as

pytestmark = pytest.mark.integration


@pytest.fixture
def own_server(tmp_path: Path) -> Iterator[EmbeddedServer]:
    server = EmbeddedServer(tmp_path / "b", fsync="always")
    server.start()
    yield server
    server.stop()


@pytest.fixture
def connect(own_server: EmbeddedServer) -> Callable[[], Broker]:
    def make() -> Broker:
        config = BrokerConfig()
        return Broker(Connection(own_server.url, Keys(config.prefix, "cut"), 20.0), config)

    return make


def restart_with(server: EmbeddedServer, size: int) -> None:
    """Kill the server, and start it with the append-only file it had when it was ``size`` bytes long."""
    assert server.process is not None
    server.process.kill()
    server.process.wait(10)
    part = newest_part(server)
    with part.open("r+b") as file:
        file.truncate(size)
    server.start()


def newest_part(server: EmbeddedServer) -> Path:
    return max((server.folder / "appendonlydir").glob("*.incr.aof"), key=lambda file: file.stat().st_mtime)


def test_a_second_of_lost_writes_is_made_again_and_what_was_trained_is_not(
    own_server: EmbeddedServer, connect: Callable[[], Broker]
) -> None:
    broker = connect()
    training = take_over(broker)
    broker.ledger.admit(make_task(0))
    generate_and_score(broker, 0, (Score(reward=1.0), Score(reward=0.0)))
    size = newest_part(own_server).stat().st_size
    record = claim_batch(training)
    training.journal_batch(record)
    training.complete_step(record)
    for task_id in (1, 2):
        broker.ledger.admit(make_task(task_id))
    saved = checkpoint(training)
    restart_with(own_server, size)
    with pytest.raises(BrokerLost, match="restarted"):
        training.read_pipeline()
    _, takeover = take_over_as(broker, saved)
    assert takeover.lost
    state = broker.ledger.read_state()
    assert (state.step, state.trained, state.active, state.readmit, state.cursor) == (1, 1, 0, 2, 3)
    assert state.balanced
    assert broker.connection.client.xlen(broker.connection.keys.trajectories) == 0, "what was trained is gone"
    assert broker.ledger.admit(make_task(1)).answer == "ok"


def test_a_step_after_a_lost_one_is_refused_and_what_was_trained_does_not_come_back(
    own_server: EmbeddedServer, connect: Callable[[], Broker]
) -> None:
    broker = connect()
    training = take_over(broker)
    for task_id in (0, 1):
        assert broker.ledger.admit(make_task(task_id)).answer == "ok"
        generate_and_score(broker, task_id, (Score(reward=1.0), Score(reward=0.0)))
    outcomes = training.claim_scores(100)
    records = [
        make_batch_record([outcome for outcome in outcomes if outcome.task_id == task_id], step=task_id)
        for task_id in (0, 1)
    ]
    training.journal_batch(records[0])
    size = newest_part(own_server).stat().st_size
    training.complete_step(records[0])
    training.journal_batch(records[1])
    saved = change_request(
        checkpoint(training), unfinished=set(), step=2, saved=0, version=2, version_if_lost=2, trained=2
    )
    restart_with(own_server, size)
    with pytest.raises(BrokerLost):
        training.journal_batch(records[1])
    with pytest.raises(BrokerLost):
        training.complete_step(records[1])
    assert broker.ledger.read_state().step == 0
    assert take_over_as(broker, saved)[1].lost
    state = broker.ledger.read_state()
    assert (state.step, state.trained, state.active, state.readmit, state.balanced) == (2, 2, 0, 0, True)


def test_a_restart_that_lost_nothing_is_no_loss(own_server: EmbeddedServer, connect: Callable[[], Broker]) -> None:
    broker = connect()
    training = take_over(broker)
    train_one(broker, training, 0)
    broker.ledger.admit(make_task(1))
    saved = checkpoint(training)
    restart_with(own_server, newest_part(own_server).stat().st_size)
    with pytest.raises(BrokerLost):
        training.read_pipeline()
    new, takeover = take_over_as(broker, saved)
    assert not takeover.lost
    assert new.read_pipeline().unfinished == {1}
    assert broker.ledger.read_state().balanced
