"""Metrics through accelerate's trackers: every step once, also when the trainer dies and steps are trained again."""

import re
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from broker.client import Broker
from broker.queues.tasks import eval_task_id
from consumers.trainer.loop import Trainer
from consumers.trainer.model.policy import Policy, load_model
from consumers.trainer.records import tracker_thread, trackers
from consumers.trainer.records.trackers import MODULES, check_trackers, listed_as
from consumers.trainer.step.build import build_train_step
from schemas.config import DatasetConfig, EvalConfig, parse_config
from schemas.errors import ConfigError
from schemas.messages import Score
from schemas.run_folder import read_lines
from schemas.system.lifecycle import StopFlag
from tests.support.models.tiny_model import make_tiny_model
from tests.support.trainer.deterministic_run import STEPS, Pipeline, make_config
from tests.support.trainer.trajectories import make_trajectory
from tests.support.user_code.docs_code import SMALLEST

OWN = """
import json
import re
import time
from pathlib import Path

from accelerate.tracking import GeneralTracker


class Lines(GeneralTracker):
    name = "lines"
    requires_logging_directory = False
    tracker = None

    def __init__(self, run, folder):
        super().__init__()
        self.file = Path(folder) / f"{run}.jsonl"

    def _write(self, **entry):
        with self.file.open("a") as stream:
            stream.write(json.dumps(entry) + "\\n")

    def store_init_configuration(self, values):
        self._write(config=values)

    def log(self, values, step=None, **_):
        self._write(step=step, values=values)

    def finish(self):
        self._write(end=True)


class ServerError(Exception):
    pass


class Failing(Lines):
    def log(self, values, step=None, **_):
        super().log(values, step)
        raise ServerError("503")


class Hanging(Lines):
    def _hang(self):
        end = time.monotonic() + 20
        while not self.file.with_name("release").exists() and time.monotonic() < end:
            time.sleep(0.01)

    def log(self, values, step=None, **_):
        self._hang()
        super().log(values, step)


class HangingAtTheEnd(Hanging):
    log = Lines.log

    def finish(self):
        self._hang()


class HangingAtTheStart(Hanging):
    def start(self):
        self._hang()


class Slow(Lines):
    def log(self, values, step=None, **_):
        time.sleep(0.3)
        super().log(values, step)


class FailingAtTheEnd(Lines):
    def finish(self):
        raise ServerError("503")


class Tables(Lines):
    def log_table(self, table_name, columns=None, data=None, step=None, **_):
        self._write(table=table_name, columns=columns, rows=data, at=step)


class Closed(Lines):
    def start(self):
        raise KeyError("token")
"""


@pytest.fixture
def make(tmp_path: Path, broker: Broker) -> Callable[..., Trainer]:
    (tmp_path / "own.py").write_text(OWN)
    model = make_tiny_model(tmp_path / "model", hidden=32, layers=1)

    def trainer(*names: str, **settings: Any) -> Trainer:
        data = make_config(tmp_path / "run", model, broker, trackers=list(names), **settings)
        data["run"] |= {"tags": ["small"], "notes": "a longer warm-up"}
        config = parse_config(data, base=tmp_path)
        policy = Policy(load_model(config.model.path, "float32"))
        return Trainer(config, "trainer", broker, build_train_step(config, policy=policy))

    return trainer


def sent(folder: Path) -> list[dict[str, Any]]:
    (file,) = (folder / "run" / "trackers").glob("*.jsonl")
    return read_lines(file)


