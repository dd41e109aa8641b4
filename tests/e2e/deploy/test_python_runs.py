"""Runs that Python starts from its own objects: real services, watched and ordered through the handle."""

import asyncio
import stat
import tempfile
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import datasets
import nbformat
import pytest
from nbclient import NotebookClient

import tidemill
from tests.support.models.tiny_model import make_tiny_model

ROOT = Path(__file__).resolve().parents[3]
ROWS = [{"question": f"{n}+1=", "digits": str(n)} for n in range(8)]
SEVEN = "7"
SECRET = "hook-secret-4711"


class Recorded(tidemill.Callback):
    def __init__(self) -> None:
        self.both, self._loop = asyncio.Event(), asyncio.get_running_loop()
        self.steps: list[int] = []
        self.versions: list[int] = []

    def on_step(self, run: tidemill.StartedRun, metrics: Mapping[str, Any]) -> None:
        self.steps.append(metrics["step"])

    def on_evaluation(self, run: tidemill.StartedRun, evaluation: Any) -> None:
        self.versions.append(evaluation.version)
        if self.steps:
            self._loop.call_soon_threadsafe(self.both.set)


def readable_by_others(folder: Path) -> list[Path]:
    """The files that other users of the machine can read under the usual umask."""
    found = []
    for path in folder.iterdir():
        mode = path.lstat().st_mode
        if path.is_dir() and mode & 0o011:
            found += readable_by_others(path)
        elif stat.S_ISREG(mode) and mode & 0o044:
            found.append(path)
    return found


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Any]]:
    """A small run without data and reward; its embedded server's socket has to be a short path."""
    monkeypatch.delenv("REDIS_URL", raising=False)
    make_tiny_model(tmp_path / "model")
    with tempfile.TemporaryDirectory(prefix="tidemill-py-") as run:
        yield {
            "run": {"name": "py", "folder": run},
            "model": {"path": str(tmp_path / "model"), "dtype": "float32", "max_length": 64},
            "train": {"name": None, "args": {"prompt": "question"}},
            "eval": {"every": 1, "sampling": {"max_tokens": 4}},
            "sampling": {"n": 2, "max_tokens": 4},
            "generator": {"engine": "transformers"},
            "notify": {"webhook": f"http://127.0.0.1:9/hook?token={SECRET}", "events": ["stuck"]},
            "trainer": {"steps": 500, "batch_groups": 2, "threads": 1, "advantage": {"keep_zero_variance": True}},
        }


@pytest.mark.timeout(300)
async def test_a_run_is_started_watched_paused_and_stopped_in_an_event_loop(config: dict[str, Any]) -> None:
    def sevens(completion: str, digits: str) -> float:
        """Share of sevens; the value is a global of this module."""
        return completion.count(SEVEN) / max(len(completion), 1) + 0 * int(digits)

    recorded = Recorded()
    table = datasets.Dataset.from_list(ROWS)
    held_out = {"name": ROWS[:2], "args": {"prompt": "question"}}
    with tidemill.start(config, rewards=[sevens], train=table, eval=held_out, callbacks=[recorded]) as run:
        assert run.status().state == "starting"
        paused = await asyncio.to_thread(run.pause, wait_s=120)
        assert (paused.order, paused.done, run.status().state) == ("pause", True, "paused")
        assert run.resume().changed
        await asyncio.wait_for(recorded.both.wait(), 120)
        assert run.status().state == "running"
        with pytest.raises(TimeoutError, match="run 'py' has not ended within"):
            run.wait(0.1)
        second = tidemill.start(config, rewards=[sevens], train=table, eval=held_out)
        assert await asyncio.to_thread(second._process.wait, 60) == 1
        head = await asyncio.to_thread(run.stop)
    with pytest.raises(tidemill.InfraError, match=r"^another `tidemill up` uses the folder"):
        second.wait()
    assert (head.state, run.exit_code) == ("stopped", 130)
    steps = [line["step"] for line in run.metrics()]
    assert steps == recorded.steps == [*range(1, len(steps) + 1)]
    assert recorded.versions == [one.version for one in run.evaluations()][: len(recorded.versions)]
    (first, *_) = run.samples(step=1)
    assert first.full_prompt in {row["question"] for row in ROWS}
    assert [sample.terms.keys() for sample in first.samples] == [{"sevens"}] * 2
    folder = Path(config["run"]["folder"])
    token = (folder / "control_token").read_bytes().strip()
    others = readable_by_others(folder)
    assert {"metrics.jsonl", "feeder.log"} <= {file.name for file in others}
    assert [file for file in others for secret in (SECRET.encode(), token) if secret in file.read_bytes()] == []


@pytest.mark.matrix("a second way to start the run that the test above starts")
@pytest.mark.timeout(300)
def test_a_thread_runs_to_the_end_and_a_mistake_is_one_line(config: dict[str, Any]) -> None:
    codes: list[int] = []
    config["trainer"]["steps"] = 2
    del config["eval"]
    one = threading.Thread(target=lambda: codes.append(tidemill.run(config, rewards=["exact"], train="arithmetic")))
    one.start()
    one.join(240)
    assert codes == [0]
    with pytest.raises(tidemill.ConfigError, match=r"^run 'py' in .* is finished: increase trainer.steps"):
        tidemill.start(config, rewards=["exact"], train="arithmetic").wait()


@pytest.mark.matrix("the same handle from a notebook's cells")
@pytest.mark.timeout(300)
def test_the_notebook_runs_from_its_first_cell_to_its_last(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("REDIS_URL", raising=False)
    monkeypatch.setenv("TMPDIR", "/tmp")
    notebook = nbformat.read(ROOT / "examples/notebook/digits.ipynb", as_version=4)
    NotebookClient(notebook, timeout=200, resources={"metadata": {"path": str(tmp_path)}}).execute()
    printed = [output["text"] for cell in notebook.cells for output in cell.get("outputs", []) if "text" in output]
    assert any(line.startswith("step 10: reward ") for text in printed for line in text.splitlines())
    assert printed[-1].startswith("stopped at step ")
