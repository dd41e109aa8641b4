"""Generators take work as they get through with it."""

from __future__ import annotations

import asyncio
from collections import Counter
from pathlib import Path

import pytest

from broker.client import Broker
from tests.support.generator_service import configuration, engine_of, living, publish, published, task
from tests.support.tiny_model import make_tiny_model
from tests.support.trainer_sessions import begin

pytestmark = pytest.mark.integration
TASKS = 60


def test_a_slow_and_a_fast_generator_share_the_tasks_by_their_speed(broker: Broker, tmp_path: Path) -> None:
    training = begin(broker, staleness=TASKS)
    publish(broker, training, tmp_path, 1)
    broker.ledger.admit_all([task(task_id) for task_id in range(TASKS)])
    config = configuration(make_tiny_model(tmp_path / "model"), tmp_path, max_samples=4)
    made: Counter[str] = Counter()
    done = asyncio.Event()

    async def count() -> None:
        made.update(item.generator for item in await published(broker, 2 * TASKS))
        done.set()

    async def both() -> None:
        fast = engine_of(config, min_length=20, max_length=20, token_s=0.002)
        slow = engine_of(config, min_length=20, max_length=20, token_s=0.02)
        await asyncio.gather(
            living(config, broker, fast, count, "fast"), living(config, broker, slow, done.wait, "slow")
        )

    asyncio.run(both())
    assert made["fast"] > 2 * made["slow"] > 0
