"""Which service an order or a changed setting wakes; no combination of settings stops a run permanently."""

import json
import threading
from dataclasses import replace
from pathlib import Path

import pytest

from broker.client import Broker
from broker.flow.progress import Progress, TakeoverRequest
from schemas.config.run import slots_problem
from schemas.errors import BrokerLost, ConfigError, RefusedError
from schemas.messages import Score
from tests.support.broker.control_plane import ControlPlane
from tests.support.broker.leadership import leadership_in
from tests.support.broker.prompt_groups import claim_batch, count_entries, generate_and_score, make_task, train_record
from tests.support.broker.trainer_sessions import FIRST, change_request, take_over, take_over_as
from tests.support.configurations import minimal_config
from tests.support.runs.command_line import run_tidemill

WINDOWED = TakeoverRequest(batch=4, staleness=4, window=4, steps=100, max_uncommitted=10)
"""17 slots; staleness * batch may not be below 3."""
TOO_FEW = r"flow\.window 4 leaves 1 slots for a batch of 4 at staleness 0"


def test_groups_that_come_and_go_wake_no_generator(broker: Broker) -> None:
    training = take_over(broker)
    orders, changes = broker.run_control.order_position(), broker.ledger.change_position()
    for task_id in range(2):
        broker.ledger.admit(make_task(task_id))
        generate_and_score(broker, task_id, (Score(reward=1.0), Score(reward=1.0)))
    outcomes = training.claim_scores(2)
    assert training.drop_group(0, "zero_variance", [outcome.scored_id for outcome in outcomes])
    train_record(training, claim_batch(training))
    assert broker.ledger.change_position() != changes
    assert broker.run_control.order_position() == orders


@pytest.mark.parametrize("order", ["pause", "resume", "concurrency", "take-over"])
def test_an_order_wakes_generators_and_whoever_waits_for_room(broker: Broker, order: str) -> None:
    take_over(broker)
    broker.run_control.pause("drain", "t")
    orders, changes = broker.run_control.order_position(), broker.ledger.change_position()
    waiting = [
        threading.Thread(target=broker.run_control.wait_order, args=(orders, 9_000)),
        threading.Thread(target=broker.ledger.wait_change, args=(changes, 9_000)),
    ]
    for thread in waiting:
        thread.start()
    if order == "concurrency":
        broker.ledger.change_settings({"concurrency": 3})
    elif order == "take-over":
        take_over(broker, fresh=False)
    else:
        broker.run_control.pause("freeze" if order == "pause" else "none", "t")
    for thread in waiting:
        thread.join(5)
        assert not thread.is_alive()


def test_the_trainer_notices_when_nobody_can_wait_for_orders(broker: Broker) -> None:
    training = take_over(broker)
    broker.connection.authority = True
    broker.connection.client.set(broker.connection.keys.orders, "hello")
    with pytest.raises(BrokerLost, match="replaced"):
        training.read_pipeline()
    take_over(broker, fresh=False).read_pipeline()
    assert broker.run_control.order_position() != b"0-0"


def test_the_trainer_notices_that_orders_are_gone_and_gives_them_again(broker: Broker) -> None:
    training, known = take_over(broker), Progress()
    broker.run_control.pause("freeze", "ada")
    known.update(training.read_pipeline())
    broker.connection.client.delete(broker.connection.keys.run_control)
    broker.run_control.checkpoint("bob")
    with pytest.raises(BrokerLost, match="lost the orders"):
        training.read_pipeline()
    again, takeover = take_over_as(broker, replace(FIRST, fresh=False, progress=known))
    assert not takeover.lost, "orders are no part of the pipeline"
    control = again.read_pipeline().control
    assert (control.pause, control.pause_id, control.by) == ("freeze", 1, "ada")
    assert broker.run_control.pause("none", "ada")
    assert not broker.ledger.read_state().paused


def in_force(broker: Broker) -> tuple[int, int, int]:
    state = broker.ledger.read_state()
    return state.staleness, state.batch, state.capacity


def test_settings_that_leave_no_room_for_a_batch_are_refused_with_the_configurations_words(broker: Broker) -> None:
    take_over_as(broker, WINDOWED)
    with pytest.raises(RefusedError, match=TOO_FEW) as refused:
        broker.ledger.change_settings({"staleness": 0})
    with pytest.raises(ConfigError, match=TOO_FEW) as refused_file:
        minimal_config(model={"path": "m"}, flow={"staleness": 0, "window": 4}, trainer={"batch_groups": 4})
    assert str(refused.value) == str(refused_file.value)
    assert in_force(broker) == (4, 4, 17)
    assert broker.ledger.read_state().settings == {}
    assert broker.ledger.admit(make_task(0)).answer == "ok"


