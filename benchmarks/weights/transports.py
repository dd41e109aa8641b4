"""``tidemill bench weights``: a version from trainer's parameters to generator's engine, compared with a plain copy.

Ours and the plain copy move the same bytes over the same medium in turns, several rounds; figures are the best of
them, since others on the machine only ever add to them.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import socket
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from benchmarks.harness.processes import ServerUsage, describe, serving
from benchmarks.harness.report import ResultRow, Table
from benchmarks.harness.rounds import Advance
from benchmarks.harness.workload import PipelineShape, begin, open_broker
from benchmarks.weights.model import WIRE, WeightsModel, load_times
from broker.connection.connection import open_client
from broker.weights.delta_writer import DeltaWriter
from broker.weights.local_copy import LocalWeights
from broker.weights.peers.node import PeerNode
from broker.weights.transports import PeerOrigin, PeerReader, make_transport
from consumers.trainer.model.snapshot import Snapshot
from schemas.config.publish import PeerConfig
from schemas.digests import CHUNK_BYTES
from schemas.errors import InfraError
from schemas.messages import Manifest, TensorSpec

Times = dict[str, list[float]]


class Stopwatch:
    """Seconds of named pieces of work in all rounds, and processor seconds of this process and the server."""

    def __init__(self, url: str) -> None:
        self._url = url
        self.times: Times = {}
        self.cpu: Times = {}

    def time(self, name: str, work: Callable[[], Any]) -> Any:
        server, own, started = ServerUsage.of(self._url).cpu_s, time.process_time(), time.perf_counter()
        result = work()
        self.times.setdefault(name, []).append(time.perf_counter() - started)
        used = time.process_time() - own + ServerUsage.of(self._url).cpu_s - server
        self.cpu.setdefault(name, []).append(used)
        return result

    def best(self, *names: str) -> float:
        return sum(min(self.times[name]) for name in names)

    def best_cpu(self, *names: str) -> float:
        return sum(min(self.cpu[name]) for name in names)


class TransportEnds:
    """A trainer's and a generator's side of a transport, and the model whose weights are sent."""

    def __init__(self, url: str, kind: str, folder: Path, model: WeightsModel, clock: Stopwatch) -> None:
        run = f"bench-{secrets.token_hex(4)}"
        self.broker, self._reading = open_broker(url, run), open_broker(url, run)
        self._training = self.broker.trainer_session()
        begin(self._training, PipelineShape())
        self._transport = make_transport(self.broker.connection, kind, folder / "out")
        self._reader: PeerReader | None = None
        if isinstance(self._transport, PeerOrigin):
            self.broker.weights.serve(self._transport)
            connection = self._reading.connection
            self._reader = PeerReader(connection, PeerNode(connection, "generator", PeerConfig()))
            self._reading.weights.serve(self._reader)
        self._folder = folder
        self.model = model
        self._clock = clock
        self._version = 0
        self._specs: list[TensorSpec] = []
        self._deltas = DeltaWriter(folder / "out", max_chain=8)
        (folder / "out").mkdir(parents=True)

    def forget(self) -> LocalWeights:
        """Make the next version whole, for a new generator."""
        self._deltas = DeltaWriter(self._folder / "out", max_chain=8)
        return LocalWeights(self._reading.weights, self._folder / "in")

    def close(self) -> None:
        """Stop serving, and delete everything in the broker."""
        if self._reader is not None:
            self._reader.close()
        self._transport.close()
        self.broker.purge()

    def publish(self, name: str, file: Path | None = None) -> Manifest:
        """Publish the model's weights, or those in ``file``, timing each part."""
        if file is not None:
            os.link(file, self._folder / "out" / "part")
            self._version += 1
            self._clock.time(f"{name}_send", lambda: self._send(self._specs))
        else:
            self.finish(name, self.take())
        manifest = self.broker.weights.newest()
        if manifest is None:
            raise InfraError(f"weights version {self._version} is gone just after it was published")
        return manifest

    def take(self) -> Snapshot:
        """Take a snapshot, for the file that ``finish`` sends."""
        return self.model.take(self._folder / "out" / "part")

    def finish(self, name: str, snapshot: Snapshot) -> None:
        """Write and send a snapshot, as a trainer does in a thread."""
        self._version += 1
        self._specs = snapshot.specs
        self._clock.time(f"{name}_write", snapshot.fill)
        self._clock.time(f"{name}_send", lambda: self._send(snapshot.specs))

    def _send(self, tensors: list[TensorSpec]) -> None:
        self.broker.weight_publication(self._transport, 2, self._deltas).publish(
            self._folder / "out" / "part",
            version=self._version,
            step=self._version,
            leader_term=self._training.leader_term,
            tensors=tensors,
            probe=None,
        )


WEIGHTS = Table(
    "Weights from trainer to engine: best of the rounds",
    {
        "model": "{model}",
        "by": "{transport}",
        "plain copy s": "{raw_copy_s:.3f}",
        "whole s": "{publish_s:.3f} + {fetch_s:.3f}",
        "ratio": "{ratio:.2f}",
        "delta s": "{publish_delta_s:.3f} + {fetch_delta_s:.3f}",
        "ratio of delta": "{ratio_delta:.2f}",
        "delta size": "{delta_ratio:.2%}",
        "apply, pause s": "{apply_s:.3f}, {pause_s:.3f}",
    },
)
"""Best seconds of the rounds. delta: for the changes of one step, otherwise whole weights; raw: for a plain copy.

apply_s, pause_s: of the load into an engine, and that running requests wait for it. step_s, step_beside_s: of a
step alone, and beside a version on its way, which holds it up for held_s.
"""


