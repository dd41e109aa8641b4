"""A converted configuration's loss and gradient are those of the other system's own code, on the same batch.

The other's were computed by `python -m tools.foreign` and are in foreign_losses.json, with where they come from.
"""

import json
import math
import re
from pathlib import Path
from typing import Any, cast

import msgspec
import numpy as np
import pytest
import torch
from torch import Tensor, nn

from consumers.trainer.data.groups import Group
from consumers.trainer.data.load_balancing import Cost
from consumers.trainer.distributed.ranks import Ranks
from consumers.trainer.fragments.moments import Moments
from consumers.trainer.model.policy import Policy, TokenScores
from consumers.trainer.step import fragment_step, sac_step
from consumers.trainer.step.build import build_learner, build_train_step
from deploy.migrate.convert import convert_file
from schemas.codec import Array
from schemas.config import TidemillConfig, parse_config
from schemas.messages import Fragment, Span, Trajectory
from tests.support.migrate.fixed_batch import ControlBatch, FixedBatch, SacBatch, directions
from tests.support.trainer.trajectories import make_trajectory

FOREIGN = json.loads(Path(__file__).with_name("foreign_losses.json").read_text())
CONTROL, SAC = (FOREIGN.pop(title) for title in ("PPO for control, RLinf", "SAC, RLinf"))


class TablePolicy(nn.Module):
    """A policy that has the log-probabilities of each sample's tokens as weights, float32 [S, T].

    The first token of a row is the number of its sample.
    """

    vision = router_replay = adapter = causal_lm = None
    packed = share_prefixes = False
    cost = Cost()
    device = torch.device("cpu")

    def __init__(self, logprobs: np.ndarray[Any, Any], entropy: np.ndarray[Any, Any]) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.from_numpy(logprobs))
        self.entropy = torch.from_numpy(entropy)

    def forward(self, tokens: Tensor, targets: Tensor, mask: Tensor, *_: Any, **__: Any) -> TokenScores:
        """See Policy."""
        rows = tokens[:, 0]
        return TokenScores(torch.where(mask, self.table[rows], 0.0), torch.where(mask, self.entropy[rows], 0.0))


def sample(batch: FixedBatch, number: int) -> tuple[Trajectory, float]:
    """A sample of the batch with its reward: one token of prompt, then its completion."""
    length = batch.mask.shape[1] + 1
    mask, logprobs = np.zeros(length, np.uint8), np.zeros(length, np.float32)
    mask[1:], logprobs[1:] = batch.mask[number], np.where(batch.mask[number], batch.rollout[number], 0.0)
    made = Trajectory(
        run="r",
        task_id=number // batch.n,
        sample=number % batch.n,
        kind="train",
        tokens=Array.of([number] + [1] * (length - 1), "i4"),
        loss_mask=Array.of(mask, "u1"),
        logprobs=Array.of(logprobs, "f4"),
        spans=[Span(0, 1, length)],
        turns=[],
        finish="stop",
        prompt="",
        completion="",
        generator="g",
    )
    return made, float(batch.rewards[number])


