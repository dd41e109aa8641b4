"""Observations and rewards normalised as by VecNormalize, and moments that travel with the version that has them."""

import copy
import json
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch

from consumers.trainer.checkpoint.compare import compare
from consumers.trainer.checkpoint.store import CheckpointStore
from consumers.trainer.data.groups import Group
from consumers.trainer.distributed.ranks import Ranks
from consumers.trainer.fragments.moments import Moments
from consumers.trainer.fragments.transitions import discounted_returns
from consumers.trainer.model.hf_weights import named_weights
from consumers.trainer.step.build import build_learner
from consumers.trainer.step.fragment_step import PpoStep
from producers.embodied.environment_process import EnvironmentSpec
from producers.embodied.fragment_collector import Collected, FragmentCollector
from producers.embodied.mlp_engine import Acted, Perceptron
from schemas.config import parse_config
from schemas.errors import DataError
from schemas.policy_shape import PolicyShape
from tests.support.models.pretended_gpu import pretend_gpu

SPEC = EnvironmentSpec("Pendulum-v1")
DISCOUNT = 0.9


def make_step(folder: Path, lr: float = 0.01) -> PpoStep:
    shape = {"observations": 3, "actions": 1, "continuous": True, "hidden": [8], "normalise": True}
    (folder / "config.json").write_text(json.dumps(shape))
    config = parse_config(
        {
            "run": {"folder": str(folder / "run")},
            "model": {"kind": "mlp", "path": str(folder), "dtype": "float32"},
            "train": {"name": "gymnasium", "args": {"id": SPEC.id}},
            "reward": {"terms": [{"name": "episode"}]},
            "generator": {"engine": "mlp", "workflow": {"name": "fragments"}},
            "trainer": {
                "advantage": {"name": "gae", "args": {"gamma": DISCOUNT}},
                "critic": {"optimizer": {"lr": lr}},
                "optimizer": {"lr": lr},
                "scale_rewards": True,
                "epochs": 2,
            },
        }
    )
    torch.manual_seed(0)
    return cast(PpoStep, build_learner(config, Ranks()))


def play(collector: FragmentCollector, step: PpoStep, folder: Path) -> Collected:
    """A fragment by the weights that would be published now."""
    policy = Perceptron.of(
        {n: value.cpu().numpy() for n, value in named_weights(step.policy)}, PolicyShape.read(folder)
    )

    def act(seen: Any, rng: np.random.Generator) -> Acted:
        return Acted(*policy.sample(policy.outputs(seen), rng, greedy=False), 0)

    found = collector.collect(16, act)
    assert found is not None
    return found


def train(step: PpoStep, number: int, played: Collected) -> dict[str, float]:
    own: Any = SimpleNamespace(fragment=played.fragment, versions=partial(np.zeros, 16), spans=played.spans)
    return step.run(step.planner.plan([Group(number, [(own, 0.0)])]).batch(0), number).metrics


def test_moments_are_those_of_all_rows() -> None:
    rng = np.random.default_rng(0)
    parts = [rng.normal(100, 3, (n, 4)).astype(np.float32) for n in (5, 1, 300, 40)]
    moments = Moments(4)
    untouched = torch.from_numpy(parts[0])
    assert torch.equal(moments(untouched), untouched.clamp(-10, 10)), "before the first rows mean 0 and variance 1"
    before = moments.mean
    for part in parts:
        moments.add(torch.from_numpy(part))
    rows = np.concatenate(parts).astype(np.float64)
    np.testing.assert_allclose(moments.mean, rows.mean(0), rtol=1e-6)
    np.testing.assert_allclose(moments.variance, rows.var(0), rtol=1e-5)
    assert int(moments.count) == 346
    assert before.tolist() == [0, 0, 0, 0], "a snapshot that is being written keeps its own"
    assert float(moments(torch.full((1, 4), 1e6)).max()) == 10


def vec_normalize(rewards: Any, ends: Any, discount: float) -> tuple[Any, float]:
    """Discounted returns step by step, and their variance, by the rules of Stable-Baselines3's VecNormalize."""
    total, found = np.zeros(rewards.shape[1]), []
    for reward, end in zip(rewards, ends, strict=True):
        total = total * discount + reward
        found.append(total.copy())
        total[end > 0] = 0
    return np.array(found), float(np.var(found))


