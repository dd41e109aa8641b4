"""SAC against an update by Stable-Baselines3, and its replay buffer: draws, files, and what follows a truncation."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from consumers.trainer.checkpoint.compare import compare
from consumers.trainer.checkpoint.store import CheckpointStore
from consumers.trainer.data.groups import Group
from consumers.trainer.distributed.ranks import Ranks
from consumers.trainer.fragments.replay_buffer import FOLDER, ReplayBuffer
from consumers.trainer.step.build import build_learner
from consumers.trainer.step.sac_step import SacStep
from deploy.checks.preflight import check_model
from schemas.codec import Array
from schemas.config import CriticConfig, TidemillConfig, parse_config
from schemas.errors import ConfigError, DiskError, InfraError
from schemas.messages import Fragment, Span, Trajectory
from tests.support.models.pretended_gpu import pretend_gpu

ORACLE = Path(__file__).with_name("sac_update.json")
OPTIMIZER = {"lr": 1e-3, "betas": [0.9, 0.999], "max_grad_norm": 1e9}


def make_config(folder: Path, squashed: bool = True, normalise: bool = False, **sac: Any) -> TidemillConfig:
    """A run; normalise: observations and rewards."""
    policy = folder / "policy"
    policy.mkdir(exist_ok=True)
    shape = {"observations": 3, "actions": 1, "continuous": True, "hidden": [8, 8], "activation": "relu"}
    (policy / "config.json").write_text(json.dumps({**shape, "squashed": squashed, "normalise": normalise}))
    return parse_config(
        {
            "run": {"folder": str(folder / "run")},
            "model": {"kind": "mlp", "path": str(policy), "dtype": "float32"},
            "train": {"name": "gymnasium", "args": {"id": "Pendulum-v1"}},
            "sampling": {"n": 1, "max_tokens": 1},
            "reward": {"terms": [{"name": "episode"}]},
            "generator": {"engine": "mlp", "workflow": {"name": "fragments"}},
            "trainer": {
                "steps": 40,
                "optimizer": OPTIMIZER,
                "sac": {"batch": 16, "start": 1, **sac},
                "scale_rewards": normalise,
            },
        }
    )


def make_step(folder: Path, squashed: bool = True, **sac: Any) -> SacStep:
    torch.manual_seed(0)
    found = build_learner(make_config(folder, squashed, **sac), Ranks())
    assert isinstance(found, SacStep)
    return found


def trajectory(number: int, steps: int = 4, envs: int = 2) -> Trajectory:
    """A random fragment; its observations begin with the task's number."""
    rng = np.random.default_rng(number)
    ends = rng.choice([0, 0, 0, 1, 2], steps * envs)
    observations = rng.normal(size=(steps + 1, envs, 3))
    observations[..., 0] = number
    fragment = Fragment(
        envs=envs,
        observations=Array.of(observations.reshape(-1), "f4"),
        actions=Array.of(rng.uniform(-1, 1, steps * envs), "f4"),
        logprobs=Array.of(np.zeros(steps * envs), "f4"),
        rewards=Array.of(rng.normal(size=steps * envs), "f4"),
        ends=Array.of(ends, "u1"),
        last=Array.of(rng.normal(size=3 * int((ends == 2).sum())), "f4"),
    )
    return Trajectory(
        run="r",
        task_id=number,
        sample=0,
        kind="train",
        tokens=Array.of([0] * steps, "i4"),
        loss_mask=Array.of([1] * steps, "u1"),
        logprobs=Array.of([0.0] * steps, "f4"),
        spans=[Span(number, 0, steps)],
        turns=[],
        finish="stop",
        prompt="",
        completion="",
        generator="g",
        fragment=fragment,
    )


def train(step: SacStep, number: int) -> dict[str, float]:
    """Take the step of this number, over a fragment that follows from it."""
    plan: Any = step.planner.plan([Group(number, [(trajectory(number), 0.0)])])
    return step.run(plan.batch(0), version=number + 1).metrics


