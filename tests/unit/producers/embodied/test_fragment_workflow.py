"""What the workflow refuses before a run starts, and an evaluation whose environments crash."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from producers.embodied.environment_process import EnvironmentLost, EnvironmentSpec
from producers.embodied.fragment_collector import FragmentCollector
from producers.embodied.fragment_workflow import Fragments, _episode
from producers.embodied.mlp_engine import Acted, Floats
from schemas.errors import ConfigError, DataError

MODULE = "tests.support.embodied.environments"


def start(tmp_path: Path, args: dict[str, Any], stall_s: float = 300.0, **shape: Any) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"observations": 1, "actions": 2, **shape}))
    config = SimpleNamespace(
        model=SimpleNamespace(path=str(tmp_path)),
        train=[SimpleNamespace(args={"id": "Counting-v0", "modules": [MODULE], **args})],
        eval=None,
        generator=SimpleNamespace(stall_s=stall_s),
    )
    services: Any = SimpleNamespace(config=config)
    asyncio.run(Fragments().start(services))


def test_a_policy_that_fits_is_taken(tmp_path: Path) -> None:
    start(tmp_path, {})


@pytest.mark.parametrize(
    ("args", "shape", "reason"),
    [
        ({}, {"actions": 3}, "a policy for Counting-v0 needs observations 1, actions 2, continuous false"),
        (
            {"args": {"scale": float("inf")}},
            {"actions": 1, "continuous": True, "squashed": True},
            "environment Counting-v0: a squashed policy needs actions with finite bounds",
        ),
        ({"reset_s": 400}, {}, "step_s 30 and reset_s 400 must be below generator.stall_s 300"),
        ({"args": {"length": "x", "no": 1}}, {}, "environment Counting-v0: TypeError"),
    ],
)
def test_what_does_not_fit_is_named(tmp_path: Path, args: dict[str, Any], shape: dict[str, Any], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        start(tmp_path, args, **shape)


async def test_a_fragment_under_way_is_waited_for_beside_the_event_loop() -> None:
    workflow = Fragments()
    workflow._turn.acquire()
    threading.Timer(0.5, workflow._turn.release).start()
    closing = asyncio.create_task(workflow.close())
    await asyncio.sleep(0.05)
    assert not closing.done()
    await closing


def act(observations: Floats, rng: np.random.Generator) -> Acted:
    return Acted(np.zeros(len(observations), np.int32), np.full(len(observations), -0.5, np.float32), 7)


def test_an_episode_that_a_crash_breaks_off_is_played_again_from_its_seed() -> None:
    """The process crashes at its 60th step, in the third episode of 25 steps, and its successor does not."""
    collector = FragmentCollector(
        EnvironmentSpec("Counting-v0", {"length": 25, "fault": "crash", "at": 60}, [MODULE]), 1, 0
    )
    for _ in range(3):
        parts = _episode(collector, 5, act)
        assert parts is not None
        assert (len(parts), parts[-1].episodes.returns) == (25, [25.0])
    collector.close()


def test_an_episode_that_always_crashes_fails() -> None:
    collector = FragmentCollector(
        EnvironmentSpec("Counting-v0", {"length": 50, "fault": "crash", "at": 30}, [MODULE]), 1, 0
    )
    with pytest.raises(EnvironmentLost, match="the episode of seed 5 was broken off 3 times"):
        _episode(collector, 5, act)
    collector.close()


class PlainEngine:
    """Acts without weights."""

    @contextmanager
    def playing(self) -> Iterator[int]:
        yield 0

    def act(self, observations: Floats, rng: np.random.Generator, begun: int) -> Acted:
        return act(observations, rng)


def test_a_reward_that_is_not_finite_fails_its_fragment_and_no_other() -> None:
    args = {"length": 1000, "fault": "nan", "at": 45}
    data = {"id": "Counting-v0", "args": args, "modules": [MODULE], "envs": 1, "processes": 1, "steps": 30, "seed": 0}
    task: Any = SimpleNamespace(data=data, text="")
    engine: Any = PlainEngine()
    workflow = Fragments()
    assert workflow._play_fragment(engine, task, 0).reward == 30
    with pytest.raises(DataError, match="environment Counting-v0: a reward is not finite"):
        workflow._play_fragment(engine, task, 0)
    found = workflow._play_fragment(engine, task, 0)
    assert found.fragment is not None
    assert found.fragment.numpy()["observations"][0].tolist() == [[0]], "fresh environments"
    asyncio.run(workflow.close())
