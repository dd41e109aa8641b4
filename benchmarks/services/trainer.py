"""``tidemill bench trainer``: Tidemill's optimizer step, TRL's, and a bare limit, on the same trajectories.

Each contender is a process of its own (``python -m benchmarks.services.trainer``), so that its peak memory is its own.
They take turns, so that a busy machine slows all of them. Figures are medians over the rounds. ``ours`` is the
trainer's whole step, ``compiled`` the same with compiled layers. ``limit`` is forward and backward of the same packed
tokens through the bare model, by the same attention, with the plainest cross-entropy, and no optimizer. ``trl`` is the
loss of TRL's GRPOTrainer, its padding, and the same optimizer.
"""

from __future__ import annotations

import importlib.util
import json
import os
import resource
import select
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.nn.functional as F
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen2ForCausalLM

from benchmarks.harness.report import ResultRow, Table
from benchmarks.harness.rounds import Advance, Figures, Round, Spread, compare, ratio
from benchmarks.harness.trajectories import GROUP, random_groups
from consumers.trainer.data.groups import Group
from consumers.trainer.data.packed import pack
from consumers.trainer.step.build import build_train_step
from deploy.offline.tiny_model import write_tiny_model
from schemas.config import TidemillConfig, parse_config
from schemas.errors import InfraError

STEP_DEADLINE_S = 1800.0


TRAINER = Table(
    "Our optimizer step beside others",
    {
        "tokens/s": "{tokens_per_s:,.0f}",
        "times the bare model": "{vs_limit:.2f}",
        "times TRL (– if it is not installed)": "{vs_trl:.2f}",
        "times compiled layers": "{vs_compiled:.2f}",
        "peak memory": "{peak_rss_mb:,.0f} MB, {peak_rss_vs_limit:.2f} of the bare model's",
    },
)
"""Our step beside the others: by how many times it is faster, in wall and in processor seconds."""


