"""The results of ``benchmarks/gpu.sh`` as Markdown tables, one for each part."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

Row = Mapping[str, Any]
Column = tuple[str, Callable[[Row], Any]]


def number(row: Row, name: str, digits: int = 0, scale: float = 1.0) -> str:
    """Format the figure with this name, also from the run's ``figures``; a dash if it is missing."""
    value = row.get(name, row.get("figures", {}).get(name))
    return "-" if value is None else f"{value * scale:,.{digits}f}"


COLUMNS: dict[str, list[Column]] = {
    "trainer": [
        ("tokens/s", lambda row: number(row, "tokens_per_s")),
        ("bare model", lambda row: number(row, "limit_tokens_per_s")),
        ("MFU %", lambda row: number(row, "mfu", 1, 100)),
        ("attention", lambda row: row.get("kernel", "-")),
        ("memory GB", lambda row: number(row, "peak_gb", 1)),
        ("planned GB", lambda row: number(row, "planned_gb", 1)),
    ],
    "generator": [
        ("tokens/s through the service", lambda row: number(row, "tokens_per_s")),
        ("bare vLLM", lambda row: number(row, "bare_tokens_per_s")),
        ("ratio", lambda row: number(row, "ratio", 2)),
        ("CPU µs a token", lambda row: number(row, "cpu_us_per_token", 1)),
    ],
    "weights": [
        ("publish s", lambda row: number(row, "publish_s", 2)),
        ("fetch s", lambda row: number(row, "fetch_s", 2)),
        ("plain copy s", lambda row: number(row, "raw_copy_s", 2)),
        ("load s", lambda row: number(row, "apply_s", 2)),
        ("pause s", lambda row: number(row, "pause_s", 2)),
    ],
    "recipe": [
        ("s a step", lambda row: number(row, "time/total_s", 1)),
        ("of it waiting", lambda row: number(row, "time/wait_s", 1)),
        ("generated tokens/s", lambda row: number(row, "perf/generated_tokens_per_s")),
        ("trained tokens/s", lambda row: number(row, "perf/tokens_per_s")),
        ("MFU %", lambda row: number(row, "perf/mfu", 1, 100)),
        ("trainer GB", lambda row: number(row, "perf/gpu_memory_peak_bytes", 1, 1 / 1024**3)),
        ("publish s", lambda row: number(row, "time/publish_s", 2)),
        ("hand-over s", lambda row: number(row, "time/hand_over_s", 2)),
        ("log-prob gap, mean nats", lambda row: number(row, "train/logprob_gap_mean", 5)),
    ],
}


def table(rows: Sequence[Row]) -> str:
    """Markdown; a case that failed says why."""
    parts = []
    for part, columns in COLUMNS.items():
        chosen = [row for row in rows if row["part"] == part]
        if not chosen:
            continue
        lines = [f"| {part} | " + " | ".join(name for name, _ in columns) + " |", "| --- |" + " --- |" * len(columns)]
        for row in chosen:
            cells = [f"failed: {row['failed']}"] if "failed" in row else [str(value(row)) for _, value in columns]
            lines.append(f"| {row['name']} | " + " | ".join(cells) + " |")
        parts.append("\n".join(lines) + "\n")
    return "\n".join(parts)
