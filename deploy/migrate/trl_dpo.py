"""TRL's DPO trainer: a script that makes a DPOConfig, or a command line of ``trl dpo``; becomes `tidemill dpo`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from deploy.migrate import trl
from deploy.migrate.conversion import FILL_IN, Conversion, ConversionRule, ForeignSystem, same, schedule
from deploy.migrate.trl_rules import DTYPES
from deploy.migrate.trl_rules import RULES as TRAINING

OPTIMIZER = "dpo.optimizer"
LOSSES = ("sigmoid", "ipo")
WHOLE = "tidemill dpo trains all weights"
_SHARED = ("trust_remote_code", "seed", "gradient_checkpointing", "args", "callbacks", "processing_class", "task_type")

RULES = (
    ConversionRule("trainer", "dpo", "the trainer, by its name without Trainer"),
    ConversionRule("shown_flags", note="how many settings the command in the script's text has"),
    ConversionRule("model", "model.path", convert=same),
    ConversionRule("model_name_or_path", "model.path", convert=same),
    ConversionRule("dtype", "model.dtype", convert=lambda value: value if str(value) in DTYPES else None),
    ConversionRule("max_length", "model.max_length", "1024 there by default"),
    ConversionRule("output_dir", "dpo.out", convert=same),
    ConversionRule("loss_type", "dpo.loss", "sigmoid, ipo"),
    ConversionRule("beta", "dpo.beta", "0.1 in both by default", float),
    ConversionRule("learning_rate", f"{OPTIMIZER}.lr", convert=same),
    ConversionRule("lr_scheduler_type", f"{OPTIMIZER}.schedule", "constant, linear, cosine", schedule),
    ConversionRule("warmup_steps", f"{OPTIMIZER}.warmup_steps", convert=int),
    ConversionRule("weight_decay", f"{OPTIMIZER}.weight_decay", convert=same),
    ConversionRule("max_grad_norm", f"{OPTIMIZER}.max_grad_norm", convert=same),
    ConversionRule(
        "per_device_train_batch_size", "dpo.batch_size", "times gradient_accumulation_steps times processes"
    ),
    ConversionRule("gradient_accumulation_steps", "dpo.batch_size", "see above"),
    ConversionRule("max_steps", "dpo.steps", convert=lambda steps: steps if steps > 0 else None),
    ConversionRule("num_train_epochs", "dpo.steps", "epochs times pairs divided by batch_size"),
    ConversionRule("eval_steps", "dpo.eval_every", convert=lambda steps: int(steps) if steps >= 1 else None),
    ConversionRule("dataset_name", "dpo.dataset.args.path", "the reader is hf"),
    ConversionRule("dataset_config", "dpo.dataset.args.name"),
    ConversionRule("dataset_train_split", "dpo.dataset.args.split"),
    ConversionRule("dataset_test_split", "dpo.eval.args.split", "test by default"),
    ConversionRule("data_files", "dpo.dataset.args.path"),
    ConversionRule(
        "train_dataset", note="columns prompt, chosen and rejected; what the script does with rows is its own"
    ),
    ConversionRule("eval_dataset", note="as train_dataset"),
    *(ConversionRule(key, note=WHOLE) for key in ("use_peft", "peft_config", "lora_r", "lora_alpha")),
    *(ConversionRule(key, note=WHOLE) for key in ("lora_target_modules", "lora_dropout", "quantization_config")),
    *(rule for rule in TRAINING if rule.theirs in _SHARED or (not rule.ours and rule.theirs.startswith("push"))),
)


def convert(done: Conversion, processes: int = 1) -> None:
    """Convert settings of DPO, in TRL's defaults where they differ from ours and decide what is trained."""
    known = {key: value for key, value in done.known.items() if value is not None}
    if "shown_flags" in known:
        done.ask("settings are those of the command in the script's text: compare them with yours", "shown_flags")
        del done.left_out["shown_flags"]
    done.set("model.max_length", known.get("max_length", 1024))
    # No sample is drawn, but a configuration's sampling has to leave room for a prompt.
    done.set("sampling.max_tokens", max(1, known.get("max_length", 1024) // 2))
    done.set("dpo.out", known.get("output_dir", "runs/models/preferred"))
    kind = known.get("loss_type", "sigmoid")
    kind = kind[0] if isinstance(kind, list) and len(kind) == 1 else kind
    if kind not in LOSSES:
        done.leave("loss_type", f"not one of {', '.join(LOSSES)}")
    done.set("dpo.loss", kind if kind in LOSSES else FILL_IN)
    pairs = known.get("per_device_train_batch_size", 8) * known.get("gradient_accumulation_steps", 1) * processes
    done.set("dpo.batch_size", pairs)
    if known.get("max_steps", -1) <= 0:
        done.ask(f"dpo.steps: {known.get('num_train_epochs', 3):g} epochs are that many times pairs / dpo.batch_size")
    if "lr_scheduler_type" not in known:
        done.set(f"{OPTIMIZER}.schedule", "linear")
    done.set(f"{OPTIMIZER}.betas", [0.9, 0.999])
    args: dict[str, Any] = {"path": known.get("data_files") or known.get("dataset_name") or "DATASET"}
    if known.get("dataset_config"):
        args["name"] = known["dataset_config"]
    args |= {"split": known.get("dataset_train_split", "train"), "answer": None}
    if not known.get("dataset_name"):
        done.ask("dpo.dataset: name the pairs, such as {name: jsonl, args: {path: pairs.jsonl, answer: null}}")
    done.set("dpo.dataset", {"name": "hf", "args": dict(args)})
    done.set("dpo.eval", {"name": "hf", "args": {**args, "split": known.get("dataset_test_split", "test")}})
    # The sections that every configuration has; tidemill dpo reads neither.
    done.set("train", {"name": "hf", "args": args})
    done.set("reward.terms", [{"name": "exact"}])
    if processes > 1:
        done.set("trainer.processes", processes)


def _looks_like(file: Path, text: str) -> bool:
    if file.suffix in (".sh", ".bash"):
        return "trl dpo" in text
    return file.suffix == ".py" and "DPOTrainer(" in text and "OnlineDPO" not in text


SYSTEM = ForeignSystem("TRL's DPO", RULES, _looks_like, trl.read, convert)
