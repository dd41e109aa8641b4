"""Results of the benchmarks: tables for people, one JSON object for scripts."""

from __future__ import annotations

import json
import os
import platform
import time
from collections.abc import Callable, Sequence
from importlib.metadata import version
from typing import Any

import typer
from rich.console import Console
from rich.table import Table


def machine() -> dict[str, Any]:
    """The machine and the versions that figures were measured with."""
    return {
        "date": time.strftime("%Y-%m-%d"),
        "cpus": os.cpu_count(),
        "python": platform.python_version(),
        "redis-py": version("redis"),
        "tidemill": version("tidemill"),
    }


def show(
    benchmark: str,
    rows: Sequence[dict[str, Any]],
    as_json: bool,
    for_people: Callable[[Sequence[dict[str, Any]]], None],
    **more: Any,
) -> None:
    """Print the rows of a benchmark as ``for_people`` does, or as one JSON object, with ``more`` in it."""
    if as_json:
        typer.echo(json.dumps({"benchmark": benchmark, **machine(), "rows": list(rows), **more}, indent=2))
    else:
        for_people(rows)


def print_transport(rows: Sequence[dict[str, Any]]) -> None:
    """Print medians, with the range of the ratio; processor time of a trajectory for each pipeline."""
    title = f"Transport, {rows[0]['server']}: medians of {rows[0]['rounds']} rounds; ours / raw / one hop of JSON"
    table = Table(title=title)
    for column in ("tokens", "bytes", "AOF", "trajectories/s", "ratio to raw", "to one hop", "Python µs", "server µs"):
        table.add_column(column, justify="right")
    for row in rows:
        table.add_row(
            f"{row['tokens']:,}",
            f"{row['bytes_per_trajectory']:,}",
            row["aof"],
            f"{row['trajectories_per_s']:,.0f} / {row['raw_per_s']:,.0f} / {row['one_hop_per_s']:,.0f}",
            "{:.2f} ({:.2f}–{:.2f})".format(row["ratio"], *row["ratio_range"]),
            "{:.2f} ({:.2f}–{:.2f})".format(row["one_hop_ratio"], *row["one_hop_ratio_range"]),
            " / ".join(f"{row[f'{name}cpu_us_per_trajectory']:.0f}" for name in ("", "raw_", "one_hop_")),
            " / ".join(f"{row[f'{name}server_cpu_us_per_trajectory']:.0f}" for name in ("", "raw_", "one_hop_")),
        )
    Console().print(table)


def print_overlap(rows: Sequence[dict[str, Any]]) -> None:
    """Print the simulated throughput of each cluster and staleness, beside what the real broker made of it."""
    table = Table(title="Tokens trained a second, simulated and on a real broker")
    for column in (
        "GPUs",
        "staleness",
        "generate : train",
        "window",
        "tokens/s",
        "on the broker",
        "times staleness 0",
        "times all GPUs in turns",
        "trainer busy",
        "oldest",
    ):
        table.add_column(column, justify="right")
    for row in rows:
        table.add_row(
            str(row["gpus"]),
            str(row["staleness"]),
            f"{row['generators']} : {row['trainers']}",
            str(row["window"]),
            f"{row['tokens_per_s']:,}",
            f"{row['measured_tokens_per_s']:,}" if "measured_tokens_per_s" in row else "",
            f"{row['times_staleness_0']:.2f}" if row["times_staleness_0"] else "",
            f"{row['times_colocated']:.2f}",
            f"{row['trainer_busy']:.0%}",
            str(row.get("measured_oldest", row["oldest"])),
        )
    Console().print(table)


def print_behind(rows: Sequence[dict[str, Any]]) -> None:
    """Print how a long run compares with a fresh one."""
    (result,), console = rows, Console()
    console.print(
        f"{result['behind']:,} trained trajectories of {result['tokens']} tokens behind it, AOF {result['aof']}:"
        f" {result['after_per_s']:,.0f} a second; a fresh run in turns with it {result['fresh_per_s']:,.0f};"
        f" change [bold]{result['change']:+.1%}[/bold]"
        + " (each turn {:+.1%} to {:+.1%})".format(*result["change_range"])
        + f"; at the start {result['start_per_s']:,.0f}."
    )
    console.print(
        f"Server memory {result['memory_start_bytes'] / 1e6:.1f} MB at the start,"
        f" {result['memory_after_bytes'] / 1e6:.1f} MB after; {result['keys']} keys with the fresh run's."
    )


