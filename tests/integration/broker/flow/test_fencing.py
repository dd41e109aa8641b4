"""A trainer that was stalled, replaced and woken: nothing that it still writes counts."""

import fcntl
import threading
from pathlib import Path

import pytest

from broker.client import Broker
from broker.flow.fencing import term_number
from broker.weights.transports import make_transport
from consumers.trainer import leadership
from consumers.trainer.leadership import LeaderRecord
from schemas.errors import BrokerLost, FencedError
from schemas.system import files
from tests.support.broker.leadership import leadership_in
from tests.support.broker.one_group import fetch_weights, publish_weights
from tests.support.broker.trainer_sessions import take_over


def test_a_replaced_trainer_publishes_no_weights_and_takes_no_number(broker: Broker, tmp_path: Path) -> None:
    old = take_over(broker)
    new = take_over(broker, fresh=False)
    client, keys = broker.connection.client, broker.connection.keys
    with pytest.raises(FencedError):
        publish_weights(broker, old.leader_term, 1, tmp_path)
    assert not client.exists(keys.chunks)
    assert broker.weights.newest() is None
    publish_weights(broker, new.leader_term, 1, tmp_path)
    assert fetch_weights(broker, tmp_path).leader_term == term_number(new.leader_term)


def test_a_replaced_trainer_cannot_overwrite_the_bytes_of_a_version(broker: Broker, tmp_path: Path) -> None:
    old = take_over(broker)
    new = take_over(broker, fresh=False)
    publish_weights(broker, new.leader_term, 1, tmp_path)
    file = tmp_path / "other"
    file.write_bytes(b"other weights")
    with pytest.raises(FencedError):
        make_transport(broker.connection, "redis", tmp_path).put(file, "redis:1", old.leader_term)
    fetch_weights(broker, tmp_path)


def test_the_manifest_of_a_replaced_trainer_is_refused_by_the_broker_itself(broker: Broker) -> None:
    old = take_over(broker)
    take_over(broker, fresh=False)
    assert broker.connection.run_script("add_version", old.leader_term, 7, b"x") == b"fenced"
    assert broker.weights.newest() is None


def test_a_number_that_another_trainer_gave_away_is_not_taken_for_ones_own(broker: Broker, tmp_path: Path) -> None:
    old = take_over(broker)
    publish_weights(broker, old.leader_term, 3, tmp_path)
    new = take_over(broker, fresh=False)
    with pytest.raises(FencedError, match="version 3"):
        publish_weights(broker, new.leader_term, 3, tmp_path)


def test_publishing_again_after_a_lost_answer_changes_nothing(broker: Broker, tmp_path: Path) -> None:
    training = take_over(broker)
    for _ in range(2):
        publish_weights(broker, training.leader_term, 1, tmp_path)
    assert broker.connection.client.xlen(broker.connection.keys.weights) == 1
    fetch_weights(broker, tmp_path)


def test_a_replaced_trainer_cannot_finish_the_run(broker: Broker) -> None:
    old = take_over(broker)
    new = take_over(broker, fresh=False)
    with pytest.raises(FencedError):
        old.finish_run()
    assert broker.ledger.read_state().state == "running"
    new.finish_run()
    assert broker.ledger.read_state().state == "finished"


def test_a_broker_that_was_wiped_takes_no_weights_before_it_is_mended(broker: Broker, tmp_path: Path) -> None:
    training = take_over(broker)
    broker.purge()
    with pytest.raises(BrokerLost):
        publish_weights(broker, training.leader_term, 1, tmp_path)
    with pytest.raises(BrokerLost):
        training.finish_run()


def test_a_replaced_trainer_leaves_the_term_file_as_its_successor_wrote_it(broker: Broker, tmp_path: Path) -> None:
    old, new = leadership_in(tmp_path, broker), leadership_in(tmp_path, broker)
    old.take_over(saved=0)
    old.reserve_version(4)
    new.restore(from_checkpoint=False)
    new.take_over(saved=0)
    assert (old.number, new.number) == (1, 2)
    assert new.read() == LeaderRecord(new.leader_term, 4)
    with pytest.raises(FencedError, match=f"replaced by {new.leader_term}"):
        old.reserve_version(6)
    assert new.read() == LeaderRecord(new.leader_term, 4)
    new.reserve_version(6)
    assert new.read() == LeaderRecord(new.leader_term, 6)
    assert new.next_version() == 7


def test_a_trainer_that_looked_before_another_took_over_does_not_overwrite_its_term(
    broker: Broker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old, new = leadership_in(tmp_path, broker), leadership_in(tmp_path, broker)
    old.leader_term, new.leader_term = "1-old", "2-new"
    replacing = threading.Thread(target=new.reserve_version, args=(5,))
    check = old._check

    def look() -> None:
        check()
        # Here the old one stalls, and the new one takes over as far as it can.
        replacing.start()
        replacing.join(0.2)

    monkeypatch.setattr(old, "_check", look)
    old.reserve_version(3)
    replacing.join(10)
    assert old.read() == LeaderRecord("2-new", 5)


def test_a_trainer_that_is_frozen_while_it_writes_its_term_holds_nobody_up(
    broker: Broker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(leadership, "LOCK_S", 0.05)
    new = leadership_in(tmp_path, broker)
    new.leader_term = "2-new"
    with (tmp_path / "LEADER_TERM.lock").open("w") as frozen:
        fcntl.flock(frozen, fcntl.LOCK_EX)
        new.reserve_version(5)
    assert new.read() == LeaderRecord("2-new", 5)


def test_a_version_that_may_be_published_is_on_the_disk_before(
    broker: Broker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flushed: list[Path] = []
    monkeypatch.setattr(files, "fsync", flushed.append)
    leadership_in(tmp_path, broker).reserve_version(5)
    assert flushed[-1] == tmp_path, "the rename"
