"""A run without an end, and what grows in it: ``make soak MINUTES=60``, or ``python -m tools.soak --minutes 60``.

The arithmetic demo trains without an end. Every few seconds the memory, file descriptors and threads of each of its
processes are noted, and the server's memory, keys and streams. At the end what is left behind the warm-up is compared,
its first tenth with its last: memory may grow by 3 %, the others not at all. What grows is named, and the exit code is
1 then. Keys whose length has a bound, which docs/reliability.md names, may grow up to that: it takes as long as three
checkpoints until the pipeline is full. Of the server's memory the rest is judged. What the control plane keeps for each
step, and it and the supervisor for each evaluation, is left out: of these they keep 10,000 and 1,000. Each look is a
line of --out.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from statistics import median
from typing import Any

import psutil

from benchmarks.end_to_end.process_meter import process_name
from benchmarks.harness.processes import serving
from broker.client import Broker
from broker.connection.connection import open_client
from broker.connection.stream_pages import KEEP_LINES
from broker.evaluations.store import KEPT_EVALUATIONS
from deploy.control_plane.status.series import MetricsSeries
from schemas.config.loading import load_config
from schemas.run_folder import CONFIG as CONFIG_FILE

CONFIG = Path(__file__).parents[1] / "examples" / "arithmetic" / "config.yaml"
STEPS = 1_000_000_000
START_DEADLINE_S = 600.0
STOP_S = 90.0
MOST_GROWTH = 0.03
"""Of memory, between the first and the last tenth."""
SMALL_MB = 2.0
"""Growth that is the allocator's and no leak, in a process that is small."""
SERIES_BYTES = 9.0
"""What a figure of a step takes in the control plane: a float in an array that has room to grow."""
STEP_BYTES = 600.0
"""What else a step takes there: its number, and the dict of how old its tokens were."""
EVALUATION_BYTES = 4500.0
"""What an evaluation takes there and in the supervisor, twice: each look reads all of them again."""
ALL_MEMORY = "server/all_memory_mb"
"""Goes up and down with the pipeline, and grows with what is kept for users: reported, not judged."""
EVAL_FIELDS = "fields of an evaluation, at most"
"""One more when the first sample of an evaluation fails, for example: a part of a bound, not judged."""
BOUNDED = ("groups", "journal", "samples", "trajectories", "bodies", "scored", "metrics", "events", "evals")
"""Keys whose length has a bound."""
Look = dict[str, float]


def look(root: psutil.Process, url: str, broker: Broker) -> Look:
    """Figures of all processes and of the server, by ``NAME/WHAT``; those of one name are added up."""
    found: Look = {}
    for process in [root, *root.children(recursive=True)]:
        with suppress(psutil.NoSuchProcess, psutil.AccessDenied, psutil.ZombieProcess):
            name = process_name(process, root)
            memory, files, threads = process.memory_full_info().uss / 1e6, process.num_fds(), process.num_threads()
            for what, value in (("memory_mb", memory), ("files", files), ("threads", threads), ("processes", 1)):
                found[f"{name}/{what}"] = found.get(f"{name}/{what}", 0.0) + value
    client: Any = open_client(url)
    try:
        state = broker.ledger.read_state()
        found["live groups"], found["live groups, at most"] = state.live_groups, state.live_bound
        found["uncommitted steps, at most"] = state.max_uncommitted
        found[EVAL_FIELDS] = fields_of_evaluation(client.hkeys(broker.connection.keys.evals))
        found[ALL_MEMORY] = found["server/other_memory_mb"] = client.info("memory")["used_memory"] / 1e6
        found["server/clients"] = client.info("clients")["connected_clients"]
        keys = sorted(key.decode() for key in client.scan_iter(count=1000))
        found["server/keys"] = len(keys)
        for key in keys:
            kind = client.type(key)
            if kind in SIZES:
                # Versions and steps are part of some names: what counts is how much there is of a kind.
                short = "".join("N" if part.isdigit() else part for part in _parts(key))
                found[f"key {short}/length"] = found.get(f"key {short}/length", 0.0) + SIZES[kind](client, key)
                if last_part(f"key {short}/length") in BOUNDED:
                    found["server/other_memory_mb"] -= (client.memory_usage(key, samples=0) or 0) / 1e6
    finally:
        client.close()
    return found