def test_a_step_that_is_trained_again_is_not_sent_again(
    make: Callable[..., Trainer], broker: Broker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = make("own.py:Lines")
    real, saves = first.rank_group.save, []

    def dying(**settings: Any) -> Path:
        saves.append(settings["step"])
        if len(saves) == 2:
            raise RuntimeError("killed")
        return real(**settings)

    monkeypatch.setattr(first.rank_group, "save", dying)
    with Pipeline(broker):
        with pytest.raises(RuntimeError, match="killed"):
            first.run(StopFlag())
        make("own.py:Lines").run(StopFlag())
    metrics = read_lines(tmp_path / "run" / "metrics.jsonl")
    assert [line["step"] for line in metrics] == [1, 2, 3, 4, 3, 4, 5], "steps 3 and 4 were trained again"
    start, *steps, end = sent(tmp_path)
    assert (start["config"]["trainer.steps"], end) == (STEPS, {"end": True})
    assert "broker.url" not in start["config"]
    assert [entry["step"] for entry in steps] == [1, 2, 3, 4, 5]
    by_step = {line["step"]: line for line in reversed(metrics)}
    for entry in steps:
        numbers = {name: value for name, value in by_step[entry["step"]].items() if not isinstance(value, dict)}
        ages = by_step[entry["step"]]["staleness/histogram"]
        assert entry["values"] == numbers | {f"staleness/histogram/{age}": tokens for age, tokens in ages.items()}
        assert ages
        assert {"reward/mean", "train/loss", "staleness/max", "time/total_s"} <= set(numbers)


@pytest.mark.parametrize(("kind", "lines"), [("Failing", [1]), ("FailingAtTheEnd", [1, 2, 3, 4, 5])])
def test_a_tracker_that_fails_with_whatever_error_costs_the_run_nothing(
    make: Callable[..., Trainer], broker: Broker, tmp_path: Path, kind: str, lines: list[int]
) -> None:
    trainer = make(f"own.py:{kind}")
    with Pipeline(broker):
        trainer.run(StopFlag())
    assert trainer.progress.step == STEPS
    assert [entry["step"] for entry in sent(tmp_path) if "step" in entry] == lines
    assert any(
        event.name == "tracker" and "ServerError: 503" in event.text
        for event in [stored.event for stored in broker.events.newest(10)]
    )


@pytest.mark.parametrize(
    ("kind", "what"),
    # Five steps may take less time than it has for one call.
    [("Hanging", "(failed|did not send its last metrics)"), ("HangingAtTheEnd", "did not send its last metrics")],
    ids=["in a step", "at the end"],
)
def test_a_tracker_that_hangs_holds_up_neither_a_step_nor_the_end(
    make: Callable[..., Trainer],
    broker: Broker,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    kind: str,
    what: str,
) -> None:
    trainer = make(f"own.py:{kind}")
    monkeypatch.setattr(tracker_thread, "DEADLINE_S", 0.2)
    monkeypatch.setattr(trackers, "LONG_DEADLINE_S", 0.5)
    with Pipeline(broker):
        trainer.run(StopFlag())
    assert trainer.progress.step == STEPS
    (told,) = [event.text for event in [stored.event for stored in broker.events.newest(10)] if event.name == "tracker"]
    assert re.match(f"tracker lines {what} and gets nothing more: it did not answer within", told)
    (tmp_path / "run" / "trackers" / "release").touch()


def test_a_trainer_that_ends_by_an_error_waits_only_briefly_for_a_tracker_that_hangs(
    make: Callable[..., Trainer], broker: Broker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert trackers.ERROR_DEADLINE_S <= 5
    monkeypatch.setattr(trackers, "ERROR_DEADLINE_S", 0.2)
    trainer = make("own.py:Hanging")

    def dying(**settings: Any) -> Path:
        raise RuntimeError("killed")

    monkeypatch.setattr(trainer.rank_group, "save", dying)
    with Pipeline(broker), pytest.raises(RuntimeError, match="killed"):
        trainer.run(StopFlag())
    (told,) = [event.text for event in [stored.event for stored in broker.events.newest(10)] if event.name == "tracker"]
    assert told == "tracker lines failed and gets nothing more: it did not answer within 0.2 s"
    (tmp_path / "run" / "trackers" / "release").touch()


def test_a_tracker_that_hangs_at_its_start_is_an_error_of_the_configuration(
    make: Callable[..., Trainer], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trackers, "LONG_DEADLINE_S", 0.5)
    with pytest.raises(ConfigError, match=r"trainer.trackers cannot start: it did not answer within 0.5 s"):
        make("own.py:HangingAtTheStart")
    (tmp_path / "run" / "trackers" / "release").touch()


def test_a_slow_tracker_has_all_steps_in_order(make: Callable[..., Trainer], broker: Broker, tmp_path: Path) -> None:
    with Pipeline(broker):
        make("own.py:Slow").run(StopFlag())
    assert [entry["step"] for entry in sent(tmp_path)[1:-1]] == [1, 2, 3, 4, 5]
    assert sent(tmp_path)[-1] == {"end": True}


def test_a_complete_evaluation_is_sent_with_texts(make: Callable[..., Trainer], broker: Broker, tmp_path: Path) -> None:
    trainer = make("own.py:Tables", log_completions=3)
    trainer.config.eval = EvalConfig(dataset=DatasetConfig(name="arithmetic"))
    fields = {"n": 4, "scored": 4, "sum": 3.0, "tokens": 40, "time": 7.0}
    with Pipeline(broker):
        thread = threading.Thread(target=trainer.run, args=(StopFlag(),))
        thread.start()
        while trainer.progress.step < STEPS and thread.is_alive():
            time.sleep(0.01)
        task = eval_task_id(STEPS, 3)
        broker.eval_samples.keep([(make_trajectory(task, k), Score(reward=float(k))) for k in (1, 0)])
        broker.connection.client.hset(
            broker.connection.keys.evals, mapping={f"{STEPS}:{name}": value for name, value in fields.items()}
        )
        thread.join(60)
    (evaluation,) = [entry for entry in sent(tmp_path) if "eval/reward" in entry.get("values", {})]
    assert evaluation == {
        "step": STEPS,
        "values": {"eval/reward": 0.75, "eval/length": 10.0, "eval/version": STEPS},
    }
    (prompt,) = read_lines(tmp_path / "run" / "samples" / f"eval-{STEPS:08d}.jsonl")
    assert (prompt["index"], [one["reward"] for one in prompt["samples"]]) == (3, [0.0, 1.0])
    (table,) = [entry for entry in sent(tmp_path) if "table" in entry]
    assert (table["table"], table["columns"], table["at"]) == ("completions", trackers.COLUMNS, STEPS)
    assert [row[3] for row in table["rows"]] == [0.0, 1.0, 1.0], "from the worst to the best"


def test_evaluations_that_complete_at_once_are_in_the_lines_of_steps_one_by_one(
    make: Callable[..., Trainer], broker: Broker, tmp_path: Path
) -> None:
    trainer = make()
    trainer.config.eval = EvalConfig(dataset=DatasetConfig(name="arithmetic"))
    fields = {"n": 4, "scored": 4, "sum": 3.0, "tokens": 40, "time": 7.0}
    known = {f"{version}:{name}": value for version in (0, 1, 2) for name, value in fields.items()}
    broker.connection.client.hset(broker.connection.keys.evals, mapping=known)
    trainer.step_log.write_evaluations()
    # Nothing waits for the evaluation of the last version.
    trainer.config.eval = None
    with Pipeline(broker):
        trainer.run(StopFlag())
    lines = read_lines(tmp_path / "run" / "metrics.jsonl")
    assert [line.get("eval/version") for line in lines] == [0, 1, 2, None, None]


def test_completions_also_come_with_checkpoints(make: Callable[..., Trainer], broker: Broker, tmp_path: Path) -> None:
    with Pipeline(broker):
        make("own.py:Tables", log_completions=1).run(StopFlag())
    assert [entry["at"] for entry in sent(tmp_path) if "table" in entry] == [2, 4]


def test_one_that_fails_takes_no_other_with_it(make: Callable[..., Trainer], broker: Broker, tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "metrics.jsonl").write_text('{"step": 1}\n')
    make("own.py:Closed", "own.py:Lines").step_log.close()
    assert sent(tmp_path) == [{"end": True}]


def test_one_that_cannot_start_is_an_error_of_the_configuration(make: Callable[..., Trainer]) -> None:
    with pytest.raises(ConfigError, match=r"trainer.trackers cannot start: KeyError: 'token'"):
        make("own.py:Closed")


def test_one_that_cannot_start_again_is_a_warning_on_a_run_that_goes_on(
    make: Callable[..., Trainer], broker: Broker, tmp_path: Path
) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "metrics.jsonl").write_text('{"step": 3}\n')
    make("own.py:Closed")
    assert any(
        "did not start" in event.text and "token" in event.text
        for event in [stored.event for stored in broker.events.newest(10)]
    )


def test_what_is_not_installed_or_unknown_is_one_line_with_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trackers, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"^trainer.trackers 'wandb' is not installed: pip install wandb$"):
        check_trackers(["wandb"])
    with pytest.raises(ConfigError, match=r"unknown trainer.trackers 'tensorbord' \(did you mean 'tensorboard'\?\)"):
        check_trackers(["tensorbord"])