def test_settings_are_changed_all_or_none_and_judged_together(broker: Broker) -> None:
    take_over_as(broker, WINDOWED)
    assert broker.ledger.change_settings({"batch": 1})
    with pytest.raises(RefusedError):
        broker.ledger.change_settings({"concurrency": 7, "staleness": 2})
    state = broker.ledger.read_state()
    assert (state.settings, state.control.settings) == ({"batch": 1}, {"batch": 1})
    assert broker.ledger.change_settings({"staleness": 1, "batch": 3}), "neither fits without the other"
    assert in_force(broker) == (1, 3, 3)


def test_broker_and_configuration_agree_on_every_combination(broker: Broker) -> None:
    for window in (1, 2, 5):
        take_over_as(broker, change_request(WINDOWED, window=window, batch=9, staleness=9, settings={}))
        for staleness in range(4):
            for batch in range(1, 5):
                try:
                    fits = broker.ledger.change_settings({"staleness": staleness, "batch": batch})
                except RefusedError:
                    fits = False
                assert fits is (slots_problem(staleness, batch, window) is None), (staleness, batch, window)


def test_restored_settings_beyond_a_changed_window_give_way_with_a_word(broker: Broker, tmp_path: Path) -> None:
    take_over_as(broker, WINDOWED)
    broker.ledger.change_settings({"batch": 1, "staleness": 3, "concurrency": 5})
    _, taken = take_over_as(broker, change_request(WINDOWED, window=5, leader_term_floor=1))
    assert taken.refused_settings == "staleness 3 batch 1"
    assert in_force(broker) == (4, 4, 16)
    assert broker.ledger.read_state().settings == {"concurrency": 5}

    broker.ledger.change_settings({"batch": 1})
    leadership = leadership_in(tmp_path, broker, window=9)
    leadership.take_over(saved=0)
    event = broker.events.newest(1)[0].event
    assert (event.name, event.level) == ("settings", "warning")
    assert "(batch 1) leave no room for a batch with flow.window 9" in event.text


def test_a_setting_that_was_given_back_does_not_return_with_an_older_checkpoint(broker: Broker) -> None:
    take_over_as(broker, WINDOWED)
    broker.ledger.change_settings({"staleness": 2})
    broker.ledger.change_settings({"staleness": None})
    assert in_force(broker) == (4, 4, 17), "at once"
    take_over_as(broker, change_request(WINDOWED, settings={"staleness": 2}, leader_term_floor=1))
    assert in_force(broker) == (4, 4, 17)


@pytest.mark.parametrize(("name", "typo", "most"), [("batch", 100_000, 32), ("staleness", 1000, 32)])
def test_a_value_far_above_the_configured_is_rejected(broker: Broker, name: str, typo: int, most: int) -> None:
    take_over_as(broker, WINDOWED)
    with pytest.raises(RefusedError, match=f"{name} {typo} is not allowed: at most {most} in a run configured with 4"):
        broker.ledger.change_settings({name: typo})
    assert in_force(broker) == (4, 4, 17)
    assert broker.ledger.change_settings({name: most})


def test_a_smaller_pipeline_withdraws_groups_that_no_generator_has_taken(broker: Broker) -> None:
    """Their prompts are not lost: the groups are admitted again when there is room."""
    training = take_over_as(broker, WINDOWED)[0]
    broker.ledger.change_settings({"batch": 32})
    for task_id in range(40):
        if task_id == 3:
            # One group is generated, and its generator holds the other two.
            generate_and_score(broker, 0, (Score(reward=1.0), Score(reward=1.0)))
        assert broker.ledger.admit(make_task(task_id)).answer == "ok"

    broker.ledger.change_settings({"batch": None})
    assert broker.ledger.admit(make_task(40)).next == 17
    state = broker.ledger.read_state()
    assert (state.active, state.capacity, state.readmit, state.balanced) == (17, 17, 23, True)
    assert [slot.task_id for slot in training.read_pipeline().slots] == list(range(17))
    assert broker.ledger.admit(make_task(17)).answer == "full"
    assert count_entries(broker)["tasks"] == 16, "all but the generated one"

    broker.ledger.change_settings({"batch": 1})
    assert broker.ledger.admit(make_task(17)).next == 3
    assert [slot.task_id for slot in training.read_pipeline().slots] == [0, 1, 2], "a generator has these"

    broker.ledger.change_settings({"batch": 32})
    for task_id in range(3, 40):
        assert broker.ledger.admit(make_task(task_id)).answer == "ok"
    assert broker.ledger.read_state().readmit == 0
    assert broker.ledger.read_state().balanced