def from_oracle(weights: dict[str, list[float]]) -> dict[str, torch.Tensor]:
    """Return the weights of Stable-Baselines3's networks by our names, flat."""
    flat = {name: torch.tensor(values) for name, values in weights.items()}
    found = {"log_alpha": flat["log_alpha"]}
    for kind in ("weight", "bias"):
        for layer in (0, 2):
            found[f"actor.layers.{layer}.{kind}"] = flat[f"actor.latent_pi.{layer}.{kind}"]
        found[f"actor.layers.4.{kind}"] = torch.cat([flat[f"actor.mu.{kind}"], flat[f"actor.log_std.{kind}"]])
        for part, ours in (("critic", "q"), ("target", "target")):
            for k in range(2):
                for layer in (0, 2, 4):
                    found[f"{ours}.{k}.{layer}.{kind}"] = flat[f"{part}.qf{k}.{layer}.{kind}"]
    return found


def own(step: SacStep) -> dict[str, torch.Tensor]:
    actor = {f"actor.{name}": value for name, value in step.policy.state_dict().items()}
    return {**actor, **step.critic[0].state_dict(), "log_alpha": step.temperature[0].log_alpha.data}


def test_an_update_is_that_of_stable_baselines3(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    oracle = json.loads(ORACLE.read_text())
    step = make_step(tmp_path)
    before, after = from_oracle(oracle["before"]), from_oracle(oracle["after"])
    for name, value in own(step).items():
        value.copy_(before[name].reshape(value.shape))
    sizes = {"observations": (-1, 3), "next_observations": (-1, 3), "actions": (-1, 1)}
    data = {name: torch.tensor(values).reshape(sizes.get(name, (-1,))) for name, values in oracle["data"].items()}
    noise = iter(oracle["noise"])
    monkeypatch.setattr("consumers.trainer.step.sac_step._normal", lambda *_: torch.tensor(next(noise))[:, None])
    step.update_once(data, torch.Generator(), 1e-3)
    for name, value in own(step).items():
        assert float((value.flatten() - after[name]).abs().max()) < 1e-5, name
        assert name.startswith("target") or not torch.equal(value.flatten(), before[name]), f"{name} did not move"


OPTIONS: list[dict[str, Any]] = [{}, {"norm": "batch", "policy_every": 3, "critics": 3, "normalise": True}]


@pytest.mark.parametrize("option", OPTIONS)
def test_a_gpu_trains_and_continues_from_a_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, option: dict[str, Any]
) -> None:
    with pretend_gpu(monkeypatch) as gpu:
        step, again = (make_step(tmp_path, start=1, **option) for _ in range(2))
        for number in range(4):
            train(step, number)
        store = CheckpointStore(tmp_path / "run" / "checkpoints")
        store.save(step, step=4, version=4, leader_term=1, extra={})
        assert store.load(store.at(), again).step == 4
        found = compare(again, store.at())
        assert found.equal, found.differs
        train(again, 4)
        assert again.policy.device == gpu


@pytest.mark.parametrize("option", OPTIONS)
def test_a_trainer_rebuilt_at_any_step_ends_with_the_same_bits(tmp_path: Path, option: dict[str, Any]) -> None:
    """Checkpoints every third step; after each step the trainer is replaced, and what no checkpoint covers is replayed.

    The ring is small enough to turn over.
    """
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
    undisturbed = make_step(tmp_path / "a", buffer=64, start=30, **option)
    for number in range(20):
        train(undisturbed, number)
    store = CheckpointStore(tmp_path / "b" / "run" / "checkpoints")
    saved = 0
    for number in range(20):
        step = make_step(tmp_path / "b", buffer=64, start=30, **option)
        if saved:
            assert store.load(store.at(), step).step == saved
        for again in range(saved, number + 1):
            train(step, again)
        if number % 3 == 2:
            saved = number + 1
            store.save(step, step=saved, version=saved, leader_term=1, extra={})
    store.save(step, step=20, version=20, leader_term=1, extra={})
    found = compare(undisturbed, store.at())
    assert found.equal, found.differs
    assert found.tensors > 35
    # Two checkpoints are kept, of 64 transitions each: no file of older ones is left.
    left = sorted(int(path.name.partition("-")[0]) for path in (tmp_path / "b" / "run" / FOLDER).iterdir())
    assert left[0] == 48, "the checkpoint of step 15 was still there: it begins at transition 56, and a file has 24"


def test_a_seed_may_be_large(tmp_path: Path) -> None:
    step = make_step(tmp_path)
    step.seed = 2**62
    assert train(step, 0)["updates"]


