"""What the workflow refuses before a run starts, and an evaluation whose environments crash."""

import asyncio
import json
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gymnasium
import numpy as np
import pytest

from producers.datasets.loading import build_dataset
from producers.embodied.environment_process import EnvironmentLost, EnvironmentSpec
from producers.embodied.episode_groups import play_episodes, play_group
from producers.embodied.fragment_collector import FragmentCollector
from producers.embodied.fragment_workflow import Fragments
from producers.embodied.mlp_engine import Acted, Floats
from schemas.config import DatasetConfig
from schemas.errors import ConfigError, DataError

MODULE = "tests.support.embodied.environments"


def start(tmp_path: Path, args: dict[str, Any], stall_s: float = 300.0, **shape: Any) -> Fragments:
    (tmp_path / "config.json").write_text(json.dumps({"observations": 1, "actions": 2, **shape}))
    config = SimpleNamespace(
        model=SimpleNamespace(path=str(tmp_path)),
        train=[SimpleNamespace(args={"id": "Counting-v0", "modules": [MODULE], **args})],
        eval=None,
        generator=SimpleNamespace(stall_s=stall_s),
        compares_episodes=False,
        reward_discount=None,
        base=tmp_path,
    )
    services: Any = SimpleNamespace(config=config)
    workflow = Fragments()
    asyncio.run(workflow.start(services))
    return workflow


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


def test_modules_and_the_interpreter_are_looked_for_beside_the_configuration(tmp_path: Path) -> None:
    """A task has the words of the configuration, since a generator may have its folder in another place."""
    interpreter = tmp_path / "bin" / "python"
    interpreter.parent.mkdir()
    interpreter.write_text(f'#!/bin/sh\nTHROUGH=bin exec {sys.executable} "$@"\n')
    interpreter.chmod(0o755)
    (tmp_path / "beside.py").write_text(f"import os, {MODULE}\nassert os.environ['THROUGH'] == 'bin'\n")
    args = {"id": "Counting-v0", "modules": ["beside"], "python": "bin/python", "envs": 1, "steps": 3}
    example = build_dataset(DatasetConfig(name="gymnasium", args=args), tmp_path)[0]
    assert (example.data["python"], example.data["modules"]) == ("bin/python", ["beside"])
    assert str(tmp_path) not in str(example.data)
    workflow = start(tmp_path, args)
    task: Any = SimpleNamespace(kind="train", data=example.data, text="")
    engine: Any = PlainEngine()
    assert [workflow._play_fragment(engine, task, 0).reward for _ in range(2)] == [3, 3]
    assert [len(idle) for idle in workflow._idle.values()] == [1], "both have the same environments"
    asyncio.run(workflow.close())


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


def test_pictures_and_parts_are_observed_as_they_are() -> None:
    """A Dict in the order of its names, a picture in bytes; the last observation of an episode, too."""
    spec = EnvironmentSpec("Seen-v0", {"parts": True}, [MODULE])
    assert spec.shape().observations == 3
    collector = FragmentCollector(spec, 2, 0)
    found = collector.collect(3, act)
    collector.close()
    assert found is not None
    assert found.fragment.numpy()["observations"][:, 0].tolist() == [[0.5, -0.5, t % 2] for t in range(4)]
    spec = EnvironmentSpec("Seen-v0", {}, [MODULE])
    assert spec.shape().observations == (8, 10, 3)
    collector = FragmentCollector(spec, 2, 3)
    group = play_group(collector, 3, 4, act)
    collector.close()
    assert group is not None
    for one in group:
        seen = one.fragment.numpy()["observations"]
        assert (seen.dtype, seen.shape) == (np.uint8, (3, 1, 240))
        assert set(seen[1].reshape(-1).tolist()) == {21, 200}


def test_an_episode_that_a_crash_breaks_off_is_played_again_from_its_seed() -> None:
    """The process crashes at its 60th step, in the third episode of 25 steps, and its successor does not."""
    collector = FragmentCollector(
        EnvironmentSpec("Counting-v0", {"length": 25, "fault": "crash", "at": 60}, [MODULE]), 1, 0
    )
    for _ in range(3):
        parts = play_episodes(collector, 5, 1, act)
        assert parts is not None
        assert (len(parts), parts[-1].episodes.returns) == (25, [25.0])
    collector.close()


