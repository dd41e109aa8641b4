"""``tidemill bench transport``: trajectories per second through every hop, compared with raw commands.

All pipelines run in turns on one server, several rounds, so that a busy machine slows all; figures are medians over
the rounds, with the smallest and largest beside them.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable
from functools import partial
from typing import Any

from benchmarks.harness.processes import BenchRole, RoleProcesses, ServerUsage, describe, serving
from benchmarks.harness.report import ResultRow, Table
from benchmarks.harness.rounds import Advance, Figures, compare, ratio, summarize
from benchmarks.harness.workload import PipelineShape, TrajectoryPool, open_broker
from benchmarks.pipelines import one_hop, raw, tidemill
from broker.connection.connection import open_client
from schemas.codec import encode
from schemas.errors import InfraError

ROLES = ("producer", "reward", "assembler")
PIPELINES = ("ours", "raw", "one_hop")
DEADLINE_S = 120.0
"""Longest time of a round, in addition to 10 ms for each trajectory."""


class PipelineRole:
    """A role of all pipelines in one process.

    ``ours`` goes through Tidemill, ``raw`` through bare Redis commands, ``one_hop`` as JSON through a plain stream.
    """

    def __init__(self, role: str, url: str, run: str, tokens: int, flow: PipelineShape) -> None:
        pool = TrajectoryPool(tokens)
        roles: dict[str, Any] = {
            "producer": (tidemill.Producer, raw.Producer, one_hop.Producer),
            "reward": (tidemill.Rewarder, raw.Rewarder, one_hop.Rewarder),
            "assembler": (tidemill.Assembler, raw.Assembler, one_hop.Assembler),
        }
        self._jobs = {name: make(url, run, pool, flow) for name, make in zip(PIPELINES, roles[role], strict=True)}

    def run(self, job: str, amount: float) -> dict[str, Any]:
        figures: dict[str, Any] = self._jobs[job].run(int(amount))
        return figures


TRANSPORT = Table(
    "Transport: ours / raw Redis / one hop of JSON",
    {
        "tokens": "{tokens:,}",
        "bytes": "{bytes_per_trajectory:,}",
        "AOF": "{aof}",
        "trajectories/s": " / ".join(f"{{by[{name}][trajectories_per_s].median:,.0f}}" for name in PIPELINES),
        "ratio to raw": "{ratio:.2f}",
        "to one hop": "{one_hop_ratio:.2f}",
        "Python µs": " / ".join(f"{{by[{name}][cpu_us_per_trajectory].median:.0f}}" for name in PIPELINES),
        "server µs": " / ".join(f"{{by[{name}][server_cpu_us_per_trajectory].median:.0f}}" for name in PIPELINES),
    },
)
"""The three pipelines at one length of trajectories."""


BEHIND = Table(
    "A long run beside a fresh one",
    {
        "trained before": "{behind:,} trajectories of {tokens} tokens, AOF {aof}",
        "trajectories/s": "{after_per_s:,.0f}",
        "of the fresh run": "{fresh_per_s:,.0f}",
        "over the fresh run's": "{ratio:.3f}",
        "at the start": "{start_per_s:,.0f}",
        "server memory": "{memory_start_bytes:,} bytes at the start, {memory_after_bytes:,} after",
        "keys of both runs": "{keys}",
    },
)
"""A run after many trained trajectories, compared with a fresh one."""


class PipelineBench:
    """The processes of all pipelines on one server. ``round`` sends trajectories through one of the pipelines."""

    def __init__(self, url: str, tokens: int, flow: PipelineShape) -> None:
        self.run = f"bench-{secrets.token_hex(4)}"
        self._url = url
        self._flow = flow
        makers: dict[str, Callable[[], BenchRole]] = {
            role: partial(PipelineRole, role, url, self.run, tokens, flow) for role in ROLES
        }
        self._roles = RoleProcesses(makers)

    def __enter__(self) -> PipelineBench:
        self._roles.__enter__()
        return self

    def __exit__(self, *args: Any) -> None:
        self._roles.__exit__(*args)
        open_broker(self._url, self.run).purge()

    def round(self, pipeline: str, trajectories: int) -> Figures:
        """Send trajectories through a pipeline; InfraError if one is lost, damaged or out of order.

        cpu_us_per_trajectory: of the processes of all roles; ROLE_cpu_us: of one.
        """
        steps = self._flow.steps_for(trajectories)
        count = steps * self._flow.per_step
        before = ServerUsage.of(self._url)
        shares = self._roles.run(pipeline, steps, DEADLINE_S + count / 100)
        after = ServerUsage.of(self._url)
        if shares["assembler"].figures["trained"] != count:
            raise InfraError(f"{count} trajectories went into the {pipeline} pipeline, others came out: {shares}")
        seconds = max(share.ended for share in shares.values()) - min(share.started for share in shares.values())
        return {
            "trajectories_per_s": count / seconds,
            "cpu_us_per_trajectory": sum(share.cpu_s for share in shares.values()) / count * 1e6,
            **{f"{role}_cpu_us": share.cpu_s / count * 1e6 for role, share in shares.items()},
            "server_cpu_us_per_trajectory": (after.cpu_s - before.cpu_s) / count * 1e6,
            "wire_bytes_per_trajectory": (after.wire - before.wire) / count,
        }

    def balanced(self) -> None:
        """Check that the run's ledger is balanced; InfraError otherwise."""
        state = open_broker(self._url, self.run).ledger.read_state()
        if not state.balanced or state.active:
            raise InfraError(f"the ledger does not add up: {state}")


