"""``tidemill bench control``: the cost of the control plane with many services, events and open pages.

A real control plane in a process of its own looks at a real pipeline's run. First it is watched alone: its processor
time and memory, and the latency of GET /v1/status. Then the pipeline runs in turns with it and with it stopped
(SIGSTOP), so that a busy machine slows both; the pages belong to it and stand still with it.
"""

from __future__ import annotations

import json
import os
import selectors
import signal
import socket
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from statistics import quantiles
from types import TracebackType
from typing import Any
from urllib.request import Request, urlopen

import psutil
import redis

from benchmarks.harness.processes import cpu_s, describe, serving
from benchmarks.harness.report import ResultRow, Table
from benchmarks.harness.rounds import Advance, Figures, compare, summarize
from benchmarks.harness.workload import PipelineShape, open_broker
from benchmarks.services.transport import PipelineBench
from broker.client import Broker
from broker.telemetry.heartbeats import FORGOTTEN_S
from deploy.control_plane.address import address_of
from deploy.services.main import command
from schemas.codec import encode
from schemas.errors import InfraError, TidemillError
from schemas.messages import Event, Heartbeat

START_S = 60.0
ASK_EVERY_S = 0.05
TOKEN = "token-of-the-benchmark"
CONFIG = "model: {path: nowhere}\ntrain: {name: arithmetic}\nreward: {terms: [{name: exact}]}\n"


CONTROL = Table(
    "What the control plane costs",
    {
        "load": "{services} services, {events_per_s} events a second, {pages} open pages",
        "processor": "{cpu:.1%} of a core",
        "memory": "{rss_mb:.0f} MB",
        "status, p50 / p99": "{status_p50_ms:.1f} / {status_p99_ms:.1f} ms of {requests} requests",
        "trajectories/s with it": "{trajectories_per_s_with:,.0f}",
        "without it": "{trajectories_per_s_without:,.0f}",
        "lost": "{throughput_loss:+.1%}",
    },
)
"""A control plane measured alone, and the pipeline with it and without it. cpu: share of a core."""


def measure(
    services: int,
    events_per_s: float,
    pages: int,
    seconds: float,
    rounds: int,
    trajectories: int,
    url: str | None,
    advance: Advance,
) -> ResultRow:
    """Measure the control plane alone, then the pipeline in turns with it and without it."""
    with ExitStack() as stack:
        address = stack.enter_context(serving(url, "everysec"))
        bench = stack.enter_context(PipelineBench(address, 256, PipelineShape()))
        process, where = stack.enter_context(control_plane(address, bench.run))
        heartbeats = stack.enter_context(SimulatedServices(open_broker(address, bench.run), services, events_per_s))
        open_pages = stack.enter_context(OpenPages(where, pages))
        bench.round("ours", 1)
        alone = watch(process, where, seconds)
        advance(1)

        def flow(signum: signal.Signals) -> Figures:
            os.kill(process.pid, signum)
            return bench.round("ours", trajectories)

        contenders = {"with": partial(flow, signal.SIGCONT), "without": partial(flow, signal.SIGSTOP)}
        found = summarize(compare(contenders, rounds, warm_up=0, advance=advance))
        os.kill(process.pid, signal.SIGCONT)
        bench.balanced()
        with_it, without = (found[name]["trajectories_per_s"] for name in ("with", "without"))
        return CONTROL.row(
            server=describe(address),
            services=services,
            events_per_s=round(heartbeats.sent / heartbeats.seconds, 2),
            pages=pages,
            page_bytes_per_s=round(open_pages.received / open_pages.seconds / max(pages, 1)),
            trajectories_per_s_with=with_it,
            trajectories_per_s_without=without,
            throughput_loss=1 - with_it.median / without.median,
            **alone,
        )


@contextmanager
def control_plane(broker_url: str, run: str) -> Iterator[tuple[subprocess.Popen[bytes], str]]:
    """Run a control plane for this run on a free port; yield its process and address."""
    with tempfile.TemporaryDirectory(prefix="tidemill-bench-") as name:
        folder = Path(name)
        (folder / "run.yaml").write_text(f"run: {{name: {run}, folder: {folder / 'run'}}}\n{CONFIG}", encoding="utf-8")
        arguments = ["control", str(folder / "run.yaml"), "control.port=0"]
        with (folder / "log").open("wb") as log:
            process = subprocess.Popen(
                command(*arguments),
                env={**os.environ, "REDIS_URL": broker_url, "TIDEMILL_CONTROL_TOKEN": TOKEN},
                stdout=log,
                stderr=log,
            )
        try:
            yield process, _wait_address(process, folder)
        finally:
            process.send_signal(signal.SIGCONT)
            process.terminate()
            try:
                process.wait(15)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait(15)