def measure(
    name: str, kind: str, rounds: int, engine: str, url: str | None, folder: Path | None, advance: Advance
) -> ResultRow:
    """Measure one row: a model of this size through the transport ``kind``; files are written to ``folder``."""
    with serving(url, "everysec") as address, tempfile.TemporaryDirectory(prefix="tidemill-bench-", dir=folder) as made:
        place, clock = Path(made), Stopwatch(address)
        model = WeightsModel(name)
        saved = model.save(place / "model")
        before = place / "before"
        model.write(before)
        model.step()
        ends = TransportEnds(address, kind, place, model, clock)
        try:
            for _ in range(rounds):
                whole, delta, file = _round(ends, clock, before)
                _copy_plainly(clock, file.read_bytes(), kind, address, place / "plain")
                advance(1)
            _delay(ends, clock, rounds)
            apply_s, pause_s = asyncio.run(load_times(engine, saved, file, rounds))
        finally:
            ends.close()
        server = describe(address)
    return WEIGHTS.row(
        model=name,
        parameters=model.parameters,
        dtype=WIRE,
        transport=kind,
        server=server,
        engine=engine,
        rounds=rounds,
        apply_s=apply_s,
        pause_s=pause_s,
        pause_ratio=pause_s / apply_s,
        **_figures(clock, whole, delta),
    )


def _round(ends: TransportEnds, clock: Stopwatch, before: Path) -> tuple[Manifest, Manifest, Path]:
    copy = ends.forget()
    whole = ends.publish("whole")
    clock.time("whole_fetch", lambda: copy.fetch(whole))
    copy.fetch(ends.publish("base", before))
    delta = ends.publish("delta")
    if delta.delta is None:
        raise InfraError("one step at a learning rate of 1e-6 changed half of the weights")
    file: Path = clock.time("delta_fetch", lambda: copy.fetch(delta))
    return whole, delta, file


def _copy_plainly(clock: Stopwatch, data: bytes, kind: str, url: str, file: Path) -> None:
    """Move the same bytes over the same medium and back with simple code."""
    if kind == "file":
        clock.time("raw", lambda: (file.write_bytes(data), file.read_bytes()))
        file.unlink()
        return
    if kind == "peer":
        clock.time("raw", lambda: _send_plainly(data, file))
        file.unlink()
        return
    client = open_client(url)
    chunks = [data[start : start + CHUNK_BYTES] for start in range(0, len(data), CHUNK_BYTES)]
    names = [f"{{bench-plain}}:{index}" for index in range(len(chunks))]

    def there_and_back() -> None:
        for name, chunk in zip(names, chunks, strict=True):
            client.set(name, chunk)
        for name in names:
            client.get(name)

    clock.time("raw", there_and_back)
    client.delete(*names)


def _send_plainly(data: bytes, file: Path) -> None:
    """Send the file through one TCP connection into another file."""
    with socket.create_server(("127.0.0.1", 0)) as listener, ThreadPoolExecutor(1) as thread:

        def give() -> None:
            stream, _ = listener.accept()
            with stream:
                stream.sendall(data)

        giving = thread.submit(give)
        with socket.create_connection(listener.getsockname()) as stream, file.open("wb") as target:
            while piece := stream.recv(CHUNK_BYTES):
                target.write(piece)
        giving.result()


def _delay(ends: TransportEnds, clock: Stopwatch, rounds: int) -> None:
    """Time a step before its optimizer, alone and while a version is sent, and its delays."""
    with ThreadPoolExecutor(1) as thread:
        for _ in range(rounds):
            clock.time("step_alone", ends.model.backward)
            snapshot = clock.time("take", ends.take)
            clock.time("probe", ends.model.probe)
            sending = thread.submit(ends.finish, "beside", snapshot)
            clock.time("step_beside", ends.model.backward)
            clock.time("wait", snapshot.wait)
            sending.result()


def _figures(clock: Stopwatch, whole: Manifest, delta: Manifest) -> dict[str, Any]:
    at, cpu = clock.best, clock.best_cpu
    size = delta.delta.payload.size if delta.delta else 0
    wholly, by_delta = (
        ("whole_write", "whole_send", "whole_fetch"),
        tuple(f"delta_{part}" for part in ("write", "send", "fetch")),
    )
    return {
        "publish_s": at("whole_write", "whole_send"),
        "fetch_s": at("whole_fetch"),
        "publish_delta_s": at("delta_write", "delta_send"),
        "fetch_delta_s": at("delta_fetch"),
        "raw_copy_s": at("raw"),
        "cpu_s": cpu(*wholly),
        "cpu_delta_s": cpu(*by_delta),
        "raw_cpu_s": cpu("raw"),
        "write_s": min(at("whole_write"), at("delta_write")),
        "step_s": at("step_alone"),
        "step_beside_s": at("step_beside"),
        "held_s": at("take", "wait"),
        "probe_s": at("probe"),
        "publish_beside_s": at("beside_write", "beside_send"),
        "held_ratio": at("take", "wait") / at("beside_write", "beside_send"),
        "ratio": at(*wholly) / at("raw"),
        "ratio_delta": at(*by_delta) / at("raw"),
        "cpu_ratio": cpu(*wholly) / cpu("raw"),
        "cpu_ratio_delta": cpu(*by_delta) / cpu("raw"),
        "bytes_full": whole.state.size,
        "bytes_delta": size,
        "delta_ratio": size / whole.state.size,
    }