def test_these_are_the_trackers_of_accelerate() -> None:
    from accelerate.tracking import LOGGER_TYPE_TO_CLASS

    assert set(MODULES) == set(LOGGER_TYPE_TO_CLASS)


def test_tensorboard_itself(make: Callable[..., Trainer], broker: Broker, tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    with Pipeline(broker):
        make("tensorboard").run(StopFlag())
    (events,) = (path for path in (tmp_path / "run" / "trackers").glob("*/events.*"))
    found = EventAccumulator(str(events)).Reload().Scalars("train/loss")
    lines = read_lines(tmp_path / "run" / "metrics.jsonl")
    assert [event.step for event in found] == [line["step"] for line in lines]
    assert [event.value for event in found] == pytest.approx([line["train/loss"] for line in lines], abs=1e-6)


def test_weights_and_biases_lists_runs_by_name_in_one_project(
    make: Callable[..., Trainer], broker: Broker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run without a connection: what it was started with, and that it has every step."""
    import wandb

    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_PROJECT", "sums")
    real, started, last = wandb.init, [], {}

    def start(**given: Any) -> Any:
        run = real(**given)
        finish = run.finish

        def end() -> None:
            last.update(step=run.step, summary=dict(run.summary))
            finish()

        monkeypatch.setattr(run, "finish", end)
        started.append(run)
        return run

    monkeypatch.setattr(wandb, "init", start)
    trainer = make("wandb", tracking={"name": "first try", "group": "seeds"})
    (run,) = started
    assert (run.project, run.name, run.group, run.tags) == ("sums", "first try", "seeds", ("small",))
    assert run.notes == "a longer warm-up"
    with Pipeline(broker):
        trainer.run(StopFlag())
    assert last["step"] == STEPS
    assert {"train/loss", "reward/mean"} <= set(last["summary"])
    assert list((tmp_path / "run" / "trackers").glob("wandb/offline-run-*"))


@pytest.mark.parametrize(
    ("name", "title", "arguments"),
    [
        ("trackio", "sums", {"name": "one", "group": "seeds", "resume": "never"}),
        ("swanlab", "sums", {"name": "one", "group": "seeds", "tags": ["small"], "description": "a try"}),
        ("mlflow", "sums", {"run_name": "one", "tags": {"group": "seeds", "small": "true"}, "description": "a try"}),
        ("clearml", "sums", {"task_name": "one", "tags": ["small"]}),
        ("aim", "one", {"experiment": "sums"}),
        ("comet_ml", "sums", {}),
        ("tensorboard", "one", {}),
    ],
)
def test_every_tracker_gets_the_project_and_the_name_where_it_has_them(
    tmp_path: Path, name: str, title: str, arguments: dict[str, Any]
) -> None:
    data = {
        **SMALLEST,
        "run": {"tags": ["small"], "notes": "a try"},
        "trainer": {"tracking": {"project": "sums", "name": "one", "group": "seeds"}},
    }
    assert listed_as(parse_config(data), name, tmp_path, resumed=False) == (title, arguments)


def test_the_project_is_the_trackers_own_variable_or_tidemill(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    config = parse_config({**SMALLEST, "run": {"name": "mine", "tags": ["small"], "notes": "a try"}})
    monkeypatch.delenv("WANDB_PROJECT", raising=False)
    title, arguments = listed_as(config, "wandb", tmp_path, resumed=False)
    assert (arguments["tags"], arguments["notes"]) == (["small"], "a try")
    assert (title, arguments["name"], arguments["group"]) == ("tidemill", "mine", None)
    monkeypatch.setenv("WANDB_PROJECT", "sums")
    again = listed_as(config, "wandb", tmp_path, resumed=True)
    assert again == ("sums", arguments), "a resumed run has the same id"
