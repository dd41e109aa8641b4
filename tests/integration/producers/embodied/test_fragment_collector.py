"""Environments that are stepped together: ends, last observations, processes that are lost, and what is refused."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from producers.embodied.environment_process import EnvironmentSpec
from producers.embodied.fragment_collector import FragmentCollector
from producers.embodied.mlp_engine import Acted, Floats
from schemas.errors import ConfigError, DataError

MODULE = "tests.support.embodied.environments"


@contextmanager
def collector(envs: int = 1, processes: int = 1, squashed: bool = False, **args: Any) -> Iterator[FragmentCollector]:
    deadlines = {name: args.pop(name) for name in ("step_s", "reset_s") if name in args}
    made = FragmentCollector(EnvironmentSpec("Counting-v0", args, [MODULE], **deadlines), envs, 0, processes, squashed)
    yield made
    made.close()


def act(observations: Floats, rng: np.random.Generator) -> Acted:
    return Acted(np.zeros(len(observations), np.int32), np.full(len(observations), -0.5, np.float32), 7)


@pytest.mark.parametrize(("truncates", "processes"), [(True, 1), (False, 2)])
def test_the_last_observation_of_a_truncated_episode_is_kept(truncates: bool, processes: int) -> None:
    with collector(2, processes, truncates=truncates) as made:
        found = made.collect(4, act)
        assert found is not None
        columns = found.fragment.numpy()
        assert columns["observations"][:, 0, 0].tolist() == [0, 1, 2, 0, 1]
        assert columns["ends"][:, 1].tolist() == [0, 0, 2 if truncates else 1, 0]
        assert columns["last"].tolist() == ([[3], [3]] if truncates else [])
        assert [(span.version, span.start, span.end) for span in found.spans] == [(7, 0, 4)]
        means = {"return": 3, "length": 3, "success_once": 1, "success_at_end": 0, "restarts": 0}
        assert found.episodes.metrics() == means
        # The environments live on.
        again = made.collect(2, act)
        assert again is not None
        assert again.fragment.numpy()["observations"][:, 0, 0].tolist() == [1, 2, 0]


def test_a_fragment_ends_when_the_engine_aborts_and_the_next_one_begins_in_step() -> None:
    answers = iter([True, True, True, False])
    with collector(3, 2, length=100) as made:
        assert made.collect(4, lambda seen, rng: act(seen, rng) if next(answers) else None) is None
        found = made.collect(1, act)
        assert found is not None
        assert found.fragment.numpy()["observations"][0, :, 0].tolist() == [2, 1, 1]


def test_a_fragment_carries_what_the_episodes_under_way_have_earned() -> None:
    """Rewards of 1 in episodes of 3 steps, at a discount of 0.5."""
    made = FragmentCollector(EnvironmentSpec("Counting-v0", {}, [MODULE]), 2, 0, 2, discount=0.5)
    fragments = [found.fragment for _ in range(3) if (found := made.collect(2, act)) is not None]
    made.close()
    carried = [fragment.carried.numpy().tolist() for fragment in fragments if fragment.carried is not None]
    assert carried == [[0, 0], [1.5, 1.5], [1, 1]]
    with collector(1) as plain:
        found = plain.collect(1, act)
        assert found is not None
        assert found.fragment.carried is None


@pytest.mark.parametrize("fault", ["crash", "hang", "raise"])
def test_a_lost_process_is_replaced_and_its_episode_is_cut_at_what_was_last_seen(fault: str) -> None:
    """One process of two environments is lost at every 40th of its steps, which is the 20th of each environment."""
    with collector(2, 1, length=1000, fault=fault, at=40, step_s=1.0) as made:
        found = made.collect(30, act)
    assert found is not None
    columns = found.fragment.numpy()
    # 19 steps were finished. The next observation was 19; it is the last of the truncated episode.
    assert columns["ends"][:, 0].tolist() == [0] * 18 + [2] + [0] * 11
    assert columns["observations"][:, 1, 0].tolist() == [*range(19), *range(12)]
    assert columns["last"].tolist() == [[19], [19]]
    assert columns["rewards"].sum() == 60
    assert found.episodes.metrics() == {"restarts": 1}, "a broken episode counts nowhere else"


def test_others_go_on_while_a_process_is_replaced() -> None:
    with collector(2, 2, length=1000, fault="crash", at=25) as made:
        found = made.collect(30, act)
        assert found is not None
        assert found.episodes.restarts == 2, "each of the two processes at its own 25th step"
        assert found.fragment.numpy()["ends"].sum(0).tolist() == [2, 2]


def test_of_a_group_of_processes_the_one_that_is_lost_alone_begins_again() -> None:
    """Of five environments in four processes the last has two, and is lost at its 40th step; it forms a group with the
    third."""
    with collector(5, 4, length=1000, fault="crash", at=40) as made:
        found = made.collect(30, act)
    assert found is not None
    columns = found.fragment.numpy()
    for i in range(3):
        assert columns["observations"][:, i, 0].tolist() == list(range(31))
    for i in (3, 4):
        assert columns["observations"][:, i, 0].tolist() == [*range(19), *range(12)]
    assert columns["ends"].sum(0).tolist() == [0, 0, 0, 2, 2]
    assert columns["rewards"].sum() == 150
    assert found.episodes.metrics() == {"restarts": 1}


def test_a_process_that_is_lost_again_and_again_fails_the_fragment() -> None:
    with (
        collector(fault="raise", at=2) as made,
        pytest.raises(DataError, match="Counting-v0: lost 4 times in a row: RuntimeError: the arm is stuck"),
    ):
        made.collect(40, act)


def test_a_reward_that_is_not_finite_is_named() -> None:
    with (
        collector(fault="nan") as made,
        pytest.raises(DataError, match="environment Counting-v0: a reward is not finite"),
    ):
        made.collect(1, act)


def test_actions_of_a_squashed_policy_are_scaled_to_the_bounds() -> None:
    def squashed(observations: Floats, rng: np.random.Generator) -> Acted:
        return Acted(np.array([[-1.0], [0.5]], np.float32), np.zeros(2, np.float32), 0)

    with collector(2, 1, squashed=True, scale=8.0) as made:
        found = made.collect(1, squashed)
    assert found is not None
    assert found.fragment.numpy()["rewards"].tolist() == [[0.0, 6.0]]
    assert found.fragment.numpy()["actions"].tolist() == [[[-1.0], [0.5]]], "the fragment has them as the policy drew"


def test_one_half_is_stepped_while_the_policy_acts_for_the_other(tmp_path: Path) -> None:
    noted, acts = tmp_path / "steps", 0
    noted.touch()

    def patient(observations: Floats, rng: np.random.Generator) -> Acted:
        """Act once the half that was acted for before has been stepped."""
        nonlocal acts
        deadline = time.monotonic() + 60
        while noted.stat().st_size < acts:
            assert time.monotonic() < deadline, "one half waits for the other's action"
            time.sleep(0.001)
        acts += 1
        return act(observations, rng)

    with collector(2, 2, noted=str(noted), length=1000) as made:
        assert made.collect(20, patient) is not None
    assert noted.stat().st_size == 40


@pytest.mark.parametrize(
    ("id", "reason"),
    [
        ("CliffWalking-v1", "environment CliffWalking-v1: ValueError: observations Discrete"),
        ("NoSuch-v0", "environment NoSuch-v0: "),
    ],
)
def test_what_is_not_supported_is_refused_by_name(id: str, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        EnvironmentSpec(id).shape()


@pytest.mark.parametrize(
    ("args", "named"),
    [
        ({"counts": [[2, 2], [2, 2]]}, r"MultiDiscrete\("),
        ({"counts": [2, 3], "start": 1}, r"MultiDiscrete\("),
        ({"start": 1}, r"Discrete\(2, start=1\)"),
    ],
)
def test_actions_that_are_not_supported_are_refused_by_name(args: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=rf"Counting-v0: ValueError: actions {named}"):
        EnvironmentSpec("Counting-v0", args, [MODULE]).shape()


def test_an_action_may_have_several_parts() -> None:
    spec = EnvironmentSpec("Counting-v0", {"counts": [3, 2], "length": 100}, [MODULE])
    assert (spec.shape().actions, spec.shape().continuous) == ((3, 2), False)
    made = FragmentCollector(spec, 3, 0, 2)
    actions = iter([[[2, 1]], [[2, 0], [1, 1]]] * 2)

    def chosen(observations: Floats, rng: np.random.Generator) -> Acted:
        return Acted(np.array(next(actions), np.int32), np.zeros(len(observations), np.float32), 0)

    found = made.collect(2, chosen)
    made.close()
    assert found is not None
    assert found.fragment.numpy()["actions"].tolist() == [[[2, 1], [2, 0], [1, 1]]] * 2
    assert found.fragment.numpy()["rewards"].tolist() == [[1, 0, 0]] * 2, "the environment sees what was chosen"


def test_an_interpreter_that_is_not_there_is_named() -> None:
    with pytest.raises(ConfigError, match="environment CartPole-v1: its process ended"):
        EnvironmentSpec("CartPole-v1", python="/no/python").shape()


def test_sizes_are_those_of_the_spaces() -> None:
    shape = EnvironmentSpec("CartPole-v1").shape()
    assert (shape.observations, shape.actions, shape.continuous, shape.squashed) == (4, 2, False, False)
    shape = EnvironmentSpec("Pendulum-v1").shape()
    assert (shape.observations, shape.actions, shape.continuous, shape.squashed) == (3, 1, True, True)