class Contender:
    """A worker process that takes one step at a time."""

    def __init__(self, name: str, folder: str, samples: int, micro_batch_tokens: int, threads: int) -> None:
        self.name = name
        environment = {**os.environ, "OMP_NUM_THREADS": str(threads), "CUDA_VISIBLE_DEVICES": ""}
        command = [sys.executable, "-P", "-m", "benchmarks.services.trainer", name, folder, str(samples)]
        self._process = subprocess.Popen(
            [*command, str(micro_batch_tokens)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environment,
            text=True,
        )

    def step(self) -> Figures:
        """Take one step: ``seconds``, ``cpu_seconds``, its ``tokens``, and the process's ``peak_rss_mb`` so far."""
        process = self._process
        if process.stdin is None or process.stdout is None:
            raise InfraError(f"{self.name} has no pipes")
        process.stdin.write("step\n")
        process.stdin.flush()
        ready, _, _ = select.select([process.stdout], [], [], STEP_DEADLINE_S)
        line = process.stdout.readline() if ready else ""
        if not line:
            raise InfraError(f"{self.name} made no step within {STEP_DEADLINE_S:.0f} s, or ended; see what it printed")
        figures: Figures = json.loads(line)
        return figures

    def close(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.wait()


def contenders(compiled: bool) -> list[str]:
    """Choose the contenders: TRL if installed; compiled layers, whose first step takes a minute, if requested."""
    there = {"ours": True, "compiled": compiled, "limit": True, "trl": importlib.util.find_spec("trl") is not None}
    return [name for name, takes_part in there.items() if takes_part]


def measure(
    names: Sequence[str], samples: int, rounds: int, micro_batch_tokens: int, threads: int, advance: Advance
) -> ResultRow:
    """Measure one row; ratios are None for a contender that is not among ``names``."""
    with tempfile.TemporaryDirectory(prefix="tidemill-bench-") as folder, ExitStack() as stack:
        running = {}
        for name in names:
            contender = Contender(name, folder, samples, micro_batch_tokens, threads)
            stack.callback(contender.close)
            # The first step allocates; it also writes the model's folder, one process after the other.
            contender.step()
            advance(1)
            running[name] = contender.step
        return _row(compare(running, rounds, 0, advance), threads)


def _row(rounds: Sequence[Round], threads: int) -> ResultRow:
    def faster(name: str, figure: str = "seconds") -> Spread | None:
        return ratio(rounds, figure, name, "ours") if name in last else None

    def per_s(name: str) -> float:
        return median(done[name]["tokens"] / done[name]["seconds"] for done in rounds)

    last = rounds[-1]
    peaks = {name: figures["peak_rss_mb"] for name, figures in last.items()}
    return TRAINER.row(
        threads=threads,
        rounds=len(rounds),
        tokens=int(last["ours"]["tokens"]),
        tokens_per_s=per_s("ours"),
        limit_tokens_per_s=per_s("limit"),
        vs_limit=ratio(rounds, "seconds", "limit", "ours"),
        vs_limit_cpu=ratio(rounds, "cpu_seconds", "limit", "ours"),
        vs_trl=faster("trl"),
        vs_trl_cpu=faster("trl", "cpu_seconds"),
        vs_compiled=faster("compiled"),
        peak_rss_mb=peaks["ours"],
        limit_peak_rss_mb=peaks["limit"],
        trl_peak_rss_mb=peaks.get("trl"),
        peak_rss_vs_limit=peaks["ours"] / peaks["limit"],
    )


VOCABULARY, HIDDEN, LAYERS, HEADS = 8192, 384, 8, 6
PROMPT, MEAN, SPREAD, LONGEST = 32, 120.0, 1.1, 1024
"""Of the trajectories, see random_groups."""
ROWS = 8
"""Samples in a micro-batch of TRL: its per_device_train_batch_size."""


def make_model(folder: Path) -> Path:
    """Write a random Qwen2 of 25 million parameters with a tokenizer, once."""
    if (folder / "config.json").is_file():
        return folder
    words = {f"<{index}>": index for index in range(VOCABULARY)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<3>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<0>", eos_token="<2>")
    write_tiny_model(
        folder, fast, 0, hidden=HIDDEN, intermediate=4 * HIDDEN, layers=LAYERS, heads=HEADS, max_length=LONGEST
    )
    return folder


def configuration(folder: Path, micro_batch_tokens: int, compiled: bool = False) -> TidemillConfig:
    return parse_config(
        {
            "model": {"path": str(folder), "dtype": "float32"},
            "train": {"name": "arithmetic"},
            "reward": {"terms": [{"name": "exact"}]},
            "sampling": {"max_tokens": LONGEST},
            "trainer": {"micro_batch_tokens": micro_batch_tokens, "compile": compiled},
        }
    )


def ours(folder: Path, groups: list[Group], micro_batch_tokens: int, compiled: bool = False) -> Callable[[], None]:
    step = build_train_step(configuration(folder, micro_batch_tokens, compiled))

    def run() -> None:
        step.run(step.planner.plan(groups).batch(), version=0)

    return run


def limit(folder: Path, groups: list[Group], micro_batch_tokens: int) -> Callable[[], None]:
    step = build_train_step(configuration(folder, micro_batch_tokens))
    # Only the plan, and the model with its packed attention, are reused.
    micro_batches, model = step.planner.plan(groups).batch().micro_batches, step.policy.causal_lm
    step.update.optimizer.state.clear()
    packed = [
        (found, found.tokens_of(micro.targets))
        for micro in micro_batches
        for found in [pack(micro.tokens[:, :-1], micro.lengths)]
    ]

    def run() -> None:
        model.zero_grad(set_to_none=True)
        for tokens, targets in packed:
            logits = model(**tokens.arguments(), use_cache=False).logits[0]
            F.cross_entropy(logits.float(), targets).backward()

    return run


def trl(folder: Path, groups: list[Group], micro_batch_tokens: int) -> Callable[[], None]:
    import datasets
    import trl  # type: ignore[import-not-found,unused-ignore]

    library: Any = trl  # it comes with few types
    count = sum(len(group.samples) for group in groups)
    arguments = library.GRPOConfig(
        output_dir=str(folder / "trl"),
        use_cpu=True,
        bf16=False,
        fp16=False,
        gradient_checkpointing=False,
        per_device_train_batch_size=ROWS,
        gradient_accumulation_steps=count // ROWS,
        num_generations=GROUP,
        max_completion_length=LONGEST,
        report_to=[],
        disable_tqdm=True,
    )
    trainer = library.GRPOTrainer(
        model=Qwen2ForCausalLM.from_pretrained(folder, dtype=torch.float32),
        reward_funcs=lambda completions, **_: [0.0] * len(completions),
        args=arguments,
        train_dataset=datasets.Dataset.from_list([{"prompt": "<5>"}] * count),
        processing_class=PreTrainedTokenizerFast.from_pretrained(folder),
    )
    model: Any = trainer.model
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6, fused=True)
    batches = _padded(groups)
    # The library's training loop, which is missing here, sets these.
    trainer.current_gradient_accumulation_steps = len(batches)

    def run() -> None:
        for batch in batches:
            loss = trainer.compute_loss(model, batch)
            (loss / len(batches)).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return run


def _padded(groups: list[Group]) -> list[dict[str, Any]]:
    """Make rows in TRL's layout: prompts padded left, completions padded right, all to the longest of the step."""
    samples = [(t, reward) for group in groups for t, reward in group.samples]
    prompts = [int((t.loss_mask.numpy() == 0).sum()) for t, _ in samples]
    completions = [len(t.tokens) - prompt for (t, _), prompt in zip(samples, prompts, strict=True)]
    prompt_ids = torch.zeros(len(samples), max(prompts), dtype=torch.int64)
    completion_ids = torch.zeros(len(samples), max(completions), dtype=torch.int64)
    prompt_mask, completion_mask = torch.zeros_like(prompt_ids), torch.zeros_like(completion_ids)
    for row, ((t, _), prompt, completion) in enumerate(zip(samples, prompts, completions, strict=True)):
        tokens = torch.from_numpy(t.tokens.numpy().copy()).long()
        prompt_ids[row, max(prompts) - prompt :], prompt_mask[row, max(prompts) - prompt :] = tokens[:prompt], 1
        completion_ids[row, :completion], completion_mask[row, :completion] = tokens[prompt:], 1
    rewards = torch.tensor([reward for _, reward in samples]).reshape(-1, GROUP)
    advantages = (rewards - rewards.mean(1, keepdim=True)).flatten()
    whole = {
        "prompt_ids": prompt_ids,
        "prompt_mask": prompt_mask,
        "completion_ids": completion_ids,
        "completion_mask": completion_mask,
        "advantages": advantages,
        "old_per_token_logps": torch.full(completion_ids.shape, -9.0),
    }
    total = completion_mask.sum()
    return [
        {**{name: value[start : start + ROWS] for name, value in whole.items()}, "num_items_in_batch": total}
        for start in range(0, len(samples), ROWS)
    ]


def main() -> None:
    """``python -m benchmarks.services.trainer NAME FOLDER SAMPLES MICRO_BATCH_TOKENS``."""
    name, folder, samples, micro_batch_tokens = sys.argv[1:]
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    # Libraries print to stdout, which is read for results.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    groups = random_groups(int(samples), PROMPT, MEAN, SPREAD, LONGEST, VOCABULARY)
    tokens = sum(len(t.tokens) for group in groups for t, _ in group.samples)
    makers: dict[str, Callable[[Path, list[Group], int], Callable[[], None]]] = {
        "ours": ours,
        "compiled": partial(ours, compiled=True),
        "limit": limit,
        "trl": trl,
    }
    run = makers[name](make_model(Path(folder)), groups, int(micro_batch_tokens))
    for _ in sys.stdin:
        started, used = time.perf_counter(), time.process_time()
        run()
        seconds, cpu_seconds = time.perf_counter() - started, time.process_time() - used
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (1e6 if sys.platform == "darwin" else 1e3)
        answers.write(
            json.dumps({"seconds": seconds, "cpu_seconds": cpu_seconds, "tokens": tokens, "peak_rss_mb": peak}) + "\n"
        )
        answers.flush()


if __name__ == "__main__":
    main()
