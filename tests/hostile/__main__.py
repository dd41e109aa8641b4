"""``python -m tests.hostile``: run hostile programs, say what they got at and how much their neighbour was slowed down.

Exit code 1 when something escaped, stayed, or lasted too long.
"""

from __future__ import annotations

import argparse
import os
import select
import statistics
import subprocess
import sys
import time

from schemas.errors import ConfigError
from schemas.sandbox.jail import SANDBOXES, Sandbox, choose
from tests.hostile.run import Report, run_programs

NEIGHBOUR = """
import sys, time
work = lambda: sum(i * i for i in range(300_000))
while True:
    began = time.perf_counter(); work()
    print(time.perf_counter() - began, flush=True); time.sleep(0.02)
"""


def main() -> int:
    """Run, count, print."""
    parser = argparse.ArgumentParser(prog="python -m tests.hostile", description=__doc__)
    parser.add_argument("--count", type=int, default=500, help="programs")
    parser.add_argument("--first", type=int, default=0, help="seed of the first")
    parser.add_argument("--workers", type=int, default=2, help="programs at once")
    parser.add_argument("--sandbox", choices=[one for one in SANDBOXES if one != "none"], default="auto")
    parser.add_argument("--neighbour", action="store_true", help="measure a process beside them, which takes longer")
    options = parser.parse_args()
    try:
        sandbox = choose(options.sandbox)
    except ConfigError as error:
        print(error, file=sys.stderr)
        return 2
    last = options.first + options.count
    if options.neighbour:
        return _beside(sandbox, range(options.first, last), options.workers)
    total = Report()
    for first in range(options.first, last, 200):
        report = run_programs(sandbox, range(first, min(first + 200, last)), options.workers)
        for name in ("programs", "seconds"):
            setattr(total, name, getattr(total, name) + getattr(report, name))
        total.kinds += report.kinds
        total.ends += report.ends
        for name in ("escapes", "left", "late", "not_started"):
            getattr(total, name).extend(getattr(report, name))
        print(f"{total.programs} programs, {len(total.escapes)} escapes, {len(total.left)} left", flush=True)
    return _tell(sandbox.name, total)


def _tell(name: str, report: Report) -> int:
    print(f"{name}: {report.programs} programs of {len(report.kinds)} kinds in {report.seconds:.0f} s")
    print(f"ends: {dict(report.ends)}")
    for what in ("escapes", "left", "late", "not_started"):
        found = getattr(report, what)
        print(f"{what}: {len(found)} {found[:20] if found else ''}")
    return 1 if report.escapes or report.left or report.late else 0


def _beside(sandbox: Sandbox, programs: range, workers: int) -> int:
    """Alternate between programs and none, and compare how long the neighbour takes for the same work."""
    with subprocess.Popen([sys.executable, "-S", "-c", NEIGHBOUR], stdout=subprocess.PIPE, text=True) as neighbour:
        times: dict[bool, list[float]] = {True: [], False: []}
        worst = 0
        for first in range(programs.start, programs.stop, 10):
            for busy in (True, False):
                stopped = time.monotonic() + 3
                _drain(neighbour)
                if busy:
                    worst |= _quiet(run_programs(sandbox, range(first, first + 10), workers))
                else:
                    time.sleep(max(0.0, stopped - time.monotonic()))
                times[busy] += _drain(neighbour)
        neighbour.kill()
    for busy, found in times.items():
        where = "beside programs" if busy else "alone"
        print(f"{where}: {len(found)} pieces of work, mean {statistics.mean(found) * 1000:.1f} ms")
    print(f"slower by {100 * (statistics.mean(times[True]) / statistics.mean(times[False]) - 1):.1f} %")
    return worst


def _quiet(report: Report) -> int:
    return 1 if report.escapes or report.left or report.late else 0


def _drain(neighbour: subprocess.Popen[str]) -> list[float]:
    found, data = [], b""
    assert neighbour.stdout is not None
    fd = neighbour.stdout.fileno()
    while select.select([fd], [], [], 0)[0]:
        data += os.read(fd, 1 << 16)
    for line in data.split():
        found.append(float(line))
    return found


if __name__ == "__main__":
    sys.exit(main())
