"""Advantages of fragments against a scalar reference, and the networks against what generators compute."""

import json
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from consumers.trainer.algorithms.advantages import grpo
from consumers.trainer.data.groups import Group
from consumers.trainer.distributed.ranks import Ranks
from consumers.trainer.fragments.actor_critic import Actor
from consumers.trainer.fragments.transitions import Transitions, estimate_advantages
from consumers.trainer.model.hf_weights import named_weights
from consumers.trainer.step.build import build_learner
from producers.embodied.environment_process import EnvironmentSpec
from producers.embodied.episode_groups import play_group
from producers.embodied.fragment_collector import FragmentCollector
from producers.embodied.mlp_engine import Acted, Perceptron
from schemas.codec import Array
from schemas.config import parse_config
from schemas.errors import DataError
from schemas.messages import Fragment, Span
from schemas.policy_shape import PolicyShape

MODULE = "tests.support.embodied.environments"


def fragment(rewards: Any, ends: Any, actions: Any = None, observed: int = 1) -> Fragment:
    """A fragment of zeros, with so many observed numbers; rewards, ends and actions [T, N]."""
    rewards, ends = np.asarray(rewards), np.asarray(ends)
    steps, envs = rewards.shape
    return Fragment(
        envs=envs,
        observations=Array.of(np.zeros((steps + 1) * envs * observed), "f4"),
        actions=Array.of(np.zeros(rewards.size) if actions is None else actions, "i4"),
        logprobs=Array.of(np.zeros(rewards.size), "f4"),
        rewards=Array.of(rewards.reshape(-1), "f4"),
        ends=Array.of(ends.reshape(-1), "u1"),
        last=Array.of(np.zeros(int((ends == 2).sum())), "f4"),
    )


def reference(rewards: Any, ends: Any, values: Any, last: list[float], gamma: float, lam: float) -> Any:
    """GAE by its definition, in float64: the sum of discounted errors up to the end of the episode."""
    steps, envs = rewards.shape
    place = {(t, i): last[k] for k, (t, i) in enumerate(zip(*np.nonzero(ends == 2), strict=True))}
    found = np.zeros((steps, envs))
    for i in range(envs):
        for t in range(steps):
            factor = 1.0
            for k in range(t, steps):
                following = 0.0 if ends[k, i] == 1 else place.get((k, i), values[k + 1, i])
                found[t, i] += factor * (rewards[k, i] + gamma * following - values[k, i])
                if ends[k, i]:
                    break
                factor *= gamma * lam
    return found


def test_a_truncated_episode_is_continued_by_its_own_last_observation() -> None:
    """By hand: rewards of 1, gamma 0.5, lambda 1. The value after the truncation is 8, the next episode's 100."""
    found, returns = estimate_advantages(
        fragment([[1.0], [1.0], [1.0]], [[0], [2], [1]]),
        np.array([[0.0], [2.0], [100.0], [7.0]], dtype=np.float32),
        np.array([8.0], dtype=np.float32),
        gamma=0.5,
        lam=1.0,
    )
    # t=2 terminated: 1 - 100. t=1: 1 + 0.5 * 8 - 2. t=0: 1 + 0.5 * 2 - 0 + 0.5 * 3.
    np.testing.assert_allclose(found[:, 0], [3.5, 3.0, -99.0])
    np.testing.assert_allclose(returns[:, 0], [3.5, 5.0, 1.0])


@settings(max_examples=60)
@given(st.integers(0, 2**32), st.integers(1, 12), st.integers(1, 4), st.floats(0, 1), st.floats(0, 1))
def test_advantages_are_those_of_the_definition(seed: int, steps: int, envs: int, gamma: float, lam: float) -> None:
    rng = np.random.default_rng(seed)
    rewards = rng.normal(size=(steps, envs)).astype(np.float32)
    ends = rng.choice([0, 0, 1, 2], size=(steps, envs))
    values = rng.normal(size=(steps + 1, envs)).astype(np.float32)
    last = rng.normal(size=int((ends == 2).sum())).astype(np.float32)
    found, returns = estimate_advantages(fragment(rewards, ends), values, last, gamma, lam)
    expected = reference(rewards, ends, values, last.tolist(), gamma, lam)
    np.testing.assert_allclose(found, expected, atol=1e-5)
    np.testing.assert_allclose(returns, expected + values[:-1], atol=1e-5)


