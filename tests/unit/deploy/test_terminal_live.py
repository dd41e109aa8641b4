"""The live view is a pure function of a snapshot, and says the same without a terminal."""

from __future__ import annotations

import io
from dataclasses import replace

from rich.console import Console

from deploy.terminal.live import View, clock, plain_line, render, sparkline
from deploy.terminal.snapshot import Accuracy, Notice, Replica, RunSnapshot, remaining

BUSY = RunSnapshot(
    run="sums",
    steps=800,
    staleness_bound=4,
    state="running",
    step=412,
    version=412,
    elapsed_s=192,
    remaining_s=151,
    rewards=[0.1, 0.5, 0.75],
    accuracies=[Accuracy(0, 0.2, 500, 500), Accuracy(400, 0.84, 500, 500), Accuracy(450, 0.0, 3, 500)],
    staleness_mean=1.4,
    staleness_max=4,
    generated_per_s=6123,
    trained_per_s=4810,
    active=158,
    capacity=160,
    groups_trained=13184,
    dropped={"zero_variance": 120},
    lags={"tasks": 12, "trajectories": 3, "scored": 40},
    replicas=[
        Replica("generator-0", "generator", "running", 412, 1, 3100.0),
        Replica("reward-0", "reward", "running", silent_s=72),
    ],
    notices=[Notice("generator-0", "killed by SIGKILL [really]; restart 1 in 0.5 s", "warning", 1.0)],
)


def drawn(snapshot: RunSnapshot, width: int = 80) -> str:
    console = Console(file=io.StringIO(), width=width, force_terminal=True, color_system=None)
    console.print(render(snapshot))
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_everything_is_in_the_panel_at_80_columns() -> None:
    text = drawn(BUSY)
    for part in (
        "sums  running",
        "412/800",
        "2:31 to go",
        "0.750",
        "0.840",
        "from 0.200",
        "mean 1.4   max 4   bound 4",
        "generated 6,123   trained 4,810",
        "slots 158/160",
        "dropped 120",
        "tasks 12   trajectories 3   scored 40",
        "silent for 1:12",
        "killed by SIGKILL [really]; restart 1 in 0.5 s",
        "3:12",
    ):
        assert part in text
    assert all(len(line) <= 80 for line in text.splitlines())


def test_a_run_nothing_is_known_of_can_be_drawn() -> None:
    nothing = RunSnapshot("sums", 10, 4)
    assert "starting" in drawn(nothing)
    assert plain_line(nothing) == "step 0/10  slots 0/0  starting"


def test_pause_and_a_lost_broker_are_shown() -> None:
    assert "paused" in drawn(replace(BUSY, paused=True))
    assert "waiting for the broker" in drawn(replace(BUSY, broker_answers=False))
    assert plain_line(replace(BUSY, broker_answers=False)).endswith("waiting for the broker")


def test_the_plain_line_speaks_of_complete_evaluations_only() -> None:
    assert plain_line(BUSY) == (
        "step 412/800  reward 0.750  held-out 0.840 (version 400)  staleness 1.4 max 4 bound 4"
        "  tokens/s 6,123 generated 4,810 trained  slots 158/160  2:31 to go"
    )


def test_without_a_terminal_lines_come_now_and_then_and_at_each_evaluation() -> None:
    output = io.StringIO()
    with View(Console(file=output, width=80)) as view:
        for now, accuracies in ((0.0, 0), (1.0, 0), (2.0, 1), (3.0, 1), (13.0, 1)):
            view.show(replace(BUSY, accuracies=BUSY.accuracies[:accuracies]), now)
        view.notice(Notice("trainer", "started [again]"))
    lines = output.getvalue().splitlines()
    assert len(lines) == 4
    assert lines[-1] == "trainer: started [again]"


def test_a_sparkline_spans_its_values() -> None:
    assert sparkline([]) == ""
    assert sparkline([1.0, 1.0]) == "▁▁"
    assert sparkline([0.0, 1.0]) == "▁█"
    assert len(sparkline([float(i) for i in range(1000)], width=30)) == 30


def test_time_to_go_is_the_pace_of_the_last_steps() -> None:
    lines = [{"step": step, "wall_s": 100.0 + 2.0 * step} for step in range(1, 50)]
    assert remaining(lines, steps=59) == 20.0
    assert remaining(lines[:1], steps=59) is None
    assert remaining([{"step": 5, "wall_s": 3.0}, {"step": 4, "wall_s": 4.0}], steps=59) is None


def test_clock() -> None:
    assert [clock(s) for s in (0, 59.9, 61, 3661)] == ["0:00", "0:59", "1:01", "1:01:01"]
