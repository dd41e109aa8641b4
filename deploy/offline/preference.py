"""Preference pairs from a dataset to a trained model; behind ``tidemill dpo`` and ``tidemill reward-model``."""

from __future__ import annotations

import sys
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from deploy.logs import configure_logging
from producers.datasets.loading import build_dataset
from producers.datasets.rows import answer_text
from producers.images.placeholders import ImagePlaceholders
from producers.tokenizer import HfTokenizer
from schemas.config import DatasetConfig, DpoConfig, RewardModelConfig, TidemillConfig
from schemas.errors import ConfigError

if TYPE_CHECKING:
    from consumers.offline.pairs import Preference
    from consumers.offline.preference import PairwiseProgress


def make_preference_model(config: TidemillConfig, settings: DpoConfig | RewardModelConfig) -> dict[str, Any] | None:
    """Train model.path on preference pairs and write ``out``. Returns what ``--json`` prints, None in other ranks."""
    from consumers.offline.loop import MemoryLimits
    from consumers.offline.preference import train_on_pairs
    from consumers.trainer.distributed.ranks import Ranks

    dpo = isinstance(settings, DpoConfig)
    command = "dpo" if dpo else "reward-model"
    configure_logging(config, command, command)
    pairs, heldout = (preferences(dataset, config.base) for dataset in (settings.dataset, settings.eval))
    ranks = Ranks.of(config.trainer)
    with ranks.watchdog():
        result = train_on_pairs(
            config.model,
            pairs,
            heldout,
            settings,
            load_tokenizer=partial(HfTokenizer, trust_remote_code=config.model.trust_remote_code),
            limits=MemoryLimits.of(config.trainer),
            seed=config.run.seed,
            progress=_show,
            ranks=ranks,
            places=ImagePlaceholders.of(config) if dpo else None,
        )
    if not ranks.is_main:
        return None
    share = f"{result.accuracy:.3f} of {len(heldout)} held-out pairs"
    print(f"model {settings.out}: {f'prefers the chosen answer in {share}' if dpo else f'ranks {share} right'}")
    return {"model": str(settings.out), "heldout_pairs": len(heldout), **asdict(result)}


def preferences(dataset: DatasetConfig, base: Path) -> list[Preference]:
    """Return every example as a pair; ConfigError when one has no prompt, or not both answers."""
    from consumers.offline.pairs import Preference

    examples = build_dataset(dataset, base)
    found: list[Preference] = []
    for index in range(len(examples)):
        example = examples[index]
        chosen, rejected = (answer_text(example.data.get(name)) for name in ("chosen", "rejected"))
        prompt = example.messages if example.text is None else example.text
        if prompt is None or chosen is None or rejected is None:
            raise ConfigError(
                f"example {index} of dataset {dataset.name!r} needs a prompt, and the texts chosen and rejected"
            )
        found.append(Preference(prompt, chosen, rejected, example.images))
    return found


def _show(progress: PairwiseProgress) -> None:
    print(
        f"step {progress.step}: held-out loss {progress.loss:.4f}, accuracy {progress.accuracy:.3f},"
        f" margin {progress.margin:.3f}, {progress.seconds:.0f} s",
        file=sys.stderr,
    )
