"""What tests run on every rank of a trainer: each algorithm that looks beyond a rank's own samples, and the
trainers without generators. Rank 0 reports what came out."""

import json
import os
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
from torch.distributed.tensor import DTensor

from consumers.offline.pairs import Preference
from consumers.offline.preference import PairwiseProgress, train_on_pairs
from consumers.offline.sft import SftProgress, train_sft
from consumers.trainer.distributed.ranks import Ranks
from consumers.trainer.step.build import build_train_step
from producers.tokenizer import HfTokenizer
from schemas.codec import Array
from schemas.config import DpoConfig, ModelConfig, ParallelConfig, RewardModelConfig, WarmStartConfig
from schemas.messages import Trajectory
from tests.support.configurations import minimal_config
from tests.support.trainer.trajectories import make_groups

ALGORITHMS: dict[str, dict[str, Any]] = {
    "m2po": {"loss": {"name": "m2po", "args": {"second_moment": 2.0}}},
    "gae": {"advantage": {"name": "gae"}, "critic": {"optimizer": {"lr": 1e-3}}},
    "kl in the loss": {"kl": {"coef": 0.5}},
    "kl off the reward": {"kl": {"coef": 0.5, "place": "reward"}},
    "reference in main memory": {"kl": {"coef": 0.5, "device": "cpu"}},
}
OWN = {"name": "teacher_self", "datasets": ["c"], "args": {"template": "{prompt}"}}
GIVEN = {
    "train": [{"name": "arithmetic", "label": label} for label in "abc"],
    "reward": {"terms": [{"name": "exact", "datasets": ["a"]}, {"name": "supervised", "datasets": ["b"]}, OWN]},
}
"""Sections of a run whose loss has three components: of rewards, of given answers, and of the policy as a teacher."""
TAUGHT = {"advantage": {"name": "reinforce_pp"}, "kl": {"coef": 0.5, "reference": "teacher"}}
PAIRS = [Preference(f"{a}>", "xyz"[a % 3] * 2, "abc"[a % 3] * (1 + a % 4)) for a in range(21)]
EXAMPLES = [(f"{a}>", "xyz"[a % 3] * (1 + a % 2)) for a in range(13)]


LORA = {"lora": {"rank": 4, "alpha": 8.0}, "kl": {"coef": 0.5, "reference": "lora_off"}}


LEARNED = {"stop_accuracy": 0.5, "max_steps": 200}
"""How long demonstrations are trained."""


def run_algorithms(model: Path, reference: Path, folder: Path, sft: Mapping[str, Any] = LEARNED) -> None:
    """Train each in turn on this rank; rank 0 writes ``folder/report.json``. sft: how long demonstrations are."""
    ranks = Ranks(timeout_s=100.0)
    with ranks.watchdog():
        report = {name: algorithm(ranks, str(model), str(reference), trainer) for name, trainer in ALGORITHMS.items()}
        report["three components"] = algorithm(ranks, str(model), "", TAUGHT, **GIVEN)
        report |= without_generators(ranks, str(model), folder, sft)
        if ranks.is_main:
            (folder / "report.json").write_text(json.dumps(report))


def run_algorithms_in_parts(model: Path, reference: Path, folder: Path) -> None:
    """The same where ranks share layers and tokens, as far as there are four of them."""
    cuts = [{"context": 2, "tensor": 2}, {"context": 2}, {"tensor": 2}]
    both, tokens, layers = (
        Ranks(timeout_s=100.0, parallel=ParallelConfig(**(cut if "RANK" in os.environ else {}))) for cut in cuts
    )
    report: dict[str, Any] = {}
    with both.watchdog():
        for name in ("gae", "kl in the loss", "reference in main memory"):
            report[name] = algorithm(both, str(model), str(reference), ALGORITHMS[name])
        report["lora"] = algorithm(tokens, str(model), "", LORA)
        report |= without_generators(layers, str(model), folder)
        if both.is_main:
            (folder / "report.json").write_text(json.dumps(report))


