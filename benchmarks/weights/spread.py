"""``tidemill bench weights --generators``: one version to many generators at once, each in a separate process.

The trainer publishes, all generators fetch; taken is the time until the last one has it, checked, and what left the
trainer, or the broker, over the size of the version. Then one more generator joins. With ``peer`` also: one generator
has a version that the others fetch from it, and is killed while two or more of them read.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import secrets
import signal
import tempfile
import time
from collections.abc import Sequence
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from benchmarks.harness.processes import ServerUsage, describe, serving
from benchmarks.harness.report import ResultRow, Table
from benchmarks.harness.rounds import Spread
from benchmarks.harness.workload import PipelineShape, begin, open_broker
from broker.weights.collective.process import BroadcastProcess
from broker.weights.local_copy import LocalWeights
from broker.weights.peers.node import PeerNode
from broker.weights.transports import NcclOrigin, NcclReader, PeerOrigin, PeerReader, make_transport
from schemas.config.publish import PeerConfig, PublishConfig
from schemas.errors import InfraError

DEADLINE_S = 300.0


class Reader:
    """A generator's weights in a separate process, without an engine."""

    def __init__(self, url: str, run: str, name: str, kind: str, folder: Path) -> None:
        spawn = multiprocessing.get_context("spawn")
        self._pipe, theirs = spawn.Pipe()
        self.name = name
        self.process = spawn.Process(target=_read, args=(theirs, url, run, name, kind, folder), name=name, daemon=True)
        self.process.start()
        theirs.close()

    def order(self, version: int, dies: bool = False) -> None:
        """Let it fetch this version once it is published. dies: it kills itself once two others read from it."""
        self._pipe.send((version, dies))

    def answer(self) -> Any:
        """Wait for its next message. InfraError after the deadline, or if it has died."""
        try:
            if self._pipe.poll(DEADLINE_S):
                return self._pipe.recv()
        except EOFError as error:
            raise InfraError(f"the benchmark's {self.name} ended without a word") from error
        raise InfraError(f"the benchmark's {self.name} was not done within {DEADLINE_S:.0f} s")

    def close(self) -> None:
        """End the process."""
        self._pipe.close()
        self.process.join(5)
        if self.process.is_alive():
            self.process.kill()
            self.process.join(5)


def _read(pipe: Connection, url: str, run: str, name: str, kind: str, folder: Path) -> None:
    """Run a reader: report the start, then of each version when it arrived, its seconds, and whether by broadcast."""
    broker = open_broker(url, run)
    with contextlib.ExitStack() as stack:
        node = PeerNode(broker.connection, name, PeerConfig()) if kind in ("peer", "nccl") else None
        nccl: NcclReader | None = None
        if kind == "nccl" and node is not None:
            nccl = stack.enter_context(contextlib.closing(NcclReader(broker.connection, node, PublishConfig())))
            _wait_backend(nccl.process)
            broker.weights.serve(nccl)
        elif node is not None:
            broker.weights.serve(stack.enter_context(contextlib.closing(PeerReader(broker.connection, node))))
        copy = LocalWeights(broker.weights, folder)
        pipe.send(None)
        with contextlib.suppress(EOFError):
            while True:
                version, dies = pipe.recv()
                while (manifest := broker.weights.wait_newer(version - 1)) is None:
                    continue
                started, cpu, received = time.monotonic(), time.process_time(), nccl.received if nccl else 0
                copy.fetch(manifest)
                ended, used = time.monotonic(), time.process_time() - cpu
                pipe.send((ended, ended - started, used, nccl is not None and nccl.received > received))
                if dies and node is not None:
                    while node.server.sent_bytes < manifest.state.size // 10 or node.server.connections <= node.streams:
                        time.sleep(0.0005)
                    os.kill(os.getpid(), signal.SIGKILL)


class Publisher:
    """The trainer's side: versions of random bytes."""

    def __init__(self, url: str, run: str, kind: str, folder: Path, size: int) -> None:
        self.broker = open_broker(url, run)
        self._term = self.broker.trainer_session()
        begin(self._term, PipelineShape())
        folder.mkdir()
        self._folder = folder
        self._size = size
        self.transport = make_transport(self.broker.connection, kind, folder)
        if isinstance(self.transport, PeerOrigin):
            self.broker.weights.serve(self.transport)
        if isinstance(self.transport, NcclOrigin):
            _wait_backend(self.transport.process)
        self.version = 0

    def prepare(self) -> None:
        """Write the next version."""
        self.version += 1
        (self._folder / "part").write_bytes(np.random.default_rng(self.version).bytes(self._size))

    def publish(self) -> None:
        """Publish it, digests and manifest included."""
        self.broker.weight_publication(self.transport, keep=2).publish(
            self._folder / "part",
            version=self.version,
            step=self.version,
            leader_term=self._term.leader_term,
            tensors=[],
            probe=None,
        )

    @property
    def sent_bytes(self) -> int:
        """Bytes that the trainer sent to readers with ``peer``; with ``nccl`` only to those that missed a broadcast."""
        return self.transport.node.server.sent_bytes if isinstance(self.transport, PeerOrigin) else 0


