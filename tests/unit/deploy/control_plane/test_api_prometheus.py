"""What Grafana and the alerts ask for is what /metrics says; probes of a single service."""

from __future__ import annotations

import json
import re
import time
from pathlib import Path
from urllib.error import HTTPError
from urllib.request import urlopen

import pytest
import yaml

from broker.health import SILENT_S, ProbeServer, Pulse
from deploy.control_plane.status.prometheus import render
from schemas.errors import ConfigError
from tests.support.broker.run_statuses import make_status

FOLDER = Path(__file__).parents[4] / "deploy" / "observability"


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
