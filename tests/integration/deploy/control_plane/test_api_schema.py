"""The OpenAPI document against the server, with generated requests: no 5xx, and no answer that is not described."""

from __future__ import annotations

from typing import Any

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
from deploy.control_plane.web import security
from schemas.messages import Score
from tests.support.broker.control_plane import ControlPlane
from tests.support.broker.prompt_groups import generate_and_score, make_task
from tests.support.broker.trainer_sessions import take_over

pytestmark = pytest.mark.integration
CHECKS = [not_a_server_error, status_code_conformance, content_type_conformance, response_schema_conformance]
ENDLESS = "/v1/events"


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
            @settings(max_examples=8, deadline=None, database=None, suppress_health_check=list(HealthCheck))
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
