"""Log lines, and the numbers of a run that are read from them."""

import importlib
import io
import json
import subprocess
import sys
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from rich.console import Console

from consumers.trainer.records.evaluation_log import EvaluationLog
from deploy.export.plot import Evaluation, plot_run, smooth
from deploy.run.ending import Ending, finish
from deploy.run.summary import (
    Final,
    summarise,
    write_summary,
)
from deploy.supervisor.failures import _record
from deploy.supervisor.supervisor import RunOutcome
from schemas.run_folder import StoredLines, read_lines, surviving_lines
from tests.support.configurations import minimal_config

CODE = """
import logging, sys, structlog
from deploy.logs import configure_logging
from schemas.config import parse_config
config = parse_config({"run": {"name": "sums"}, "model": {"path": "x"}, "train": {"name": "arithmetic"},
                       "reward": {"terms": [{"name": "exact"}]}, "log": {"format": sys.argv[1]}})
configure_logging(config, "reward", "reward-0")
structlog.get_logger().info("scored", samples=3)
structlog.get_logger().debug("not shown")
logging.getLogger("some.library").warning("careful with %s", "that")
logging.getLogger("some.library").info("not shown")
raise ValueError("no such column")
"""


def run(form: str) -> list[str]:
    done = subprocess.run([sys.executable, "-c", CODE, form], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1
    return done.stderr.splitlines()


def test_json_lines_say_where_they_come_from() -> None:
    own, library, crash = [json.loads(line) for line in run("json")]
    assert (own["event"], own["samples"], own["level"]) == ("scored", 3, "info")
    assert (library["event"], library["logger"]) == ("careful with that", "some.library")
    for line in (own, library, crash):
        assert (line["run"], line["role"], line["service"]) == ("sums", "reward", "reward-0")


def test_the_last_words_of_a_crash_name_its_reason() -> None:
    assert _record(run("auto")[-1]) == "service crashed: ValueError: no such column"


def test_human_lines_are_short() -> None:
    first = run("human")[0]
    assert "scored" in first
    assert "samples=3" in first
    assert not first.startswith("{")


def test_a_log_that_can_not_be_written_ends_nothing() -> None:
    code = CODE.replace('raise ValueError("no such column")', 'print("still running")')
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-c", code, "json"],
            stdout=subprocess.PIPE,
            stderr=full,
            text=True,
            timeout=60,
            check=False,
        )
    assert (done.returncode, done.stdout) == (0, "still running\n")


def trained(step: int, *samples: tuple[int, int], **more: Any) -> dict[str, Any]:
    return {"step": step, "leader_term": "1-0", "samples": [list(sample) for sample in samples], **more}


def metric(step: int, **more: Any) -> dict[str, Any]:
    return {"step": step, "version": step, "wall_s": 2.0 * step, "train/tokens": 10, **more}


def test_a_replayed_step_counts_once() -> None:
    lines = [trained(0, (0, 0)), trained(1, (1, 0)), trained(1, (1, 0)), trained(2, (2, 0))]
    summary = summarise([], lines, Final("finished", published=3))
    assert summary["steps"] == 3
    assert summary["trajectories_trained"] == 3
    assert summary["trajectories_trained_twice"] == 0
    assert summary["trajectories_lost"] == 0


def test_steps_behind_a_checkpoint_that_was_gone_back_to_do_not_count() -> None:
    steps = [line["step"] for line in surviving_lines([trained(s) for s in (0, 1, 2, 3, 1, 2)])]
    assert steps == [0, 1, 2]


def test_a_sample_in_two_steps_was_trained_twice() -> None:
    lines = [trained(0, (0, 0), (0, 1)), trained(1, (0, 1), (1, 0))]
    assert summarise([], lines, Final("finished", published=3))["trajectories_trained_twice"] == 1


def test_what_is_nowhere_was_lost() -> None:
    final = Final("finished", published=10, dropped=2, failed=1, live=3)
    lines = [trained(0, (0, 0), (0, 1), excluded=1)]
    assert summarise([], lines, final)["trajectories_lost"] == 10 - 2 - 1 - 3 - 2 - 1


def test_without_the_broker_nobody_knows_what_was_lost() -> None:
    summary = summarise([], [trained(0, (0, 0))], Final("failed: broker"))
    assert summary["trajectories_lost"] is None
    assert summary["trajectories_trained"] == 1


def test_what_was_lost_is_unknown_if_the_broker_counted_another_run() -> None:
    """A fork that ends before its first step has the counts of its checkpoint, and a new broker's publications."""
    summary = summarise([], [], Final("stopped", published=0, dropped=21_000, failed=312))
    assert summary["trajectories_lost"] is None


