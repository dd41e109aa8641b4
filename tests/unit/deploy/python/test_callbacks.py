"""What callbacks of a started run receive."""

import json
from pathlib import Path
from typing import Any

from deploy.control_plane.files.lines import GrowingFile
from deploy.python.started_run import Callback, StartedRun
from schemas.run_folder import METRICS


class Recorded(Callback):
    def __init__(self) -> None:
        self.steps: list[int] = []

    def on_step(self, run: StartedRun, metrics: Any) -> None:
        self.steps.append(metrics["step"])


def test_the_last_step_is_told_once_if_its_evaluation_comes_after_it(tmp_path: Path) -> None:
    """The trainer then writes the step's line again, with the evaluation and without the times."""
    line = {"step": 2, "reward/mean": 0.5}
    written = [{**line, "step": 1, "time/total_s": 1.0}, {**line, "time/total_s": 1.0}, {**line, "eval/reward": 0.6}]
    (tmp_path / METRICS).write_text("".join(json.dumps(one) + "\n" for one in written))
    recorded, run = Recorded(), StartedRun.__new__(StartedRun)
    run.folder, run._callbacks = tmp_path, [recorded]
    run._call(GrowingFile(tmp_path / METRICS), set())
    assert recorded.steps == [1, 2]
