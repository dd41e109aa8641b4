"""TRL's GRPOTrainer, or RLOOTrainer, on a workload of this benchmark: ``python -m benchmarks.end_to_end.trl_run``.

One JSON line a step goes to a file: seconds since the process began, CPU seconds of the process and the tokens that
were generated, without what evaluations took. Everything of a step is one forward pass, which is the fastest here.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

BEGAN, CPU = time.time(), time.process_time

SAME_LOSS = {"beta": 0.0, "num_iterations": 1, "epsilon": 0.2}


def main() -> None:
    """``CONFIG OUT KIND PROMPTS SAMPLES STEPS LR SEED THREADS BEGAN``: KIND is grpo or rloo; BEGAN: Unix time."""
    file, out, kind, *numbers = sys.argv[1:]
    prompts, samples, steps = map(int, numbers[:3])
    lr, seed, threads, began = float(numbers[3]), int(numbers[4]), int(numbers[5]), float(numbers[6])
    import datasets
    import torch
    import trl
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback

    from benchmarks.learning.greedy import greedy
    from producers.datasets.loading import build_dataset
    from schemas.config import load_config
    from schemas.errors import ConfigError

    torch.set_num_threads(threads)
    library: Any = trl  # it comes with few types
    config = load_config(Path(file), [], environment={})
    if config.eval is None:
        raise ConfigError(f"{file} has no eval, which both contenders are measured by")
    tokenizer = AutoTokenizer.from_pretrained(config.model.path, padding_side="left")
    train, heldout = (build_dataset(part, config.base) for part in (config.train[0], config.eval.dataset[0]))
    every, most = config.eval.every, config.sampling.max_tokens
    questions = [tokenizer(heldout[i].text, add_special_tokens=False).input_ids for i in range(len(heldout))]
    answers = [tokenizer(heldout[i].data["answer"], add_special_tokens=False).input_ids for i in range(len(heldout))]

    generated = 0

    def exact(completions: list[str], answer: list[str], completion_ids: list[list[int]], **_: Any) -> list[float]:
        nonlocal generated
        generated = sum(map(len, completion_ids))
        return [float(given.strip() == want.strip()) for given, want in zip(completions, answer, strict=True)]

    class Steps(TrainerCallback):
        """Callback that writes a line for each step."""

        def __init__(self, lines: Any) -> None:
            self.lines, self.left_s, self.left_cpu_s = lines, 0.0, 0.0

        def on_train_begin(self, args: Any, state: Any, control: Any, **more: Any) -> None:
            self.write(0, self.evaluate(more["model"]))

        def on_step_end(self, args: Any, state: Any, control: Any, **more: Any) -> None:
            due = state.global_step % every == 0 or state.global_step == steps
            self.write(state.global_step, self.evaluate(more["model"]) if due else None)

        def evaluate(self, model: Any) -> float:
            """Measure the accuracy, with the clocks stopped."""
            moment, cpu_s = time.time(), CPU()
            found = self.accuracy(model)
            self.left_s += time.time() - moment
            self.left_cpu_s += CPU() - cpu_s
            return found

        def accuracy(self, model: Any) -> float:
            found = greedy(model, questions, most, {tokenizer.eos_token_id})
            return float(sum(a == want for a, want in zip(found, answers, strict=True)) / len(answers))

        def write(self, step: int, accuracy: float | None) -> None:
            line = {
                "step": step,
                "wall_s": time.time() - began - self.left_s,
                "cpu_s": CPU() - self.left_cpu_s,
                "tokens": generated,
                "accuracy": accuracy,
            }
            self.lines.write(json.dumps(line) + "\n")
            self.lines.flush()

    arguments = {
        "output_dir": str(Path(out).parent / "trl"),
        "use_cpu": True,
        "bf16": False,
        "gradient_checkpointing": False,
        "per_device_train_batch_size": prompts * samples,
        "num_generations": samples,
        "max_completion_length": most,
        "max_steps": steps,
        "learning_rate": lr,
        "lr_scheduler_type": "constant",
        "adam_beta1": 0.9,
        "adam_beta2": 0.95,
        "weight_decay": 0.0,
        "temperature": 1.0,
        "seed": seed,
        "save_strategy": "no",
        "logging_steps": 25,
        "report_to": [],
        "disable_tqdm": True,
        **SAME_LOSS,
    }
    made, settings = (
        (library.GRPOTrainer, library.GRPOConfig) if kind == "grpo" else (library.RLOOTrainer, library.RLOOConfig)
    )
    rows = [{"prompt": train[i].text, "answer": train[i].data["answer"]} for i in range(len(train))]
    with Path(out).open("w", encoding="utf-8") as lines:
        trainer = made(
            model=AutoModelForCausalLM.from_pretrained(config.model.path, dtype=torch.float32),
            reward_funcs=exact,
            args=settings(**arguments),
            train_dataset=datasets.Dataset.from_list(rows),
            processing_class=tokenizer,
            callbacks=[Steps(lines)],
        )
        trainer.train()


if __name__ == "__main__":
    main()
