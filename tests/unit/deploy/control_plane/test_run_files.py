"""Runs read from their folders: running, ended, damaged, and without secrets."""

import json
import os
import shutil
import socket
import time
from pathlib import Path
from typing import Any, get_args

import pytest

from deploy.control_plane.files import groups as group_files
from deploy.control_plane.files import resources
from deploy.control_plane.files.archive import Archive
from deploy.control_plane.files.evaluations import read_evaluations, read_prompts
from deploy.control_plane.files.groups import Sort, Wanted
from deploy.control_plane.files.lines import GrowingFile
from deploy.control_plane.files.logs import list_logs, read_log
from deploy.control_plane.files.run_folder import RunFolder, mask
from deploy.control_plane.web.paging import Page
from deploy.control_plane.web.refusal import Refusal
from tests.support.runs.run_folders import group_line, make_run, metrics_line


def test_a_finished_run_is_listed_with_where_it_stands(tmp_path: Path) -> None:
    make_run(tmp_path / "first", steps=3)
    make_run(tmp_path / "second", steps=5, state="failed: no memory")
    (tmp_path / "no-run").mkdir()
    found = {head.name: head for head in Archive(tmp_path).runs(Page(9)).runs}
    assert set(found) == {"first", "second"}
    first, second = found["first"], found["second"]
    assert (first.state, first.step, first.steps, first.model) == ("finished", 3, 40, "tiny")
    assert (first.heldout_reward_before, first.heldout_reward, first.heldout_version) == (0.25, 0.75, 3)
    assert (first.accuracy_before, first.accuracy) == (None, None), "a mean reward is not called an accuracy"
    assert (second.state, second.cause, second.live) == ("failed", "no memory", None)
    assert Archive(tmp_path / "first").runs(Page(9)).runs[0].name == "first", "a run's own folder"


def test_steps_that_an_order_changed_are_listed_as_ordered(tmp_path: Path) -> None:
    file = make_run(tmp_path / "run", steps=3) / "summary.json"
    for ordered, steps in ((80, 80), (None, 40)):
        file.write_text(json.dumps({**json.loads(file.read_text()), "trainer_steps": ordered}))
        assert (head := RunFolder(tmp_path / "run").head()) is not None
        assert head.steps == steps


@pytest.mark.parametrize("order", ["oldest", "newest"])
def test_each_run_is_listed_once_while_runs_change(tmp_path: Path, order: str) -> None:
    names = [f"run-{number}" for number in range(5)]
    for name in names:
        make_run(tmp_path / name)
    archive, listed, cursor = Archive(tmp_path), list[str](), None
    for page in range(9):
        found = archive.runs(Page(1, cursor, order == "newest"))
        listed += [head.name for head in found.runs]
        cursor = found.next
        if cursor is None:
            break
        # One that was shown changes, and one that was not.
        for name in (listed[-1], min(set(names) - set(listed), default=listed[-1])):
            later = time.time() + 1000 * (page + 1)
            os.utime(tmp_path / name / "metrics.jsonl", (later, later))
    assert listed == (names if order == "oldest" else names[::-1])


