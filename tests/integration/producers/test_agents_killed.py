"""Generators that are killed with ``kill -9`` in the middle of agents' episodes: real processes, a real broker."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from broker.client import Broker
from broker.connection.embedded import EmbeddedServer
from tests.support.killed_agents import play

pytestmark = [pytest.mark.integration, pytest.mark.timeout(180)]


def test_episodes_under_kills_are_those_without_and_only_requests_under_way_are_asked_again(
    server: EmbeddedServer, make_broker: Callable[..., Broker], tmp_path: Path
) -> None:
    killed = play(tmp_path / "killed", make_broker("killed"), server.url, episodes=8, calls=4, kills=2)
    quiet = play(tmp_path / "quiet", make_broker("quiet"), server.url, episodes=8, calls=4, kills=0)
    samples = [(found.task_id, found.sample) for found in killed.published]
    assert sorted(samples) == [(task_id, sample) for task_id in range(4) for sample in range(2)]
    assert killed.answers == quiet.answers
    assert 0 <= killed.begun_again <= killed.in_flight + killed.kills
    assert sum(found.metrics["replayed"] for found in killed.published) > 0
    assert quiet.begun_again == 0
    assert all(len(found.rows()) == 1 for found in killed.published)