def test_rewards_are_divided_by_the_deviation_of_returns_across_fragments(tmp_path: Path) -> None:
    """Fragments of 16 steps, episodes of 200: a return continues where the fragment before it ended."""
    step = make_step(tmp_path)
    collector = FragmentCollector(SPEC, 3, 0, discount=DISCOUNT)
    fragments = []
    for number in range(14):
        played = play(collector, step, tmp_path)
        fragments.append(played.fragment)
        train(step, number, played)
    collector.close()
    columns = [fragment.numpy() for fragment in fragments]
    rewards, ends = (np.concatenate([one[name] for one in columns]) for name in ("rewards", "ends"))
    assert np.count_nonzero(ends) == 3, "each episode has ended once"
    returns, variance = vec_normalize(rewards.astype(np.float64), ends, DISCOUNT)
    np.testing.assert_allclose(discounted_returns(fragments, DISCOUNT)[:, 0], returns.reshape(-1), rtol=1e-4)
    assert step.critic is not None
    moments = cast(Any, step.critic.critic).returns
    np.testing.assert_allclose(moments.variance, variance, rtol=1e-4)
    scaled = moments.scale(torch.tensor([-8.0, 1e9]))
    np.testing.assert_allclose(scaled, [-8 / np.sqrt(variance + 1e-8), 10], rtol=1e-4)


def test_a_version_has_the_moments_that_its_fragments_were_normalised_by(tmp_path: Path) -> None:
    step = make_step(tmp_path, lr=1e-30)
    collector = FragmentCollector(SPEC, 4, 0, discount=DISCOUNT)
    stale = play(collector, step, tmp_path)
    assert train(step, 0, stale)["kl"] < 1e-10
    actor = cast(Any, step.policy)
    assert int(actor.moments.count) == 64
    np.testing.assert_allclose(
        actor.moments.mean, stale.fragment.numpy()["observations"][:-1].reshape(-1, 3).mean(0), atol=1e-6
    )
    assert step.critic is not None
    assert torch.equal(cast(Any, step.critic.critic).moments.mean, actor.moments.mean)
    # Of the newest version the trainer computes what the generator did, though its moments have moved since version 0.
    fresh = play(collector, step, tmp_path)
    collector.close()
    assert train(step, 1, fresh)["kl"] < 1e-10
    # A stale fragment has raw observations: its ratio is that of the two policies, each with its own moments.
    columns = stale.fragment.numpy()
    policy = Perceptron.of({n: value.cpu().numpy() for n, value in named_weights(actor)}, PolicyShape.read(tmp_path))
    outputs = policy.outputs(columns["observations"][:-1].reshape(-1, 3))
    now = policy.logprobs(outputs, columns["actions"].reshape(-1, 1)).astype(np.float64)
    ratio = now - columns["logprobs"].reshape(-1)
    kl = float(np.mean(np.exp(ratio) - 1 - ratio))
    assert kl > 1e-10
    assert train(step, 2, stale)["kl"] == pytest.approx(kl, rel=1e-3)


def test_a_step_without_a_finite_gradient_leaves_the_moments(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    step = make_step(tmp_path)
    collector = FragmentCollector(SPEC, 2, 0, discount=DISCOUNT)
    played = play(collector, step, tmp_path)
    collector.close()
    cast(Any, step.policy).log_std.data.fill_(torch.nan)
    before = copy.deepcopy(dict(named_weights(step.policy)))
    assert train(step, 0, played)["skipped"] == 1
    for name, value in named_weights(step.policy):
        assert torch.equal(value.nan_to_num(), before[name].nan_to_num()), name


def test_weights_without_moments_are_refused(tmp_path: Path) -> None:
    step = make_step(tmp_path)
    tensors = {name: value.numpy() for name, value in named_weights(step.policy) if "moments" not in name}
    with pytest.raises(DataError, match="are not those of model"):
        Perceptron.of(tensors, PolicyShape.read(tmp_path))


@pytest.mark.parametrize("pretended", [False, True])
def test_a_trainer_that_is_built_again_continues_with_the_same_bits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pretended: bool
) -> None:
    """Fragments are stale from the second on: all are of version 0. pretended: on a pretended GPU."""
    with pretend_gpu(monkeypatch) if pretended else nullcontext():
        continue_from_a_checkpoint(tmp_path)


def continue_from_a_checkpoint(tmp_path: Path) -> None:
    step = make_step(tmp_path)
    collector = FragmentCollector(SPEC, 2, 0, discount=DISCOUNT)
    fragments = [play(collector, step, tmp_path) for _ in range(4)]
    collector.close()
    store = CheckpointStore(tmp_path / "checkpoints")
    for number, played in enumerate(fragments):
        if number == 2:
            store.save(step, step=2, version=2, leader_term=1, extra={})
        train(step, number, played)
    again = make_step(tmp_path)
    assert store.load(store.at(), again).step == 2
    for number in (2, 3):
        train(again, number, fragments[number])
    store.save(again, step=4, version=4, leader_term=1, extra={})
    found = compare(step, store.at())
    assert found.equal, found.differs
    assert step.critic is not None
    assert int(cast(Any, step.critic.critic).returns.count) == 4 * 32