def test_draws_follow_from_seed_and_step(tmp_path: Path) -> None:
    buffer = ReplayBuffer(tmp_path, 100, 3, 1)
    buffer.add([trajectory(1), trajectory(2)])
    drawn = [buffer.draw(np.random.default_rng([5, step]), 32)["rewards"] for step in (3, 3, 4)]
    assert torch.equal(drawn[0], drawn[1])
    assert not torch.equal(drawn[0], drawn[2])


def test_what_follows_a_truncated_episode_is_its_own_last_observation(tmp_path: Path) -> None:
    sample = next(each for each in map(trajectory, range(50)) if {1, 2} <= set(each.fragment.ends.numpy().tolist()))
    buffer = ReplayBuffer(tmp_path, 8, 3, 1)
    assert buffer.add([sample]) == 8
    found, data = sample.fragment.numpy(), buffer._columns
    ends = found["ends"].reshape(-1)
    assert data["terminated"].tolist() == (ends == 1).tolist()
    assert np.array_equal(data["next_observations"][ends == 2], found["last"])
    others = ends != 2
    assert np.array_equal(data["next_observations"][others], found["observations"][1:].reshape(-1, 3)[others])


def test_a_damaged_file_of_the_buffer_is_named(tmp_path: Path) -> None:
    buffer = ReplayBuffer(tmp_path, 100, 3, 1)
    buffer.add([trajectory(1)])
    state = json.loads(json.dumps(buffer.state()))
    (file,) = (tmp_path / FOLDER).iterdir()
    again = ReplayBuffer(tmp_path, 100, 3, 1)
    again.restore(state)
    assert again.count == 8
    file.write_bytes(file.read_bytes()[:-1] + b"!")
    with pytest.raises(InfraError, match=f"{file.name} has changed since it was written"):
        again.restore(state)
    file.unlink()
    with pytest.raises(InfraError, match="the replay buffer cannot be read"):
        again.restore(state)


@pytest.mark.parametrize("content", ['{"learner": ', '{"learner": {}}', "[]"])
def test_a_damaged_checkpoint_keeps_no_buffer_from_being_written(tmp_path: Path, content: str) -> None:
    older = tmp_path / "checkpoints" / "step-00000001-t0001"
    older.mkdir(parents=True)
    (older / "state.json").write_text(content)
    buffer = ReplayBuffer(tmp_path, 100, 3, 1)
    buffer.add([trajectory(1)])
    assert buffer.state()["count"] == 8


def test_a_full_disk_is_reported_and_the_next_try_writes_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    buffer = ReplayBuffer(tmp_path, 100, 3, 1)
    buffer.add([trajectory(1)])
    (tmp_path / FOLDER).write_text("in the way")
    with pytest.raises(DiskError, match="cannot write the replay buffer"):
        buffer.state()
    (tmp_path / FOLDER).unlink()
    again = ReplayBuffer(tmp_path, 100, 3, 1)
    again.restore(buffer.state())
    assert np.array_equal(again._columns["rewards"], buffer._columns["rewards"])
    with pytest.raises(ConfigError, match=r"trainer\.sac\.buffer is 50, but the checkpoint has a buffer of 100"):
        ReplayBuffer(tmp_path, 50, 3, 1).restore(buffer.state())


def test_updates_follow_new_transitions_exactly(tmp_path: Path) -> None:
    step = make_step(tmp_path, updates_per_transition=0.3, start=10)
    assert [train(step, number)["updates"] for number in range(4)] == [0, 2, 3, 2]


@pytest.mark.parametrize("option", [{}, {"norm": "batch", "policy_every": 3}, {"norm": "layer", "critics": 5}])
def test_the_q_networks_learn_what_is_earned(tmp_path: Path, option: dict[str, Any]) -> None:
    """Every episode has one step, which pays the action."""
    step = make_step(tmp_path, gamma=0.0, **option)
    rng, noise = np.random.default_rng(0), torch.Generator().manual_seed(0)
    for number in range(250):
        seen = torch.from_numpy(rng.normal(size=(64, 3)).astype(np.float32))
        acts = torch.from_numpy(rng.uniform(-1, 1, (64, 1)).astype(np.float32))
        data = {"observations": seen, "next_observations": seen, "actions": acts, "terminated": torch.ones(64)}
        data["rewards"] = acts[:, 0]
        step.update_once(data, noise, 5e-3, improve=number % step.settings.policy_every == 0)
    tried = torch.tensor([[-0.9], [0.0], [0.5], [0.9]])
    with torch.no_grad():
        values = step.critic[0](torch.zeros(4, 3), tried).mean(0)
    assert values.tolist() == pytest.approx([-0.9, 0.0, 0.5, 0.9], abs=0.4)
    assert values.tolist() == sorted(values.tolist())
    assert (len(step.critic[0].target) == 0) == (option.get("norm") == "batch")


