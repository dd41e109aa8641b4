"""Orders over HTTP: one that is repeated with its key is done once, and an evaluation can be asked for."""

from __future__ import annotations

import json
from collections.abc import Iterator
from urllib.request import Request, urlopen

import pytest

from broker.client import Broker
from producers.datasets.mixture import Mixture, Part
from producers.feeder import Feeder
from schemas.config import parse_config
from tests.support.broker.control_plane import ControlPlane
from tests.support.broker.feeding import feed_until
from tests.support.broker.trainer_sessions import take_over
from tests.support.user_code.datasets import Numbers

pytestmark = pytest.mark.integration


@pytest.fixture
def api(broker: Broker) -> Iterator[ControlPlane]:
    with ControlPlane(broker, broker.connection.keys.run, held_out=True) as api:
        yield api


def test_an_order_that_is_repeated_with_its_key_is_done_once(api: ControlPlane) -> None:
    take_over(api.broker)
    first = api.ask("POST", "/v1/checkpoint", {}, idempotency_key="mine-1")
    again = api.ask("POST", "/v1/checkpoint", {}, idempotency_key="mine-1")
    assert first == again
    assert api.broker.ledger.read_state().control.checkpoint == 1
    assert api.ask("POST", "/v1/checkpoint", {}, idempotency_key="mine-2")[0] == 200
    assert api.broker.ledger.read_state().control.checkpoint == 2
    status, problem = api.ask("POST", "/v1/pause", {}, idempotency_key="mine-1")
    assert (status, problem["detail"][:45]) == (422, "this Idempotency-Key was sent with another re")
    assert api.broker.ledger.read_state().control.pause == "none"
    refused = api.ask("POST", "/v1/stop", None, idempotency_key="mine-3")
    assert refused == api.ask("POST", "/v1/stop", None, idempotency_key="mine-3")
    assert refused[0] == 409


def test_every_route_has_a_name_of_its_own_for_generated_clients(api: ControlPlane) -> None:
    with urlopen(Request(f"{api.url}/openapi.json"), timeout=20) as answer:
        paths = json.loads(answer.read())["paths"]
    named = [operation["operationId"] for path in paths.values() for operation in path.values()]
    assert len(named) == len(set(named))
    assert {"status", "pause", "evaluate", "list_runs", "download_checkpoint"} <= set(named)
    assert "Idempotency-Key" in [one["name"] for one in paths["/v1/pause"]["post"]["parameters"]]


def test_an_evaluation_is_ordered_of_the_present_version_and_of_one_to_come(api: ControlPlane) -> None:
    take_over(api.broker, step=6, version=6)
    status, answer = api.ask("POST", "/v1/evaluations", {}, x_tidemill_by="ann@desk")
    assert (status, answer["changed"], answer["done"]) == (200, True, False)
    assert answer["text"] == "the evaluation of version 6 is under way"
    assert not api.ask("POST", "/v1/evaluations", {"version": 6})[1]["changed"]
    assert api.ask("POST", "/v1/evaluations", {"version": 5})[0] == 409
    config = parse_config(
        {
            "run": {"name": api.broker.connection.keys.run},
            "model": {"path": "m"},
            "train": {"name": "arithmetic"},
            "eval": {"dataset": {"name": "arithmetic"}, "every": 50},
            "reward": {"terms": [{"name": "exact"}]},
        }
    )
    results, ctl = api.broker.evals.read_results, api.broker.connection.keys.ctl
    feeder = Feeder(config, api.broker, Mixture([Part("sums", [Numbers(4)], 1.0)]), [Numbers(3)])

    def both() -> bool:
        if len(results()) == 1 and api.ask("POST", "/v1/evaluations", {"version": 9})[1]["changed"]:
            for version in (8, 9, 10):
                api.broker.connection.client.hset(ctl, "version", version)
                api.broker.run_control.pause("drain", f"wakes the feeder at {version}")
                api.broker.run_control.pause("none", "")
        return len(results()) == 2

    assert feed_until(feeder, both) == []
    assert [(one.version, one.n) for one in results()] == [(6, 3), (9, 3)]
    (event, *_) = [one.event for one in api.broker.events.newest(9) if one.event.name == "evaluation"]
    assert event.text == "evaluation of version 6 ordered by ann@desk"


def test_without_held_out_prompts_no_evaluation_is_ordered(broker: Broker) -> None:
    with ControlPlane(broker, broker.connection.keys.run) as api:
        status, problem = api.ask("POST", "/v1/evaluations", {})
    assert (status, problem["detail"]) == (409, "the configuration has no eval section: there are no held-out prompts")