def _wait_address(process: subprocess.Popen[bytes], folder: Path) -> str:
    deadline = time.monotonic() + START_S
    while True:
        found = address_of(folder / "run")
        if found is not None and _answers(found):
            return found
        if process.poll() is not None or time.monotonic() > deadline:
            log = (folder / "log").read_text(errors="replace")[-500:]
            raise InfraError(f"the control plane did not start within {START_S:.0f} s: {log}")
        time.sleep(0.05)


def _answers(url: str) -> bool:
    try:
        with urlopen(f"{url}readyz", timeout=5) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False


class SimulatedServices:
    """Simulated services that send a heartbeat each second, and events, all in one batch to cost little here."""

    def __init__(self, broker: Broker, services: int, events_per_s: float) -> None:
        self._broker = broker
        self._services = services
        self._events = events_per_s
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._started = 0.0
        self._error: Exception | None = None
        self.sent = 0

    @property
    def seconds(self) -> float:
        return max(time.monotonic() - self._started, 1e-9)

    def __enter__(self) -> SimulatedServices:
        self._started = time.monotonic()
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        self._thread.join(10)
        if self._error is not None and error is None:
            raise InfraError(f"the benchmark's services fell silent: {self._error}") from self._error

    def _run(self) -> None:
        try:
            self._send()
        except (TidemillError, redis.RedisError) as error:
            self._error = error

    def _send(self) -> None:
        roles = ("generator", "reward")
        while not self._stop.wait(max(0.0, self._started + self.sent / self._events - time.monotonic())):
            if self.sent % max(1, int(self._events)) == 0:
                now = self._broker.heartbeats.read_clock()
                beats = [
                    Heartbeat(
                        service=f"service-{index}",
                        role=roles[index % 2],
                        host=f"host-{index // 8}",
                        pid=index,
                        state="running",
                        version=7,
                        time=now,
                        figures={"tokens_per_s": 1000.0 + index, "samples_in_flight": 60.0, "tokens": 1e6},
                    )
                    for index in range(self._services)
                ]
                calls = [(beat.service, encode(beat), FORGOTTEN_S) for beat in beats]
                self._broker.connection.run_scripts("heartbeat", calls)
            self._broker.events.emit(Event(name="bench", service="service-0", text=f"event {self.sent}"))
            self.sent += 1


class OpenPages:
    """Open pages: event streams, read by one thread."""

    def __init__(self, url: str, pages: int) -> None:
        self._url = url
        self._pages = pages
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._started = time.monotonic()
        self.received = 0

    @property
    def seconds(self) -> float:
        return max(time.monotonic() - self._started, 1e-9)

    def __enter__(self) -> OpenPages:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join(10)

    def _run(self) -> None:
        host, _, port = self._url.removeprefix("http://").rstrip("/").rpartition(":")
        request = f"GET /v1/events HTTP/1.1\r\nHost: {host}\r\nAuthorization: Bearer {TOKEN}\r\n\r\n".encode()
        with ExitStack() as stack, selectors.DefaultSelector() as selector:
            for _ in range(self._pages):
                page = stack.enter_context(socket.create_connection((host, int(port)), timeout=10))
                page.sendall(request)
                selector.register(page, selectors.EVENT_READ)
            while not self._stop.is_set():
                for key, _ in selector.select(timeout=0.5):
                    if isinstance(key.fileobj, socket.socket):
                        self.received += len(key.fileobj.recv(1 << 20))


def watch(process: subprocess.Popen[bytes], url: str, seconds: float) -> dict[str, Any]:
    """Measure processor time, memory, and the latency of the status without other load."""
    request = Request(f"{url}v1/status", headers={"Authorization": f"Bearer {TOKEN}"})
    times: list[float] = []
    used, started = cpu_s(process.pid), time.monotonic()
    size = 0
    while time.monotonic() - started < seconds:
        asked = time.perf_counter()
        with urlopen(request, timeout=30) as answer:
            body = answer.read()
        times.append((time.perf_counter() - asked) * 1000)
        size = len(body)
        json.loads(body)
        time.sleep(ASK_EVERY_S)
    spent = cpu_s(process.pid) - used
    cuts = quantiles(times, n=100)
    return {
        "cpu": round(spent / (time.monotonic() - started), 4),
        "rss_mb": psutil.Process(process.pid).memory_info().rss / 1e6,
        "status_p50_ms": round(cuts[49], 2),
        "status_p99_ms": round(cuts[98], 2),
        "status_bytes": size,
        "requests": len(times),
    }