TO_GENERATORS = Table(
    "A version to generators at once",
    {
        "by": "{transport}",
        "MB": "{megabytes:,}",
        "generators": "{generators}",
        "all have it s": "{seconds:.2f}",
        "egress": "{egress:.2f}",
        "by broadcast": "{broadcast:.0%}",
        "joiner s": "{joiner_s:.2f}",
        "one killed: all others s": "{killed_s:.2f}",
    },
)
"""Results for a version and many generators. egress: bytes sent by the trainer or broker, over the version's size.

broadcast: share of the generators that have it by broadcast. killed: after the loss of a generator in the middle.
"""


def measure(kind: str, generators: int, megabytes: int, rounds: int, url: str | None, folder: Path | None) -> ResultRow:
    """Measure one row: ``rounds`` versions of a number of megabytes to a number of generators."""
    size = megabytes * 1_000_000
    with (
        serving(url, "everysec") as address,
        tempfile.TemporaryDirectory(prefix="tidemill-bench-", dir=folder) as made,
        contextlib.ExitStack() as stack,
    ):
        place, run = Path(made), f"bench-{secrets.token_hex(4)}"
        publisher = Publisher(address, run, kind, place / "out", size)
        stack.callback(publisher.broker.purge)
        stack.callback(publisher.transport.close)
        join = partial(_join, stack, address, run, kind, place)
        readers = [join(f"generator-{index}") for index in range(generators)]
        if kind == "nccl":
            _meet(publisher, readers, address, size)
        spread = [_spread(publisher, readers, address, size) for _ in range(rounds)]
        seconds, egress, processor, broadcast = zip(*spread, strict=True)
        joiner = join("generator-late")
        joiner.order(publisher.version)
        _, joined_s, joined_cpu, _ = joiner.answer()
        killed = _kill_one(publisher, readers, joiner, address, size) if kind == "peer" and generators > 2 else {}
        server = describe(address)
    return TO_GENERATORS.row(
        transport=kind,
        generators=generators,
        megabytes=megabytes,
        rounds=rounds,
        seconds=Spread.of(seconds),
        egress=max(egress),
        broadcast=sum(broadcast) / rounds,
        reader_cpu_s=median(processor),
        joiner_s=joined_s,
        joiner_cpu_s=joined_cpu,
        server=server,
        **killed,
    )


def _join(stack: contextlib.ExitStack, url: str, run: str, kind: str, place: Path, name: str) -> Reader:
    reader = Reader(url, run, name, kind, place / name)
    stack.callback(reader.close)
    reader.answer()
    return reader


def _wait_backend(process: BroadcastProcess) -> None:
    if not process.backends(DEADLINE_S):
        raise InfraError("the process that broadcasts weights does not start")


def _meet(publisher: Publisher, readers: Sequence[Reader], url: str, size: int) -> None:
    """Publish until all readers take part in broadcasts; the first broadcasts find the members."""
    for _ in range(10):
        if _spread(publisher, readers, url, size)[3] == 1.0:
            return
    raise InfraError("not all generators of the benchmark take part in broadcasts")


def _spread(publisher: Publisher, readers: Sequence[Reader], url: str, size: int) -> tuple[float, float, float, float]:
    """Measure the seconds until the last reader has a new version, and the mean processor seconds of a reader.

    Between them what left the trainer or the broker, over the size of the version; last the share of the readers that
    have it by broadcast, whose processor time is in part another process's.
    """
    publisher.prepare()
    for reader in readers:
        reader.order(publisher.version)
    sent, before = publisher.sent_bytes, ServerUsage.of(url).wire
    started = time.monotonic()
    publisher.publish()
    answers = [reader.answer() for reader in readers]
    ended = max(one[0] for one in answers)
    # Through redis, the version enters the server once; all other bytes leave it.
    through = max(0, ServerUsage.of(url).wire - before - size)
    peer = isinstance(publisher.transport, PeerOrigin)
    left = (publisher.sent_bytes - sent) if peer else through
    cpu, broadcast = (sum(one[index] for one in answers) / len(answers) for index in (2, 3))
    return ended - started, left / size, cpu, broadcast


def _kill_one(publisher: Publisher, readers: Sequence[Reader], joiner: Reader, url: str, size: int) -> dict[str, Any]:
    """Let one reader get a version first, and kill it while the others read from it."""
    publisher.prepare()
    joiner.order(publisher.version, dies=True)
    publisher.publish()
    joiner.answer()
    sent, started = publisher.sent_bytes, time.monotonic()
    for reader in readers:
        reader.order(publisher.version)
    answers = [reader.answer() for reader in readers]
    joiner.process.join(5)
    return {
        "killed_s": max(ended for ended, *_ in answers) - started,
        "killed_arrived": len(answers),
        "killed_by": joiner.process.exitcode,
        "killed_egress": (publisher.sent_bytes - sent) / size,
    }
