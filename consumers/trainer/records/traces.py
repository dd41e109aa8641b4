"""Traces of episodes, sent as OpenTelemetry's spans (OTLP over HTTP, in JSON): a share of all, and all that failed.

The names are those of OpenTelemetry's semantic conventions for generative AI. A thread sends them; what can't be sent
is lost, and training continues. The ids follow from run, task and sample: a step that is trained again after a crash
has the same spans again.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from typing import Any
from urllib.parse import unquote
from urllib.request import Request, urlopen

import structlog

from consumers.trainer.records.tracker_thread import LONG_DEADLINE_S, TrackerThread
from schemas.config import TraceConfig
from schemas.messages import Score, Trajectory
from schemas.messages.moments import Moment, nest, now_us, pack, trace_id

SEND_S = 10.0
"""Seconds for one request."""
HEADERS = "OTEL_EXPORTER_OTLP_HEADERS"
"""The environment variable with headers of the requests, name=value,…: a token of the receiver, for example."""
ERROR = 2
"""The status code of spans that failed."""

log = structlog.get_logger()


class TraceLog:
    """Completes the traces of samples at their end, and sends them. config: None if there are no traces."""

    def __init__(self, config: TraceConfig | None = None, run: str = "", model: str = "") -> None:
        self._config = config
        self._url = f"{(config.url or '').rstrip('/')}/v1/traces" if config is not None else ""
        self._run = run
        self._model = model
        self._complained = False
        self._thread = TrackerThread("traces") if config is not None and config.url else None

    def trained(self, step: int, seconds: float, samples: Sequence[tuple[Trajectory, float]]) -> None:
        """Note in samples that a step of ``seconds``, which ends now, trained them; send a share of them."""
        if self._config is None:
            return
        moment = pack(Moment.ending("step", str(step), seconds))
        spans: list[dict[str, Any]] = []
        for body, reward in samples:
            body.trace += moment
            id = trace_id(self._run, body.task_id, body.sample)
            if int.from_bytes(id[:8]) < self._config.share * 2**64:
                nested = nest(body.trace, body.seconds, body.sampled_tokens)
                spans += self._spans(id, body.task_id, body.sample, nested, {"tidemill.reward": reward})
        self._send(spans)

    def failed(self, task_id: int, sample: int, score: Score) -> None:
        """Send the trace of a sample without a reward, whose score has its moments."""
        if self._config is not None:
            id = trace_id(self._run, task_id, sample)
            self._send(self._spans(id, task_id, sample, nest(score.trace), {}, score.reason or "it failed"))

    def close(self) -> None:
        """Wait until what was given is sent, within a deadline."""
        if self._thread is not None:
            self._thread.wait(LONG_DEADLINE_S)
            self._thread.end()

    def _spans(
        self,
        id: bytes,
        task_id: int,
        sample: int,
        nested: Sequence[tuple[Moment, int]],
        figures: Mapping[str, float],
        problem: str = "",
    ) -> list[dict[str, Any]]:
        now = now_us()
        begin = min((one.start for one, _ in nested), default=now)
        end = max((one.end for one, _ in nested), default=now)
        own: dict[str, str | float] = {
            "gen_ai.operation.name": "invoke_agent",
            "gen_ai.conversation.id": f"{task_id}-{sample}",
            "tidemill.task_id": task_id,
            "tidemill.sample": sample,
            **figures,
        }
        root = _span(id, -1, None, "invoke_agent episode", (begin, end), own, problem)
        spans = [root]
        for index, (one, parent) in enumerate(nested):
            name, attributes = _describe(one, self._model)
            why = f"{name} failed" if one.failed else ""
            spans.append(_span(id, index, parent, name, (one.start, one.end), attributes, why))
        return spans

    def _send(self, spans: Sequence[Mapping[str, Any]]) -> None:
        if self._thread is not None and spans:
            self._thread.put(lambda: self._post(spans))

    def _post(self, spans: Sequence[Mapping[str, Any]]) -> None:
        resource = _attributes({"service.name": "tidemill", "tidemill.run": self._run})
        scope = {"scope": {"name": "tidemill"}, "spans": spans}
        body = {"resourceSpans": [{"resource": {"attributes": resource}, "scopeSpans": [scope]}]}
        headers = {"Content-Type": "application/json", **dict(_headers())}
        try:
            urlopen(Request(self._url, json.dumps(body).encode(), headers), timeout=SEND_S).close()
        except (OSError, ValueError) as error:
            if not self._complained:
                log.warning("traces can't be sent", url=self._url, error=str(error))
            self._complained = True


def _headers() -> Iterable[tuple[str, str]]:
    for part in os.environ.get(HEADERS, "").split(","):
        name, equals, value = part.partition("=")
        if equals:
            yield name.strip(), unquote(value.strip())


def _describe(one: Moment, model: str) -> tuple[str, dict[str, str | int]]:
    """Return the name and the attributes of a moment's span."""
    if one.kind == "chat":
        usage = {"gen_ai.usage.output_tokens": one.tokens}
        return f"chat {model}", {"gen_ai.operation.name": "chat", "gen_ai.request.model": model, **usage}
    if one.kind == "tool":
        return f"execute_tool {one.name}", {"gen_ai.operation.name": "execute_tool", "gen_ai.tool.name": one.name}
    if one.kind == "term":
        return f"evaluate {one.name}", {"gen_ai.evaluation.name": one.name}
    if one.kind == "step":
        return f"train step {one.name}", {"tidemill.step": int(one.name)}
    return one.kind, {"tidemill.generator": one.name} if one.name else {}


def _span(
    id: bytes,
    index: int,
    parent: int | None,
    name: str,
    times: tuple[int, int],
    attributes: Mapping[str, str | float],
    problem: str,
) -> dict[str, Any]:
    span: dict[str, Any] = {
        "traceId": id.hex(),
        "spanId": _span_id(id, index),
        "name": name,
        "kind": 1,
        "startTimeUnixNano": f"{times[0]}000",
        "endTimeUnixNano": f"{times[1]}000",
        "attributes": _attributes(attributes),
    }
    if parent is not None:
        span["parentSpanId"] = _span_id(id, parent)
    if problem:
        span["status"] = {"code": ERROR, "message": problem}
    return span


def _span_id(id: bytes, index: int) -> str:
    return f"{(int.from_bytes(id[8:]) + index + 1) % 2**64 or 1:016x}"


def _attributes(values: Mapping[str, str | float]) -> list[dict[str, Any]]:
    kinds = {str: "stringValue", int: "intValue", float: "doubleValue"}
    return [
        {"key": name, "value": {kinds[type(value)]: str(value) if isinstance(value, int) else value}}
        for name, value in values.items()
    ]
