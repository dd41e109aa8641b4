"""Preference pairs from a dataset to a trained model; behind ``tidemill dpo`` and ``tidemill reward-model``."""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from deploy.logs import configure_logging
from producers.datasets.loading import build_dataset
from producers.rendering.tokenizer import HfTokenizer
from schemas.config import DatasetConfig, DpoConfig, RewardModelConfig, TidemillConfig
from schemas.errors import ConfigError

if TYPE_CHECKING:
    from consumers.offline.pairs import Preference
    from consumers.offline.preference import PairwiseProgress


def make_dpo_model(config: TidemillConfig, settings: DpoConfig) -> None:
    """Train model.path on the pairs of the ``dpo`` section and write ``dpo.out``."""
    from consumers.offline.preference import train_dpo
    from consumers.offline.step import MemoryLimits
    from consumers.trainer.distributed.ranks import Ranks

    configure_logging(config, "dpo", "dpo")
    pairs, heldout = (preferences(dataset, config.base) for dataset in (settings.dataset, settings.eval))
    ranks = Ranks()
    with ranks.watchdog():
        result = train_dpo(
            config.model,
            pairs,
            heldout,
            settings,
            load_tokenizer=partial(HfTokenizer, trust_remote_code=config.model.trust_remote_code),
            limits=MemoryLimits(config.trainer.micro_batch_tokens, config.trainer.activation_checkpointing),
            seed=config.run.seed,
            progress=_show,
            ranks=ranks,
        )
    if ranks.is_main:
        preferred = f"prefers the chosen answer in {result.accuracy:.3f} of {len(heldout)} held-out pairs"
        print(f"model {settings.out}: {preferred}")


def make_reward_model(config: TidemillConfig, settings: RewardModelConfig) -> None:
    """Train a reward model on the pairs of the ``reward_model`` section and write ``reward_model.out``."""
    from consumers.offline.preference import train_reward_model
    from consumers.offline.step import MemoryLimits
    from consumers.trainer.distributed.ranks import Ranks

    configure_logging(config, "reward-model", "reward-model")
    pairs, heldout = (preferences(dataset, config.base) for dataset in (settings.dataset, settings.eval))
    ranks = Ranks()
    with ranks.watchdog():
        result = train_reward_model(
            config.model,
            pairs,
            heldout,
            settings,
            load_tokenizer=partial(HfTokenizer, trust_remote_code=config.model.trust_remote_code),
            limits=MemoryLimits(config.trainer.micro_batch_tokens, config.trainer.activation_checkpointing),
            seed=config.run.seed,
            progress=_show,
            ranks=ranks,
        )
    if ranks.is_main:
        print(f"model {settings.out}: ranks {result.accuracy:.3f} of {len(heldout)} held-out pairs right")


def preferences(dataset: DatasetConfig, base: Path) -> list[Preference]:
    """Every example as a pair; ConfigError when one has no prompt, or not both answers."""
    from consumers.offline.pairs import Preference

    examples = build_dataset(dataset, base)
    found: list[Preference] = []
    for index in range(len(examples)):
        example = examples[index]
        chosen, rejected = (example.data.get(name) for name in ("chosen", "rejected"))
        prompt = example.messages if example.text is None else example.text
        if prompt is None or not isinstance(chosen, str) or not isinstance(rejected, str):
            raise ConfigError(
                f"example {index} of dataset {dataset.name!r} needs a prompt, and the texts chosen and rejected"
            )
        found.append(Preference(prompt, chosen, rejected))
    return found


def _show(progress: PairwiseProgress) -> None:
    print(
        f"step {progress.step}: held-out loss {progress.loss:.4f}, accuracy {progress.accuracy:.3f},"
        f" margin {progress.margin:.3f}, {progress.seconds:.0f} s",
        file=sys.stderr,
    )
