"""Computes the losses of other systems on a fixed batch by their own code, for the test that compares ours.

    python -m tools.foreign --verl FOLDER --trl FOLDER --areal FOLDER --rlinf FOLDER --prime-rl FOLDER

Each folder is a checkout of the system's repository. Their packages need not be installed.
"""

from __future__ import annotations

import argparse
import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tests.support.migrate.fixed_batch import FixedBatch, directions
from tools.foreign.areal import areal
from tools.foreign.prime_rl import prime_rl
from tools.foreign.rlinf import rlinf, rlinf_control, rlinf_sac
from tools.foreign.sources import Case
from tools.foreign.trl import async_trl, trl
from tools.foreign.verl import verl

OUT = Path("tests/unit/deploy/migrate/foreign_losses.json")
FLAGS = (
    "trl grpo --model_name_or_path=Qwen/Qwen2.5-0.5B-Instruct --dataset_name=openai/gsm8k --beta=0.04"
    " --reward_funcs=accuracy_reward --per_device_train_batch_size=16 --use_vllm=false --num_generations=8"
)
CASES: dict[str, tuple[str, Callable[..., Case], tuple[Any, ...]]] = {
    "GRPO on GSM8K, verl": ("verl", verl, ("examples/grpo_trainer/run_qwen2-7b.sh",)),
    "GRPO on GSM8K, TRL": ("trl", trl, (FLAGS,)),
    "asynchronous GRPO on GSM8K, TRL": ("trl", async_trl, ("examples/scripts/async_grpo.py",)),
    "GRPO on GSM8K, AReaL": ("areal", areal, ("examples/math/gsm8k_grpo.yaml",)),
    "GRPO on math, RLinf": ("rlinf", rlinf, ("examples/reasoning/config/math/qwen2.5-1.5b-grpo-fsdp.yaml",)),
    "GRPO on math, prime-rl": ("prime-rl", prime_rl, ("configs/basic/hendrycks-sanity/rl.toml",)),
    "DAPO, AReaL": ("areal", areal, ("examples/math/gsm8k_dapo_dynamic_bs.yaml",)),
    "DAPO with tools, verl": ("verl", verl, ("examples/sglang_multiturn/run_qwen3_4b_dapo_multiturn.sh", True)),
    "GSPO, verl": ("verl", verl, ("examples/gspo_trainer/test_gspo_3b_math.sh",)),
    "GSPO, AReaL": ("areal", areal, ("examples/math/gsm8k_gspo.yaml",)),
    "several turns with tools, verl": (
        "verl",
        verl,
        ("examples/sglang_multiturn/run_qwen2.5-3b_gsm8k_multiturn.sh", True),
    ),
    "images, verl": ("verl", verl, ("examples/grpo_trainer/run_qwen2_5_vl-7b.sh",)),
    "PPO for control, RLinf": ("rlinf", rlinf_control, ("examples/embodiment/config/maniskill_ppo_mlp.yaml",)),
    "SAC, RLinf": ("rlinf", rlinf_sac, ("examples/embodiment/config/maniskill_sac_mlp.yaml",)),
    "LoRA, verl": ("verl", verl, ("examples/grpo_trainer/run_qwen2_5-3b_gsm8k_grpo_lora.sh",)),
}
"""By name: the system, the function that reads it, and its arguments; the first is the file."""


def computed(case: Case) -> dict[str, Any]:
    """Return the loss of a case, and its gradient by the log-probabilities (and values) in some directions."""
    batch = FixedBatch.make(case.n, case.turns) if case.batch is None else case.batch()
    arrays = {name: value for name, value in vars(batch).items() if isinstance(value, np.ndarray)}
    tensors = {name: torch.from_numpy(value.copy()) for name, value in arrays.items()}
    names = ("logprobs", "values", "policy_values")
    trained = [tensors[name].requires_grad_() for name in names if name in tensors]
    loss = case.loss(batch, tensors)
    loss.backward()
    along = [
        (directions(tuple(one.shape)) * one.grad.double().numpy()).sum((1, 2))
        for one in trained
        if one.grad is not None
    ]
    return {"loss": float(loss.detach()), "gradient": np.concatenate(along).tolist()}


def main() -> None:
    """Write the fixture, with where each loss comes from."""
    parser = argparse.ArgumentParser(description="Compute losses of other systems on a fixed batch, by their code.")
    for name in ("verl", "trl", "areal", "rlinf", "prime-rl"):
        parser.add_argument(f"--{name}", type=Path, required=True, help=f"a checkout of {name}")
    parser.add_argument("--commit", action="append", default=[], help="SYSTEM=COMMIT for a folder that is no checkout")
    given = vars(parser.parse_args())
    commits = dict(one.split("=") for one in given["commit"])
    found = {}
    # Sums are the same on any machine.
    torch.set_num_threads(1)
    for title, (system, read, args) in CASES.items():
        root = given[system.replace("-", "_")]
        if system not in commits:
            asked = ["git", "-C", str(root), "rev-parse", "HEAD"]
            commits[system] = subprocess.run(asked, capture_output=True, text=True, check=True).stdout.strip()
        case = read(root, *args)
        source = {"system": system, "commit": commits[system], "file": args[0], "functions": case.functions}
        batch = {"n": case.n, "turns": case.turns} if case.batch is None else {}
        found[title] = {**source, "batch": batch, "suffix": case.suffix, "text": case.text, **computed(case)}
        print(f"{title}: {found[title]['loss']:.7f}")
    OUT.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