def fields_of_evaluation(names: Sequence[bytes]) -> float:
    """The most fields that one evaluation has; each name begins with the evaluation's version."""
    versions = [name.partition(b":")[0] for name in names]
    return float(max(map(versions.count, set(versions)), default=0))


SIZES = {
    b"stream": lambda client, key: client.xlen(key),
    b"hash": lambda client, key: client.hlen(key),
    b"zset": lambda client, key: client.zcard(key),
    b"set": lambda client, key: client.scard(key),
    b"list": lambda client, key: client.llen(key),
}


def _parts(key: str) -> list[str]:
    """A key's name, cut at colons, which stay."""
    return [part for word in key.split(":") for part in (":", word)][1:]


def length_bounds(live_bound: int, samples: int, uncommitted: int, eval_fields: int = 0) -> dict[str, float]:
    """Most entries of the keys that hold the pipeline, by name, for so many live groups of so many samples each.

    The same holds for what is kept for users: eval_fields are those of one evaluation.
    """
    group_fields = 5
    of_samples = dict.fromkeys(("samples", "trajectories", "bodies", "scored"), float(samples * live_bound))
    # The server cuts a stream at a node's end, of a hundred entries at most.
    lines = dict.fromkeys(("metrics", "events"), float(KEEP_LINES + 100))
    # The oldest evaluation goes when another is opened.
    evaluations = {"evals": float((KEPT_EVALUATIONS + 1) * eval_fields)}
    return {
        "groups": float(group_fields * live_bound + 1),
        "journal": float(uncommitted),
        **of_samples,
        **lines,
        **evaluations,
    }


def last_part(name: str) -> str:
    """Of the name of a key's length, the word after its last colon: what docs/reliability.md calls it."""
    return name.removesuffix("/length").rpartition(":")[2]


def kept_for_people(looks: Sequence[Look], series: int, eval_fields: int) -> dict[str, float]:
    """MB by which processes grew because of what they keep to show: of each step so many series, and evaluations."""

    def more(key: str) -> float:
        before, after = tenths(looks, next((name for name in looks[-1] if last_part(name) == key), ""))
        return max(0.0, after - before)

    steps = more("metrics") * (series * SERIES_BYTES + STEP_BYTES) / 1e6
    evaluations = more("evals") / max(1, eval_fields) * EVALUATION_BYTES / 1e6
    return {"control/memory_mb": steps + evaluations, "main/memory_mb": evaluations}