def test_without_targets_the_next_steps_values_have_no_gradient_and_means_move(tmp_path: Path) -> None:
    critic = make_step(tmp_path, norm="batch").critic[0]
    seen, acts = torch.randn(8, 3) + 5, torch.randn(8, 1)
    before = critic.state_dict()["q.0.0.running_mean"].clone()
    found, following = critic.of_both_steps((seen, acts), (seen + 1, acts))
    assert found.requires_grad
    assert not following.requires_grad
    assert not critic.training, "what the policy is judged by"
    assert not torch.equal(critic.state_dict()["q.0.0.running_mean"], before)
    joined = torch.cat([torch.cat([seen, seen + 1]), torch.cat([acts, acts])], -1)
    assert torch.allclose(critic.train().q[0](joined)[:8, 0], found[0])


def test_half_of_a_batch_is_of_demonstrations(tmp_path: Path) -> None:
    shown = ReplayBuffer(tmp_path / "a", 100, 3, 1)
    shown.add([trajectory(7)])
    shown.state()
    folder = tmp_path / "a" / FOLDER
    buffer = ReplayBuffer(tmp_path / "b", 100, 3, 1, folder)
    buffer.add([trajectory(1)])
    drawn = buffer.draw(np.random.default_rng(0), 9)
    first = drawn["observations"][:, 0].tolist()
    assert first == [1.0] * 5 + [7.0] * 4, "the task's number"
    assert buffer.count == 8
    state = buffer.state()
    ReplayBuffer(tmp_path / "b", 100, 3, 1, folder).restore(state)
    with pytest.raises(ConfigError, match="other transitions than the checkpoint"):
        ReplayBuffer(tmp_path / "b", 100, 3, 1).restore(state)
    with pytest.raises(ConfigError, match=r"demonstrations .* has columns .*, must be"):
        ReplayBuffer(tmp_path / "b", 100, 4, 1, folder)
    with pytest.raises(ConfigError, match=r"no \*.safetensors file with transitions"):
        ReplayBuffer(tmp_path / "b", 100, 3, 1, tmp_path)


def test_ppo_takes_no_squashed_policy(tmp_path: Path) -> None:
    config = make_config(tmp_path)
    ppo = config.trainer.model_copy(update={"sac": None, "critic": CriticConfig()})
    with pytest.raises(ConfigError, match=r"a squashed policy needs trainer\.sac"):
        build_learner(config.model_copy(update={"trainer": ppo}), Ranks())


def test_sac_is_not_for_actions_of_several_parts(tmp_path: Path) -> None:
    config = make_config(tmp_path)
    file = tmp_path / "policy" / "config.json"
    file.write_text(json.dumps({"observations": 3, "actions": [3, 2]}))
    with pytest.raises(ConfigError, match=r"trainer\.sac needs .* MultiDiscrete spaces are trained by PPO or GRPO"):
        check_model(config)
    with pytest.raises(ConfigError, match="MultiDiscrete spaces are trained by PPO or GRPO"):
        build_learner(config, Ranks())
    file.write_text(json.dumps({"observations": 3, "actions": [3, 2], "continuous": True, "squashed": True}))
    with pytest.raises(ConfigError, match=r"actions must be a number if continuous, not \[3, 2\]"):
        check_model(config)


def test_a_policy_that_is_not_squashed_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"trainer\.sac needs squashed: true"):
        make_step(tmp_path, squashed=False)


@pytest.mark.parametrize(
    ("sac", "reason"),
    [
        ({"batch": 200, "buffer": 100}, "trainer.sac.batch 200 must be at most trainer.sac.buffer, 100"),
        ({"start": 101, "buffer": 100}, "trainer.sac.start 101 must be at most"),
    ],
)
def test_settings_that_cannot_be_are_refused(tmp_path: Path, sac: dict[str, Any], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        make_config(tmp_path, **sac)
