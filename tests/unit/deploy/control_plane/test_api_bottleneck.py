"""What limits a run, what state it is in, and how far a pause is: pure functions."""

from dataclasses import replace
from typing import Any

import pytest

from broker.flow.ledger import LedgerState
from broker.flow.run_control import ControlState
from broker.telemetry.stream_lag import StreamLag
from broker.telemetry.trajectories import choose
from deploy.control_plane.routes.decoding import pieces
from deploy.control_plane.status.bottleneck import Evidence, find_bottleneck
from deploy.control_plane.status.collector import Collector, PlannedRun, natural
from deploy.control_plane.status.poller import StatusPoller
from deploy.control_plane.status.run_state import LIVE_S, pause_status, run_state
from deploy.control_plane.status.series import MetricsSeries, Rates
from producers.generator.orders import FENCE_S
from schemas.messages import Heartbeat
from tests.support.broker.run_statuses import make_status
from tests.support.configurations import minimal_config
from tests.support.trainer.trajectories import make_trajectory

BUSY = Evidence(
    state="running",
    cause="",
    begun=True,
    missing=[],
    loading=[],
    active=20,
    capacity=20,
    wait=0.6,
    publish=0.05,
    update=0.01,
    unscored=0,
    unclaimed=4,
    step_samples=32,
    load=0.95,
    filtered=0.1,
    generated_per_s=1000,
    trained_per_s=900,
)


@pytest.mark.parametrize(
    ("changes", "limit"),
    [
        ({}, "generation"),
        ({"wait": 0.05}, "training"),
        ({"wait": 0.05, "publish": 0.5}, "weights"),
        ({"wait": 0.05, "hand_over": 0.1}, "training"),
        ({"wait": 0.05, "hand_over": 0.4}, "turns"),
        ({"unscored": 100}, "reward"),
        ({"update": 0.6}, "weights"),
        ({"active": 3}, "prompts"),
        ({"load": 0.2, "unclaimed": 0}, "staleness"),
        ({"wait": None}, "nothing"),
        ({"wait": None, "filtered": 0.99}, "prompts"),
        ({"filtered": 0.9}, "prompts"),
        ({"filtered": 0.9, "wait": 0.05}, "training"),
        ({"state": "paused"}, "paused"),
        ({"state": "pausing", "cause": "waiting for generator-0"}, "paused"),
        ({"state": "failed", "missing": ["trainer"]}, "nothing"),
        ({"missing": ["generator"]}, "generation"),
        ({"missing": ["reward"]}, "reward"),
        ({"missing": ["trainer"]}, "training"),
    ],
)
def test_the_bottleneck_names_what_limits_the_run(changes: dict[str, object], limit: str) -> None:
    found = find_bottleneck(replace(BUSY, **changes))  # type: ignore[arg-type]
    assert found.limit == limit
    assert found.text.endswith(".")


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"begun": False, "wait": None, "missing": ["trainer", "generator"]}, "Starting: no sign of the trainer and"),
        ({"state": "starting", "missing": ["trainer"]}, "Starting: no sign of the trainer yet."),
        ({"wait": None, "loading": ["generator-0"]}, "Starting: generator-0 loads."),
        ({"wait": None}, "The first step is being made: 20 of 20 prompt groups are under way."),
        (
            {"wait": None, "evaluating": "version 0 (3 of 9 samples)"},
            "Generators evaluate version 0 (3 of 9 samples) first; the first step comes after that.",
        ),
        (
            {"evaluating": "version 20 (3 of 9 samples)"},
            "Generation: the trainer waits for 60% of its time; generators are 95% full, and they also evaluate",
        ),
        (
            {"wait": None, "filtered": 1.0},
            "Prompts: 100% of the groups are dropped because all their samples have the same reward. Check the reward",
        ),
        ({"missing": ["trainer"]}, "No trainer is alive: the run stands still until there is one."),
        ({"state": "failed", "missing": ["trainer"], "cause": "out of memory"}, "The run has failed. Fix the cause"),
        ({"state": "finished", "missing": ["trainer"]}, "The run is finished: all steps are trained."),
        ({"state": "pausing", "cause": "waiting for g0"}, "A pause was ordered; waiting for g0."),
        ({"wait": 0.05}, "Training: the trainer waits for only 5% of its time; more generators would not help."),
    ],
)
def test_the_bottleneck_says_what_a_user_would(changes: dict[str, object], text: str) -> None:
    assert find_bottleneck(replace(BUSY, **changes)).text.startswith(text)  # type: ignore[arg-type]


