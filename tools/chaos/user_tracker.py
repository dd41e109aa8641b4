"""A tracker that fails while the suite says so, apart from the rest because it imports accelerate."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from accelerate.tracking import GeneralTracker


class Outage(Exception):
    """What W&B's and MLflow's errors are: no subclass of anything that a caller would think of."""


class Tracker(GeneralTracker):  # type: ignore[misc]
    name = "chaos"
    requires_logging_directory = True

    def __init__(self, run_name: str, logging_dir: str) -> None:
        super().__init__()
        # RUN_FOLDER/trackers in the suite's folder.
        self._flag = Path(logging_dir).parents[1] / "misbehave-tracker"
        self._fail()

    @property
    def tracker(self) -> None:
        return None

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        self._fail()

    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        self._fail()

    def finish(self) -> None:
        self._fail()

    def _fail(self) -> None:
        if self._flag.exists():
            raise Outage("the tracker's server is down (the chaos suite)")
