"""The Prometheus files with Prometheus' own tool: valid, and each alert fires when it should and not otherwise."""

import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.support.runs.programs import find_program

FOLDER = Path(__file__).parents[4] / "deploy" / "observability"
RULES = {rule["alert"]: rule for rule in yaml.safe_load((FOLDER / "alerts.yaml").read_text())["groups"][0]["rules"]}
RUNS = {'tidemill_run_state{state="running"}': "1x120"}
STANDS = {'tidemill_run_state{state="running"}': "0x120"}

Series = dict[str, str]
"""What Prometheus has seen, a value each 15 s: ``AxN`` is A, N times more; ``A+BxN`` grows."""

CASES: list[tuple[str, Series, list[Series]]] = [
    ("TidemillBrokerDown", {"tidemill_broker_up": "0x120"}, [{"tidemill_broker_up": "1x120"}]),
    ("TidemillControlPlaneDown", {}, [{"tidemill_broker_up": "1x120"}, {"tidemill_broker_up": "0x120"}]),
    ("TidemillLedgerLeaks", {"tidemill_ledger_balanced": "0x120"}, [{"tidemill_ledger_balanced": "1x120"}]),
    (
        "TidemillRunFailed",
        {'tidemill_run_state{state="failed"}': "1x120"},
        [{'tidemill_run_state{state="failed"}': "0x120"}],
    ),
    (
        "TidemillNoProgress",
        {"tidemill_steps_total": "7x120", **RUNS},
        [{"tidemill_steps_total": "0+1x120", **RUNS}, {"tidemill_steps_total": "7x120", **STANDS}],
    ),
    (
        "TidemillServiceMissing",
        {'tidemill_services_live{role="trainer"}': "0x120"},
        [{'tidemill_services_live{role="trainer"}': "1x120"}, {'tidemill_services_live{role="control"}': "0x120"}],
    ),
    ("TidemillMismatch", {"tidemill_generators_quarantined": "1x120"}, [{"tidemill_generators_quarantined": "0x120"}]),
    (
        "TidemillOldWork",
        {'tidemill_oldest_pending_age_seconds{stream="tasks"}': "700x120", **RUNS},
        [
            {'tidemill_oldest_pending_age_seconds{stream="tasks"}': "500x120", **RUNS},
            {'tidemill_oldest_pending_age_seconds{stream="tasks"}': "700x120", **STANDS},
        ],
    ),
    ("TidemillDeadLetters", {"tidemill_dlq_total": "0+1x120"}, [{"tidemill_dlq_total": "30x120"}]),
    ("TidemillPauseStuck", {"tidemill_pause_waiting": "1x120"}, [{"tidemill_pause_waiting": "0x120"}]),
    ("TidemillTrainerReplaced", {"tidemill_fenced_total": "0+1x120"}, [{"tidemill_fenced_total": "3x120"}]),
    (
        "TidemillLeasesExpire",
        {'tidemill_leases_expired_total{group="generators"}': "0+10x120"},
        [{'tidemill_leases_expired_total{group="generators"}': "0+1x120"}],
    ),
]


def promtool(*words: str) -> None:
    done = subprocess.run([find_program("promtool"), *words], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_prometheus_accepts_its_files(tmp_path: Path) -> None:
    text = (FOLDER / "prometheus.yml").read_text()
    for inside in re.findall(r"/(?:etc|tidemill)/[\w/.]+", text):
        # Where the container has it, and where this machine does.
        outside = tmp_path / Path(inside).name
        outside.write_text((FOLDER / outside.name).read_text() if (FOLDER / outside.name).is_file() else "token")
        text = text.replace(inside, str(outside))
    (tmp_path / "prometheus.yml").write_text(text)
    promtool("check", "config", str(tmp_path / "prometheus.yml"))


def test_every_alert_has_a_case() -> None:
    assert [alert for alert, _, _ in CASES] == list(RULES)


@pytest.mark.parametrize(("alert", "bad", "good"), CASES, ids=[case[0] for case in CASES])
def test_an_alert_fires_when_it_should_and_no_more(alert: str, bad: Series, good: list[Series], tmp_path: Path) -> None:
    promtool("check", "rules", str(FOLDER / "alerts.yaml"))
    file = tmp_path / "tests.yaml"
    cases = [look(alert, bad, fires=True), *(look(alert, series, fires=False) for series in good)]
    file.write_text(
        yaml.safe_dump({"rule_files": [str(FOLDER / "alerts.yaml")], "evaluation_interval": "15s", "tests": cases})
    )
    promtool("test", "rules", str(file))


def look(alert: str, series: Series, fires: bool) -> dict[str, Any]:
    """A case of promtool: whether the alert is there after half an hour of this."""
    rule = RULES[alert]
    told = dict(re.findall(r'(\w+)="(\w+)"', next(iter(series), "")))
    summary = re.sub(r"{{ \$labels\.(\w+) }}", lambda match: told[match.group(1)], rule["annotations"]["summary"])
    expected = [{"exp_labels": {**rule["labels"], **told}, "exp_annotations": {"summary": summary}}] if fires else []
    return {
        "interval": "15s",
        "input_series": [{"series": name, "values": values} for name, values in series.items()],
        "alert_rule_test": [{"eval_time": "30m", "alertname": alert, "exp_alerts": expected}],
    }
