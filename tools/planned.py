"""What ``tidemill plan --gpu`` computes for a rank beside what real ranks of a small model take, on a CPU over gloo::

    python -m tools.planned

It prints a Markdown table. Memory is the peak beside parameters and optimizer; collectives are what a rank sends.
"""

import json
import tempfile
from pathlib import Path
from typing import Any

from deploy.planning.changes import rehearse_apart
from tests.support.models.tiny_mixture import make_mixture
from tests.support.models.tiny_model import make_tiny_model
from tests.support.trainer.forked_ranks import run_in_ranks
from tests.support.trainer.sized_steps import configuration, measure_in_ranks

CASES: list[tuple[str, str, int, dict[str, Any]]] = [
    ("alone", "dense", 1, {}),
    ("shards", "dense", 2, {}),
    ("shards, bfloat16", "dense", 2, {"dtype": "bfloat16"}),
    ("shards, activation checkpointing", "dense", 2, {"activation_checkpointing": True}),
    ("shards, a reference model", "dense", 2, {"kl": {"coef": 0.1}}),
    ("shards, a critic", "dense", 2, {"critic": {}, "advantage": {"name": "gae"}}),
    ("shards, LoRA", "dense", 2, {"lora": {"rank": 4}}),
    ("tensor and context", "dense", 4, {"parallel": {"tensor": 2, "context": 2}}),
    ("shards, a mixture of experts", "mixture", 2, {}),
]
"""Name, kind of model, ranks, and settings of the trainer."""


def main() -> None:
    """Measure each case, and print the table."""
    print("| Ranks | MB computed | measured | GFLOP computed | measured | MB sent, computed | measured |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    for name, kind, ranks, trainer in CASES:
        with tempfile.TemporaryDirectory() as folder:
            model, report = Path(folder, "model"), Path(folder, "report")
            if kind == "mixture":
                make_mixture(model, hidden_size=64, head_dim=16)
            else:
                make_tiny_model(model, hidden=128, layers=4)
            settings = {"processes": ranks, **trainer}
            run_in_ranks(ranks, measure_in_ranks, model, settings, report, output=Path(folder, "output"))
            real = json.loads(report.read_text(encoding="utf-8"))
            found = rehearse_apart(configuration(model, **settings), ranks, on_gpu=False)
        peak = sum(found[part] for part in ("gradients", "activations", "temporary"))
        sent = sum(each["sent"] for each in found["traffic"])
        pairs = [(peak, real["peak"]), (found["flops"], real["flops"]), (sent, sum(real["sent"].values()))]
        figures = [
            f"{value / scale:,.2f}" for pair, scale in zip(pairs, (1e6, 1e9, 1e6), strict=True) for value in pair
        ]
        print(f"| {ranks}: {name} | " + " | ".join(figures) + " |", flush=True)


if __name__ == "__main__":
    main()
