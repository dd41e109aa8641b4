"""What a run's folder keeps: samples of steps and of evaluations, and one line for each evaluated version."""

import functools
import json
import os
import resource
import signal
from pathlib import Path
from typing import Any

import msgspec
import pytest

from broker.evaluations.samples import describe
from consumers.trainer.data.groups import Group
from consumers.trainer.records import evaluation_samples as eval_sample_log
from consumers.trainer.records import samples as sample_log
from consumers.trainer.records.evaluation_log import EvaluationLog, best_versions, count_since_best, read_evaluations
from consumers.trainer.records.evaluation_samples import EvalSampleLog
from consumers.trainer.records.machine import write_environment
from consumers.trainer.records.samples import SampleLog, choose_groups, common_beginning
from schemas.messages import PlacedImage, Score
from schemas.run_folder import ENVIRONMENT
from tests.support.trainer.trajectories import make_trajectory


def group(task_id: int, *rewards: float) -> Group:
    return Group(task_id, [(make_trajectory(task_id, sample), reward) for sample, reward in enumerate(rewards)])


def lines(folder: Path) -> list[dict[str, object]]:
    files = sorted((folder / "samples").glob("*.jsonl"))
    return [json.loads(line) for file in files for line in file.read_text().splitlines()]


def test_a_group_is_kept_whole_with_terms_and_advantages(tmp_path: Path) -> None:
    log = SampleLog(tmp_path, 1)
    groups = [group(7, 0.5, 0.5), group(8, 0.0, 1.0)]
    log.write(3, 2, groups, [0.0, 0.0, -1.0, 1.0], {(8, 1): {"exact": 1.0}})
    (line,) = lines(tmp_path)
    first = groups[1].samples[0][0]
    assert (line["step"], line["version"], line["task_id"], line["prompt"]) == (3, 2, 8, first.prompt)
    samples = line["samples"]
    assert isinstance(samples, list)
    assert [(one["reward"], one["advantage"]) for one in samples] == [(0.0, -1.0), (1.0, 1.0)]
    assert samples[1]["terms"] == {"exact": 1.0}
    assert samples[0]["completion"] == first.completion


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ({(0, 1): "x"}, "{(0, 1): 'x'}"),
        ([{b"a": 1}], "[{b'a': 1}]"),
        ({"a": b"x"}, """{"a": "b'x'"}"""),
        (functools.reduce(lambda inner, _: [inner], range(5000), 0), "list that is nested too deeply"),
    ],
    ids=["tuple", "bytes", "json", "deep"],
)
def test_data_that_json_has_not_is_kept_as_text(tmp_path: Path, value: Any, text: str) -> None:
    sample = msgspec.structs.replace(make_trajectory(8, 0), data={"grid": value})
    SampleLog(tmp_path, 1).write(3, 2, [Group(8, [(sample, 1.0)])], [], {})
    assert lines(tmp_path)[0]["data"] == {"grid": text}
    assert describe(sample, Score())["data"] == {"grid": text}


def test_samples_of_episodes_are_kept_with_all_that_was_said_in_each(tmp_path: Path) -> None:
    said = [("Guess. 32 too low. ", "48"), ("Guess. 32 too low. 48 too high. ", "40"), ("Guess. 35 too low. ", "50")]
    samples = [
        (msgspec.structs.replace(make_trajectory(8, k), prompt=prompt, completion=last), float(k == 1))
        for k, (prompt, last) in enumerate(said)
    ]
    SampleLog(tmp_path, 1).write(3, 2, [Group(8, samples)], [], {})
    (line,) = lines(tmp_path)
    assert line["prompt"] == "Guess. "
    kept = line["samples"]
    assert isinstance(kept, list)
    assert [one["completion"] for one in kept] == ["32 too low. 48", "32 too low. 48 too high. 40", "35 too low. 50"]


def test_prompts_may_have_words_of_any_length() -> None:
    """A file in hexadecimal digits is one word."""
    digits = "0f" * 500_000
    assert common_beginning([f"{digits} a", f"{digits} b"]) == f"{digits} "
    assert common_beginning([f"See {digits}a", f"See {digits}b"]) == "See "
    assert common_beginning([digits, f"{digits}0"]) == ""


