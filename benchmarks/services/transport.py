"""``tidemill bench transport``: trajectories a second through every hop, beside what the same server can do raw.

All pipelines run in turns on one server, several rounds, so that a busy machine slows all; figures are medians over
the rounds, with the smallest and largest beside them.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Any

from benchmarks.harness.processes import BenchRole, RoleProcesses, RoleUsage, ServerUsage, describe, serving
from benchmarks.harness.workload import PipelineShape, TrajectoryPool, open_broker
from benchmarks.pipelines import one_hop, raw, tidemill
from broker.connection.connection import open_client
from schemas.codec import encode
from schemas.errors import InfraError

ROLES = ("producer", "reward", "assembler")
PIPELINES = ("ours", "raw", "one_hop")
DEADLINE_S = 120.0
"""One round may take this long, and as much more as one trajectory in 10 ms."""

Advance = Callable[[int], None]
"""Told how many trajectories went through since the last call."""


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


@dataclass(frozen=True)
class Round:
    """The figures of one round of one pipeline. cpu_us: of each role's process, for each trajectory."""

    per_s: float
    cpu_us: dict[str, float]
    server_us: float
    wire_bytes: float


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

    def round(self, pipeline: str, trajectories: int) -> Round:
        """InfraError when a trajectory is lost, damaged or out of order."""
        steps = self._flow.steps_for(trajectories)
        count = steps * self._flow.per_step
        before = ServerUsage.of(self._url)
        shares = self._roles.run(pipeline, steps, DEADLINE_S + count / 100)
        after = ServerUsage.of(self._url)
        if shares["assembler"].figures["trained"] != count:
            raise InfraError(f"{count} trajectories went into the {pipeline} pipeline, others came out: {shares}")
        return Round(
            per_s=count / _seconds(shares),
            cpu_us={role: share.cpu_s / count * 1e6 for role, share in shares.items()},
            server_us=(after.cpu_s - before.cpu_s) / count * 1e6,
            wire_bytes=(after.wire - before.wire) / count,
        )

    def balanced(self) -> None:
        """InfraError unless the run's ledger adds up."""
        state = open_broker(self._url, self.run).ledger.read_state()
        if not state.balanced or state.active:
            raise InfraError(f"the ledger does not add up: {state}")


def _seconds(shares: dict[str, RoleUsage]) -> float:
    return max(share.ended for share in shares.values()) - min(share.started for share in shares.values())


def measure(
    tokens: int, aof: str, trajectories: int, rounds: int, flow: PipelineShape, url: str | None, advance: Advance
) -> dict[str, Any]:
    """Measure one row of the result: ``rounds`` of all pipelines in turns, after one of each to warm up."""
    pool = TrajectoryPool(tokens)
    body = len(encode(pool.trajectory(pool.task(0, flow.samples), 0, 0)))
    found: dict[str, list[Round]] = {pipeline: [] for pipeline in PIPELINES}
    with serving(url, aof) as address, PipelineBench(address, tokens, flow) as bench:
        for turn in range(rounds + 1):
            for pipeline, results in found.items():
                results.append(bench.round(pipeline, trajectories if turn else 1))
                advance(1)
        bench.balanced()
        server = describe(address)
    own, limit, hop = (found[pipeline][1:] for pipeline in PIPELINES)
    ratios = [mine.per_s / its.per_s for mine, its in zip(own, limit, strict=True)]
    to_one_hop = [mine.per_s / its.per_s for mine, its in zip(own, hop, strict=True)]
    cpu = [sum(item.cpu_us.values()) for item in own]
    return {
        "tokens": tokens,
        "aof": "as it is" if url else aof,
        "server": server,
        "trajectories_per_s": round(median(item.per_s for item in own), 1),
        "trajectories_per_s_range": _range([item.per_s for item in own]),
        "raw_per_s": round(median(item.per_s for item in limit), 1),
        "raw_per_s_range": _range([item.per_s for item in limit]),
        "ratio": round(median(ratios), 3),
        "ratio_range": _range(ratios, 3),
        "cpu_us_per_trajectory": round(median(cpu), 1),
        "cpu_us_range": _range(cpu),
        "cpu_us_by_role": {role: round(median(item.cpu_us[role] for item in own), 1) for role in ROLES},
        "one_hop_per_s": round(median(item.per_s for item in hop), 1),
        "one_hop_per_s_range": _range([item.per_s for item in hop]),
        "one_hop_ratio": round(median(to_one_hop), 3),
        "one_hop_ratio_range": _range(to_one_hop, 3),
        "one_hop_cpu_us_per_trajectory": round(median(sum(item.cpu_us.values()) for item in hop), 1),
        "one_hop_server_cpu_us_per_trajectory": round(median(item.server_us for item in hop), 1),
        "raw_cpu_us_per_trajectory": round(median(sum(item.cpu_us.values()) for item in limit), 1),
        "server_cpu_us_per_trajectory": round(median(item.server_us for item in own), 1),
        "raw_server_cpu_us_per_trajectory": round(median(item.server_us for item in limit), 1),
        "bytes_per_trajectory": body,
        "wire_bytes_per_trajectory": round(median(item.wire_bytes for item in own)),
        "raw_wire_bytes_per_trajectory": round(median(item.wire_bytes for item in limit)),
        "trajectories": flow.steps_for(trajectories) * flow.per_step,
        "rounds": rounds,
    }


def measure_behind(
    behind: int,
    tokens: int,
    aof: str,
    trajectories: int,
    rounds: int,
    flow: PipelineShape,
    url: str | None,
    advance: Advance,
) -> dict[str, Any]:
    """Throughput at a run's start, and after ``behind`` trained trajectories in turns with a fresh run beside it."""
    chunk = flow.steps_for(trajectories) * flow.per_step
    with serving(url, aof) as address, PipelineBench(address, tokens, flow) as old:
        old.round("ours", 1)
        start = [old.round("ours", trajectories).per_s for _ in range(rounds)]
        memory_before = ServerUsage.of(address).memory
        done = rounds * chunk
        advance(done)
        while done < behind:
            amount = min(max(behind // 50, chunk), max(behind - done, 1))
            old.round("ours", amount)
            sent = flow.steps_for(amount) * flow.per_step
            done += sent
            advance(sent)
        with PipelineBench(address, tokens, flow) as fresh:
            fresh.round("ours", 1)
            pairs = []
            for turn in range(2 * rounds):
                # Who comes first changes, as the second finds a warmer machine.
                order = (old, fresh) if turn % 2 else (fresh, old)
                speed = {bench.run: bench.round("ours", trajectories).per_s for bench in order}
                pairs.append((speed[old.run], speed[fresh.run]))
            fresh.balanced()
        old.balanced()
        memory_after = ServerUsage.of(address).memory
        keys = len(list(open_client(address).scan_iter(match="*", count=1000)))
        server = describe(address)
    return {
        "behind": done,
        "tokens": tokens,
        "aof": "as it is" if url else aof,
        "server": server,
        "start_per_s": round(median(start), 1),
        "after_per_s": round(median(old_speed for old_speed, _ in pairs), 1),
        "fresh_per_s": round(median(fresh_speed for _, fresh_speed in pairs), 1),
        "change": round(median(old_speed / fresh_speed for old_speed, fresh_speed in pairs) - 1, 4),
        "change_range": _range([old_speed / fresh_speed - 1 for old_speed, fresh_speed in pairs], 3),
        "memory_start_bytes": memory_before,
        "memory_after_bytes": memory_after,
        "keys": keys,
    }


def _range(values: Sequence[float], digits: int = 1) -> list[float]:
    return [round(min(values), digits), round(max(values), digits)]
