"""The command line says the same of a run over its control plane and straight from its broker."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from subprocess import PIPE, Popen

import pytest

from broker.client import Broker
from schemas.messages import Score
from tests.support.broker.control_plane import ControlPlane
from tests.support.broker.prompt_groups import make_task, make_trajectory
from tests.support.broker.trainer_sessions import take_over
from tests.support.runs.command_line import run_tidemill

pytestmark = pytest.mark.integration
RUN = "sources"


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
    assert broker.events.tail(1)[0].name == "drop"


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
    assert "@" in broker.events.tail(1)[0].data["by"]
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
