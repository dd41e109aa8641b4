"""Use of machines over time, and alerts, as a run's folder has them: resources.jsonl and alerts.jsonl."""

from pathlib import Path
from typing import Any

from deploy.control_plane.files.lines import GrowingFile
from schemas.control_api.run_folders import AlertRecord, Resources
from schemas.run_folder import ALERTS, RESOURCES, parse_line, read_lines

MOST_BYTES = 8 * 2**20
"""Bytes of the lines that are kept, of the file's own text: those of a day of eight services, or fewer of a week."""


class ResourceFile:
    """Columns of what was written so far; beyond MOST_BYTES, every second line of the older half is forgotten."""

    def __init__(self, folder: Path) -> None:
        self._file = GrowingFile(folder / RESOURCES)
        self._lines: list[tuple[float, bytes]] = []
        self._size = 0

    def read(self, after: float, points: int) -> Resources:
        """Measurements after a time, as columns of at most ``points`` moments: of more, one in so many."""
        self._follow()
        found = [text for time, text in self._lines if time > after]
        every = -(-len(found) // points) if found else 1
        # The newest always, and from there back.
        kept = [line for text in found[::-1][::every][::-1] if (line := parse_line(text)) is not None]
        names = sorted({name for line in kept for name in _part(line, "services")})
        queues = sorted({name for line in kept for name in _part(line, "queues")})

        def column(service: str, figure: str) -> list[float | None]:
            return [number(_part(_part(line, "services"), service).get(figure)) for line in kept]

        return Resources(
            time=[float(line["time"]) for line in kept],
            cpu={name: column(name, "cpu") for name in names},
            memory_bytes={name: column(name, "memory_bytes") for name in names}
            | _only({"broker data": [number(line.get("broker_bytes")) for line in kept]}),
            gpu_memory_bytes=_only({name: column(name, "gpu_memory_bytes") for name in names}),
            queues={name: [number(_part(line, "queues").get(name)) for line in kept] for name in queues},
        )

    def _follow(self) -> None:
        for begin, text in self._file.read():
            if begin < 0:
                self._lines, self._size = [], 0
            elif (line := parse_line(text)) is not None and isinstance(line.get("time"), int | float):
                self._lines.append((line["time"], text))
                self._size += len(text)
            if self._size > MOST_BYTES:
                half = len(self._lines) // 2
                self._lines[:half] = self._lines[:half:2]
                self._size = sum(len(text) for _, text in self._lines)


def read_alerts(folder: Path) -> list[AlertRecord]:
    """Return the alerts that fired, the newest first."""
    found: list[AlertRecord] = []
    for line in read_lines(folder / ALERTS):
        name, time = line.get("name"), line.get("time")
        if not isinstance(name, str) or not isinstance(time, int | float):
            continue
        if line.get("fired"):
            level = "error" if line.get("level") == "error" else "warning"
            found.append(AlertRecord(name=name, level=level, text=str(line.get("text", "")), fired=time, over=None))
        elif lasting := [record for record in found if record.name == name and record.over is None]:
            lasting[-1].over = time
    return found[::-1]


def _part(line: dict[str, Any], name: str) -> dict[str, Any]:
    found = line.get(name)
    return found if isinstance(found, dict) else {}


def _only(columns: dict[str, list[float | None]]) -> dict[str, list[float | None]]:
    return {name: values for name, values in columns.items() if any(value is not None for value in values)}


def number(value: Any) -> float | None:
    """Return a number of a line as a float, None for another value."""
    return float(value) if isinstance(value, int | float) else None
