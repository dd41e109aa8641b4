"""The commands that look at a run and help it by hand: on a real server, and the same over its control plane."""

import json
import socket
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from subprocess import PIPE, Popen

import pytest

from broker.client import Broker
from schemas.errors import DataError
from schemas.messages import Score
from tests.support.broker.control_plane import ControlPlane
from tests.support.broker.prompt_groups import generate_and_score, make_task, make_trajectory
from tests.support.broker.trainer_sessions import take_over
from tests.support.runs.command_line import run_tidemill

RUN = "sources"


def test_status_shows_the_invariant_and_says_when_it_is_broken(make_broker: Callable[..., Broker]) -> None:
    broker = make_broker("status-run")
    training = take_over(broker)
    for task_id in (0, 1, 2):
        broker.ledger.admit(make_task(task_id))
    training.drop_group(1, "stale", [])
    url = broker.connection.url
    done = run_tidemill("status", "status-run", "--url", url)
    assert done.returncode == 0, done.stderr
    assert "3 admitted = 2 active + 0 trained + 1 dropped + 0 failed: balanced" in done.stdout
    assert "1 dropped: stale" in done.stdout
    assert "2 of at most 18" in done.stdout
    figures = json.loads(run_tidemill("status", "status-run", "--url", url, "--json").stdout)
    ledger = figures["ledger"]
    assert (ledger["balanced"], ledger["active"], ledger["live_bound"]) == (True, 2, 18)
    broker.connection.client.zrem(broker.connection.keys.slots, "0")
    done = run_tidemill("status", "status-run", "--url", url)
    assert done.returncode == 1
    assert "NOT BALANCED" in done.stdout


def test_a_run_that_is_not_there_is_one_line_with_those_that_are(make_broker: Callable[..., Broker]) -> None:
    broker = make_broker("here")
    take_over(broker)
    done = run_tidemill("status", "elsewhere", "--url", broker.connection.url)
    assert done.returncode == 2
    assert "no run 'elsewhere'" in done.stderr
    assert "here" in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_without_a_broker_the_message_says_where_one_was_looked_for(tmp_path: Path) -> None:
    done = run_tidemill("status", "nothing", cwd=tmp_path)
    assert done.returncode == 2
    assert "no embedded one answers in runs/nothing/broker" in done.stderr


def _leave_a_run(folder: Path, reason: str) -> None:
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text(
        "model: {path: m}\ntrain: {name: arithmetic}\nreward: {terms: [{name: exact}]}\ntrainer: {steps: 9}\n"
    )
    lines = [json.dumps({"step": step, "reward/mean": step / 10}) for step in (1, 2, 3)]
    (folder / "metrics.jsonl").write_text("\n".join([*lines, '{"step": 4, "rew']))
    summary = {"exit_reason": reason, "steps": 3, "accuracy_before": 0.5, "accuracy_after": 0.75}
    (folder / "summary.json").write_text(json.dumps(summary))


