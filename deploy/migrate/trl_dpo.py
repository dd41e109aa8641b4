"""TRL's DPO trainer: a script that makes a DPOConfig, or a command line of ``trl dpo``; becomes `tidemill dpo`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from deploy.migrate import trl
from deploy.migrate.conversion import SHELL, Conversion, ForeignSystem
from deploy.migrate.rules import read_rules


def convert(done: Conversion) -> None:
    """Convert settings of DPO, in TRL's defaults where they differ from ours and decide what is trained."""
    known = done.known
    # No sample is drawn, but a configuration's sampling has to leave room for a prompt.
    done.set("sampling.max_tokens", max(1, done.value("max_length") // 2))
    done.set("dpo.out", known.get("output_dir", "runs/models/preferred"))
    rows = done.value("per_device_train_batch_size") * done.value("gradient_accumulation_steps")
    done.set("dpo.batch_size", rows * done.processes)
    done.set_steps("max_steps", "num_train_epochs", "dpo")
    done.set("dpo.optimizer.betas", [0.9, 0.999])
    args: dict[str, Any] = {"path": known.get("data_files") or known.get("dataset_name") or "DATASET", "answer": None}
    if known.get("dataset_config"):
        args["name"] = known["dataset_config"]
    if not known.get("dataset_name"):
        done.ask("dpo.dataset: name the pairs, such as {name: jsonl, args: {path: pairs.jsonl, answer: null}}")
    train, held_out = ({**args, "split": done.value(f"dataset_{kind}_split")} for kind in ("train", "test"))
    done.set("dpo.dataset", {"name": "hf", "args": train})
    done.set("dpo.eval", {"name": "hf", "args": held_out})
    # The sections that every configuration has; tidemill dpo reads neither.
    done.set("train", {"name": "hf", "args": dict(train)})
    done.set("reward.terms", [{"name": "exact"}])


def _looks_like(file: Path, text: str) -> bool:
    if file.suffix in SHELL:
        return "trl dpo" in text
    return file.suffix == ".py" and "DPOTrainer(" in text and "OnlineDPO" not in text


SYSTEM = ForeignSystem("TRL's DPO", read_rules("trl_dpo"), _looks_like, trl.read, convert)