def tenths(looks: Sequence[Look], name: str) -> tuple[float, float]:
    """Medians of the first and the last tenth of the looks."""
    tenth = max(1, len(looks) // 10)
    return median(one.get(name, 0.0) for one in looks[:tenth]), median(one.get(name, 0.0) for one in looks[-tenth:])


def growth(
    looks: Sequence[Look], bounds: Mapping[str, float] | None = None, kept: Mapping[str, float] | None = None
) -> list[dict[str, Any]]:
    """What grew between the first and the last tenth of the looks, and beyond its bound if it has one.

    kept: MB that a process was meant to gain.
    """
    rows = []
    for name in sorted({name for one in looks for name in one}):
        before, after = tenths(looks, name)
        most = max(one.get(name, 0.0) for one in looks)
        is_memory = name.endswith("_mb")
        bound = (bounds or {}).get(last_part(name), 0.0)
        allowed = (
            max(SMALL_MB, MOST_GROWTH * before) + (kept or {}).get(name, 0.0)
            if is_memory
            else max(0.0, peak(looks, name) - before, bound - before)
        )
        rows.append(
            {
                "name": name,
                "before": round(before, 2),
                "after": round(after, 2),
                "most": round(most, 2),
                "bound": bound or None,
                "grows": name not in (ALL_MEMORY, EVAL_FIELDS) and after - before > allowed,
            }
        )
    return rows


def peak(looks: Sequence[Look], name: str) -> float:
    """The most of the first half: a pipeline's lengths go up and down, and grow only beyond what they had before."""
    return max(one.get(name, 0.0) for one in looks[: max(1, len(looks) // 2)])


def watch(
    process: subprocess.Popen[bytes], folder: Path, url: str, seconds: float, every: float, out: Path
) -> list[Look]:
    """Measure until the time is up; RuntimeError if the run ends before."""
    root, end = psutil.Process(process.pid), time.monotonic() + START_DEADLINE_S
    while not (folder / "metrics.jsonl").is_file():
        if process.poll() is not None or time.monotonic() > end:
            raise RuntimeError("the run did not come to its first step")
        time.sleep(1.0)
    looks, began, broker = list[Look](), time.monotonic(), Broker.connect(load_config(folder / CONFIG_FILE))
    with out.open("w", encoding="utf-8") as lines:
        while time.monotonic() - began < seconds:
            if process.poll() is not None:
                raise RuntimeError(f"the run ended by itself with exit code {process.returncode}")
            looks.append(look(root, url, broker))
            lines.write(json.dumps({"seconds": round(time.monotonic() - began, 1), **looks[-1]}) + "\n")
            lines.flush()
            time.sleep(every)
    return looks


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--warm-up", type=float, help="Minutes that are not judged; by default a sixth.")
    parser.add_argument("--every", type=float, default=5.0, help="Seconds between two looks.")
    parser.add_argument("--engine", default="transformers", help="Of the generator.")
    parser.add_argument("--out", type=Path, default=Path("soak.jsonl"))
    parser.add_argument("--json", action="store_true")
    parser.add_argument("settings", nargs="*", metavar="KEY=VALUE", help="Further settings of the run.")
    options = parser.parse_args()
    warm_up = options.minutes / 6 if options.warm_up is None else options.warm_up
    with tempfile.TemporaryDirectory(prefix="tidemill-soak-") as base, serving(None, "everysec") as url:
        folder = Path(base) / "run"
        settings = [f"run.folder={folder}", f"generator.engine={options.engine}", f"trainer.steps={STEPS}"]
        settings.append(f"broker.url={url}")
        command = [sys.executable, "-P", "-m", "deploy.cli", "up", str(CONFIG), *settings, *options.settings]
        with (Path(base) / "log").open("wb") as log:
            process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=dict(os.environ))
            try:
                looks = watch(process, folder, url, options.minutes * 60, options.every, options.out)
            except RuntimeError as error:
                print(f"{error}: {(Path(base) / 'log').read_text(errors='replace')[-1500:]}", file=sys.stderr)
                return 1
            finally:
                if process.poll() is None:
                    process.send_signal(signal.SIGTERM)
                    with suppress(subprocess.TimeoutExpired):
                        process.wait(STOP_S)
                if process.poll() is None:
                    process.kill()
        config = load_config(folder / CONFIG_FILE)
        lines = (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    series = MetricsSeries()
    series.add(json.loads(lines[-2]))
    live, uncommitted = int(looks[-1]["live groups, at most"]), int(looks[-1]["uncommitted steps, at most"])
    eval_fields = int(max(one[EVAL_FIELDS] for one in looks))
    bounds = length_bounds(live, config.sampling.n, uncommitted, eval_fields)
    judged = looks[int(len(looks) * warm_up / options.minutes) :]
    rows = growth(judged, bounds, kept_for_people(judged, len(series.names), eval_fields))
    grown = [row for row in rows if row["grows"]]
    if options.json:
        print(
            json.dumps({"benchmark": "soak", "minutes": options.minutes, "steps": len(lines), "rows": rows}, indent=2)
        )
    else:
        for row in rows:
            mark = "  GROWS" if row["grows"] else f"  of at most {row['bound']:,.0f}" if row["bound"] else ""
            print(f"{row['name']:<60} {row['before']:>10,.1f} {row['after']:>10,.1f} {row['most']:>10,.1f}{mark}")
        print(f"{len(lines)} steps in {options.minutes:g} minutes; {len(grown)} things grow")
    return 1 if grown else 0


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    sys.exit(main())
