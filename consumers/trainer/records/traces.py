"""Traces of episodes, sent as OpenTelemetry's spans (OTLP over HTTP, in JSON): a share of all, and all that failed.

The names are those of OpenTelemetry's semantic conventions for generative AI. A thread sends them; what can't be sent
is lost, and training continues. The ids follow from run, task and sample: a step that is trained again after a crash
has the same spans again.
"""

import os
import time
from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import unquote
from urllib.request import Request, urlopen

import msgspec
import structlog

from consumers.trainer.records.tracker_thread import LONG_DEADLINE_S, TrackerThread
from schemas.config import TraceConfig
from schemas.messages import Score, Trajectory
from schemas.messages.moments import Moment, nest, now_us, pack, trace_id

MANY, OFTEN_S = 1000, 5.0
"""Spans that are sent at once; fewer wait so long, because a request costs as much as the traces of many samples."""
SEND_S = 10.0
"""Seconds for one request."""
HEADERS = "OTEL_EXPORTER_OTLP_HEADERS"
"""The environment variable with headers of the requests, name=value,…: a token of the receiver, for example."""
ERROR = 2
"""The status code of spans that failed."""
RETRY_S = 60.0
"""Seconds in which nothing is sent after a request that failed."""

log = structlog.get_logger()


class TraceLog:
    """Completes the traces of samples at their end, and sends them with each step. config: None without traces."""

    def __init__(self, config: TraceConfig | None = None, run: str = "", model: str = "") -> None:
        self._config = config
        self._run = run
        self._model = model
        self._spans: list[dict[str, Any]] = []
        self._retry_at = self._sent_at = 0.0
        self._thread = TrackerThread("traces") if config is not None and config.url else None

    def trained(self, step: int, seconds: float, samples: Sequence[tuple[Trajectory, float]]) -> None:
        """Note in samples that a step of ``seconds``, which ends now, trained them; send a share of them."""
        if self._config is None:
            return
        moment = pack(Moment.ending("step", str(step), seconds))
        share = self._config.share * 2**32 if self._thread is not None else -1.0
        for body, reward in samples:
            body.trace += moment
            # Multiples of the golden ratio are spread evenly: cheaper than a digest of each sample.
            if (body.task_id * 0x9E3779B1 + body.sample * 0x85EBCA77) & 0xFFFFFFFF < share:
                id = trace_id(self._run, body.task_id, body.sample)
                nested = nest(body.trace, body.seconds, body.sampled_tokens)
                self._add(id, (body.task_id, body.sample), nested, {"tidemill.reward": reward})
        self._send_often()

    def failed(self, task_id: int, sample: int, score: Score) -> None:
        """Send the trace of a sample without a reward, whose score has its moments."""
        if self._config is not None:
            id = trace_id(self._run, task_id, sample)
            self._add(id, (task_id, sample), nest(score.trace), {}, score.reason or "it failed")
            self._send_often()

    def close(self) -> None:
        """Wait until what was given is sent, within a deadline."""
        self._send()
        if self._thread is not None:
            self._thread.wait(LONG_DEADLINE_S)
            self._thread.end()

    def _add(
        self,
        id: bytes,
        sample: tuple[int, int],
        nested: Sequence[tuple[Moment, int]],
        figures: Mapping[str, float],
        problem: str = "",
    ) -> None:
        """Add the spans of an episode: span number n + 1 is of moment n, and the first is the episode's own."""
        if self._thread is None:
            return
        begin = min((one.start for one, _ in nested), default=now_us())
        end = max((one.end for one, _ in nested), default=begin)
        own: dict[str, str | float] = {
            "gen_ai.operation.name": "invoke_agent",
            "gen_ai.conversation.id": "{}-{}".format(*sample),
            "tidemill.task_id": sample[0],
            "tidemill.sample": sample[1],
            **figures,
        }
        first = int.from_bytes(id[8:]) >> 32 << 32 | 1

        def add(at: int, parent: int | None, name: str, times: tuple[int, int], of: Any, why: str) -> None:
            span = {"traceId": id.hex(), "spanId": f"{first + at:016x}", "name": name, "kind": 1}
            span |= {"startTimeUnixNano": f"{times[0]}000", "endTimeUnixNano": f"{times[1]}000"}
            span |= {} if parent is None else {"parentSpanId": f"{first + parent:016x}"}
            span |= {"status": {"code": ERROR, "message": why}} if why else {}
            self._spans.append(span | {"attributes": _attributes(of)})

        add(0, None, "invoke_agent episode", (begin, end), own, problem)
        for index, (one, parent) in enumerate(nested):
            name, attributes = _describe(one, self._model)
            add(index + 1, parent + 1, name, (one.start, one.end), attributes, f"{name} failed" if one.failed else "")

    def _send_often(self) -> None:
        if len(self._spans) > MANY or time.monotonic() > self._sent_at + OFTEN_S:
            self._send()

    def _send(self) -> None:
        self._sent_at = time.monotonic()
        spans, self._spans = self._spans, []
        if self._thread is not None and spans:
            self._thread.put(lambda: self._post(spans))

    def _post(self, spans: Sequence[Mapping[str, Any]]) -> None:
        if self._config is None or time.monotonic() < self._retry_at:
            return
        resource = _attributes({"service.name": "tidemill", "tidemill.run": self._run})
        scope = {"scope": {"name": "tidemill"}, "spans": spans}
        body = {"resourceSpans": [{"resource": {"attributes": resource}, "scopeSpans": [scope]}]}
        given = (part.partition("=") for part in os.environ.get(HEADERS, "").split(",") if "=" in part)
        headers = {"Content-Type": "application/json"} | {name.strip(): unquote(value) for name, _, value in given}
        url = f"{(self._config.url or '').rstrip('/')}/v1/traces"
        try:
            urlopen(Request(url, msgspec.json.encode(body), headers), timeout=SEND_S).close()
        except (OSError, ValueError) as error:
            log.warning("traces can't be sent", url=url, lost=len(spans), error=str(error))
            self._retry_at = time.monotonic() + RETRY_S


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


def _attributes(values: Mapping[str, str | float]) -> list[dict[str, Any]]:
    kinds = {str: "stringValue", int: "intValue", float: "doubleValue"}
    return [
        {"key": name, "value": {kinds[type(value)]: str(value) if isinstance(value, int) else value}}
        for name, value in values.items()
    ]
