"""Generators that are killed, or asked to end, in the middle of agents' episodes: real processes, a real broker."""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from broker.client import Broker
from broker.connection.embedded import EmbeddedServer
from tests.support.producers.killed_agents import play

pytestmark = [pytest.mark.integration, pytest.mark.timeout(180)]

SAMPLES = [(task_id, sample) for task_id in range(4) for sample in range(2)]


def test_episodes_under_kills_are_those_without_and_no_call_with_an_answer_is_made_again(
    server: EmbeddedServer, make_broker: Callable[..., Broker], tmp_path: Path
) -> None:
    killed = play(tmp_path / "killed", make_broker("killed"), server.url, episodes=8, calls=4, ends=2)
    quiet = play(tmp_path / "quiet", make_broker("quiet"), server.url, episodes=8, calls=4, ends=0)
    assert sorted((found.task_id, found.sample) for found in killed.published) == SAMPLES
    assert killed.answers == quiet.answers
    assert (killed.calls, killed.answered_again) == (32, 0)
    assert killed.made_again <= killed.in_flight
    assert sum(found.metrics["replayed"] for found in killed.published) > 0
    assert (quiet.calls, quiet.made_again) == (32, 0)
    assert all(len(found.rows()) == 1 for found in killed.published)


def test_a_generator_that_is_asked_to_end_hands_over_every_call_that_was_sampled(
    server: EmbeddedServer, make_broker: Callable[..., Broker], tmp_path: Path
) -> None:
    found = play(
        tmp_path, make_broker("ended"), server.url, episodes=8, calls=4, ends=2, tool_s=0.1, sign=signal.SIGTERM
    )
    assert sorted((sample.task_id, sample.sample) for sample in found.published) == SAMPLES
    assert (found.calls, found.ended_again) == (32, 0)
    assert sum(sample.metrics["replayed"] for sample in found.published) > 0
    assert all(sample.calls == 4 and len(sample.rows()) == 1 for sample in found.published)
    assert found.slowest_end_s < 20