def test_the_status_of_a_run_that_no_broker_has_is_what_its_folder_says(tmp_path: Path) -> None:
    _leave_a_run(tmp_path / "runs" / "old", "failed: trainer [log: a.log]")
    done = run_tidemill("status", "old", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    for part in (
        "failed: trainer [log: a.log]",
        "3 of 9",
        "0.3 in the last step",
        "accuracy 50.0% before, 75.0% after",
    ):
        assert part in done.stdout
    figures = json.loads(run_tidemill("status", "old", "--json", cwd=tmp_path).stdout)
    assert (figures["state"], figures["step"], figures["summary"]["accuracy_after"]) == ("failed", 3, 0.75)


def test_a_run_that_was_killed_has_a_status_that_says_so(tmp_path: Path) -> None:
    _leave_a_run(tmp_path / "runs" / "old", "finished")
    (tmp_path / "runs" / "old" / "summary.json").unlink()
    (tmp_path / "runs" / "old" / "up.lock").write_text(f"process {2**22 - 1} on {socket.gethostname()}")
    done = run_tidemill("status", "old", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "unknown: it has no summary.json" in done.stdout


def test_an_order_for_a_run_that_is_over_or_unknown_says_so(tmp_path: Path) -> None:
    _leave_a_run(tmp_path / "runs" / "old", "finished")
    over, unknown = (run_tidemill("pause", name, cwd=tmp_path) for name in ("old", "odl"))
    assert (over.returncode, unknown.returncode) == (1, 1)
    assert "run 'old' is finished: `tidemill show old`" in over.stderr
    assert "run 'odl' has no control plane" in unknown.stderr
    assert "runs here: old;" in unknown.stderr


def test_runs_are_listed_from_their_folders_where_there_is_no_broker(tmp_path: Path) -> None:
    assert run_tidemill("runs", cwd=tmp_path).stdout == "no runs\n"
    assert run_tidemill("runs", "--json", cwd=tmp_path).stdout == "[]\n"
    _leave_a_run(tmp_path / "runs" / "old", "finished")
    (tmp_path / "runs" / "cache").mkdir()
    done = run_tidemill("runs", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert [line.split()[:4] for line in done.stdout.splitlines()[1:]] == [["old", "finished", "3", "0.3"]]
    (listed,) = json.loads(run_tidemill("runs", "--json", cwd=tmp_path).stdout)
    assert (listed["name"], listed["state"], listed["step"], listed["reward"]) == ("old", "finished", 3, 0.3)


def test_runs_are_listed_with_their_tags_and_notes_where_they_have_some(tmp_path: Path) -> None:
    for name in ("one", "two"):
        _leave_a_run(tmp_path / "runs" / name, "finished")
    with (tmp_path / "runs" / "two" / "config.yaml").open("a") as stream:
        stream.write('run: {tags: [seed-1, "[bold]"], notes: a longer warm-up}\n')
    done = run_tidemill("runs", cwd=tmp_path)
    assert done.stdout.splitlines()[3:] == [" two: seed-1, [bold]. a longer warm-up"], done.stderr
    listed = json.loads(run_tidemill("runs", "--json", cwd=tmp_path).stdout)
    assert [(run["tags"], run["notes"]) for run in listed] == [([], None), (["seed-1", "[bold]"], "a longer warm-up")]


def test_runs_on_a_broker_are_listed_with_what_their_folders_say(
    make_broker: Callable[..., Broker], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    broker = make_broker("here-and-there")
    take_over(broker)
    monkeypatch.setenv("REDIS_URL", broker.connection.url)
    _leave_a_run(tmp_path / "runs" / "here-and-there", "stopped")
    listed = [
        run
        for run in json.loads(run_tidemill("runs", "--json", cwd=tmp_path).stdout)
        if run["name"] == "here-and-there"
    ]
    assert [(run["state"], run["reward"], run["keys"] > 0) for run in listed] == [("running", 0.3, True)]


def test_runs_are_listed_with_their_memory_and_deleted_after_asking(make_broker: Callable[..., Broker]) -> None:
    broker, other = make_broker("big-run"), make_broker("small-run")
    for each in (broker, other):
        take_over(each)
    broker.connection.client.set(f"{broker.connection.keys.base}:ballast", b"x" * 100_000)
    url = broker.connection.url
    listed = {run["name"]: run for run in json.loads(run_tidemill("runs", "--url", url, "--json").stdout)}
    assert listed["big-run"]["memory"] > 100_000 > listed["small-run"]["memory"] > 0
    assert listed["big-run"]["state"] == "running"
    assert "nothing was deleted" in run_tidemill("purge", "big-run", "--url", url, answer="n\n").stdout
    assert (
        run_tidemill("purge", "big-run", "--url", url, "--json").stderr
        == "tidemill: --json cannot ask for confirmation: add --yes\n"
    )
    assert run_tidemill("purge", "big-run", "--url", url, answer="y\n").returncode == 0
    listed = {run["name"] for run in json.loads(run_tidemill("runs", "--url", url, "--json").stdout)}
    assert "big-run" not in listed
    assert "small-run" in listed
    deleted = json.loads(run_tidemill("purge", "small-run", "--url", url, "--yes", "--json").stdout)
    assert deleted["run"] == "small-run"
    assert deleted["deleted_keys"] > 0


def test_settings_change_while_it_runs_and_wrong_ones_change_nothing(
    make_broker: Callable[..., Broker],
) -> None:
    broker = make_broker("set-run")
    take_over(broker)
    url = broker.connection.url
    assert run_tidemill("set", "set-run", "staleness=1", "batch=4", "--url", url).returncode == 0
    assert broker.ledger.read_state().capacity == 8
    for wrong in ("staleness=-1", "batch=0", "lr=3", "batch=many"):
        done = run_tidemill("set", "set-run", "staleness=5", wrong, "--url", url)
        assert done.returncode == 2, wrong
        name, _, value = wrong.partition("=")
        assert f"setting {name}: {value!r} is not allowed, must be " in done.stderr
    assert broker.ledger.read_state().staleness == 1


def test_a_failed_group_is_admitted_again_from_its_dead_letter(make_broker: Callable[..., Broker]) -> None:
    broker = make_broker("letters-run", max_deliveries=1)
    take_over(broker)
    broker.ledger.admit(make_task(0))
    for name in ("a", "b", "c"):
        broker.task_queue(name).claim_stale(0.0, 10) or broker.task_queue(name).read(1, 10)
    assert broker.ledger.read_state().failed == {"dead_letter": 1}
    url = broker.connection.url
    listed = json.loads(run_tidemill("dead-letters", "list", "letters-run", "--url", url, "--json").stdout)
    (letter,) = listed["letters"]
    assert listed["total"] == 1
    assert "delivered 2 times" in letter["reason"]
    shown = json.loads(run_tidemill("dead-letters", "show", "letters-run", letter["id"], "--url", url).stdout)
    assert shown["payload"]["text"] == "1+1="
    assert run_tidemill("dead-letters", "requeue", "letters-run", letter["id"], "--url", url).returncode == 0
    state = broker.ledger.read_state()
    assert (state.readmit, state.balanced, sum(state.failed.values())) == (1, True, 0)
    assert broker.ledger.admit(make_task(1)).next == 0
    assert broker.ledger.admit(make_task(0)).answer == "ok"
    assert broker.ledger.read_state().balanced
    assert broker.dead_letters.page(1000, None, newest=False)[0] == []


def test_what_was_trained_without_a_sample_is_not_made_again(make_broker: Callable[..., Broker]) -> None:
    broker = make_broker()
    training = take_over(broker)
    broker.ledger.admit(make_task(0))
    generate_and_score(broker, 0, (Score(reward=1.0), Score(status="error", reason="boom")))
    (filed,) = broker.dead_letters.page(1000, None, newest=False)[0]
    assert broker.dead_letters.requeue(filed.id) == "active"
    training.drop_group(0, "zero_variance", [])
    assert broker.dead_letters.requeue(filed.id) == "ended"
    broker.dead_letters.drop(filed.id)
    with pytest.raises(DataError, match="no dead letter"):
        broker.dead_letters.get(filed.id)


@pytest.fixture
def broker(make_broker: Callable[..., Broker]) -> Iterator[Broker]:
    """A run with a dead letter, a scored sample and one that waits for its score."""
    broker = make_broker(RUN)
    take_over(broker)
    broker.ledger.admit(make_task(0))
    queue = broker.task_queue("g")
    queue.read(1, 10)
    queue.publish(0, [make_trajectory(0, 0)])
    scores = broker.score_queue("r")
    scores.publish([(item, Score(reward=0.5)) for item in scores.read(1, 10)])
    queue.fail_sample(0, 1, "too long")
    yield broker
    broker.purge()


@pytest.fixture(params=["--control", "--url"])
def way(request: pytest.FixtureRequest, broker: Broker) -> Iterator[tuple[str, str]]:
    """How the command line gets there."""
    if request.param == "--url":
        yield "--url", broker.connection.url
    else:
        with ControlPlane(broker, RUN) as api:
            yield "--control", api.url


def test_dead_letters_are_listed_shown_refused_and_dropped(way: tuple[str, str], broker: Broker) -> None:
    listed = json.loads(run_tidemill("dead-letters", "list", RUN, *way, "--json").stdout)
    assert (listed["total"], [letter["reason"] for letter in listed["letters"]]) == (1, ["too long"])
    assert "too long" in run_tidemill("dead-letters", "list", RUN, *way).stdout
    id = listed["letters"][0]["id"]
    for form in ((), ("--json",)):
        assert json.loads(run_tidemill("dead-letters", "show", RUN, id, *way, *form).stdout)["task_id"] == 0
    refused = run_tidemill("dead-letters", "requeue", RUN, id, *way)
    assert (refused.returncode, refused.stderr.count("\n")) == (5, 1)
    assert "still in the pipeline" in refused.stderr
    dropped = run_tidemill("dead-letters", "drop", RUN, id, *way, "--json")
    assert (dropped.returncode, json.loads(dropped.stdout)["order"]) == (0, "drop")
    assert run_tidemill("dead-letters", "drop", RUN, id, *way).returncode == 5
    assert broker.events.newest(1)[0].event.name == "drop"


def test_trajectories_are_found_and_shown(way: tuple[str, str]) -> None:
    found = json.loads(run_tidemill("trajectories", "list", RUN, *way, "--state", "scored", "--json").stdout)
    assert [(one["sample"], one["reward"]) for one in found["trajectories"]] == [(0, 0.5)]
    assert "no such" in run_tidemill("trajectories", "list", RUN, *way, "--version", "99").stdout
    assert "reward 0.5" in run_tidemill("trajectories", "show", RUN, "0", "0", *way).stdout
    assert run_tidemill("trajectories", "show", RUN, "7", "0", *way).returncode == 5
    assert run_tidemill("trajectories", "list", RUN, *way, "--finish", "never").returncode == 2


def test_settings_are_changed_and_logged_with_who_did_it(way: tuple[str, str], broker: Broker) -> None:
    done = run_tidemill("set", RUN, "staleness=2", "concurrency=9", *way, "--json")
    assert (json.loads(done.stdout)["staleness"], json.loads(done.stdout)["concurrency"]) == (2, 9)
    assert "@" in broker.events.newest(1)[0].event.data["by"]
    assert json.loads(run_tidemill("status", RUN, *way, "--json").stdout)["settings"]["staleness"] == 2
    assert run_tidemill("set", RUN, "staleness=1001", *way).returncode == 2


def test_top_is_a_status_a_line_for_scripts(way: tuple[str, str]) -> None:
    command = [sys.executable, "-m", "deploy.cli", "top", RUN, *way, "--json"]
    with Popen(command, stdout=PIPE, stderr=PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert [json.loads(process.stdout.readline())["run"] for _ in range(2)] == [RUN, RUN]
        process.stdout.close()
        assert (process.wait(30), process.stderr.read()) == (0, "")


def test_nobody_who_answers_is_an_error_of_its_own() -> None:
    done = run_tidemill("dead-letters", "list", RUN, "--control", "http://127.0.0.1:9")
    assert (done.returncode, "cannot reach the control plane" in done.stderr) == (1, True)