@pytest.mark.parametrize(
    "shape",
    [
        PolicyShape(4, 3, hidden=(8, 8)),
        PolicyShape(4, (3, 2, 5), hidden=(8, 8)),
        # More products than one thread is given: the probe is computed in parts.
        PolicyShape(4, 3, hidden=(256, 256)),
        PolicyShape(4, 3, hidden=(8, 8), normalise=True),
        PolicyShape(3, 2, continuous=True, hidden=(5, 4), squashed=True, normalise=True),
        PolicyShape(3, 2, continuous=True, hidden=(5,)),
        PolicyShape(3, 2, continuous=True, hidden=(5, 4), squashed=True, activation="relu"),
        PolicyShape((13, 17, 3), 4, hidden=(8,), filters=((5, 4, 3), (6, 3, 1))),
        PolicyShape((9, 9, 1), 2, continuous=True, hidden=(8,), filters=((4, 3, 2),)),
    ],
)
def test_a_generator_computes_the_log_probabilities_of_the_trainer(shape: PolicyShape) -> None:
    torch.manual_seed(0)
    actor = Actor(shape)
    with torch.no_grad():
        for parameter in actor.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.3)
    actor.moments.add(torch.randn(7, shape.size) * 3 + 5)
    tensors = {name: value.numpy() for name, value in named_weights(actor)}
    policy = Perceptron.of(tensors, shape)
    tokens = list(range(40))
    np.testing.assert_allclose(policy.probe(tokens), actor.probe(tokens).numpy(), atol=1e-5)
    rng = np.random.default_rng(0)
    observations: Any = rng.normal(size=(16, shape.size)).astype(np.float32)
    if shape.picture is not None:
        observations = rng.integers(0, 256, (16, shape.size), np.uint8)
    outputs = policy.outputs(observations)
    actions, logprobs = policy.sample(outputs, np.random.default_rng(1), greedy=False)
    np.testing.assert_array_equal(logprobs, policy.logprobs(outputs, actions))
    taken = torch.from_numpy(actions) if shape.continuous else torch.from_numpy(actions).long()
    expected = actor(torch.from_numpy(observations), taken)[0].detach().numpy()
    np.testing.assert_allclose(policy.logprobs(outputs, actions), expected, atol=1e-5)


def test_weights_of_another_shape_are_refused() -> None:
    tensors = {name: value.numpy() for name, value in Actor(PolicyShape(4, 3)).state_dict().items()}
    with pytest.raises(DataError, match="are not those of model"):
        Perceptron.of(tensors, PolicyShape(4, 2))


def test_episodes_are_compared_within_their_group_and_all_their_steps_count_alike() -> None:
    lengths, rewards, groups = [2, 3, 1, 4], [2.0, 4.0, 1.0, 0.0], [0, 0, 1, 1]
    samples: Any = [
        SimpleNamespace(fragment=fragment(np.ones((n, 1)), [[0]] * (n - 1) + [[1]]), versions=partial(np.zeros, n))
        for n in lengths
    ]
    advantages = grpo(np.array(rewards), np.array(groups))
    data = Transitions.of_episodes(samples, advantages)
    assert data.advantages.tolist() == pytest.approx(np.repeat([-1, 1, 1, -1], lengths) / np.sqrt(2), rel=1e-5)
    assert (len(data), float(data.values.abs().max())) == (10, 0.0)


def test_without_a_critic_a_step_makes_better_episodes_more_likely(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"observations": 4, "actions": 2, "hidden": [8], "model_type": "mlp"}')
    config = parse_config(
        {
            # Any seed that PyTorch takes.
            "run": {"folder": str(tmp_path / "run"), "seed": 2**62},
            "model": {"kind": "mlp", "path": str(tmp_path), "dtype": "float32"},
            "train": {"name": "gymnasium", "args": {"id": "CartPole-v1"}},
            "sampling": {"n": 2},
            "reward": {"terms": [{"name": "episode"}]},
            "generator": {"engine": "mlp", "workflow": {"name": "fragments"}},
            "trainer": {"advantage": {"name": "grpo"}, "epochs": 2, "optimizer": {"lr": 0.01}},
        }
    )
    step = build_learner(config, Ranks())
    assert set(step.parts()) == {"model"}
    samples = []
    for action, reward in [(0, 0.0), (1, 5.0)]:
        made = fragment(np.ones((6, 1)), [[0]] * 5 + [[1]], actions=np.full(6, action), observed=4)
        spans = [Span(0, 0, 6)]
        own: Any = SimpleNamespace(fragment=made, versions=partial(np.zeros, 6), spans=spans)
        samples.append((own, reward))
    batch = step.planner.plan([Group(0, samples)]).batch(0)
    seen = torch.zeros(1, 4)

    @torch.no_grad()
    def chance() -> float:
        return float(cast(Any, step.policy)(seen, torch.tensor([1]))[0].exp())

    before = chance()
    result = step.run(batch, 0)
    assert chance() > before + 1e-4
    assert "critic_explained_variance" not in result.metrics
    assert result.metrics["tokens"] == 12


