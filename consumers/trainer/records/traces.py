"""Traces of episodes, sent as OpenTelemetry's spans (OTLP over HTTP, in JSON): a share of all, and all that failed.

The names are those of OpenTelemetry's semantic conventions for generative AI. A thread sends them; what can't be sent
is lost, and training continues. The ids follow from run, task and sample, and the share from the step: a step that is
trained again after a crash has the same spans again. ``flush`` comes before the broker may forget the samples, so that
a crash loses no spans either.
"""

import functools
import math
import os
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple
from urllib.parse import unquote
from urllib.request import Request, urlopen

import msgspec
import structlog

from consumers.trainer.records.tracker_thread import LONG_DEADLINE_S, TrackerThread
from schemas.config import TraceConfig
from schemas.messages import Score, Trajectory
from schemas.messages.moments import MomentKind, ending, nest, now_us, trace_id

MANY, OFTEN_S = 40_000, 5.0
"""Bytes of traces, of about 1,000 moments, whose spans are made and sent at once; fewer wait so long, because a request
costs as much as many spans."""
SEND_S = 10.0
"""Seconds for one request."""
HEADERS = "OTEL_EXPORTER_OTLP_HEADERS"
"""The environment variable with headers of the requests, name=value,…: a token of the receiver, for example."""
ERROR = 2
"""The status code of spans that failed."""
KINDS = {str: "stringValue", int: "intValue", float: "doubleValue"}
"""The names of OTLP's types of attributes."""
FLUSH_S = 1.0
"""Seconds that training waits for spans to be sent, before samples may be forgotten."""
RETRY_S = 60.0
"""Seconds in which nothing is sent after a request that failed."""

log = structlog.get_logger()


class _Episode(NamedTuple):
    """A sample whose spans are made when they are sent: those of many at once cost a third of those of one.

    reward: None and a ``problem`` if it failed. ended: when it did, Unix microseconds, should its trace not say.
    """

    task_id: int
    sample: int
    trace: bytes
    seconds: float = 0.0
    tokens: int = 0
    reward: float | None = None
    problem: str = ""
    ended: int = 0


class TraceLog:
    """Completes the traces of samples at their end, and sends them with each step. config: None without traces."""

    def __init__(self, config: TraceConfig | None = None, run: str = "", model: str = "") -> None:
        self._config = config
        self._run = run
        self._model = model
        self._waiting: list[_Episode] = []
        self._retry_at = self._sent_at = 0.0
        self._answers = True
        """Whether the receiver had all spans in time when it was last waited for."""
        self._thread = TrackerThread("traces") if config is not None and config.url else None

    def trained(self, step: int, seconds: float, samples: Sequence[tuple[Trajectory, float]]) -> bytes:
        """Send traces of some samples of a step of ``seconds``, which ends now; return its moment for their traces."""
        if self._config is None:
            return b""
        moment = ending("step", str(step), seconds)
        if self._thread is not None:
            chosen = (samples[place] for place in choose(step, len(samples), self._config.share))
            self._add(
                _Episode(body.task_id, body.sample, body.trace + moment, body.seconds, body.sampled_tokens, reward)
                for body, reward in chosen
            )
        return moment

    def failed(self, task_id: int, sample: int, score: Score) -> None:
        """Send the trace of a sample without a reward, whose score has its moments."""
        if self._thread is not None:
            problem = score.reason or "it failed"
            self._add([_Episode(task_id, sample, score.trace, problem=problem, ended=now_us())])

    def flush(self) -> None:
        """Send what waits, and wait until it is sent; not again while a receiver is late."""
        self._send()
        if self._thread is not None:
            self._answers = self._thread.is_idle(FLUSH_S if self._answers else 0.0)

    def close(self) -> None:
        """Wait until what was given is sent, within a deadline."""
        self._send()
        if self._thread is not None:
            self._thread.wait(LONG_DEADLINE_S)
            self._thread.end()

    def _add(self, episodes: Iterable[_Episode]) -> None:
        self._waiting += episodes
        if sum(len(each.trace) for each in self._waiting) > MANY or time.monotonic() > self._sent_at + OFTEN_S:
            self._send()

    def _send(self) -> None:
        self._sent_at = time.monotonic()
        episodes, self._waiting = self._waiting, []
        if self._thread is not None and episodes:
            self._thread.put(lambda: self._post(episodes))

    def _post(self, episodes: Sequence[_Episode]) -> None:
        if self._config is None or time.monotonic() < self._retry_at:
            return
        spans = [span for one in episodes for span in spans_of(one, self._run, self._model)]
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


