"""Alerts of a run, what they leave in its folder, and the metrics that Grafana and Prometheus ask for."""

import json
import re
import sys
import time
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.request import urlopen

import pytest
import yaml

from broker.health import SILENT_S, ProbeServer, Pulse
from deploy.control_plane.alerts import notify, run_watch
from deploy.control_plane.alerts.alerts import AlertRules
from deploy.control_plane.alerts.run_watch import RunWatch
from deploy.control_plane.files.resources import ResourceFile, read_alerts
from deploy.control_plane.files.run_folder import RunFolder
from deploy.control_plane.status.prometheus import render
from schemas.config import TidemillConfig
from schemas.control_api.status import RunStatus, ServiceStatus
from schemas.errors import ConfigError
from tests.support.broker.run_statuses import make_status
from tests.support.configurations import minimal_config
from tests.support.servers.scripted_server import serving

FOLDER = Path(__file__).parents[4] / "deploy" / "observability"


def service(role: str, **figures: float) -> ServiceStatus:
    return ServiceStatus(
        name=f"{role}-0",
        role=role,
        host="here",
        pid=1,
        state="running",
        version=None,
        silent_s=0,
        live=True,
        paused=False,
        tokens_per_s=0,
        load=None,
        acknowledged={},
        figures=figures,
    )


SERVICES = [service(role, cpu=0.5, memory_bytes=1e9) for role in ("feeder", "generator", "reward", "trainer")]


def status(**changes: Any) -> RunStatus:
    SERVICES = [service(role, cpu=0.5, memory_bytes=1e9) for role in ("feeder", "generator", "reward", "trainer")]
    base = make_status()
    ledger = base.ledger.model_copy(update={"balanced": True})
    streams = [stream.model_copy(update={"oldest_s": 1.0}) for stream in base.streams]
    given = {"state": "running", "cause": "", "services": SERVICES, "ledger": ledger, "streams": streams}
    return base.model_copy(update=given | changes)


def config(folder: Path, **notify: Any) -> TidemillConfig:
    return minimal_config(run={"name": "watched", "folder": str(folder)}, model={"path": "nowhere"}, notify=notify)


def test_a_run_without_a_step_is_stuck_once_and_then_goes_on() -> None:
    rules = AlertRules(stuck_s=100)
    assert rules.observe(status(step=3), 0.0) == []
    assert rules.observe(status(step=3), 99.0) == []
    ((alert, fired),) = rules.observe(status(step=3), 101.0)
    assert (fired, alert.name, alert.level) == (True, "no_progress", "error")
    assert rules.observe(status(step=3), 200.0) == []
    ((alert, fired),) = rules.observe(status(step=4), 201.0)
    assert (fired, alert.name) == (False, "no_progress")


def test_a_paused_run_is_not_stuck() -> None:
    rules = AlertRules(stuck_s=100)
    rules.observe(status(), 0.0)
    assert rules.observe(status(state="paused"), 5000.0) == []
    assert rules.observe(status(), 5050.0) == []


@pytest.mark.parametrize(
    ("changes", "name", "after_s"),
    [
        ({"state": "unreachable"}, "broker_silent", 60),
        ({"services": [service("trainer")]}, "service_missing", 120),
        ({"state": "failed", "cause": "no memory"}, "run_failed", 0),
        ({"services": [one.model_copy(update={"state": "mismatch"}) for one in SERVICES]}, "mismatch", 0),
        ({"dead_letters": 11}, "dead_letters", 0),
        ({"counters": {"fenced": 1.0}}, "trainer_replaced", 0),
        ({"counters": {"leases_expired:generators": 101.0}}, "leases_expire", 0),
    ],
)
def test_a_condition_that_holds_long_enough_is_an_alert(changes: dict[str, Any], name: str, after_s: float) -> None:
    rules = AlertRules(stuck_s=900)
    rules.observe(status(), 0.0)
    if after_s:
        assert rules.observe(status(**changes), 1.0) == []
        assert rules.observe(status(**changes), after_s) == []
    assert [alert.name for alert, _ in rules.observe(status(**changes), 1.0 + after_s)] == [name]


