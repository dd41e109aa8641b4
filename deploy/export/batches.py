"""``tidemill batches``: the recorded batches of a run by step or by sample, as a table or as JSON."""

import json
from typing import Any

from rich.console import Console
from rich.table import Table

from consumers.trainer.checkpoint.batch_files import BatchFiles
from schemas.config import TidemillConfig
from schemas.errors import ConfigError
from schemas.messages import StepRecord, Trajectory


def print_batches(config: TidemillConfig, step: int | None, as_json: bool) -> None:
    """Print a line a step; with ``step`` a line a sample of it, whose JSON has its tokens."""
    files = BatchFiles(config.folder)
    known = sorted(files.steps())
    if not known:
        raise ConfigError(f"no batches in {files.folder}: trainer.record: true keeps those since the oldest checkpoint")
    if step is not None and step not in known:
        raise ConfigError(f"the batch of step {step} is not in {files.folder}: there are {known[0]} to {known[-1]}")
    lines = [_step_line(files.read(one)) for one in known] if step is None else _sample_lines(files.read(step))
    if as_json:
        for line in lines:
            print(json.dumps(line))
        return
    shown = [name for name in lines[0] if name not in ("tokens", "logprobs", "loss_mask", "versions")]
    table = Table(*shown, box=None, header_style="dim")
    for line in lines:
        table.add_row(*(f"{line[name]:.4g}" if isinstance(line[name], float) else str(line[name]) for name in shown))
    Console().print(table)


def _step_line(record: StepRecord) -> dict[str, Any]:
    rewards = [reward for group in record.groups for reward in group.rewards]
    samples = [sample for group in record.groups for sample in group.samples]
    return {
        "step": record.step,
        "version": record.version,
        "leader_term": record.leader_term,
        "groups": len(record.groups),
        "samples": len(samples),
        "loss_tokens": sum(_generated(sample) for sample in samples),
        "reward": sum(rewards) / len(rewards) if rewards else 0.0,
        "lr": record.lr or None,
    }


def _sample_lines(record: StepRecord) -> list[dict[str, Any]]:
    return [
        {
            "task": group.task_id,
            "sample": sample.sample,
            "reward": reward,
            "loss_tokens": _generated(sample),
            "finish": sample.finish,
            "generator": sample.generator,
            "tokens": sample.tokens.numpy().tolist(),
            "loss_mask": sample.loss_mask.numpy().tolist(),
            "logprobs": sample.logprobs.numpy().tolist(),
            "versions": sample.versions().tolist(),
        }
        for group in record.groups
        for sample, reward in zip(group.samples, group.rewards, strict=True)
    ]


def _generated(sample: Trajectory) -> int:
    return sample.loss_mask.data.count(1)
