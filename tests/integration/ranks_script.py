"""What test_trainer_ranks.py runs on every rank: three steps, each rank on its own groups of an uneven batch.

With a checkpoint folder it also saves before the last step, loads that into a fresh trainer and does the step again.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from torch.distributed.tensor import DTensor

sys.path.insert(0, str(Path(__file__).parents[1]))
from trajectories import groups_of

from consumers.trainer.checkpoints import Checkpoints
from consumers.trainer.export import write_weights
from consumers.trainer.policy import Policy, load_model
from consumers.trainer.ranks import Ranks
from consumers.trainer.step import StepResult, TrainStep
from schemas.config.models import TrainerConfig


def main(model: str, report: str, checkpoints: str = "") -> None:
    ranks = Ranks()
    settings = TrainerConfig.model_validate({"steps": 3, "micro_batch_tokens": 60, "optimizer": {"lr": 1e-3}})

    def fresh() -> TrainStep:
        return TrainStep(Policy(load_model(model, "float32")), settings, temperature=1.0, max_tokens=8, ranks=ranks)

    def advance(step: TrainStep, version: int) -> StepResult:
        groups = groups_of([4, 1, 5, 2, 3], seed=version)
        own = groups[:4] if ranks.rank == 0 else groups[4:]
        return step.run(step.assemble(groups if ranks.world == 1 else own), version)

    def sample(step: TrainStep) -> list[float]:
        path = Path(f"{report}.safetensors")
        write_weights(step.policy, path, "float32", main=ranks.is_main)
        ranks.wait()
        return [float(v) for v in torch.frombuffer(bytearray(path.read_bytes()[-4000:]), dtype=torch.float32)]

    step = fresh()
    results = [advance(step, 0), advance(step, 1)]
    path = Checkpoints(Path(checkpoints)).save(step, step=2, version=2, epoch=1, extra={}) if checkpoints else None
    results.append(advance(step, 2))
    sharded = all(isinstance(p, DTensor) for p in step.policy.parameters())
    weights, resumed = sample(step), None
    if path:
        again = fresh()
        Checkpoints(Path(checkpoints)).load(path, again)
        advance(again, 2)
        resumed = sample(again)
    if ranks.is_main:
        content = {
            "sharded": sharded,
            "metrics": [r.metrics for r in results],
            "staleness": [r.staleness for r in results],
            "weights": weights,
            "resumed": resumed,
        }
        Path(report).write_text(json.dumps(content))
    ranks.wait()


if __name__ == "__main__":
    main(*sys.argv[1:])
