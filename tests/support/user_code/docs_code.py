"""The code and the settings in the pages of the documentation, as tests of them take them."""

import re
from pathlib import Path
from typing import Any

import yaml

from schemas.codec import Array
from schemas.messages import Span, Trajectory

ROOT = Path(__file__).resolve().parents[3]
SMALLEST = {"model": {"path": "m"}, "train": {"name": "arithmetic"}, "reward": {"terms": [{"name": "exact"}]}}
OWN_CODE = sorted((ROOT / "docs" / "bring-your-own").glob("*.md"))
CODE = re.compile(r'^```python title="([^"]+)"\n(.*?)^```$', re.MULTILINE | re.DOTALL)


def write_code(page: Path, folder: Path) -> list[str]:
    """Write a page's titled Python blocks as files; returns their names."""
    blocks = CODE.findall(page.read_text(encoding="utf-8"))
    for title, text in blocks:
        (folder / title).write_text(text, encoding="utf-8")
    return [title for title, _ in blocks]


def own_code_yaml(title: str = "") -> list[dict[str, Any]]:
    """Return the YAML blocks of docs/bring-your-own/ that have this title, by default those without one."""
    start = rf' title="{re.escape(title)}"' if title else ""
    pattern = re.compile(rf"^```yaml{start}\n(.*?)^```$", re.MULTILINE | re.DOTALL)
    return [yaml.safe_load(block) for page in OWN_CODE for block in pattern.findall(page.read_text(encoding="utf-8"))]


def trajectory(completion: str, tokens: int, **data: Any) -> Trajectory:
    """A prompt of one token and a completion of ``tokens``."""
    return Trajectory(
        run="docs",
        task_id=0,
        sample=0,
        kind="train",
        tokens=Array.of(range(tokens + 1), "i4"),
        loss_mask=Array.of([0] + [1] * tokens, "u1"),
        logprobs=Array.of([0.0] + [-1.0] * tokens, "f4"),
        spans=[Span(0, 1, tokens + 1)],
        turns=[],
        finish="stop",
        prompt="p",
        completion=completion,
        generator="g",
        data=data,
    )