def print_control(rows: Sequence[dict[str, Any]]) -> None:
    """Print what the control plane costs, line by line."""
    (row,), console = rows, Console()
    console.print(
        f"{row['services']} services, {row['events_per_s']} events a second, {row['pages']} open pages:"
        f" [bold]{row['cpu']:.1%}[/bold] of a core, {row['rss_mb']:.0f} MB;"
        f" status {row['status_p50_ms']:.1f} / {row['status_p99_ms']:.1f} ms (p50 / p99, {row['requests']} requests)."
    )
    console.print(
        f"Pipeline: {row['trajectories_per_s_with']:,.0f} trajectories a second with it,"
        f" {row['trajectories_per_s_without']:,.0f} without: {row['throughput_loss']:+.1%} lost."
    )


def print_scale(rows: Sequence[dict[str, Any]]) -> None:
    """Print one line for each number of generators; milliseconds are p50 / p99."""
    table = Table(title=f"Scale, {rows[0]['server']}, AOF {rows[0]['aof']}, {rows[0]['seconds']:.0f} s each")
    for column in ("generators", "busy", "trajectories/s", "broker CPU", "admission ms", "task ms"):
        table.add_column(column, justify="right")
    for row in rows:
        table.add_row(
            f"{row['generators']:,}",
            f"{row['generators_busy']:.0%}",
            f"{row['trajectories_per_s']:,.0f}",
            f"{row['broker_cpu']:.1%}",
            *(f"{_ms(row[f'{name}_ms_p50'])} / {_ms(row[f'{name}_ms_p99'])}" for name in ("admission", "task")),
        )
    Console().print(table)


def print_weights(rows: Sequence[dict[str, Any]]) -> None:
    """Print a line for each model and transport: seconds to publish and to fetch, and their sum over a plain copy."""
    table = Table(title=f"Weights, {rows[0]['server']}, {rows[0]['dtype']}: best of {rows[0]['rounds']} rounds")
    columns = ("model", "by", "plain copy s", "whole s", "ratio", "delta s", "ratio", "delta size", "apply, pause s")
    for column in columns:
        table.add_column(column, justify="right")
    for row in rows:
        table.add_row(
            row["model"],
            row["transport"],
            f"{row['raw_copy_s']:.3f}",
            f"{row['publish_s']:.3f} + {row['fetch_s']:.3f}",
            f"{row['ratio']:.2f}",
            f"{row['publish_delta_s']:.3f} + {row['fetch_delta_s']:.3f}",
            f"{row['ratio_delta']:.2f}",
            f"{row['delta_ratio']:.2%}",
            f"{row['apply_s']:.3f}, {row['pause_s']:.3f}",
        )
    Console().print(table)


def print_spread(rows: Sequence[dict[str, Any]]) -> None:
    """Print a line for each transport and number of generators; egress is in sizes of a version."""
    table = Table(title=f"{rows[0]['bytes'] / 1e6:,.0f} MB to generators at once, {rows[0]['server']}")
    for column in (
        "by",
        "generators",
        "all have it s",
        "egress",
        "by broadcast",
        "joiner s",
        "one killed: all others s",
    ):
        table.add_column(column, justify="right")
    for row in rows:
        table.add_row(
            row["transport"],
            str(row["generators"]),
            f"{row['seconds']:.2f} ({row['seconds_range'][0]:.2f}–{row['seconds_range'][1]:.2f})",
            f"{row['egress']:.2f}",
            f"{row['broadcast']:.0%}" if row["transport"] == "nccl" else "",
            f"{row['joiner_s']:.2f}",
            f"{row['killed_s']:.2f}" if "killed_s" in row else "",
        )
    Console().print(table)


