"""Metrics of a run's newest steps, in a bounded stream."""

import json
from collections.abc import Iterable
from typing import Any

from broker.connection.connection import RunData
from broker.connection.stream_pages import KEEP_LINES, Entry


class Metrics(RunData):
    """The metrics of steps, a JSON object each; the trainer's metrics.jsonl holds them all."""

    def append(self, line: dict[str, Any]) -> None:
        self._connection.run_script("append_telemetry", "metrics", "j", json.dumps(line), KEEP_LINES)

    def read_after(self, id: str, count: int) -> tuple[str, list[dict[str, Any]]]:
        """Read up to ``count`` lines after the entry ``id``; return also the id of the last one."""
        entries = self._connection.run_command("following metrics", "xrange", self._keys.metrics, f"({id}", "+", count)
        last = entries[-1][0].decode() if entries else id
        return last, _lines(entries)


def _lines(entries: Iterable[Entry]) -> list[dict[str, Any]]:
    """Parse entries of the stream, without those that are not JSON objects."""
    lines = []
    for _, fields in entries:
        try:
            line = json.loads(fields.get(b"j", b""))
        except (ValueError, RecursionError):
            continue
        if isinstance(line, dict):
            lines.append(line)
    return lines