def spans_of(episode: _Episode, run: str, model: str) -> list[dict[str, Any]]:
    """Return the spans of an episode in OTLP's JSON: number n + 1 is of moment n, and the first is its own."""
    nested = nest(episode.trace, episode.seconds, episode.tokens)
    begin = min((one.start for one, _ in nested), default=episode.ended)
    end = max((one.end for one, _ in nested), default=begin)
    own: dict[str, str | float] = {
        "gen_ai.operation.name": "invoke_agent",
        "gen_ai.conversation.id": f"{episode.task_id}-{episode.sample}",
        "tidemill.task_id": episode.task_id,
        "tidemill.sample": episode.sample,
    }
    if episode.reward is not None:
        own["tidemill.reward"] = episode.reward
    id = trace_id(run, episode.task_id, episode.sample)
    trace, first = id.hex(), int.from_bytes(id[8:]) >> 32 << 32 | 1
    spans: list[dict[str, Any]] = []

    def add(name: str, start: int, end: int, of: Sequence[Mapping[str, Any]], why: str) -> dict[str, Any]:
        span = {
            "traceId": trace,
            "spanId": f"{first + len(spans):016x}",
            "name": name,
            "kind": 1,
            "startTimeUnixNano": f"{start}000",
            "endTimeUnixNano": f"{end}000",
            "attributes": of,
        }
        if why:
            span["status"] = {"code": ERROR, "message": why}
        spans.append(span)
        return span

    add("invoke_agent episode", begin, end, _attributes(own), episode.problem)
    for one, parent in nested:
        name, of = _describe(one.kind, one.name, one.tokens, model)
        span = add(name, one.start, one.end, of, f"{name} failed" if one.failed else "")
        span["parentSpanId"] = f"{first + parent + 1:016x}"
    return spans


def choose(step: int, samples: int, share: float) -> list[int]:
    """Return the places of a share of a step's samples, at equal distances from a first one that the step decides."""
    # Multiples of the golden ratio are spread evenly: over many steps each place is as likely.
    phase = step * 0.6180339887498949 % 1
    return [min(samples - 1, int((k + phase) / share)) for k in range(math.ceil(samples * share - phase))]


@functools.lru_cache(4096)
def _describe(kind: MomentKind, name: str, tokens: int, model: str) -> tuple[str, list[dict[str, Any]]]:
    """Return the name and the attributes of a moment's span; those of most samples are the same."""
    of: dict[str, str | float] = {}
    if kind == "chat":
        of = {"gen_ai.operation.name": "chat", "gen_ai.request.model": model, "gen_ai.usage.output_tokens": tokens}
        name = f"chat {model}"
    elif kind == "tool":
        of = {"gen_ai.operation.name": "execute_tool", "gen_ai.tool.name": name}
        name = f"execute_tool {name}"
    elif kind == "term":
        of = {"gen_ai.evaluation.name": name}
        name = f"evaluate {name}"
    elif kind == "step":
        of = {"tidemill.step": int(name)}
        name = f"train step {name}"
    else:
        of = {"tidemill.generator": name} if name else {}
        name = kind
    return name, _attributes(of)


def _attributes(values: Mapping[str, str | float]) -> list[dict[str, Any]]:
    return [
        {"key": name, "value": {KINDS[type(value)]: str(value) if isinstance(value, int) else value}}
        for name, value in values.items()
    ]
