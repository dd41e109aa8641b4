"""A converted configuration's loss and gradient are those of the other system's own code, on the same batch.

The other's were computed by `python -m tools.foreign_losses` and are in foreign_losses.json, with where they come from.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from consumers.trainer.data.groups import Group
from consumers.trainer.data.load_balancing import Cost
from consumers.trainer.model.policy import Policy, TokenScores
from consumers.trainer.step.build import build_train_step
from deploy.migrate.convert import convert_file
from schemas.codec import Array
from schemas.config import TidemillConfig, parse_config
from schemas.messages import Span, Trajectory
from tests.support.migrate.fixed_batch import FixedBatch, directions

FOREIGN = json.loads(Path(__file__).with_name("foreign_losses.json").read_text())


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
        micros = list(step.preparation.run(step.policy, micros, 0, step.ranks.all_reduce_sum))
    if step.objective.loss.needs_proximal:
        proximal = TablePolicy(batch.proximal, batch.entropy)(micro.tokens, micro.targets, micro.mask).logprobs.detach()
        object.__setattr__(micros[0], "proximal_logprobs", proximal)
    _, _, loss = step._forward(micros[0], version=0)
    loss.backward()  # type: ignore[no-untyped-call]
    gradient = policy.table.grad
    assert gradient is not None
    along = directions(tuple(gradient.shape)) * gradient.double().numpy()
    return float(loss.detach()), along.sum((1, 2)).tolist()


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
