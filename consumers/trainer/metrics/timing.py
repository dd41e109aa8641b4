"""A step's wall time, by phases that never overlap, and PyTorch's profiles of steps, for https://ui.perfetto.dev."""

import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import structlog
import torch
from torch.profiler import ProfilerActivity, profile

log = structlog.get_logger()


class StepTimer:
    """Adds up the seconds of phases. entered: called with the phase that begins or resumes, "" outside of phases."""

    def __init__(
        self, now: Callable[[], float] = time.perf_counter, entered: Callable[[str], None] = lambda _: None
    ) -> None:
        self._now = now
        self._entered = entered
        self._open = ""
        self._began = now()
        self._spent: defaultdict[str, float] = defaultdict(float)
        self._within = 0.0
        """Seconds of the phases inside the one that is open."""

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Count the time inside the block for the phase ``name``, less that of phases inside the block."""
        began, within, self._within = self._now(), self._within, 0.0
        outer, self._open = self._open, name
        self._entered(name)
        try:
            yield
        finally:
            seconds = self._now() - began
            self._spent[name] += seconds - self._within
            self._within = within + seconds
            self._open = outer
            self._entered(outer)

    def split(self, name: str, parts: Mapping[str, float]) -> None:
        """Move seconds of the phase ``name`` to the phases ``parts``."""
        for part, seconds in parts.items():
            self._spent[part] += seconds
            self._spent[name] -= seconds

    def lap(self) -> dict[str, float]:
        """Return each phase's seconds since the last lap, ``other`` for the rest, and ``total`` without ``paused``."""
        now = self._now()
        passed, spent = now - self._began, dict(self._spent)
        self._began = now
        self._spent.clear()
        total = passed - spent.get("paused", 0.0)
        return spent | {"other": passed - sum(spent.values()), "total": total}


@contextmanager
def traced(file: Path | None) -> Iterator[None]:
    """Profile the block and write a Chrome trace to ``file``, if there is room; without a file do nothing."""
    if file is None:
        yield
        return
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if torch.cuda.is_available() else [])]
    with profile(activities=activities, record_shapes=True) as profiler:
        yield
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        profiler.export_chrome_trace(str(file))
    except (OSError, RuntimeError) as error:
        # Not worth a step, which cannot be profiled again.
        log.warning("a profile was not written", file=str(file), error=str(error))