def test_an_episode_that_always_crashes_fails() -> None:
    collector = FragmentCollector(
        EnvironmentSpec("Counting-v0", {"length": 50, "fault": "crash", "at": 30}, [MODULE]), 1, 0
    )
    with pytest.raises(EnvironmentLost, match="the episode of seed 5 was broken off 3 times"):
        play_episodes(collector, 5, 1, act)
    collector.close()


class PlainEngine:
    """Acts without weights."""

    @contextmanager
    def playing(self) -> Iterator[int]:
        yield 0

    def act(self, observations: Floats, rng: np.random.Generator, begun: int, greedy: bool = False) -> Acted:
        return act(observations, rng)


class Chances:
    """Ends an episode with another chance at each step, so that lengths differ."""

    def __call__(self, observations: Floats, rng: np.random.Generator) -> Acted:
        actions = rng.integers(0, 2, len(observations)).astype(np.int32)
        return Acted(actions, np.full(len(observations), -0.7, np.float32), 3)


@pytest.mark.parametrize("processes", [1, 3])
def test_a_group_has_an_episode_of_each_environment_from_one_state(processes: int) -> None:
    collector = FragmentCollector(EnvironmentSpec("CartPole-v1"), 5, 0, processes)
    for seed in (11, 12):
        group = play_group(collector, seed, 7, Chances())
        assert group is not None
        first = gymnasium.make("CartPole-v1").reset(seed=seed)[0]
        lengths = set()
        for one in group:
            found = one.fragment.numpy()
            assert found["observations"][0, 0].tolist() == first.tolist()
            length = one.fragment.steps
            assert found["ends"][:, 0].tolist() == [0] * (length - 1) + [1]
            assert (one.episodes.returns, one.episodes.lengths) == ([float(length)], [length])
            assert [(span.version, span.end) for span in one.spans] == [(3, length)]
            # Played again by the same actions, it is the same episode.
            env = gymnasium.make("CartPole-v1")
            seen = [env.reset(seed=seed)[0], *(env.step(int(action))[0] for action in found["actions"][:, 0])]
            np.testing.assert_allclose(found["observations"][:-1, 0], np.array(seen)[:-1])
            lengths.add(length)
        assert len(lengths) > 1
    collector.close()


def test_a_truncated_episode_of_a_group_has_its_last_observation_and_success() -> None:
    collector = FragmentCollector(EnvironmentSpec("Counting-v0", {"length": 4}, [MODULE]), 3, 0)
    group = play_group(collector, 0, 3, act)
    assert group is not None
    for one in group:
        assert one.fragment.numpy()["last"].tolist() == [[4.0]]
        assert (one.episodes.once, one.episodes.at_end) == ([1.0], [0.0])
    collector.close()


def test_a_group_that_always_crashes_fails() -> None:
    args = {"length": 50, "fault": "crash", "at": 50}
    collector = FragmentCollector(EnvironmentSpec("Counting-v0", args, [MODULE]), 2, 0)
    with pytest.raises(EnvironmentLost, match="the group of seed 5 was broken off 3 times"):
        play_group(collector, 5, 40, act)
    collector.close()


def test_a_reward_that_is_not_finite_fails_its_fragment_and_no_other() -> None:
    args = {"length": 1000, "fault": "nan", "at": 45}
    data = {"id": "Counting-v0", "args": args, "modules": [MODULE], "envs": 1, "processes": 1, "steps": 30, "seed": 0}
    task: Any = SimpleNamespace(kind="train", data=data, text="")
    engine: Any = PlainEngine()
    workflow = Fragments()
    assert workflow._play_fragment(engine, task, 0).reward == 30
    with pytest.raises(DataError, match="environment Counting-v0: a reward is not finite"):
        workflow._play_fragment(engine, task, 0)
    found = workflow._play_fragment(engine, task, 0)
    assert found.fragment is not None
    assert found.fragment.numpy()["observations"][0].tolist() == [[0]], "fresh environments"
    asyncio.run(workflow.close())
