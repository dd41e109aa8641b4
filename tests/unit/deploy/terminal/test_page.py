"""The page of a run, as ``tidemill top`` shows it, fits a terminal, and cuts what is well before what is not."""

from __future__ import annotations

import io

from rich.console import Console

from deploy.terminal.page import History, page
from schemas.control_api import RunStatus, ServiceStatus, TimelineEvent
from tests.support.broker.run_statuses import make_status


def service(name: str, role: str, state: str = "running", live: bool = True) -> ServiceStatus:
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
    service("feeder", "feeder", "full"),
    *(service(f"generator-{index}", "generator") for index in range(40)),
    service("generator-40", "generator", "lost", live=False),
    service("generator-41", "generator", "loading"),
    service("trainer", "trainer"),
]
EVENTS = [
    TimelineEvent(id=f"{index}-0", time=float(index), name="e", service="s", level="info", text=f"[e{index}]", data={})
    for index in range(6)
]


def drawn(s: RunStatus, height: int) -> list[str]:
    console = Console(file=io.StringIO(), width=80, height=height, color_system=None)
    console.print(page(s, History(events=EVENTS), height))
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue().splitlines()


def test_many_services_fit_a_terminal_and_what_is_amiss_stays() -> None:
    lines = drawn(make_status().model_copy(update={"services": CROWD}), 40)
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
    text = "\n".join(drawn(make_status().model_copy(update={"services": CROWD[:4]}), 30))
    assert "generator-2" in text
    assert "more" not in text.replace("More", "")


def test_why_a_run_failed_is_said_besides_the_bottleneck() -> None:
    failed = make_status().model_copy(update={"state": "failed", "cause": "trainer: exit code 1: out of memory"})
    text = "\n".join(drawn(failed, 30))
    assert "trainer: exit code 1: out of memory" in text
    assert failed.bottleneck.text[:30] in text