def test_the_bottleneck_gives_its_figures() -> None:
    assert find_bottleneck(BUSY).figures["trainer_wait_share"] == 0.6


def beat(service: str, role: str, pause: int = 0, time: float = 100.0, state: str = "running") -> Heartbeat:
    return Heartbeat(service=service, role=role, host="h", pid=1, state=state, time=time, acknowledged={"pause": pause})


def lags(**waiting: int) -> list[StreamLag]:
    names = ("tasks", "eval_tasks", "trajectories", "scored")
    return [StreamLag(name, waiting.get(name, 0), waiting.get(name, 0), 0, 0, None) for name in names]


FREEZE = ControlState(pause="freeze", pause_id=3)


def test_a_freeze_waits_for_every_live_generator_and_the_trainer() -> None:
    beats = [beat("g0", "generator", 3), beat("g1", "generator", 2), beat("t", "trainer", 3), beat("f", "feeder")]
    status = pause_status(FREEZE, beats, lags(tasks=5), 101.0)
    assert (status.done, status.waiting_for) == (False, ["g1"])
    assert pause_status(FREEZE, [beat("g0", "generator", 3), *beats[2:]], lags(), 101.0).done


def test_a_silent_generator_is_waited_for_until_it_has_stopped_by_itself() -> None:
    beats = [beat("g0", "generator", 2)]
    assert not pause_status(FREEZE, beats, lags(), 100.0 + FENCE_S + 2).done
    assert pause_status(FREEZE, beats, lags(), 100.0 + LIVE_S).done
    assert FENCE_S + 2 < LIVE_S


def test_a_drain_waits_for_streams_and_the_trainer() -> None:
    drain = replace(FREEZE, pause="drain")
    beats = [beat("g0", "generator", 2), beat("t", "trainer", 3)]
    assert pause_status(drain, beats, lags(trajectories=1), 101.0).waiting_for == ["trajectories"]
    assert pause_status(drain, beats, lags(scored=7), 101.0).done
    assert pause_status(drain, [beat("t", "trainer", 2)], lags(), 101.0).waiting_for == ["t"]


def test_no_pause_is_never_done() -> None:
    assert not pause_status(ControlState(), [], lags(), 100.0).done


LEDGER = LedgerState("running", False, 3, 3, 10, 2, 1, 9, 2, 0, 4, 9, 0, 7, 1, 5, leader_term=1)
ALL = [beat(role, role) for role in ("feeder", "generator", "reward", "trainer")]


@pytest.mark.parametrize(
    ("ledger", "beats", "pause", "state"),
    [
        (LEDGER, ALL, ControlState(), "running"),
        (LEDGER, ALL[:3], ControlState(), "starting"),
        (LEDGER, ALL[2:], ControlState(), "running"),
        (replace(LEDGER, leader_term=0), ALL, ControlState(), "starting"),
        (LEDGER, ALL, FREEZE, "pausing"),
        (LEDGER, ALL, replace(FREEZE, pause="drain"), "draining"),
        (LEDGER, ALL[:1], FREEZE, "paused"),
        (replace(LEDGER, state="finished"), [], ControlState(), "finished"),
        (replace(LEDGER, state="failed", cause="trainer: exit code 1"), [], FREEZE, "failed"),
        (LEDGER, [*ALL, beat("s", "supervisor", state="stopping")], ControlState(), "stopping"),
    ],
)
def test_the_state_of_a_run(ledger: LedgerState, beats: list[Heartbeat], pause: ControlState, state: str) -> None:
    found, cause = run_state(ledger, pause_status(pause, beats, lags(), 101.0), beats, 101.0)
    assert found == state
    assert cause or state in ("running", "paused", "finished")