def test_use_and_alerts_are_in_the_runs_folder(tmp_path: Path) -> None:
    told: list[str] = []
    watch = RunWatch(config(tmp_path), lambda text, level: told.append(text))
    watch.observe(status(memory_bytes=5000))
    watch.observe(status(state="failed", cause="no memory"))
    found = RunFolder(tmp_path).resources.read(0, 10)
    assert (len(found.time), found.cpu["trainer-0"], found.memory_bytes["trainer-0"]) == (1, [0.5], [1e9])
    assert (found.memory_bytes["broker data"], found.gpu_memory_bytes) == ([5000], {})
    assert found.queues["tasks"] == [3.0]
    (alert,) = read_alerts(tmp_path)
    assert (alert.name, alert.level, alert.over) == ("run_failed", "error", None)
    assert "no memory" in alert.text
    assert told == ["alert run_failed: the run has failed: no memory"]
    # The next watcher knows which alert has fired, and that it is over.
    RunWatch(config(tmp_path), lambda text, level: told.append(text)).observe(status())
    assert read_alerts(tmp_path)[0].over is not None
    assert told[-1] == "alert run_failed is over"


def test_the_file_of_a_run_of_months_is_thinned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_watch, "MOST_BYTES", 10_000)
    monkeypatch.setattr(run_watch, "EVERY_S", 0.0)
    used = ResourceFile(tmp_path)
    watch = RunWatch(config(tmp_path), lambda text, level: None)
    for _ in range(200):
        watch.observe(status())
        assert (tmp_path / "resources.jsonl").stat().st_size <= 10_000
        used.read(0, 1_000)
    times = [json.loads(line)["time"] for line in (tmp_path / "resources.jsonl").read_text().splitlines()]
    assert times == sorted(times)
    assert used.read(0, 1_000).time == times, "a reader that follows sees that the file was replaced"


def test_many_moments_are_thinned_and_the_newest_stays(tmp_path: Path) -> None:
    lines = [json.dumps({"time": at, "services": {"trainer": {"cpu": at}}, "queues": {}}) for at in range(1000)]
    (tmp_path / "resources.jsonl").write_text("\n".join([*lines, "{cut off"]))
    found = ResourceFile(tmp_path).read(after=99, points=100)
    assert (len(found.time), found.time[-1], found.cpu["trainer"][-1]) == (100, 999, 999)


def test_a_webhook_that_refuses_once_and_a_command_learn_how_it_ended(tmp_path: Path) -> None:
    write = "import sys, pathlib; pathlib.Path('told.json').write_text(sys.stdin.read())"
    with serving((503, {}), (200, {})) as server:
        settings = config(tmp_path, webhook=f"{server.url}/secret-path", command=[sys.executable, "-c", write])
        settings._base = tmp_path
        watch = RunWatch(settings, lambda text, level: None)
        watch.observe(status())
        watch.observe(status(state="finished"))
        watch.observe(status(state="finished"))
        watch.close()
    refused, got = server.requests
    assert (refused, got["event"]) == (got, "finished")
    assert got["text"] == "Tidemill run watched at step 3 of 10: finished"
    assert json.loads((tmp_path / "told.json").read_text()) == got
    shown = RunFolder(tmp_path)
    (tmp_path / "config.yaml").write_text(settings.model_dump_json(exclude_unset=True))
    assert shown.config().settings["notify.webhook"] == "***"


