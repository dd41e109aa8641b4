"""Generators take work as they get through with it."""

from __future__ import annotations

import asyncio
from collections import Counter
from pathlib import Path

import pytest

from broker.client import Broker
from tests.support.models.tiny_model import make_tiny_model
from tests.support.producers.generator_service import (
    begin_run,
    make_config,
    make_engine,
    make_task,
    read_published,
    run_generator_while,
)

pytestmark = pytest.mark.integration
TASKS = 60


async def test_a_slow_and_a_fast_generator_share_the_tasks_by_their_speed(broker: Broker, tmp_path: Path) -> None:
    begin_run(broker, tmp_path, staleness=TASKS)
    broker.ledger.admit_all([make_task(task_id) for task_id in range(TASKS)])
    config = make_config(make_tiny_model(tmp_path / "model"), tmp_path, max_samples=4)
    made: Counter[str] = Counter()
    done = asyncio.Event()

    async def count() -> None:
        made.update(item.generator for item in await read_published(broker, 2 * TASKS))
        done.set()

    fast = make_engine(config, min_length=20, max_length=20, token_s=0.002)
    slow = make_engine(config, min_length=20, max_length=20, token_s=0.02)
    await asyncio.gather(
        run_generator_while(config, broker, fast, count, "fast"),
        run_generator_while(config, broker, slow, done.wait, "slow"),
    )
    assert made["fast"] > 2 * made["slow"] > 0