def test_settings_that_services_read_outlive_a_broker_that_lost_all(broker: Broker) -> None:
    take_over_as(broker, WINDOWED)
    given = {"lr": 2.5e-06, "steps": 70, "temperature": 0.85, "eval_every": 5, "checkpoint_every": 3}
    broker.ledger.change_settings(given)
    kept = broker.ledger.read_state().settings
    broker.purge()
    take_over_as(broker, change_request(WINDOWED, settings=kept, fresh=True))
    state = broker.ledger.read_state()
    assert (state.settings, state.control.settings, state.steps) == (given, given, 70)
    broker.ledger.change_settings({"steps": None, "lr": None})
    state = broker.ledger.read_state()
    assert (state.control.settings, state.steps) == ({"temperature": 0.85, "eval_every": 5, "checkpoint_every": 3}, 100)


def test_an_order_of_steps_ends_with_a_takeover_whose_configuration_has_other_steps(broker: Broker) -> None:
    """It may be the trainer's own, of eval.patience: raising trainer.steps has to continue the run."""
    take_over(broker, steps=5)
    broker.ledger.change_settings({"steps": 2, "lr": 1e-5})
    take_over(broker, steps=5, fresh=False)
    state = broker.ledger.read_state()
    assert (state.steps, state.control.settings) == (2, {"steps": 2, "lr": 1e-5}), "as configured before"
    take_over(broker, steps=9, fresh=False)
    state = broker.ledger.read_state()
    assert (state.steps, state.settings, state.control.settings) == (9, {"lr": 1e-5}, {"lr": 1e-5})


def test_a_run_is_given_more_steps_than_it_has_taken(broker: Broker) -> None:
    take_over_as(broker, change_request(WINDOWED, step=7))
    with ControlPlane(broker, broker.connection.keys.run) as api:
        status, problem = api.ask("PATCH", "/v1/settings", {"steps": 7, "lr": 1e-5})
        assert (status, problem["detail"]) == (409, "the run has taken 7 steps: give it more than these, or stop it")
        status, settings = api.ask("PATCH", "/v1/settings", {"steps": 8, "lr": 1e-5})
        assert (status, settings["steps"], settings["lr"], settings["changed"]) == (200, 8, 1e-5, ["lr", "steps"])
        assert api.ask("PATCH", "/v1/settings", {"lr": 0})[0] == 422
        assert api.ask("PATCH", "/v1/settings", {"temperature": 0})[0] == 422, "greedy: nothing could be learnt"
    assert "lr set to 1e-05" in [event.event.text.split(" by ")[0] for event in broker.events.newest(9)]
    wrong = run_tidemill("set", broker.connection.keys.run, "lr=fast", "--url", broker.connection.url)
    assert (wrong.returncode, wrong.stderr.count("\n")) == (2, 1)
    assert "setting lr: 'fast' is not allowed, must be a valid number" in wrong.stderr
    wrong = run_tidemill("set", broker.connection.keys.run, "n=3", "--url", broker.connection.url)
    assert "these can: staleness, batch, concurrency, lr, steps, temperature" in wrong.stderr


def test_the_control_plane_and_the_command_line_refuse_such_settings_too(broker: Broker) -> None:
    take_over_as(broker, WINDOWED)
    run = broker.connection.keys.run
    with ControlPlane(broker, run) as api:
        status, problem = api.ask("PATCH", "/v1/settings", {"staleness": 0})
        assert status == 409
        over_rest = run_tidemill("set", run, "staleness=0", "--control", api.url)
    straight = run_tidemill("set", run, "staleness=0", "--url", broker.connection.url)
    for answer in (over_rest, straight):
        assert (answer.returncode, answer.stderr.count("\n")) == (5, 1)
        assert problem["detail"] in answer.stderr
    assert json.loads(run_tidemill("status", run, "--url", broker.connection.url, "--json").stdout)["settings"] == {
        "staleness": 4,
        "batch": 4,
        "concurrency": None,
        "lr": None,
        "steps": 100,
        "temperature": None,
        "eval_every": None,
        "checkpoint_every": None,
        "changed": [],
    }