def test_the_widest_the_worst_and_the_best_groups_come_first_then_others_by_turns() -> None:
    groups = [group(0, 0.5, 0.5), group(1, 1.0, 1.0), group(2, 0.0, 0.0), group(3, 0.0, 1.0), group(4, 0.4, 0.5)]
    assert choose_groups(groups, 4, step=9) == [3, 2, 1, 4]
    assert choose_groups(groups, 9, step=0) == [3, 2, 1, 0, 4]
    assert choose_groups([], 4, step=0) == []


def test_the_oldest_files_go_when_they_take_too_much_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sample_log, "FILE_BYTES", 1000)
    monkeypatch.setattr(sample_log, "KEEP_BYTES", 6000)
    log = SampleLog(tmp_path, 2)
    for step in range(30):
        log.write(step, step, [group(step, 0.0, 1.0)], [-1.0, 1.0], {})
    kept = [line["step"] for line in lines(tmp_path)]
    assert kept == list(range(kept[0], 30))
    assert kept[0] > 0
    assert sum(file.stat().st_size for file in (tmp_path / "samples").iterdir()) < 8000


def with_image(task_id: int, digest: str, body: bytes) -> Group:
    found = group(task_id, 0.0, 1.0)
    samples = [
        (msgspec.structs.replace(one, images=[PlacedImage(digest, 0, 1)]), reward) for one, reward in found.samples
    ]
    return Group(task_id, samples, {digest: body})


def test_images_of_kept_samples_are_kept_once_the_oldest_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sample_log, "IMAGE_BYTES", 400)
    log, folder = SampleLog(tmp_path, 1), tmp_path / "samples" / "images"
    groups = [with_image(0, "a" * 32, b"x" * 100), with_image(1, "b" * 32, b"y" * 100)]
    log.write(0, 0, groups, [], {})
    assert [file.name for file in folder.iterdir()] == [f"{'a' * 32}.png"]
    assert [sample["images"] for sample in lines(tmp_path)[0]["samples"]] == [["a" * 32]] * 2
    log.keep_images([groups[1].samples[0][0]], groups)
    assert (folder / f"{'b' * 32}.png").read_bytes() == b"y" * 100
    os.utime(folder / f"{'a' * 32}.png", (1, 1))
    again = SampleLog(tmp_path, 1)
    again.write(1, 1, [with_image(2, "c" * 32, b"z" * 250)], [], {})
    assert {file.name[0] for file in folder.iterdir()} == {"c"}, "down to three quarters of what there may be"
    SampleLog(tmp_path / "none", 0).keep_images([groups[1].samples[0][0]], groups)
    assert not (tmp_path / "none").exists()


def test_an_image_that_a_full_disk_cut_off_is_written_once_there_is_room(tmp_path: Path) -> None:
    log, groups = SampleLog(tmp_path, 1), [with_image(0, "a" * 32, b"x" * (2 << 20))]
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, before[1]))
        log.keep_images([groups[0].samples[0][0]], groups)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, ignored)
    folder = tmp_path / "samples" / "images"
    assert list(folder.glob("*.png")) == [], "half of an image would be shown as one"
    log.keep_images([groups[0].samples[0][0]], groups)
    assert [file.read_bytes() for file in folder.iterdir()] == [b"x" * (2 << 20)]


def test_a_folder_that_cannot_be_written_costs_no_step(tmp_path: Path) -> None:
    (tmp_path / "samples").write_text("a file in its place")
    SampleLog(tmp_path, 2).write(1, 0, [group(0, 0.0, 1.0)], [-1.0, 1.0], {})


def test_the_environment_of_earlier_trainers_is_kept(tmp_path: Path) -> None:
    write_environment(tmp_path, tmp_path, 1)
    write_environment(tmp_path, Path(__file__).parent, 2)
    found = json.loads((tmp_path / ENVIRONMENT).read_text())
    assert (found["ranks"], [one["ranks"] for one in found["before"]]) == (2, [1])
    assert {"torch", "numpy", "redis"} <= set(found["packages"])
    assert found["before"][0]["git"] is None


class Stream:
    """Entries as the broker gives them; written: up to which the log said that it needs none."""

    def __init__(self) -> None:
        self.entries: list[tuple[str, dict[str, Any]]] = []
        self.written = ""

    def add(self, version: int, index: int, sample: int) -> None:
        line = {"version": version, "index": index, "prompt": f"p{index}", "data": {}}
        self.entries.append((f"{len(self.entries) + 1}-0", {**line, "sample": {"sample": sample, "reward": 1.0}}))

    def take(self, after: str, written: str) -> list[tuple[str, dict[str, Any]]]:
        self.written = written or self.written
        return [entry for entry in self.entries if int(entry[0][:-2]) > int(after[:-2])][:2]


