"""How long a service was missed: from its kill -9 to its successor's first effective act. Pure functions over logs.

An effective act is an answered publication, score or admission that was accepted, or a trained step. Before it the
successor may have to wait for others that are down as well; ``undisturbed`` looks only at kills with no other
fault in progress between kill and act.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tools.chaos.judging.evidence import Line, Log


@dataclass(frozen=True)
class Hit:
    """One fault as the suite wrote it down. until: when its effect was undone (``at`` if there was nothing to undo)."""

    kind: str
    target: str
    at: float
    until: float


@dataclass(frozen=True)
class Recovery:
    """seconds: kill to first effective act. load_s: the successor's own loading. back_s: kill to its first answer.

    None where the successor was killed before.
    """

    role: str
    seconds: float | None
    load_s: float
    back_s: float | None
    undisturbed: bool


def acts(line: Line) -> bool:
    """Return whether a line shows accepted work."""
    if line.kind in ("publish", "score"):
        return any(item[-1] == "ok" for item in line.data["x"])
    return line.kind == "step" or (line.kind == "admit" and line.data["a"] in ("ok", "full"))


def recoveries(hits: Sequence[Hit], logs: Sequence[Log]) -> list[Recovery]:
    """List a recovery for each kill of a service."""
    by_name: dict[str, list[Log]] = defaultdict(list)
    for log in logs:
        by_name[log.name].append(log)
    found = []
    for hit in hits:
        if not hit.kind.startswith("kill ") or hit.target == "redis":
            continue
        successor = next((log for log in by_name[hit.target] if log.started > hit.at), None)
        if successor is None:
            continue
        first = next((line.at for line in successor.lines if acts(line)), None)
        ready = next((line.at for line in successor.lines if line.kind == "ready"), successor.started)
        answered = next((line.at for line in successor.lines if line.kind == "answered"), first)
        found.append(
            Recovery(
                successor.role,
                None if first is None else first - hit.at,
                ready - successor.started,
                None if answered is None else answered - hit.at,
                first is not None and not any(_overlaps(other, hit, first) for other in hits),
            )
        )
    return found


def _overlaps(other: Hit, hit: Hit, end: float) -> bool:
    return other is not hit and other.at < end and other.until + 1.0 > hit.at


def server_recoveries(hits: Sequence[Hit], logs: Sequence[Log]) -> list[float]:
    """From each death of the server to the first publication that it acknowledged afterwards, seconds."""
    accepted = sorted(line.at for log in logs for line in log.lines if line.kind == "publish" and acts(line))
    found = []
    for hit in hits:
        if hit.kind in ("kill redis", "cut aof"):
            # What was answered just before its death may be written down just after it.
            first = next((at for at in accepted if at > max(hit.until, hit.at + 0.05)), None)
            if first is not None:
                found.append(first - hit.at)
    return found


def percentile(values: Sequence[float], share: float) -> float | None:
    """The smallest value that at least this share of all values does not exceed; None without values."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)] if ordered else None


def summary(hits: Sequence[Hit], logs: Sequence[Log]) -> dict[str, dict[str, Any]]:
    """By role: count, interrupted, p50 and p99 of seconds, of seconds without loading, and of those undisturbed."""
    by_role: dict[str, list[Recovery]] = defaultdict(list)
    for recovery in recoveries(hits, logs):
        by_role[recovery.role].append(recovery)
    table: dict[str, dict[str, Any]] = {}
    for role, all_ in sorted(by_role.items()):
        done = [recovery for recovery in all_ if recovery.seconds is not None]
        columns = {
            "total": [recovery.seconds or 0.0 for recovery in done],
            "without_load": [(recovery.seconds or 0.0) - recovery.load_s for recovery in done],
            "undisturbed": [(recovery.seconds or 0.0) - recovery.load_s for recovery in done if recovery.undisturbed],
            "back": [recovery.back_s - recovery.load_s for recovery in all_ if recovery.back_s is not None],
        }
        table[role] = {"kills": len(all_), "interrupted": len(all_) - len(done), **_columns(columns)}
    server = server_recoveries(hits, logs)
    if server:
        table["redis"] = {"kills": len(server), "interrupted": 0, **_columns({"total": server})}
    return table


def _columns(columns: dict[str, list[float]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, values in columns.items():
        found[f"{name}_n"] = len(values)
        for label, share in (("p50", 0.5), ("p99", 0.99)):
            value = percentile(values, share)
            found[f"{name}_{label}"] = None if value is None else round(value, 2)
    return found
