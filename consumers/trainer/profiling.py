"""PyTorch's profiler around single steps, for ``trainer.profile_steps``: open the files in https://ui.perfetto.dev."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile


@contextmanager
def traced(file: Path | None) -> Iterator[None]:
    """Write what happens inside to ``file``, a Chrome trace; nothing without one."""
    if file is None:
        yield
        return
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if torch.cuda.is_available() else [])]
    with profile(activities=activities, record_shapes=True) as profiler:
        yield
    file.parent.mkdir(parents=True, exist_ok=True)
    profiler.export_chrome_trace(str(file))
