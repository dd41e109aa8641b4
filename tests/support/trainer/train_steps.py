"""Training steps over a model in memory, for tests that need neither a run's folder nor a model's."""

from pathlib import Path

from consumers.trainer.model.policy import Policy
from consumers.trainer.step.build import build_train_step
from consumers.trainer.step.critic import Critic
from consumers.trainer.step.train_step import TrainStep
from schemas.config import TidemillConfig
from tests.support.configurations import minimal_config


def make_train_step(
    policy: Policy,
    trainer: dict[str, object],
    *,
    reference: Policy | None = None,
    critic: Critic | None = None,
    base: Path = Path(),
) -> TrainStep:
    """A step in float32 over ``policy``, with these settings of ``trainer``; completions have at most 8 tokens.

    base: where users' own files are looked up.
    """
    config: TidemillConfig = minimal_config(
        model={"path": "in-memory", "dtype": "float32", "max_length": 64},
        sampling={"max_tokens": 8},
        trainer=trainer,
        base=base,
    )
    return build_train_step(config, policy=policy, reference=reference, critic=critic)
