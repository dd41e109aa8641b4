"""Weights that the broker lost, or whose bytes are gone: they are published again, with the bytes they had."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from broker.client import Broker
from schemas.errors import BrokerLost
from tests.support.broker.one_group import fetch_weights, publish_weights
from tests.support.broker.trainer_sessions import take_over

pytestmark = pytest.mark.integration


@pytest.mark.parametrize("name", ["weights", "chunks"])
def test_weights_are_published_again_after_a_foreign_value_in_their_key(
    broker: Broker, tmp_path: Path, name: str
) -> None:
    training = take_over(broker)
    broker.connection.authority = True
    publish_weights(broker, training.leader_term, 1, tmp_path)
    broker.connection.client.set(getattr(broker.connection.keys, name), "hello")
    with pytest.raises(BrokerLost, match="replaced"):
        publish_weights(broker, training.leader_term, 2, tmp_path)
    successor = take_over(broker, fresh=False)
    for version in (1, 2):
        publish_weights(broker, successor.leader_term, version, tmp_path)
    assert fetch_weights(broker, tmp_path).version == 2


@pytest.mark.parametrize("kind", ["redis", "file"])
def test_bytes_of_a_published_version_that_are_gone_are_put_back(broker: Broker, tmp_path: Path, kind: str) -> None:
    training = take_over(broker)
    publish_weights(broker, training.leader_term, 1, tmp_path, kind=kind)
    manifest = broker.weights.newest()
    assert manifest is not None
    broker.connection.client.delete(broker.connection.keys.chunks)
    (tmp_path / "v1-t1.safetensors").unlink(missing_ok=True)
    assert not broker.weights.holds(manifest)
    successor = take_over(broker, fresh=False)
    publish_weights(broker, successor.leader_term, 1, tmp_path, kind=kind)
    assert broker.weights.holds(manifest)
    assert fetch_weights(broker, tmp_path) == manifest


def test_a_version_is_not_given_other_bytes_than_it_had(broker: Broker, tmp_path: Path) -> None:
    training = take_over(broker)
    publish_weights(broker, training.leader_term, 1, tmp_path)
    broker.connection.client.delete(broker.connection.keys.chunks)
    publish_weights(broker, training.leader_term, 1, tmp_path, content=b"other")
    assert not broker.connection.client.exists(broker.connection.keys.chunks)


def test_a_stream_of_weights_that_is_deleted_while_a_version_is_published_is_no_error(
    broker: Broker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    training = take_over(broker)
    real = broker.connection.run_script

    def script(name: str, *args: Any) -> Any:
        answer = real(name, *args)
        if name == "add_version":
            broker.connection.client.delete(broker.connection.keys.weights)
        return answer

    monkeypatch.setattr(broker.connection, "run_script", script)
    publish_weights(broker, training.leader_term, 1, tmp_path)
    assert broker.weights.newest() is None


def test_chunks_that_no_manifest_names_are_freed_with_the_next_version(broker: Broker, tmp_path: Path) -> None:
    training = take_over(broker)
    client, keys = broker.connection.client, broker.connection.keys
    for version in (1, 2):
        publish_weights(broker, training.leader_term, version, tmp_path, keep=2)
    client.hset(keys.chunks, "0:0", b"of a trainer that died before its manifest")
    client.hset(keys.chunks, "9:0", b"of a version on its way")
    client.hset(keys.chunks, "hello", b"world")
    client.xdel(keys.weights, "1-1")
    publish_weights(broker, training.leader_term, 3, tmp_path, keep=2)
    assert set(client.hkeys(keys.chunks)) == {b"2:0", b"3:0", b"9:0"}