def test_a_run_is_running_while_its_process_lives(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", state="")
    lock = folder / "up.lock"
    lock.write_text(f"process {os.getpid()} on {socket.gethostname()} since now\n")
    head = RunFolder(folder).head()
    assert head is not None
    assert head.state == "running"
    lock.write_text(f"process {2**22 + 1} on {socket.gethostname()} since now\n")
    head = RunFolder(folder).head()
    assert head is not None
    assert (head.state, head.heldout_reward) == ("unknown", 0.75)


@pytest.mark.parametrize(
    ("settings", "tags"),
    [
        ("run: {tags: seed-1, notes: [1]}", []),
        ("run: {tags: [1, ours], notes: 5}\nmodel: {path: [a]}", ["ours"]),
    ],
)
def test_a_configuration_of_something_else_spoils_no_list_of_runs(
    tmp_path: Path, settings: str, tags: list[str]
) -> None:
    (tmp_path / "config.yaml").write_text(settings)
    head = RunFolder(tmp_path).head()
    assert head is not None
    assert (head.model, head.tags, head.notes) == (None, tags, None)


def test_before_is_version_0_or_nothing(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", state="")
    lines = (folder / "evaluations.jsonl").read_text().splitlines()
    (folder / "evaluations.jsonl").write_text(lines[1] + "\n")
    head = RunFolder(folder).head()
    assert head is not None
    assert (head.heldout_reward_before, head.heldout_reward) == (None, 0.75)


@pytest.mark.parametrize("size", [63, 64, 65, 200, 256])
def test_too_large_a_line_is_left_out_of_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    """However much of it is there at each look. size: bytes of the line, the limit is 64."""
    monkeypatch.setattr("deploy.control_plane.files.lines.LARGEST", 64)
    path = tmp_path / "lines.jsonl"
    large, whole = b"x" * (size - 1) + b"\n", (0, b"first\n")
    kept = [(6, large)] if size <= 64 else []
    content, last = b"first\n" + large + b"last\n", (6 + size, b"last\n")
    path.write_bytes(content)
    assert list(GrowingFile(path).read()) == [whole, *kept, last]
    for cut in range(6, len(content)):
        path.write_bytes(content[:cut])
        file = GrowingFile(path)
        found = list(file.read())
        with path.open("ab") as stream:
            stream.write(content[cut:])
        assert [*found, *file.read()] == [whole, *kept, last], cut


def test_a_file_replaced_within_a_large_line_is_read_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("deploy.control_plane.files.lines.LARGEST", 64)
    path = tmp_path / "lines.jsonl"
    path.write_bytes(b"x" * 100)
    file = GrowingFile(path)
    assert list(file.read()) == []
    path.write_bytes(b"new\n")
    assert list(file.read()) == [(-1, b""), (0, b"new\n")]


def test_metrics_come_oldest_first_and_grow(tmp_path: Path) -> None:
    folder = RunFolder(make_run(tmp_path / "run", steps=5))
    first = folder.metrics(None, 3, {"reward/mean", "staleness/histogram/0"})
    assert (first.step, first.next) == ([1, 2, 3], "3")
    rest = folder.metrics(3, 3, None)
    assert (rest.step, rest.next) == ([4, 5], None)
    assert "probability" not in rest.about["reward/exact/mean"]
    assert "entropy" in rest.about["train/entropy"].lower()
    with (folder.path / "metrics.jsonl").open("a") as stream:
        # A step that is trained again, and a line that is being written.
        stream.write(json.dumps(metrics_line(5) | {"train/entropy": 9.0}) + "\n" + json.dumps(metrics_line(6))[:20])
    again = folder.metrics(4, 10, {"train/entropy"})
    assert (again.step, again.series) == ([5], {"train/entropy": [9.0]})


def test_groups_are_searched_sorted_and_read_whole(tmp_path: Path) -> None:
    folder = RunFolder(make_run(tmp_path / "run", steps=20))
    groups = folder.groups
    newest = groups.list(Wanted(), "newest", Page(3))
    assert ([head.step for head in newest.groups], newest.total) == ([20, 20, 19], 40)
    assert groups.list(Wanted(), "reward_low", Page(1)).groups[0].mean == 0.25
    assert groups.list(Wanted(), "reward_high", Page(1)).groups[0].mean == 0.5
    assert [head.task_id for head in groups.list(Wanted(text="WHAT IS 7 PLUS"), "newest", Page(9)).groups] == [70, 71]
    assert groups.list(Wanted(text="7 and 1 make 8"), "newest", Page(9)).total == 1, "in a completion"
    assert groups.list(Wanted(text="generator-0"), "newest", Page(9)).total == 0, "texts alone"
    assert groups.list(Wanted(step_from=3, step_to=4, mean_from=0.4), "newest", Page(9)).total == 2
    whole = groups.get(7, 71)
    assert whole is not None
    assert [sample.reward for sample in whole.samples] == [1.0, 1.0, 0.0, 0.0]
    assert (whole.truncated, whole.data, whole.samples[1].terms["length"]) == (1, {"answer": "8"}, -0.1)
    assert groups.get(7, 999) is None


@pytest.mark.parametrize("sort", get_args(Sort))
def test_groups_that_come_and_go_while_they_are_read_shift_no_others(tmp_path: Path, sort: Sort) -> None:
    folder = make_run(tmp_path / "run", steps=9)
    unscored = group_line(9, 5, 4) | {"samples": []}
    with (folder / "samples" / "train-00000001.jsonl").open("a") as file:
        file.write(json.dumps(unscored) + "\n")
    groups = RunFolder(folder).groups
    whole = [(head.step, head.task_id) for head in groups.list(Wanted(), sort, Page(99)).groups]
    first = groups.list(Wanted(), sort, Page(5))
    shown = [(head.step, head.task_id) for head in first.groups]
    for step in (10, 11):
        line = json.dumps(group_line(step, 1, 4))
        (folder / "samples" / f"train-{step:08d}.jsonl").write_text(line + "\n")
    kept = [line for line in map(json.dumps, _lines(folder)) if json.loads(line)["step"] > 2]
    (folder / "samples" / "train-00000001.jsonl").unlink()
    (folder / "samples" / "train-00000003.jsonl").write_text("".join(f"{line}\n" for line in kept))
    cursor = first.next
    while cursor is not None:
        page = groups.list(Wanted(), sort, Page(5, cursor))
        shown += [(head.step, head.task_id) for head in page.groups]
        cursor = page.next
    assert [one for one in shown if one[0] < 10] == [one for one in whole if one in shown[:5] or one[0] > 2]
    assert len(set(shown)) == len(shown)


def _lines(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "samples" / "train-00000001.jsonl").read_text().splitlines()]


def test_a_checkpoint_deleted_while_it_is_listed_is_gone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = make_run(tmp_path / "run", steps=4)
    for step in (2, 4):
        path = folder / "checkpoints" / f"step-{step:08d}-t0001"
        path.mkdir(parents=True)
        (path / "model.safetensors").write_bytes(b"weights")
    is_file = Path.is_file

    def delete(self: Path) -> bool:
        """As the trainer does that keeps the newest, between two looks at the file."""
        found = is_file(self)
        if self.parent.name == "step-00000002-t0001":
            shutil.rmtree(self.parent)
        return found

    monkeypatch.setattr(Path, "is_file", delete)
    assert [(one.step, one.bytes) for one in RunFolder(folder).checkpoints()] == [(4, 7)]


def test_rewards_of_the_groups_that_fit_are_counted_and_so_are_their_terms(tmp_path: Path) -> None:
    groups = RunFolder(make_run(tmp_path / "run", steps=5)).groups

    def counted(**wanted: Any) -> dict[str, tuple[float, float, dict[int, int]]]:
        found = groups.list(Wanted(**wanted), "newest", Page(1)).histograms
        return {
            one.name: (one.low, one.high, {k: number for k, number in enumerate(one.counts) if number}) for one in found
        }

    everything = counted()
    assert list(everything) == ["solve_rate", "reward", "exact", "length"]
    assert everything["solve_rate"] == (0.0, 1.0, {2: 5, 5: 5})
    assert sum(everything["reward"][2].values()) == sum(everything["length"][2].values()) == 40
    assert everything["length"][0] < 0
    assert sum(counted(step_from=5)["reward"][2].values()) == 8
    assert counted(text="nowhere")["reward"] == (0.0, 1.0, {})


def test_rewards_of_any_size_are_counted(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", steps=1)
    line = group_line(2, 20, 4)
    for sample, reward in zip(line["samples"], (-1.5e308, 1e39, 1.5e308), strict=False):
        sample |= {"reward": reward, "terms": {"exact": reward}}
    with (folder / "samples" / "train-00000001.jsonl").open("a") as file:
        file.write(json.dumps(line) + "\n")
    counts = {
        one.name: sum(one.counts) for one in RunFolder(folder).groups.list(Wanted(), "newest", Page(9)).histograms
    }
    assert counts["reward"] == counts["exact"] == 12


def test_texts_are_found_whatever_their_case_in_any_script(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", steps=1)
    line = group_line(2, 20, 4) | {"prompt": "Где Ёлка?"}
    with (folder / "samples" / "train-00000001.jsonl").open("a") as file:
        file.write(json.dumps(line) + "\n")
    assert RunFolder(folder).groups.list(Wanted(text="где ёлка"), "newest", Page(9)).total == 1


def test_groups_of_a_step_that_is_trained_again_replace_the_first_and_files_may_go(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", steps=2)
    groups = RunFolder(folder).groups
    assert groups.list(Wanted(), "newest", Page(9)).total == 4
    again = group_line(2, 1, 2) | {"prompt": "asked again"}
    (folder / "samples" / "train-00000002.jsonl").write_text(json.dumps(again) + "\nno line\n{}\n")
    found = groups.get(2, 21)
    assert found is not None
    assert (found.full_prompt, groups.list(Wanted(), "newest", Page(9)).total) == ("asked again", 4)
    (folder / "samples" / "train-00000001.jsonl").unlink()
    assert groups.list(Wanted(), "newest", Page(9)).total == 1


def test_evaluations_by_prompt_come_worst_first(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", steps=4)
    assert [(one.version, one.mean, one.prompts) for one in read_evaluations(folder)] == [
        (0, 0.25, True),
        (4, 0.75, True),
    ]
    found = read_prompts(folder, 4, "worst", None, Page(2))
    assert found is not None
    assert [(one.index, one.mean) for one in found.prompts] == [(3, 0.0), (0, 1.0)]
    assert found.total == 4
    rest = read_prompts(folder, 4, "worst", None, Page(2, found.next))
    assert rest is not None
    assert ([one.index for one in rest.prompts], rest.next) == ([1, 2], None)
    assert read_prompts(folder, 3, "worst", None, Page(2)) is None
    searched = read_prompts(folder, 4, "index", "question 2", Page(9))
    assert searched is not None
    assert [one.index for one in searched.prompts] == [2]


def test_a_log_is_followed_from_its_end(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", steps=40)
    assert [head.service for head in list_logs(folder)] == ["trainer"]
    end = read_log(folder, "trainer", None, 1024)
    assert end is not None
    assert "a tracker is given up" in end.lines[-1]
    assert end.lines[0].startswith("{"), "whole lines"
    with (folder / "logs" / "trainer.log").open("a") as stream:
        stream.write("one more\nnot yet who")
    more = read_log(folder, "trainer", end.end, 1024)
    assert more is not None
    assert more.lines == ["one more"]
    (folder / "logs" / "trainer.log").write_text("again\n")
    replaced = read_log(folder, "trainer", more.end, 1024)
    assert replaced is not None
    assert replaced.lines == ["again"]


def test_links_that_were_planted_in_a_run_show_nothing(tmp_path: Path) -> None:
    run, outside = make_run(tmp_path / "run"), tmp_path / "outside"
    outside.mkdir()
    (outside / "secret").write_text("SECRET\n")
    (run / "logs").mkdir(exist_ok=True)
    (run / "logs" / "link.log").symlink_to(outside / "secret")
    os.mkfifo(run / "logs" / "pipe.log")
    (run / "checkpoints").mkdir(exist_ok=True)
    (run / "checkpoints" / "step-00000009-t0001").symlink_to(outside)
    assert not {"link", "pipe"} & {head.service for head in list_logs(run)}
    assert read_log(run, "link", None) is read_log(run, "pipe", None) is None
    assert "step-00000009-t0001" not in [one.name for one in RunFolder(run).checkpoints()]


@pytest.mark.parametrize("service", ["nobody", "../config", "..", "trainer.log"])
def test_no_other_file_is_read_as_a_log(tmp_path: Path, service: str) -> None:
    assert read_log(make_run(tmp_path / "run"), service, None, 1024) is None


@pytest.mark.parametrize("name", ["..", "nobody", "", "/etc"])
def test_no_other_folder_is_read_as_a_run(tmp_path: Path, name: str) -> None:
    make_run(tmp_path / "runs" / "run")
    with pytest.raises(Refusal, match="no run"):
        Archive(tmp_path / "runs").find(name)


def test_secrets_are_masked_and_what_was_changed_is_told(tmp_path: Path) -> None:
    config = RunFolder(make_run(tmp_path / "run")).config()
    assert "hidden" not in config.model_dump_json()
    assert {"trainer.steps", "trainer.optimizer.lr"} <= set(config.changed)
    assert "trainer.batch_groups" not in config.changed
    assert config.settings["trainer.batch_groups"] == 32
    assert config.environment["git"]["commit"] == "abc1234"
    assert mask("generator.args.hf_token", "abc") == mask("x.api_key", 5) == "***"
    assert mask("train.args", [{"password": "x", "max_tokens": 5}]) == [{"password": "***", "max_tokens": 5}]
    assert mask("sampling.max_tokens", 5) == 5
    assert mask("reward.terms", [{"headers": {"X-Anything": "abc"}, "cookie": "abc"}]) == [
        {"headers": "***", "cookie": "***"}
    ]
    for name in (
        "generator.http.headers.X-Auth",
        "a.private_key",
        "a.auth",
        "a.authorization",
        "a.dsn",
        "notify.command",
    ):
        assert mask(name, "abc") == "***", name
    assert mask("train.args.prompt_key", "question") == "question", "the name of a column"
    url = "https://me:abc@host/judge?key=abc&model=m"
    assert mask("reward.terms.0.args.url", url) == "https://***@host/judge?key=***&model=***"


def test_of_very_many_groups_the_newest_are_listed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(group_files, "MOST_GROUPS", 8)
    folder = make_run(tmp_path / "run", steps=1)
    for step in range(2, 100):
        line = json.dumps(group_line(step, 1, 4))
        (folder / "samples" / f"train-{step:08d}.jsonl").write_text(line + "\n")
    found = RunFolder(folder).groups.list(Wanted(), "newest", Page(99))
    assert 8 <= found.kept <= 10
    assert [head.step for head in found.groups] == list(range(99, 99 - found.kept, -1))


def test_use_of_machines_over_weeks_is_kept_within_bounds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resources, "MOST_BYTES", 200_000)
    services = {f"generator-{i}": {"cpu": 0.5, "memory_bytes": 1e9, "gpu_memory_bytes": 7e10} for i in range(64)}
    line = {"services": services, "queues": {"tasks": 3}, "slots": 9, "broker_bytes": 10}
    moments = range(0, 7 * 24 * 3600, 300)
    with (tmp_path / "resources.jsonl").open("w") as file:
        for moment in moments:
            file.write(json.dumps({"time": float(moment), **line}) + "\n")
    used = resources.ResourceFile(tmp_path)
    found = used.read(-1.0, 10_000)
    assert sum(len(text) for _, text in used._lines) <= 200_000, "read whole, the file has 16 MB"
    assert (found.time[0], found.time[-1]) == (moments[0], moments[-1])
    assert found.time[-1] - found.time[-2] == 300, "the last hours have all of their points"
    assert found.cpu["generator-63"] == [0.5] * len(found.time)
    assert used.read(found.time[-2], 10).time == [moments[-1]]