def algorithm(
    ranks: Ranks, model: str, reference: str, trainer: dict[str, Any], **sections: dict[str, Any]
) -> dict[str, Any]:
    """Two steps; metrics of each, and how much of the weights this rank holds."""
    trainer = dict(trainer)
    if "kl" in trainer and reference:
        trainer["kl"] = {**trainer["kl"], "model": reference}
    config = minimal_config(
        model={"path": model, "dtype": "float32", "max_length": 64},
        sampling={"max_tokens": 8},
        trainer={"steps": 9, "micro_batch_tokens": 60, "optimizer": {"lr": 1e-3}, **trainer},
        **sections,
    )
    step = build_train_step(config, ranks)
    batches = [make_groups([4, 1, 5, 2, 3], seed=version) for version in range(2)]
    for groups in batches if sections else ():
        for number, group in enumerate(groups):
            group.samples[:] = [(of_dataset(sample, "abc"[number % 3]), reward) for sample, reward in group.samples]  # type: ignore[index]
    metrics = [
        step.run(step.planner.plan(groups).batch(ranks.dp_rank), version).metrics
        for version, groups in enumerate(batches)
    ]
    scored = step.preparation.reference if step.preparation else None
    critic = step.critic.critic if step.critic else None
    return {"metrics": metrics, "sharded": [all_sharded(module) for module in (step.policy, scored, critic) if module]}


def of_dataset(sample: Trajectory, label: str) -> Trajectory:
    """The sample in this dataset of GIVEN, with what its teacher says."""
    says = -np.random.default_rng(sample.task_id * 10 + sample.sample).uniform(0.1, 3.0, len(sample.tokens))
    return msgspec.structs.replace(
        sample, dataset=label, teacher_logprobs=Array.of(says, "f4") if label == "c" else None
    )


def all_sharded(module: torch.nn.Module) -> bool:
    return all(isinstance(parameter, DTensor) for parameter in module.parameters())


def without_generators(ranks: Ranks, path: str, folder: Path, sft: Mapping[str, Any] = LEARNED) -> dict[str, Any]:
    """What each of the other trainers saw on its way."""
    model = ModelConfig(path=path, dtype="float32", max_length=64)
    data = {"name": "jsonl"}
    common = {"dataset": data, "eval": data, "steps": 12, "batch_size": 5, "eval_every": 4}
    rate = {"optimizer": {"lr": 1e-3}}
    found: dict[str, list[Any]] = {"dpo": [], "ipo": [], "reward model": [], "sft": []}

    def note(name: str) -> Any:
        def progress(look: PairwiseProgress | SftProgress) -> None:
            found[name].append({key: value for key, value in asdict(look).items() if key != "seconds"})

        return progress

    for name, loss in (("dpo", "sigmoid"), ("ipo", "ipo")):
        dpo = DpoConfig.model_validate({**common, **rate, "loss": loss, "out": folder / name})
        train_on_pairs(model, PAIRS[:14], PAIRS[14:], dpo, progress=note(name), ranks=ranks, load_tokenizer=HfTokenizer)
    scoring = RewardModelConfig.model_validate({**common, **rate, "out": folder / "reward-model"})
    train_on_pairs(
        model, PAIRS[:14], PAIRS[14:], scoring, progress=note("reward model"), ranks=ranks, load_tokenizer=HfTokenizer
    )
    warm = WarmStartConfig.model_validate(
        {"model": "m:f", "dataset": data, "eval": data, "batch_size": 5, "lr": 3e-3, "eval_every": 10} | sft
    )
    train_sft(
        model.model_copy(update={"path": str(folder / "sft")}),
        path,
        EXAMPLES,
        EXAMPLES,
        warm,
        progress=note("sft"),
        ranks=ranks,
        load_tokenizer=HfTokenizer,
    )
    return {name: {"looks": looks} for name, looks in found.items()}
