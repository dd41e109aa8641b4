"""Results of the benchmarks: rows with their columns, shown as tables or as one JSON object."""

from __future__ import annotations

import json
import os
import platform
import string
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from itertools import groupby
from typing import Any

import rich.table
import typer
from rich.console import Console

from benchmarks.harness.rounds import Spread


@dataclass(frozen=True)
class Table:
    """The columns of a benchmark's rows: by heading, a format string over a row's figures.

    part: of the benchmark, if it has several that are measured and shown separately.
    """

    title: str
    columns: Mapping[str, str]
    part: str = ""

    def row(self, **figures: Any) -> ResultRow:
        """Return a row with these figures; None if one was not measured."""
        return ResultRow(self, {"part": self.part, **figures} if self.part else figures)


@dataclass(frozen=True)
class ResultRow:
    """A row of a table: figures by name. The spreads of contenders are in the figure ``by``."""

    table: Table
    values: dict[str, Any]

    def __getitem__(self, name: str) -> Any:
        return self.figures()[name]

    def figures(self) -> dict[str, Any]:
        """Return the figures for JSON.

        A spread becomes its median, beside ``NAME_range``. Of ``by``, the figures of ``ours`` keep their name, and
        those of other contenders become ``CONTENDER_NAME``.
        """
        found: dict[str, Any] = {}
        for name, value in self.values.items():
            if name != "by":
                found |= _flat(name, value)
                continue
            for contender, figures in value.items():
                for figure, spread in figures.items():
                    found |= _flat(figure if contender == "ours" else f"{contender}_{figure}", spread)
        return found

    def cells(self) -> list[str]:
        """Return the text of each column."""
        return [_Formatter().vformat(template, (), self.values) for template in self.table.columns.values()]


def show(benchmark: str, rows: Sequence[ResultRow], as_json: bool, **more: Any) -> None:
    """Print the rows as tables, or as one JSON object with ``more`` in it."""
    if as_json:
        found = [row.figures() for row in rows]
        typer.echo(json.dumps({"benchmark": benchmark, **machine(), "rows": found, **more}, indent=2))
        return
    for table, group in groupby(rows, lambda row: row.table):
        Console().print(_rendered(table, list(group)))


def _rendered(table: Table, rows: Sequence[ResultRow]) -> rich.table.Table:
    """Return the rows of one table; a single row is transposed, with a line for each column."""
    shown = rich.table.Table(title=table.title, caption=rows[0].values.get("server"), show_header=len(rows) > 1)
    if len(rows) == 1:
        for heading, cell in zip(table.columns, rows[0].cells(), strict=True):
            shown.add_row(heading, cell)
        return shown
    for heading in table.columns:
        shown.add_column(heading, justify="right", overflow="fold")
    for row in rows:
        shown.add_row(*row.cells())
    return shown


def machine() -> dict[str, Any]:
    """Return the machine and the versions of the measurement."""
    return {
        "date": time.strftime("%Y-%m-%d"),
        "cpus": os.cpu_count(),
        "python": platform.python_version(),
        "redis-py": version("redis"),
        "tidemill": version("tidemill"),
    }


class _Formatter(string.Formatter):
    """``str.format`` with a dash for None."""

    def get_value(self, key: int | str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        return kwargs.get(str(key))

    def format_field(self, value: Any, format_spec: str) -> str:
        return "–" if value is None else format(value, format_spec)


def _flat(name: str, value: Any) -> dict[str, Any]:
    if not isinstance(value, Spread):
        return {name: _rounded(value)}
    return {name: _rounded(value.median), f"{name}_range": [_rounded(value.low), _rounded(value.high)]}


def _rounded(value: Any) -> Any:
    return float(f"{value:.6g}") if isinstance(value, float) else value
