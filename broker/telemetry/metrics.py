"""Metrics of a run's newest steps, in a bounded stream."""

import json
from typing import Any

from broker.connection.connection import RunData
from broker.connection.stream_pages import KEEP_LINES
from schemas.run_folder import parse_line


class Metrics(RunData):
    """The metrics of steps, a JSON object each; the trainer's metrics.jsonl holds them all."""

    def append(self, line: dict[str, Any]) -> None:
        """Append one line of metrics; about the newest ``KEEP_LINES`` are kept."""
        self._connection.run_script("append_telemetry", "metrics", "j", json.dumps(line), KEEP_LINES)

    def read_after(self, id: str, count: int) -> tuple[str, list[dict[str, Any]]]:
        """Return the last entry's id and up to ``count`` lines after the entry ``id``, without unreadable ones."""
        entries = self._connection.run_command("following metrics", "xrange", self._keys.metrics, f"({id}", "+", count)
        last = entries[-1][0].decode() if entries else id
        return last, [line for _, fields in entries if (line := parse_line(fields.get(b"j", b""))) is not None]