def print_generator(rows: Sequence[dict[str, Any]]) -> None:
    """Print medians, with the range of the ratio."""
    (row,) = rows
    Console().print(
        f"{row['concurrency']} samples at once, groups of {row['group']}, up to {row['tokens']} tokens,"
        f" {row['parameters']:,} parameters: {row['tokens_per_s']:,.0f} tokens a second through the service,"
        f" {row['bare_tokens_per_s']:,.0f} through {row['release']} bare;"
        f" ratio [bold]{row['ratio']:.3f}[/bold] ({row['ratio_range'][0]:.3f}–{row['ratio_range'][1]:.3f},"
        f" {row['rounds']} rounds). Processor time of the service's own process: {row['cpu_us_per_token']:.0f} µs a"
        f" token, of a bare loop's {row['bare_cpu_us_per_token']:.0f}"
    )


TRAINER_KEYS = ("tokens_per_s", "vs_trl", "vs_limit", "peak_rss_mb", "peak_rss_vs_limit")


def print_trainer(rows: Sequence[dict[str, Any]]) -> None:
    """Print the trainer's step beside the others."""
    (row,) = rows
    trl = "TRL is not installed" if row["vs_trl"] is None else f"{row['vs_trl']:.2f} times TRL"
    compiled = "" if row["vs_compiled"] is None else f"; {row['vs_compiled']:.2f} times itself with compiled layers"
    Console().print(
        f"{row['tokens_per_s']:,.0f} tokens a second; {row['vs_limit']:.2f} of the bare model; {trl}{compiled};"
        f" peak memory {row['peak_rss_mb']:,.0f} MB, {row['peak_rss_vs_limit']:.2f} of the bare model's"
    )


def print_parts(rows: Sequence[dict[str, Any]]) -> None:
    """Print each part of the agents' or the rewards' benchmark, a line for each of its rows."""
    for row in rows:
        Console().print(_PARTS[row["part"]].format(**row))


_PARTS = {
    "episodes": "{episodes} episodes of {calls} calls in all, client {client}, {processes} processes:"
    " [bold]{wall_s:.1f} s[/bold] of {ideal_s:.2f} s that calls and tools take; processor time {generator_cpu_s:.2f} s"
    " of the generator, {workers_cpu_s:.2f} s of the agents; lag of the event loop {lag_p50_ms:.1f} /"
    " {lag_p99_ms:.0f} / {lag_max_ms:.0f} ms (p50 / p99 / most)",
    "endpoint": "{clients} clients: {requests_per_s:.0f} requests a second through the endpoint,"
    " {bare_requests_per_s:.0f} through the server of vLLM {vllm}; ratio [bold]{ratio:.2f}[/bold]; processor time of a"
    " request {cpu_ms_per_request:.2f} ms, vLLM's {bare_cpu_ms_per_request:.2f}; ratio {cpu_ratio:.2f}",
    "tokens": "{turns} turns, a cut that the tokenizer would not make in {cut:.0%} of places: {tokens:.0f} tokens in"
    " {rows:.2f} rows an episode; rendered anew {rendered_ratio:.2f} times as many in {rendered_rows:.2f} rows, with a"
    " row for each call {call_ratio:.2f} times",
    "code": "code in {sandbox}, cases of {cases}: [bold]{cases_per_s_per_core:.1f}[/bold] cases a second of a core;"
    " a program of three takes {program_ms:.0f} ms",
    "judge": "judge, {concurrency} calls in flight of {answer_s:g} s each: [bold]{calls_per_s:.1f}[/bold] calls a"
    " second of {ideal_per_s:.1f}; processor time of a call {cpu_ms_per_call:.1f} ms",
    "limit": "judge that fails at times, limit {limit_per_minute:.0f} requests a minute:"
    " {requests_per_minute:.0f} ([bold]{share_of_limit:.2f}[/bold] of it), {refused} refused, {garbled} unreadable;"
    " {ok} scored, {error} and {timeout} excluded, [bold]{made_up_zeros}[/bold] zeros made up",
    "reward_model": "reward model of {parameters:,} parameters, {mean_tokens:.0f} tokens on average:"
    " {sequences_per_s:.1f} sequences a second in batches of {batch}, {one_at_a_time_per_s:.1f} one at a time; ratio"
    " [bold]{ratio:.2f}[/bold] ({ratio_range[0]:.2f}–{ratio_range[1]:.2f}, {rounds} rounds)",
}


def _ms(value: float | None) -> str:
    return "–" if value is None else f"{value:.1f}"