def test_means_are_over_tokens() -> None:
    metrics = [
        metric(1, **{"staleness/mean": 0.0, "staleness/max": 0, "train/tokens": 30}),
        metric(2, **{"staleness/mean": 4.0, "staleness/max": 4, "train/tokens": 10}),
    ]
    summary = summarise(metrics, [], Final("finished"))
    assert summary["mean_staleness"] == pytest.approx(1.0)
    assert summary["max_staleness"] == 4
    assert summary["tokens_trained"] == 40


def test_the_gap_counts_only_tokens_that_were_compared() -> None:
    metrics = [
        metric(1, **{"train/logprob_gap_mean": 0.0, "train/logprob_gap_tokens": 0}),
        metric(2, **{"train/logprob_gap_mean": 1e-6, "train/logprob_gap_tokens": 5}),
    ]
    assert summarise(metrics, [], Final("finished"))["logprob_gap_mean"] == pytest.approx(1e-6)
    assert summarise([metric(1)], [], Final("finished"))["logprob_gap_mean"] is None


def test_held_out_figures_are_of_the_first_and_of_the_last_version() -> None:
    measured = [Evaluation(20, 0.9, 0.0, 0.8), Evaluation(0, 0.2, 0.0, 0.0), Evaluation(10, 0.5, 0.0, 0.4)]
    summary = summarise([], [], Final("finished", evaluations=measured))
    assert (summary["reward_before"], summary["reward_after"]) == (0.2, 0.9)
    assert (summary["accuracy_before"], summary["accuracy_after"]) == (0.0, 0.8)
    assert summarise([], [], Final("failed"))["reward_before"] is None


def test_a_mean_reward_is_not_called_an_accuracy() -> None:
    summary = summarise([], [], Final("finished", evaluations=[Evaluation(0, 0.55), Evaluation(9, 0.48)]))
    assert (summary["reward_before"], summary["reward_after"]) == (0.55, 0.48)
    assert (summary["accuracy_before"], summary["accuracy_after"]) == (None, None)


def test_the_reward_before_training_is_unknown_when_version_0_was_not_evaluated() -> None:
    summary = summarise([], [], Final("finished", evaluations=[Evaluation(101, 0.5), Evaluation(160, 0.7)]))
    assert (summary["reward_before"], summary["reward_after"]) == (None, 0.7)


def test_evaluations_the_broker_forgot_are_in_the_runs_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("deploy.run.ending.BROKER_DEADLINE_S", 0.1)
    config = minimal_config(
        run={"folder": str(tmp_path)},
        broker={"url": "redis://127.0.0.1:1"},
        model={"path": "m"},
    )
    line = {"n": 4, "scored": 4, "failed": 0, "off_version": 0, "time": 9.0, "wall_s": 3.0}
    log = EvaluationLog(tmp_path)
    log.add(line | {"version": 0, "mean": 0.25, "accuracy": 0.125})
    log.add(line | {"version": 5, "mean": None, "accuracy": None, "scored": 0, "failed": 4})
    log.add(line | {"version": 9, "mean": 0.75, "accuracy": 0.5})
    (tmp_path / "metrics.jsonl").write_text(json.dumps(metric(1, **{"reward/mean": 0.1})) + "\n")
    ending = finish(config, RunOutcome("finished"), {})
    assert (ending.summary["reward_before"], ending.summary["reward_after"]) == (0.25, 0.75)
    assert (ending.summary["accuracy_before"], ending.summary["accuracy_after"]) == (0.125, 0.5)


def test_a_long_run_is_summarised_and_drawn_line_by_line(tmp_path: Path) -> None:
    """A week has gigabytes of samples, and a summary that does not fit into memory would never be written."""
    steps, tasks, n = 100, 64, 8
    with (tmp_path / "trained.jsonl").open("w") as lines:
        for step in range(steps):
            samples = [(task, sample) for task in range(step * tasks, (step + 1) * tasks) for sample in range(n)]
            lines.write(json.dumps(trained(step, *samples)) + "\n")
    with (tmp_path / "metrics.jsonl").open("w") as lines:
        for step in range(1, steps + 1):
            more = {f"reward/term_{number}/mean": 0.1 for number in range(80)}
            lines.write(json.dumps(metric(step, **{"reward/mean": 0.5, **more})) + "\n")
    plot_run(StoredLines(tmp_path / "metrics.jsonl"), [], "a run", tmp_path / "run.png")
    tracemalloc.start()
    summary = write_summary(tmp_path, Final("finished", published=steps * tasks * n))
    _, of_summary = tracemalloc.get_traced_memory()
    tracemalloc.reset_peak()
    plot_run(StoredLines(tmp_path / "metrics.jsonl"), [], "a run", tmp_path / "run.png")
    _, of_plot = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert (summary["steps"], summary["trajectories_trained"]) == (steps, steps * tasks * n)
    assert (summary["trajectories_trained_twice"], summary["trajectories_lost"]) == (0, 0)
    size = (tmp_path / "trained.jsonl").stat().st_size
    assert of_summary < size / 2, "not even the bytes of the file"
    assert of_plot < 30 * 2**20, "the picture, and three numbers for each step"


