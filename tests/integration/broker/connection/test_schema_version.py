"""A run that another version of Tidemill wrote is refused in one line that says what to do, and can be purged."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
from typer.testing import CliRunner

from broker.client import Broker
from broker.connection.embedded import EmbeddedServer
from deploy.cli.app import app
from schemas.codec import SCHEMA_VERSION
from schemas.config import TidemillConfig
from schemas.errors import ConfigError
from tests.support.broker.trainer_sessions import take_over


def config_of(run: str, server: EmbeddedServer) -> TidemillConfig:
    return TidemillConfig.model_validate(
        {
            "run": {"name": run},
            "model": {"path": "model"},
            "train": {"name": "arithmetic"},
            "reward": {"terms": [{"name": "exact"}]},
            "broker": {"url": server.url},
        }
    )


def as_of_schema_one(broker: Broker) -> None:
    """What a server holds that was last written before there was a ``schema`` field."""
    client, keys = broker.connection.client, broker.connection.keys
    client.hset(keys.ctl, mapping={"step": 3, "epoch": 2, "state": "running", "lineage": "start"})
    client.hset(keys.services, "trainer", b"\x82\xa4type\xa9heartbeat\xa6schema\x01")


def test_a_run_of_an_older_version_is_refused_and_can_be_purged(
    make_broker: Callable[..., Broker], server: EmbeddedServer
) -> None:
    as_of_schema_one(make_broker("oldrun"))
    config = config_of("oldrun", server)
    expected = (
        f"run 'oldrun' was written by an older Tidemill (schema 1, this one reads {SCHEMA_VERSION}): finish it with"
        " that version, or delete it: `tidemill purge oldrun`"
    )
    with pytest.raises(ConfigError, match=f"^{re.escape(expected)}") as refusal:
        Broker.connect(config)
    assert "\n" not in str(refusal.value)
    runner = CliRunner()
    looked = runner.invoke(app, ["status", "oldrun", "--url", server.url])
    assert looked.exit_code != 0
    assert make_broker("oldrun").connection.client.hget(make_broker("oldrun").connection.keys.ctl, "step") == b"3"
    purged = runner.invoke(app, ["purge", "oldrun", "--url", server.url, "--yes"])
    assert (purged.exit_code, purged.stdout.strip()) == (0, "deleted 2 keys")
    assert Broker.connect(config).measure_memory() == 0


@pytest.mark.parametrize("schema", [SCHEMA_VERSION + 1, 1])
def test_the_schema_of_a_run_is_written_when_its_trainer_takes_over(
    make_broker: Callable[..., Broker], server: EmbeddedServer, schema: int
) -> None:
    run = f"schema-{schema}"
    broker = make_broker(run)
    take_over(broker)
    client: Any = Broker.connect(config_of(run, server)).connection.client
    client.hset(broker.connection.keys.ctl, "schema", schema)
    with pytest.raises(ConfigError, match=f"schema {schema}, this one reads {SCHEMA_VERSION}"):
        Broker.connect(config_of(run, server))
    assert Broker.connect(config_of(run, server), any_schema=True).purge() > 0


def test_a_run_whose_control_state_is_of_another_type_is_left_to_its_trainer(
    make_broker: Callable[..., Broker], server: EmbeddedServer
) -> None:
    broker = make_broker("odd")
    broker.connection.client.set(broker.connection.keys.ctl, "x")
    assert Broker.connect(config_of("odd", server))
    broker.purge()