def test_a_picture_too_small_for_the_filters_is_refused() -> None:
    with pytest.raises(ValueError, match=r"pictures of \(8, 8, 3\) are too small for filters"):
        PolicyShape((8, 8, 3), 2)
    with pytest.raises(ValueError, match="normalise is for numbers"):
        PolicyShape((84, 84, 3), 2, normalise=True)
    with pytest.raises(ValueError, match="squashed is for SAC"):
        PolicyShape((84, 84, 3), 2, continuous=True, squashed=True)


def learn(
    folder: Path, shape: dict[str, Any], spec: EnvironmentSpec, trainer: dict[str, Any], rounds: int
) -> list[float]:
    """Train without a broker on the fragments of 8 environments, or on groups of 8 episodes; returns mean rewards."""
    (folder / "config.json").write_text(json.dumps({"model_type": "mlp", **shape}))
    grouped = "critic" not in trainer
    config = parse_config(
        {
            "run": {"folder": str(folder / "run")},
            "model": {"kind": "mlp", "path": str(folder), "dtype": "float32"},
            "train": {"name": "gymnasium", "args": {"id": spec.id, "modules": [MODULE], "args": spec.args}},
            "sampling": {"n": 8 if grouped else 1},
            "reward": {"terms": [{"name": "episode"}]},
            "generator": {"engine": "mlp", "workflow": {"name": "fragments"}},
            "trainer": {"optimizer": {"lr": 0.01}, "epochs": 4, **trainer},
        }
    )
    torch.manual_seed(0)
    step = build_learner(config, Ranks())
    collector = FragmentCollector(spec, 8, 0)
    earned = []
    for number in range(rounds):
        tensors = {name: value.numpy() for name, value in named_weights(step.policy)}
        policy = Perceptron.of(tensors, PolicyShape.read(folder))

        def act(seen: Any, rng: Any, policy: Perceptron = policy) -> Acted:
            return Acted(*policy.sample(policy.outputs(seen), rng, greedy=False), 0)

        found = play_group(collector, number, 8, act) if grouped else [collector.collect(16, act)]
        samples: list[Any] = []
        for one in found or []:
            assert one is not None
            own = SimpleNamespace(
                fragment=one.fragment, versions=partial(np.zeros, one.fragment.steps), spans=one.spans
            )
            samples.append((own, float(one.fragment.rewards.numpy().sum())))
        earned.append(float(np.mean([each.fragment.rewards.numpy().mean() for each, _ in samples])))
        if len({reward for _, reward in samples}) > 1 or not grouped:
            step.run(step.planner.plan([Group(number, samples)]).batch(0), number)
    collector.close()
    return earned


PPO = {"advantage": {"name": "gae", "args": {"gamma": 0.0}}, "critic": {"optimizer": {"lr": 0.01}}}


def test_a_policy_learns_from_pictures(tmp_path: Path) -> None:
    """The brighter half is to be named."""
    shape = {"observations": [8, 10, 3], "actions": 2, "hidden": [16], "filters": [[8, 4, 2]]}
    earned = learn(tmp_path, shape, EnvironmentSpec("Seen-v0", {}, [MODULE]), {**PPO, "minibatches": 2}, 12)
    assert earned[0] < 0.7
    assert np.mean(earned[-2:]) > 0.9


@pytest.mark.parametrize("trainer", [PPO, {"advantage": {"name": "grpo"}}], ids=["ppo", "grpo"])
def test_a_policy_learns_actions_of_several_parts(tmp_path: Path, trainer: dict[str, Any]) -> None:
    """One of six combinations pays."""
    spec = EnvironmentSpec("Counting-v0", {"counts": [3, 2], "length": 4}, [MODULE])
    earned = learn(tmp_path, {"observations": 1, "actions": [3, 2], "hidden": [8]}, spec, trainer, 40)
    assert earned[0] < 0.4
    assert np.mean(earned[-2:]) > 0.9