def test_history_keeps_columns_and_replaces_steps_that_are_trained_again() -> None:
    history = MetricsSeries()
    for step in (1, 2, 3):
        history.add({"step": step, "reward/mean": step / 10, "staleness/histogram": {"0": step}})
    history.add({"step": 2, "reward/mean": 9.0, "train/loss": 1.0})
    found = history.since(-1, 10)
    assert found.step == [1, 2]
    assert found.series == {"reward/mean": [0.1, 9.0], "train/loss": [None, 1.0]}
    assert found.staleness == [{"0": 1}, {}]
    assert history.since(1, 10, {"train/loss"}).series == {"train/loss": [1.0]}
    assert history.since(-1, 1).step == [2]


def test_history_leaves_out_what_is_no_number() -> None:
    history = MetricsSeries()
    history.add({"step": 1, "reward/mean": float("nan")})
    assert history.since(-1, 10).series == {"reward/mean": [None]}
    assert history.last("reward/mean") == []


def test_rates_start_anew_when_a_count_goes_back() -> None:
    rates = Rates()
    rates.add(0.0, {"a": 10})
    assert rates.of("a") is None
    rates.add(2.0, {"a": 30})
    assert rates.of("a") == 10.0
    rates.add(3.0, {"a": 0})
    assert rates.of("a") is None


def test_pieces_make_up_the_text_and_a_split_character_is_in_its_last_token() -> None:
    raw = "aé🎉b".encode()

    def decode(ids: object) -> str:
        return bytes(ids).decode(errors="replace")  # type: ignore[call-overload]

    found = pieces(decode, list(raw))
    assert "".join(found) == "aé🎉b"
    assert found == ["a", "", "é", "", "", "", "🎉", "b"]


def test_kept_samples_are_few_and_different() -> None:
    trained = [(make_trajectory(0, i, completion=2 + i), float(i)) for i in range(6)]
    kept = choose(trained, step=2)
    assert [reward for _, reward in kept] == [5.0, 0.0, 2.0]
    assert choose([], 3) == []


def test_a_broker_that_is_gone_is_the_limit_and_the_last_look_stays() -> None:
    config = minimal_config(model={"path": "m"})
    poller = StatusPoller(None, PlannedRun.of(config))  # type: ignore[arg-type]
    poller._keep(make_status())
    poller._lost("no answer\nfor 5 s")
    assert (poller.latest.state, poller.latest.cause, poller.latest.step) == ("unreachable", "no answer for 5 s", 3)
    assert (poller.latest.bottleneck.limit, poller.error) == ("broker", "no answer for 5 s")


def test_time_to_go_is_the_pace_of_the_last_steps() -> None:
    def remaining(lines: list[dict[str, Any]]) -> float | None:
        collector = Collector(None, PlannedRun("run"))  # type: ignore[arg-type]
        for line in lines:
            collector.history.add(line)
        return collector._remaining(59)

    lines = [{"step": step, "wall_s": 100.0 + 2.0 * step} for step in range(1, 50)]
    assert remaining(lines) == 20.0
    assert remaining(lines[:1]) is None
    assert remaining([{"step": 5, "wall_s": 3.0}, {"step": 4, "wall_s": 4.0}]) is None

    away = [line | {"wall_s": line["wall_s"] + 86_400.0} for line in lines[40:]]
    assert remaining(lines[:40] + away) == 20.0, "the run was stopped for a day, and resumed"
    paused = [line | {"wall_s": line["wall_s"] + 9.0} for line in lines[40:]]
    paused[0]["time/paused_s"] = 9.0
    assert remaining(lines[:40] + paused) == 20.0
    slow = [line | {"wall_s": line["wall_s"] + 4.0 * (line["step"] // 10)} for line in lines]
    assert remaining(slow) == pytest.approx(10 * (2.0 + 4.0 / 19)), "what comes now and then counts"
    set_back = [{"step": 1, "wall_s": 100.0}, {"step": 2, "wall_s": 101.0, "time/paused_s": 9.0}]
    assert remaining(set_back) is None, "the clock was set back in a pause"


def test_names_are_sorted_as_people_count() -> None:
    assert sorted(["g-10", "g-2", "g", "g-2b"], key=natural) == ["g", "g-2", "g-2b", "g-10"]
