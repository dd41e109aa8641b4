"""Lists over REST are all read by one rule, and the OpenAPI document describes every answer."""

import json
from collections.abc import Iterator
from typing import Any
from urllib.parse import quote

import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from broker.client import Broker
from broker.connection.connection import Connection
from broker.connection.embedded import EmbeddedServer
from broker.connection.keys import Keys
from deploy.control_plane.web import security
from schemas.config import BrokerConfig
from schemas.messages import Event, Score
from tests.support.broker.control_plane import ControlPlane
from tests.support.broker.one_group import publish_weights
from tests.support.broker.prompt_groups import generate_and_score, make_task, make_trajectory
from tests.support.broker.trainer_sessions import take_over
from tests.support.runs.run_folders import make_run

LISTS = {
    "/v1/timeline": "events",
    "/v1/dead-letters": "letters",
    "/v1/trajectories": "trajectories",
    "/v1/metrics-history": "step",
    "/v1/evaluations": "evaluations",
    "/v1/weights": "weights",
    "/v1/runs": "runs",
    "/v1/runs/{run}/metrics": "step",
    "/v1/runs/{run}/groups": "groups",
    "/v1/runs/{run}/evaluations": "evaluations",
    "/v1/runs/{run}/evaluations/{version}": "prompts",
    "/v1/runs/{run}/logs": "logs",
    "/v1/runs/{run}/checkpoints": "checkpoints",
    "/v1/runs/{run}/alerts": "alerts",
}
"""The field of the answer that holds the list, by route."""
WHOLE = {
    "/v1/status": "one moment",
    "/v1/services": "one moment",
    "/v1/throughput-history": "a window of 15 minutes",
    "/v1/runs/{run}": "one run",
    "/v1/runs/{run}/config": "one run",
    "/v1/runs/{run}/resources": "thinned out to as many points as are asked for",
    "/v1/runs/{run}/logs/{service}": "bytes of a file that grows, from `after` to `end`",
    "/v1/runs/{run}/groups/{step}/{task_id}": "one group",
    "/v1/trajectories/{task_id}/{sample}": "one trajectory",
    "/v1/dead-letters/{id}": "one letter",
}
"""Routes whose answer is JSON and no list that is paged."""
SORTED = ("/v1/runs/{run}/groups", "/v1/runs/{run}/evaluations/{version}")
"""Lists that are ordered by `sort`, of which `oldest` is one."""
CHECKS = [not_a_server_error, status_code_conformance, content_type_conformance, response_schema_conformance]
ENDLESS = "/v1/events"


@pytest.fixture(scope="module")
def api(server: EmbeddedServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ControlPlane]:
    """A control plane whose lists hold a few things each."""
    config = BrokerConfig()
    broker = Broker(Connection(server.url, Keys(config.prefix, "listed"), config.deadline_s), config)
    leader_term = take_over(broker).leader_term
    for version in (3, 4):
        publish_weights(broker, leader_term, version, tmp_path_factory.mktemp("weights"), keep=2)
    for number in range(3):
        broker.events.emit(Event(name="e", service="s", text=str(number)))
        broker.metrics.append({"step": number + 1, "reward/mean": 0.5})
        broker.evals.open(number, [make_task((1 << 32) + number, n=1, kind="eval")])
    tasks = broker.task_queue("g")
    for task_id in range(4):
        broker.ledger.admit(make_task(task_id))
    tasks.read(4, 10)
    for task_id in range(3):
        tasks.publish(task_id, [make_trajectory(task_id, 0), make_trajectory(task_id, 1)])
    for sample in range(2):
        tasks.fail_sample(3, sample, "too long")
    broker.trajectory_store.keep(1, [(make_trajectory(0, 0), 1.0), (make_trajectory(9, 0), 0.0)])
    folder = make_run(tmp_path_factory.mktemp("runs") / "listed", steps=5, state="")
    for step in (2, 4):
        (folder / "checkpoints" / f"step-{step:08d}-t0001").mkdir(parents=True)
    (folder / "logs" / "feeder.log").write_text("{}\n")
    with (folder / "alerts.jsonl").open("a") as stream:
        fired = {"time": 1e9 + 0.5, "name": "stuck", "fired": True, "level": "error", "text": "stuck"}
        stream.write(json.dumps(fired) + "\n")
    with ControlPlane(broker, "listed", folder=folder) as started:
        started.wait("the steps", lambda: started.ask("GET", "/v1/metrics-history")[1]["step"] == [1, 2, 3])
        yield started


def address(route: str, **query: Any) -> str:
    given = "&".join(f"{name}={quote(str(value))}" for name, value in query.items() if value is not None)
    return f"{route.format(run='listed', version=5)}?{given}"


def read(api: ControlPlane, route: str, **query: Any) -> tuple[list[Any], str | None]:
    status, answer = api.ask("GET", address(route, **query))
    assert status == 200, answer
    return answer[LISTS[route]], answer["next"]


