"""Traces as a receiver gets them: one a sample, children inside their parents, and all that failed."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from consumers.trainer.data.groups import Group
from consumers.trainer.records import traces
from consumers.trainer.records.samples import group_line
from consumers.trainer.records.traces import HEADERS, TraceLog, choose
from schemas.config import TraceConfig
from schemas.messages import Score, Trajectory
from schemas.messages.moments import Moment, ending, nest, now_us, pack, unpack
from tests.support.servers.scripted_server import ScriptedServer, serving
from tests.support.trainer.trajectories import make_trajectory

EPISODE = [
    Moment("admitted", "", 100000, 100000),
    Moment("attempt", "g-0", 101000, 103000),
    Moment("chat", "", 101500, 103500, 7),
    Moment("attempt", "g-1", 105000, 109000),
    Moment("chat", "", 105000, 106000, 5),
    Moment("tool", "calculator", 106000, 107000),
    Moment("chat", "", 107000, 109000, 7),
    Moment("term", "exact", 110000, 110500),
]
kinds = st.sampled_from(("admitted", "attempt", "chat", "tool", "term", "step"))
moments = st.lists(
    st.builds(lambda kind, start, length: Moment(kind, "", start, start + length), kinds, *[st.integers(0, 100)] * 2)
)


def spans_of(server: ScriptedServer) -> list[dict[str, Any]]:
    """The spans that a receiver of OTLP got."""
    assert {request.path for request in server.asked} == {"/v1/traces"}
    scopes = [scope for body in server.requests for one in body["resourceSpans"] for scope in one["scopeSpans"]]
    return [span for scope in scopes for span in scope["spans"]]


def traced(sample: int) -> Trajectory:
    body = make_trajectory(3, sample)
    body.trace = pack(*EPISODE)
    return body


def attributes(span: dict[str, Any]) -> dict[str, Any]:
    return {one["key"]: next(iter(one["value"].values())) for one in span["attributes"]}


def test_a_sample_is_one_trace_from_admission_to_its_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(HEADERS, "authorization=Bearer%20secret")
    with serving((200, {})) as server:
        log = TraceLog(TraceConfig(url=server.url, share=1.0), "run", "models/small")
        body = traced(1)
        moment = log.trained(12, 2.0, [(body, 0.5)])
        log.close()
    assert server.asked[0].headers["Authorization"] == "Bearer secret"
    spans = spans_of(server)
    (root,) = [span for span in spans if "parentSpanId" not in span]
    assert attributes(root) | {"tidemill.reward": 0.5, "gen_ai.operation.name": "invoke_agent"} == attributes(root)
    assert len({span["traceId"] for span in spans}) == 1
    assert len({span["spanId"] for span in spans}) == len(spans) == 10
    by_id = {span["spanId"]: span for span in spans}
    for span in spans:
        parent = by_id[span.get("parentSpanId", span["spanId"])]
        assert int(parent["startTimeUnixNano"]) <= int(span["startTimeUnixNano"])
        assert int(span["endTimeUnixNano"]) <= int(parent["endTimeUnixNano"])
    under = [(span["name"], by_id[span["parentSpanId"]]["name"]) for span in spans if span is not root]
    assert sorted(name for name, parent in under if parent == "attempt") == [
        *["chat models/small"] * 3,
        "execute_tool calculator",
    ]
    assert {name for name, parent in under if parent == "invoke_agent episode"} == {
        "admitted",
        "attempt",
        "evaluate exact",
        "train step 12",
    }
    assert [(one.kind, one.name) for one in unpack(moment)] == [("step", "12")], "the page shows it, too"
    (line,) = group_line(12, 1, Group(3, [(body, 0.5)]), [0.0], {}, moment)["samples"]
    assert [(one["kind"], one["name"]) for one in line["trace"]][-1] == ("step", "12")
    assert len(line["trace"]) == len(EPISODE) + 1


def test_a_share_is_sent_and_every_failure() -> None:
    with serving((200, {})) as server:
        log = TraceLog(TraceConfig(url=server.url, share=0.25), "run", "m")
        log.trained(1, 1.0, [(traced(sample), 0.0) for sample in range(200)])
        late = Score(status="error", reason="it timed out", trace=pack(Moment("term", "t", 1000, 2000, 0, True)))
        for sample in range(200, 220):
            log.failed(3, sample, late)
        log.close()
    roots = [span for span in spans_of(server) if "parentSpanId" not in span]
    failed = [span for span in roots if "status" in span]
    assert [span["status"]["message"] for span in failed] == ["it timed out"] * 20
    assert 25 <= len(roots) - len(failed) <= 75
    log = TraceLog(TraceConfig(url=server.url, share=0.25), "run", "m")
    log.trained(1, 1.0, [(traced(0), 0.0)])
    log.close()  # the receiver is gone: nothing is raised


@given(st.integers(0, 10**7), st.integers(0, 3000), st.one_of(st.sampled_from([0.0, 1.0]), st.floats(0, 1)))
def test_a_share_is_as_large_as_it_can_be_and_the_step_decides_it(step: int, samples: int, share: float) -> None:
    places = choose(step, samples, share)
    assert places == choose(step, samples, share), "a step that is trained again sends the same"
    assert places == sorted({place for place in places if 0 <= place < samples})
    assert abs(len(places) - samples * share) <= 1


def test_every_place_is_as_likely_over_many_steps() -> None:
    sent = [place for step in range(10_000) for place in choose(step, 16, 0.01)]
    assert all(95 <= sent.count(place) <= 105 for place in range(16))


@pytest.mark.parametrize(("often_s", "requests"), [(1e9, [4]), (-1.0, [1, 1, 1, 1])])
def test_steps_that_follow_closely_share_a_request(
    monkeypatch: pytest.MonkeyPatch, often_s: float, requests: list[int]
) -> None:
    monkeypatch.setattr(traces, "OFTEN_S", often_s)
    with serving((200, {})) as server:
        log = TraceLog(TraceConfig(url=server.url, share=1.0), "run", "m")
        for step in range(4):
            log.trained(step, 1.0, [(traced(step), 0.0)])
        log.close()
    spans = [one["resourceSpans"][0]["scopeSpans"][0]["spans"] for one in server.requests]
    assert [len({span["traceId"] for span in each}) for each in spans] == requests


@pytest.mark.parametrize("started", [1000, 109_800, 110_200, 10**9])
def test_no_clock_gives_the_step_another_place(started: int) -> None:
    """A step is trained again later, and the ids of spans are their places."""
    step = Moment("step", "12", started, started + 100)
    places = [(one.kind, parent) for one, parent in nest(pack(*EPISODE, step))]
    assert places == [*((one.kind, parent) for one, parent in nest(pack(*EPISODE))), ("step", -1)]


def test_an_attempt_with_tokens_is_a_single_call() -> None:
    (attempt, above), (call, parent) = nest(pack(Moment("attempt", "g", 1, 5, 7)))
    assert (attempt.kind, above, call, parent) == ("attempt", -1, Moment("chat", "", 1, 5, 7), 0)
    assert nest(pack(Moment("attempt", "g", 1, 1)), 4e-6, 7) == [(attempt, -1), (call, 0)], "its message has them"
    assert nest(b"no trace") == []


def test_a_moment_that_ends_now_is_read_as_it_was_noted() -> None:
    before = now_us()
    (one,) = unpack(ending("term", 'exact "half"', 0.25, True))
    assert before <= one.end <= now_us()
    assert one == Moment("term", 'exact "half"', one.start, one.end, 0, True)
    assert one.end - one.start in (250_000, 250_001), "both are rounded down"
    assert unpack(pack(*EPISODE)) == EPISODE


@pytest.mark.parametrize("seconds", [float("inf"), float("nan"), 1e300])
def test_a_moment_without_an_end_is_no_trace(seconds: float) -> None:
    assert unpack(ending("term", "exact", 0.5) + ending("term", "exact", seconds)) == []


@given(st.binary(max_size=40))
def test_bytes_that_are_no_trace_have_no_moments_or_some(found: bytes) -> None:
    assert len(nest(ending("term", "exact", 0.5) + found)) <= 40


def test_without_traces_nothing_is_noted() -> None:
    body = make_trajectory()
    assert TraceLog().trained(1, 1.0, [(body, 0.0)]) == b""
    assert body.trace == b""


@given(moments)
def test_calls_lie_in_the_attempt_before_them(found: list[Moment]) -> None:
    nested = nest(pack(*found))
    assert sorted(one.kind for one, _ in nested) == sorted(one.kind for one in found)
    for one, parent in nested:
        if parent >= 0:
            outer, above = nested[parent]
            assert (outer.kind, above) == ("attempt", -1)
            assert outer.start <= one.start <= one.end <= outer.end