def numbers(folder: Path, version: int) -> list[tuple[int, list[int]]]:
    lines = (folder / "samples" / f"eval-{version:08d}.jsonl").read_text().splitlines()
    return [(line["index"], [one["sample"] for one in line["samples"]]) for line in map(json.loads, lines)]


def test_a_file_is_written_when_its_evaluation_is_complete(tmp_path: Path) -> None:
    stream = Stream()
    log = EvalSampleLog(tmp_path, stream.take)
    for sample in (1, 0, 1):
        stream.add(0, 5, sample)
    stream.add(4, 1, 0)
    log.write([])
    assert not (tmp_path / "samples").exists()
    stream.add(0, 2, 0)
    log.write([0])
    assert numbers(tmp_path, 0) == [(2, [0]), (5, [0, 1])]
    log.write([0])
    assert stream.written == "", "version 4 is not complete, and would be lost with this trainer"
    log.write([0, 4])
    log.write([0, 4])
    assert stream.written == "5-0"


def test_a_trainer_that_starts_again_writes_what_the_one_before_did_not(tmp_path: Path) -> None:
    stream = Stream()
    stream.add(0, 0, 0)
    EvalSampleLog(tmp_path, stream.take).write([0])
    stream.add(0, 1, 0)
    stream.add(3, 0, 0)
    EvalSampleLog(tmp_path, stream.take).write([0, 3])
    assert (numbers(tmp_path, 0), numbers(tmp_path, 3)) == ([(0, [0])], [(0, [0])])


def test_the_first_and_the_newest_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(eval_sample_log, "KEEP", 3)
    stream = Stream()
    log = EvalSampleLog(tmp_path, stream.take)
    for version in range(6):
        stream.add(version, 0, 0)
        log.write(range(6))
    kept = sorted(int(file.stem[5:]) for file in (tmp_path / "samples").glob("*"))
    assert kept == [0, 4, 5]


def line(version: int, mean: float | None = 0.5) -> dict[str, Any]:
    return {"version": version, "n": 2, "scored": 2, "failed": 0, "off_version": 0, "mean": mean, "time": 7.0}


def test_a_version_has_one_line_for_ever_also_after_a_restart(tmp_path: Path) -> None:
    first = EvaluationLog(tmp_path)
    first.add(line(0))
    first.add(line(0, 0.9))
    second = EvaluationLog(tmp_path)
    second.add(line(0, 0.9))
    second.add(line(8, None))
    assert read_evaluations(second.file) == {0: line(0), 8: line(8, None)} == second.lines
    assert len(second.file.read_text().splitlines()) == 2


def test_a_trainer_that_was_stopped_writes_no_line_that_its_successor_has_written(tmp_path: Path) -> None:
    stopped, successor = EvaluationLog(tmp_path), EvaluationLog(tmp_path)
    successor.add(line(4))
    stopped.add(line(4))
    stopped.add(line(8))
    assert len(stopped.file.read_text().splitlines()) == 2
    assert list(stopped.lines) == [4, 8]


def test_a_line_that_a_crash_cut_off_swallows_none_and_is_written_again(tmp_path: Path) -> None:
    log = EvaluationLog(tmp_path)
    log.add(line(0))
    log.add(line(4))
    log.file.write_bytes(log.file.read_bytes()[:-20])
    again = EvaluationLog(tmp_path)
    assert list(again.lines) == [0]
    again.add(line(4))
    again.add(line(8))
    assert read_evaluations(log.file) == {0: line(0), 4: line(4), 8: line(8)}


def test_a_run_without_the_file_has_no_evaluations(tmp_path: Path) -> None:
    assert read_evaluations(tmp_path / "evaluations.jsonl") == {}


@pytest.mark.parametrize(
    ("means", "best", "since"),
    [
        ({}, [], 0),
        ({0: None}, [], 0),
        ({0: 0.5}, [0], 0),
        ({0: 0.1, 10: 0.9, 20: 0.4, 30: None, 40: 0.6}, [10, 40, 20, 0], 2),
        ({0: 0.7, 10: 0.7, 20: 0.7}, [0, 10, 20], 2),
    ],
)
def test_the_best_versions_have_the_highest_reward(means: dict[int, float | None], best: list[int], since: int) -> None:
    evaluated = {version: {"mean": mean} for version, mean in means.items()}
    assert (best_versions(evaluated), count_since_best(evaluated)) == (best, since)