@pytest.mark.parametrize(
    ("module", "read"),
    [
        ("deploy.planning.run_rates", lambda run_rates, file: run_rates.of_run(file, run_rates.stated(100, 8), 1, 1)),
        ("deploy.checks.thorough", lambda thorough, file: thorough._measured_step_s(file)),
        ("consumers.trainer.records.trackers", lambda trackers, file: trackers._last_step(file)),
    ],
)
def test_metrics_are_read_line_by_line(tmp_path: Path, module: str, read: Callable[[ModuleType, Path], object]) -> None:
    more = {f"reward/term_{number}/mean": 0.1 for number in range(400)}
    known = {name: 1.0 for name in ("time/total_s", "time/forward_s", "train/tokens")}
    known |= {f"train/length_{name}": 9.0 for name in ("mean", "median", "p95")}
    file = tmp_path / "metrics.jsonl"
    file.write_text("".join(json.dumps({"step": step, **known, **more}) + "\n" for step in range(1, 301)))
    found = importlib.import_module(module)
    read(found, file)
    tracemalloc.start()
    assert read(found, file)
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert most < file.stat().st_size / 2


def test_phases_are_the_callers_and_the_trainers() -> None:
    metrics = [metric(1, **{"time/wait_s": 1.0}), metric(2, **{"time/wait_s": 0.5})]
    summary = summarise(metrics, [], Final("finished", phases_s={"training": 9.0}))
    assert summary["wall_s_by_phase"] == {"training": 9.0, "trainer/wait": 1.5}
    assert summary["wall_s"] == 4.0


def test_a_line_cut_off_by_a_crash_is_left_out(tmp_path: Path) -> None:
    file = tmp_path / "metrics.jsonl"
    file.write_text('{"step": 1}\n{"step": 2, "rew')
    assert read_lines(file) == [{"step": 1}]
    assert read_lines(tmp_path / "none.jsonl") == []


def test_the_file_has_all_keys_also_for_a_run_that_never_began(tmp_path: Path) -> None:
    write_summary(tmp_path, Final("failed: trainer"))
    summary = json.loads((tmp_path / "summary.json").read_text())
    for key in (
        "accuracy_before",
        "accuracy_after",
        "reward_before",
        "reward_after",
        "steps",
        "trajectories",
        "tokens_generated",
        "tokens_trained",
        "max_staleness",
        "mean_staleness",
        "trajectories_lost",
        "trajectories_trained_twice",
        "trajectories_dropped_equal",
        "trajectories_dropped_stale",
        "logprob_gap_mean",
        "wall_s",
        "wall_s_by_phase",
        "device_s_by_use",
        "versions_published",
        "exit_reason",
    ):
        assert key in summary


def test_the_picture_is_a_png_also_without_evaluations(tmp_path: Path) -> None:
    metrics = [metric(step, **{"reward/mean": 0.1 * step}) for step in range(1, 4)]
    for evaluations in ([], [Evaluation(0, 0.1)], [Evaluation(0, 0.1), Evaluation(3, 0.4, 6.0)]):
        file = tmp_path / f"{len(evaluations)}.png"
        plot_run(metrics, evaluations, "a run", file)
        assert file.read_bytes().startswith(b"\x89PNG")


def test_smoothing_keeps_length_and_level() -> None:
    assert smooth([3.0] * 7, 4) == pytest.approx([3.0] * 7)
    assert smooth([0.0, 3.0, 0.0], 3) == pytest.approx([1.5, 1.0, 1.5])


@pytest.mark.parametrize(
    ("evaluations", "told", "not_told"),
    [
        ([], [], ["held-out", "before"]),
        ([Evaluation(0, 0.25), Evaluation(9, 0.5)], ["held-out reward", "0.250", "0.500"], ["accuracy", "%"]),
        (
            [Evaluation(0, 0.25, 0.0, 0.125), Evaluation(9, 0.5, 0.0, 0.375)],
            ["held-out accuracy", "12.5%", "37.5%"],
            ["held-out reward", "0.500"],
        ),
    ],
    ids=["none", "rewards", "accuracies"],
)
def test_the_end_tells_what_was_evaluated(
    tmp_path: Path, evaluations: list[Evaluation], told: list[str], not_told: list[str]
) -> None:
    shown = io.StringIO()
    found = write_summary(tmp_path, Final("finished", evaluations=evaluations))
    Ending("a run", Path("runs/a"), found, None).print(Console(file=shown, width=100))
    text = shown.getvalue()
    assert text.splitlines()[0].strip() == "a run: finished"
    assert "trajectories" in text
    assert [part in text for part in told] == [True] * len(told)
    assert [part in text for part in not_told] == [False] * len(not_told)