def measure(
    tokens: int, aof: str, trajectories: int, rounds: int, flow: PipelineShape, url: str | None, advance: Advance
) -> ResultRow:
    """Measure one row: ``rounds`` of all pipelines in turns, after one of each that does not count."""
    pool = TrajectoryPool(tokens)
    with serving(url, aof) as address, PipelineBench(address, tokens, flow) as bench:
        done = compare({name: partial(bench.round, name, trajectories) for name in PIPELINES}, rounds, 1, advance)
        bench.balanced()
        server = describe(address)
    return TRANSPORT.row(
        tokens=tokens,
        aof="as it is" if url else aof,
        server=server,
        trajectories=flow.steps_for(trajectories) * flow.per_step,
        rounds=rounds,
        bytes_per_trajectory=len(encode(pool.trajectory(pool.task(0, flow.samples), 0, 0))),
        by=summarize(done),
        ratio=ratio(done, "trajectories_per_s", "ours", "raw"),
        one_hop_ratio=ratio(done, "trajectories_per_s", "ours", "one_hop"),
    )


def measure_behind(
    behind: int,
    tokens: int,
    aof: str,
    trajectories: int,
    rounds: int,
    flow: PipelineShape,
    url: str | None,
    advance: Advance,
) -> ResultRow:
    """Measure a run's start, and the run after ``behind`` trained trajectories in turns with a fresh one."""
    chunk = flow.steps_for(trajectories) * flow.per_step
    with serving(url, aof) as address, PipelineBench(address, tokens, flow) as old:
        start = compare({"old": partial(old.round, "ours", trajectories)}, rounds)
        memory_before = ServerUsage.of(address).memory
        done = (rounds + 1) * chunk
        advance(done)
        while done < behind:
            amount = min(max(behind // 50, chunk), max(behind - done, 1))
            old.round("ours", amount)
            sent = flow.steps_for(amount) * flow.per_step
            done += sent
            advance(sent)
        with PipelineBench(address, tokens, flow) as fresh:
            pair = {
                "fresh": partial(fresh.round, "ours", trajectories),
                "old": partial(old.round, "ours", trajectories),
            }
            # The order changes, because the second finds a warmer machine.
            pairs = compare(pair, rounds) + compare(dict(reversed(pair.items())), rounds, warm_up=0)
            fresh.balanced()
        old.balanced()
        memory_after = ServerUsage.of(address).memory
        keys = len(list(open_client(address).scan_iter(match="*", count=1000)))
        server = describe(address)
    speeds = summarize(pairs)
    return BEHIND.row(
        behind=done,
        tokens=tokens,
        aof="as it is" if url else aof,
        server=server,
        start_per_s=summarize(start)["old"]["trajectories_per_s"].median,
        after_per_s=speeds["old"]["trajectories_per_s"].median,
        fresh_per_s=speeds["fresh"]["trajectories_per_s"].median,
        ratio=ratio(pairs, "trajectories_per_s", "old", "fresh"),
        memory_start_bytes=memory_before,
        memory_after_bytes=memory_after,
        keys=keys,
    )
