"""The views of a run in the terminal are pure functions of what REST answers."""

import io
from dataclasses import replace
from typing import Any

from rich.console import Console

from deploy.control_plane.status.collector import PlannedRun
from deploy.control_plane.status.poller import StatusPoller, unreachable
from deploy.run.observer import QUIET_S, latest, with_processes
from deploy.supervisor.restart_policy import State
from deploy.supervisor.supervisor import ServiceView
from deploy.terminal.live import View
from deploy.terminal.page import SPARK_WIDTH, History, clock, page, plain_line, sparkline
from schemas.config import parse_config
from schemas.control_api.history import TimelineEvent
from schemas.control_api.status import EvaluationStatus, RunStatus, ServiceStatus
from tests.support.broker.run_statuses import make_status


def service(name: str, role: str, **more: Any) -> ServiceStatus:
    told: dict[str, Any] = {
        "name": name,
        "role": role,
        "host": "node",
        "pid": 1,
        "state": "running",
        "version": None,
        "silent_s": 0.0,
        "live": True,
        "paused": False,
        "tokens_per_s": 0.0,
        "load": None,
        "acknowledged": {},
        "figures": {},
    }
    return ServiceStatus(**told | more)


def evaluation(version: int, mean: float | None, scored: int, n: int = 500) -> EvaluationStatus:
    return EvaluationStatus(
        version=version, n=n, scored=scored, failed=0, complete=scored >= n, mean=mean, off_version=0, time=1.0
    )


def event(service: str, text: str, level: Any = "info") -> TimelineEvent:
    return TimelineEvent(id="", time=1.0, name="service", service=service, level=level, text=text, data={})


def busy() -> RunStatus:
    quiet = make_status()
    ledger = {"active": 158, "capacity": 160, "trained": 13184, "dropped": {"zero_variance": 120}, "failed": {}}
    return quiet.model_copy(
        update={
            "run": "sums",
            "state": "running",
            "steps": 800,
            "step": 412,
            "version": 412,
            "elapsed_s": 192.0,
            "remaining_s": 151.0,
            "staleness": quiet.staleness.model_copy(update={"mean": 1.4, "max": 4, "bound": 4}),
            "throughput": quiet.throughput.model_copy(update={"generated_tokens": 6123.0, "trained_tokens": 4810.0}),
            "ledger": quiet.ledger.model_copy(update=ledger),
            "streams": [
                stream.model_copy(update={"waiting": waiting, "pending": 2})
                for stream, waiting in zip(quiet.streams, (10, 0, 1, 38), strict=True)
            ],
            "services": [
                service("generator-0", "generator", version=412, tokens_per_s=3100.0),
                service("reward-0", "reward", silent_s=72.0),
            ],
        }
    )


BUSY = busy()
HISTORY = History(
    rewards=[0.1, 0.5, 0.75],
    evaluations=[evaluation(0, 0.2, 500), evaluation(400, 0.84, 500), evaluation(450, 0.0, 3)],
    events=[event("generator-0", "killed by SIGKILL [really]; restart 1 in 0.5 s", "warning")],
    restarts={"generator-0": 1},
)


def drawn(status: RunStatus, history: History = HISTORY, width: int = 80) -> str:
    console = Console(file=io.StringIO(), width=width, force_terminal=True, color_system=None)
    console.print(page(status, history))
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_the_page_has_everything_at_80_columns() -> None:
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
        "tasks 12   eval_tasks 2   trajectories 3   scored 40",
        "silent for 1:12",
        "killed by SIGKILL [really]; restart 1 in 0.5 s",
        "3:12",
    ):
        assert part in text
    assert all(len(line) <= 80 for line in text.splitlines())
    assert next(line.split()[-2] for line in text.splitlines() if "generator-0" in line) == "1"


def test_a_run_nothing_is_known_of_can_be_drawn() -> None:
    nothing = make_status().model_copy(update={"state": "starting", "step": 0, "services": []})
    empty = nothing.ledger.model_copy(update={"active": 0, "capacity": 0})
    nothing = nothing.model_copy(update={"ledger": empty})
    assert "starting" in drawn(nothing, History())
    assert plain_line(nothing, History()) == (
        "step 0/10  slots 0/0  Starting: no sign of the trainer, generator, reward and feeder yet."
    )


def test_pause_and_a_lost_broker_are_shown() -> None:
    lost = unreachable(BUSY, "no answer")
    assert "paused" in drawn(BUSY.model_copy(update={"state": "paused"}))
    assert "waiting for the broker" in drawn(lost)
    assert "412/800" in drawn(lost)
    assert plain_line(lost, HISTORY).endswith("waiting for the broker")


def test_a_look_that_takes_long_shows_the_last_one_as_unreachable() -> None:
    told = {"model": {"path": "m"}, "train": {"name": "arithmetic"}, "reward": {"terms": [{"name": "exact"}]}}
    watch = StatusPoller(None, PlannedRun.of(parse_config(told)))  # type: ignore[arg-type]
    assert latest(watch) is None
    watch._keep(BUSY)
    found = latest(watch)
    assert found is not None
    assert found.state == "running"
    watch.ticked -= 2 * QUIET_S
    found = latest(watch)
    assert found is not None
    assert (found.state, found.cause, found.step) == ("unreachable", "the broker has not answered for 6 s", 412)