def ours(config: TidemillConfig, batch: FixedBatch) -> tuple[float, list[float]]:
    """Our loss on the batch, as one update on one rank computes it, and the gradient in some directions."""
    policy = TablePolicy(batch.logprobs, batch.entropy)
    reference = TablePolicy(batch.reference, batch.entropy).requires_grad_(False)
    asked = config.trainer.has_second_model
    step = build_train_step(config, policy=cast(Policy, policy), reference=cast(Policy, reference) if asked else None)
    dropped = config.trainer.advantage.drops_zero_variance
    kept = batch.varied() if dropped else np.ones(len(batch.rewards), bool)
    groups = [
        Group(number, [sample(batch, at) for at in range(number * batch.n, (number + 1) * batch.n)])
        for number in range(len(batch.rewards) // batch.n)
        if kept[number * batch.n]
    ]
    (micro,) = step.planner.plan(groups).batch().micro_batches
    micros = [micro]
    if step.preparation is not None:
        micros = list(step.preparation.run_on_host(micros))
        micros = list(step.preparation.run(step.policy, micros, 0, step.ranks.all_reduce_sum))
    if step.objective.loss.needs_proximal:
        proximal = TablePolicy(batch.proximal, batch.entropy)(micro.tokens, micro.targets, micro.mask).logprobs.detach()
        object.__setattr__(micros[0], "proximal_logprobs", proximal)
    _, _, loss = step._forward(micros[0], version=0)
    loss.backward()
    gradient = policy.table.grad
    assert gradient is not None
    along = directions(tuple(gradient.shape)) * gradient.double().numpy()
    return float(loss.detach()), along.sum((1, 2)).tolist()


class TableNetwork(nn.Module):
    """An actor or a critic that has a number for each step of each environment, float32 [T, N].

    The first number of an observation is the index of its step and environment; a critic's first answer comes from
    ``before``, float32 [T + 1, N], as the values before the step do.
    """

    adapter = vision = router_replay = None
    device = torch.device("cpu")

    def __init__(self, table: np.ndarray[Any, Any], before: np.ndarray[Any, Any] | None = None) -> None:
        super().__init__()
        self.table, self.before = nn.Parameter(torch.from_numpy(table)), before
        self.gradient = torch.zeros(())
        self.moments = self.returns = Moments(0)
        self.table.register_hook(lambda gradient: setattr(self, "gradient", gradient))

    def forward(self, observations: Tensor, actions: Tensor | None = None) -> Any:
        """See Actor and ValueNetwork."""
        if actions is None and not torch.is_grad_enabled():
            assert self.before is not None
            return torch.from_numpy(self.before.reshape(-1))[observations[..., 0].long()]
        found = self.table.reshape(-1)[observations[..., 0].long()]
        return found if actions is None else (found, torch.zeros_like(found))


def ours_for_control(config: TidemillConfig, batch: ControlBatch, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The losses of actor and critic together, and their gradients in some directions; see ``ours``."""
    actor, critic = TableNetwork(batch.logprobs), TableNetwork(batch.values, batch.old_values)
    monkeypatch.setattr(fragment_step, "Actor", lambda _: actor)
    monkeypatch.setattr(fragment_step, "ValueNetwork", lambda *_: critic)
    step = build_learner(config, Ranks())
    steps, envs = batch.rewards.shape
    played = Fragment(
        envs=envs,
        observations=Array.of(np.arange((steps + 1) * envs), "f4"),
        actions=Array.of(np.zeros(steps * envs), "f4"),
        logprobs=Array.of(batch.rollout.reshape(-1), "f4"),
        rewards=Array.of(batch.rewards.reshape(-1), "f4"),
        ends=Array.of(batch.ends.reshape(-1), "u1"),
        last=Array.of(np.zeros(0), "f4"),
    )
    sampled = msgspec.structs.replace(make_trajectory(prompt=0, completion=steps), fragment=played)
    result = step.run(step.planner.plan([Group(0, [(sampled, 0.0)])]).batch(0), 0)
    along = [directions((steps, envs)) * one.gradient.double().numpy() for one in (actor, critic)]
    return result.metrics["loss"] + result.metrics["critic_loss"], [n for one in along for n in one.sum((1, 2))]


class TableActor(nn.Module):
    """A policy that has the log-probabilities of its new actions as weights, and the Q values of these as actions."""

    moments = Moments(0)
    device = torch.device("cpu")

    def __init__(self, batch: SacBatch) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.from_numpy(np.concatenate([batch.logprobs, batch.policy_values])))
        self.following, self.gradient = torch.from_numpy(batch.next_logprobs[0]), torch.zeros(())
        self.table.register_hook(lambda gradient: setattr(self, "gradient", gradient))

    def sample(self, observations: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
        """See Actor; without a gradient, actions in the states that follow."""
        if not torch.is_grad_enabled():
            return torch.zeros_like(noise), self.following
        return self.table[1:].T, self.table[0]


class TableCritic(nn.Module):
    """Q networks that have the values of the recorded actions as weights."""

    moments = returns = Moments(0)

    def __init__(self, batch: SacBatch) -> None:
        super().__init__()
        self.table, self.targets = nn.Parameter(torch.from_numpy(batch.values)), torch.from_numpy(batch.target_values)
        self.gradient, self.followed = torch.zeros(()), list[float]()
        self.table.register_hook(lambda gradient: setattr(self, "gradient", gradient))

    def of_both_steps(self, now: Any, following: Any) -> tuple[Tensor, Tensor]:
        """See TwinCritic."""
        return self.table, self.targets

    def forward(self, observations: Tensor, actions: Tensor) -> Tensor:
        """See TwinCritic: the values of new actions."""
        return actions.T

    def follow(self, tau: float) -> None:
        """See TwinCritic."""
        self.followed.append(tau)


def test_converted_sac_has_the_others_loss(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file, batch = tmp_path / "recipe.yaml", SacBatch.make()
    file.write_text(SAC["text"])
    _, done = convert_file(file)
    shape = re.search(r"config.json is (\{.*\})", " ".join(done.to_do))
    assert shape is not None
    (tmp_path / "policy").mkdir()
    (tmp_path / "policy" / "config.json").write_text(shape[1])
    config = parse_config(done.config | {"model": done.config["model"] | {"path": str(tmp_path / "policy")}})
    found = config.trainer.sac
    assert found is not None
    # 32 updates of a step of 32 environments and 2 steps each.
    assert (found.batch, found.target_entropy, found.policy_every, found.updates_per_transition) == (1024, -4, 1, 0.5)
    actor, critic = TableActor(batch), TableCritic(batch)
    monkeypatch.setattr(sac_step, "Actor", lambda _: actor)
    monkeypatch.setattr(sac_step, "TwinCritic", lambda *_: critic)
    step = build_learner(config, Ranks())
    assert isinstance(step, sac_step.SacStep)
    step.temperature[0].log_alpha.data.fill_(math.log(batch.alpha))
    rows = batch.rewards.size
    data = {"observations": torch.zeros(rows, 1), "actions": torch.zeros(rows, 2), "terminated": torch.zeros(rows)}
    data |= {"next_observations": torch.zeros(rows, 1), "rewards": torch.from_numpy(batch.rewards[0])}
    numbers = step.update_once(data, torch.Generator(), 1e-3)
    assert numbers["critic_loss"] + numbers["loss"] == pytest.approx(SAC["loss"], abs=1e-6)
    parts = [one.double().numpy() for one in (actor.gradient[:1], critic.gradient, actor.gradient[1:])]
    along = [(directions(one.shape) * one).sum((1, 2)) for one in parts]
    assert np.concatenate(along).tolist() == pytest.approx(SAC["gradient"], abs=1e-6)
    assert critic.followed == [0.01]


def test_converted_ppo_for_control_has_the_others_loss(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "recipe.yaml"
    file.write_text(CONTROL["text"])
    _, done = convert_file(file)
    trainer = done.config["trainer"]
    assert (trainer["epochs"], trainer["minibatches"], done.config["train"]["args"]["envs"]) == (8, 8, 1024)
    shape = re.search(r"config.json is (\{.*\})", " ".join(done.to_do))
    assert shape is not None
    (tmp_path / "policy").mkdir()
    one = json.loads(shape[1]) | {"observations": 1, "actions": 1}
    (tmp_path / "policy" / "config.json").write_text(json.dumps(one))
    trainer |= {"epochs": 1, "minibatches": 1}
    made = done.config | {"model": done.config["model"] | {"path": str(tmp_path / "policy")}}
    loss, gradient = ours_for_control(parse_config(made), ControlBatch.make(), monkeypatch)
    assert loss == pytest.approx(CONTROL["loss"], abs=1e-6)
    assert gradient == pytest.approx(CONTROL["gradient"], abs=1e-6)


@pytest.mark.parametrize("title", FOREIGN)
def test_a_converted_recipe_has_the_others_loss(title: str, tmp_path: Path) -> None:
    foreign = FOREIGN[title]
    file = tmp_path / f"recipe{foreign['suffix']}"
    file.write_text(foreign["text"])
    _, done = convert_file(file)
    made: dict[str, Any] = json.loads(json.dumps(done.config))
    batch = FixedBatch.make(**foreign["batch"])
    assert made["sampling"]["n"] == batch.n
    # The batch is that of one update, on one rank. LoRA's reference is the policy without it.
    one: dict[str, Any] = {
        "minibatches": 1,
        "epochs": 1,
        "processes": 1,
        "parallel": {},
        "activation_checkpointing": False,
    }
    trainer = made["trainer"] | one
    trainer.pop("lora", None)
    made |= {"trainer": trainer, "model": {**made["model"], "dtype": "float32"}}
    loss, gradient = ours(parse_config(made), batch)
    assert loss == pytest.approx(foreign["loss"], abs=1e-6)
    assert gradient == pytest.approx(foreign["gradient"], abs=1e-6)