def by_ones(api: ControlPlane, route: str, **query: Any) -> list[Any]:
    found, cursor = read(api, route, limit=1, **query)
    while cursor is not None:
        more, cursor = read(api, route, limit=1, cursor=cursor, **query)
        assert len(found) < 100, "it comes to an end"
        found += more
    return found


def test_every_list_has_the_rule_and_the_rest_is_no_list(api: ControlPlane) -> None:
    paths = api.ask("GET", "/openapi.json")[1]["paths"]
    gets = {path: one["get"] for path, one in paths.items() if path.startswith("/v1/") and "get" in one}
    named = {path: {each["name"] for each in one.get("parameters", ())} for path, one in gets.items()}
    assert {path for path, names in named.items() if "cursor" in names} == set(LISTS)
    for path in LISTS:
        assert {"cursor", "limit", "sort" if path in SORTED else "order"} <= named[path], path
    json_answers = {path for path, one in gets.items() if "application/json" in one["responses"]["200"]["content"]}
    assert json_answers == set(LISTS) | set(WHOLE)


@pytest.mark.parametrize("route", LISTS)
def test_a_list_read_one_by_one_is_the_list(api: ControlPlane, route: str) -> None:
    most = 200 if route == "/v1/trajectories" else 1000
    for order in ("oldest", "newest"):
        query = {"sort": "index" if "version" in route else order} if route in SORTED else {"order": order}
        whole, cursor = read(api, route, limit=most, **query)
        assert cursor is None
        assert len(whole) >= (1 if route == "/v1/runs" else 2), route
        if LISTS[route] == "step":
            # Columns always rise: pages from the newest back do so one by one.
            assert by_ones(api, route, **query) == (whole if order == "oldest" else whole[::-1])
        else:
            assert by_ones(api, route, **query) == whole
        if order == "oldest":
            first = whole
    if route == "/v1/trajectories":
        # One that is kept and still in the pipeline is there once.
        assert [(one["task_id"], one["sample"]) for one in first] == [
            (9, 0),
            *((t, s) for t in range(3) for s in range(2)),
        ]
    if route not in SORTED:
        assert whole == (first if LISTS[route] == "step" else first[::-1])


@pytest.mark.parametrize("route", LISTS)
def test_oldest_first_is_the_default(api: ControlPlane, route: str) -> None:
    query = {"sort": "worst" if "version" in route else "oldest"} if route in SORTED else {"order": "oldest"}
    assert read(api, route) == read(api, route, **query)


@pytest.mark.parametrize("route", LISTS)
@pytest.mark.parametrize("cursor", ["x", "nan", "../1", "trained:x"])
def test_a_cursor_of_no_page_is_a_problem_that_says_so(api: ControlPlane, route: str, cursor: str) -> None:
    status, problem = api.ask("GET", address(route, cursor=cursor))
    assert status == 422
    assert "use `next` of the previous page" in problem["detail"]


def test_what_comes_while_a_list_is_read_is_neither_shown_twice_nor_left_out(api: ControlPlane) -> None:
    whole, _ = read(api, "/v1/timeline")
    shown, cursor = read(api, "/v1/timeline", limit=len(whole) - 1)
    api.broker.events.emit(Event(name="e", service="s", text="later"))
    more, cursor = read(api, "/v1/timeline", limit=100, cursor=cursor)
    assert [one["id"] for one in shown + more[:1]] == [one["id"] for one in whole]
    assert more[-1]["text"] == "later"
    assert cursor is None


def test_generated_requests_get_described_answers(broker: Broker, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(security.Buckets, "take", lambda *_: 0.0)
    take_over(broker)
    broker.ledger.admit(make_task(0))
    generate_and_score(broker, 0, (Score(reward=1.0), Score(reward=0.0)))
    with ControlPlane(broker, "schema") as api:
        schema = schemathesis.openapi.from_url(f"{api.url}/openapi.json")
        seen = set()
        for found in schema.get_all_operations():
            operation = found.ok()
            if operation.path == ENDLESS:
                continue
            seen.add(operation.path)

            @given(case=operation.as_strategy())
            @settings(max_examples=5, database=None, suppress_health_check=list(HealthCheck))
            def check(case: Any) -> None:
                if isinstance(case.body, dict) and isinstance(case.body.get("wait_s"), int | float):
                    case.body["wait_s"] = 0
                checks = CHECKS
                if case.path == "/v1/generate":
                    # No generator is there: 503, which is described, and 500 is not.
                    checks = [each for each in CHECKS if each is not not_a_server_error]
                    if isinstance(case.body, dict):
                        case.body["wait_s"] = 1
                case.call_and_validate(checks=checks)

            check()
        assert {"/v1/status", "/v1/pause", "/v1/scale", "/v1/settings", "/metrics", "/readyz"} <= seen