def test_services_are_told_by_their_heartbeats_and_without_one_by_the_supervisor() -> None:
    beats = [
        service("supervisor", "supervisor"),
        service("trainer", "trainer"),
        service("reward-0", "reward"),
        service("generator-away", "generator"),
    ]
    own = [
        ServiceView("broker", "broker", State.RUNNING, 0, 7),
        ServiceView("generator-0", "generator", State.RUNNING, 0, 8),
        ServiceView("reward-0", "reward", State.WAITING, 2, None),
        ServiceView("trainer", "trainer", State.RUNNING, 0, 9),
    ]
    assert [(found.name, found.state) for found in with_processes(beats, own)] == [
        ("broker", "running"),
        ("generator-0", "starting"),
        ("reward-0", "waiting"),
        ("trainer", "running"),
        ("generator-away", "running"),
    ]


def test_services_with_shared_gpus_say_since_when_they_have_them() -> None:
    services = [
        service("trainer", "trainer").model_copy(update={"figures": {"device_held_s": 71.5, "device_share": 0.62}}),
        service("generator-0", "generator").model_copy(
            update={"state": "asleep", "figures": {"device_lent_s": 8.0, "device_share": 0.31}}
        ),
        service("generator-1", "generator"),
    ]
    text = "\n".join(drawn_page(make_status().model_copy(update={"services": services}), 30))
    assert "running, GPU for 1:11 (62%)" in text
    assert "asleep, no GPU for 0:08 (31%)" in text
    assert text.count("GPU for") == 2


def test_the_plain_line_has_means_of_complete_evaluations_only() -> None:
    assert plain_line(BUSY, HISTORY) == (
        "step 412/800  reward 0.750  held-out 0.840 (version 400)  evaluating version 450: 3 of 500"
        "  staleness 1.4 max 4 bound 4"
        "  tokens/s 6,123 generated 4,810 trained  slots 158/160  2:31 to go"
    )


def test_the_plain_line_says_why_no_step_is_taken() -> None:
    text = "Prompts: 98% of the groups are dropped because all their samples have the same reward."
    figures = {"groups_filtered_share": 0.98}
    bottleneck = BUSY.bottleneck.model_copy(update={"limit": "prompts", "text": text, "figures": figures})
    assert plain_line(BUSY.model_copy(update={"bottleneck": bottleneck}), HISTORY).endswith(f"2:31 to go  {text}")


def test_without_a_terminal_lines_come_now_and_then_and_at_each_evaluation() -> None:
    output = io.StringIO()
    with View(Console(file=output, width=80)) as view:
        for now, evaluations in ((0.0, 0), (1.0, 0), (2.0, 1), (3.0, 1), (13.0, 1)):
            view.show(BUSY, replace(HISTORY, evaluations=HISTORY.evaluations[:evaluations]), now)
        view.report(event("trainer", "started [again]"))
    lines = output.getvalue().splitlines()
    assert len(lines) == 4
    assert lines[-1] == "trainer: started [again]"


def test_a_sparkline_spans_its_values() -> None:
    assert sparkline([]) == ""
    assert sparkline([1.0, 1.0]) == "▁▁"
    assert sparkline([0.0, 1.0]) == "▁█"
    assert len(sparkline([float(i) for i in range(1000)])) == SPARK_WIDTH


def test_clock() -> None:
    assert [clock(s) for s in (0, 59.9, 61, 3661)] == ["0:00", "0:59", "1:01", "1:01:01"]


def page_service(name: str, role: str, state: str = "running", live: bool = True) -> ServiceStatus:
    return ServiceStatus(
        name=name,
        role=role,
        host="node",
        pid=1,
        state=state,
        version=3,
        silent_s=0.0 if live else 90.0,
        live=live,
        paused=False,
        tokens_per_s=10.0,
        load=0.5,
        acknowledged={},
        figures={},
    )


CROWD = [
    page_service("feeder", "feeder", "full"),
    *(page_service(f"generator-{index}", "generator") for index in range(40)),
    page_service("generator-40", "generator", "lost", live=False),
    page_service("generator-41", "generator", "loading"),
    page_service("trainer", "trainer"),
]
EVENTS = [
    TimelineEvent(id=f"{index}-0", time=float(index), name="e", service="s", level="info", text=f"[e{index}]", data={})
    for index in range(6)
]


def drawn_page(s: RunStatus, height: int) -> list[str]:
    console = Console(file=io.StringIO(), width=80, height=height, color_system=None)
    console.print(page(s, History(events=EVENTS), height))
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue().splitlines()


def test_many_services_fit_a_terminal_and_what_is_amiss_stays() -> None:
    lines = drawn_page(make_status().model_copy(update={"services": CROWD}), 40)
    assert len(lines) <= 40
    text = "\n".join(lines)
    for part in (
        "feeder",
        "trainer",
        "generator-40  node  lost, silent for 1:30",
        "generator-41",
        "generator-0",
        "more",
    ):
        assert part in text, part
    assert "[e5]" in text


def test_few_services_are_all_there() -> None:
    text = "\n".join(drawn_page(make_status().model_copy(update={"services": CROWD[:4]}), 30))
    assert "generator-2" in text
    assert "more" not in text.replace("More", "")


def test_why_a_run_failed_is_said_besides_the_bottleneck() -> None:
    failed = make_status().model_copy(update={"state": "failed", "cause": "trainer: exit code 1: out of memory"})
    text = "\n".join(drawn_page(failed, 30))
    assert "trainer: exit code 1: out of memory" in text
    assert failed.bottleneck.text[:30] in text