def test_what_cannot_be_delivered_is_told_without_the_address(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(notify, "RETRY_S", 0.01)
    told: list[str] = []
    command = [sys.executable, "-c", "raise SystemExit('no such channel')"]
    settings = config(tmp_path, webhook="http://127.0.0.1:1/secret", command=command, events=["failed"])
    watch = RunWatch(settings, lambda text, level: told.append(text), ends=False)
    watch.ended("finished", "")
    watch.ended("failed", "out of memory")
    watch.close()
    assert len(told) == 2
    assert not any("secret" in text for text in told)
    assert any("exit code 1 no such channel" in text for text in told)


def test_everything_that_is_asked_for_is_told() -> None:
    text = render(make_status(), True, {0: 5, 3: 2}, {"wait": 0.1, "publish": 0.01, "total": 0.3}).decode()
    told = set(re.findall(r"^(tidemill_\w+)", text, re.MULTILINE))
    rules = yaml.safe_load((FOLDER / "alerts.yaml").read_text())["groups"][0]["rules"]
    panels = json.loads((FOLDER / "grafana.json").read_text())["panels"]
    asked = [rule["expr"] for rule in rules] + [target["expr"] for panel in panels for target in panel["targets"]]
    names = {name for expression in asked for name in re.findall(r"tidemill_\w+", expression)}
    assert names - told == {"tidemill_evaluation_mean"}
    assert 'tidemill_groups_dropped_total{reason="stale"} 1.0' in text
    assert 'tidemill_oldest_pending_age_seconds{stream="tasks"} 5.0' in text


def test_mishaps_that_were_mended_are_counters() -> None:
    told = {
        "duplicate:publish": 3.0,
        "duplicate:score": 2.0,
        "closed": 1.0,
        "fenced": 4.0,
        "leases_expired:generators": 5.0,
        "commits": 8.0,
        "commit_seconds": 0.25,
    }
    found = make_status().model_copy(update={"counters": told})
    text = render(found, True, {}, {}).decode()
    for line in (
        'tidemill_publish_total{outcome="duplicate"} 3.0',
        'tidemill_publish_total{outcome="closed"} 1.0',
        'tidemill_duplicate_total{stage="score"} 2.0',
        'tidemill_leases_expired_total{group="generators"} 5.0',
        'tidemill_leases_expired_total{group="reward"} 0.0',
        "tidemill_fenced_total 4.0",
        "tidemill_commit_seconds_count 8.0",
        "tidemill_commit_seconds_sum 0.25",
    ):
        assert line in text


def test_every_alert_says_how_bad_it_is_and_what_is_wrong() -> None:
    for rule in yaml.safe_load((FOLDER / "alerts.yaml").read_text())["groups"][0]["rules"]:
        assert rule["labels"]["severity"] in ("warning", "critical")
        assert rule["annotations"]["summary"].endswith(".")


def get(port: int, path: str) -> tuple[int, str]:
    try:
        with urlopen(f"http://127.0.0.1:{port}{path}", timeout=10) as answer:
            return answer.status, answer.read().decode()
    except HTTPError as error:
        return error.code, error.read().decode()


def test_probes_tell_starting_ready_and_stuck() -> None:
    state, pulse = ["loading"], Pulse(time.monotonic())
    server = ProbeServer("127.0.0.1", 0, lambda: (state[0], 7, {"tokens_per_s": 12.5}), pulse)
    try:
        assert [get(server.port, path)[0] for path in ("/livez", "/startupz", "/readyz")] == [200, 503, 503]
        state[0], pulse.beaten = "running", time.monotonic()
        assert [get(server.port, path)[0] for path in ("/livez", "/startupz", "/readyz")] == [200, 200, 200]
        assert "tidemill_service_tokens_per_s 12.5\n" in get(server.port, "/metrics")[1]
        state[0] = "stopping"
        assert [get(server.port, path)[0] for path in ("/startupz", "/readyz", "/other")] == [200, 503, 404]
        pulse.ticked -= 2 * SILENT_S
        assert get(server.port, "/livez")[0] == 503
        with pytest.raises(ConfigError, match=r"probes\.port"):
            ProbeServer("127.0.0.1", server.port, lambda: ("running", 0, {}), pulse)
    finally:
        server.close()
