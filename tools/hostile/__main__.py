"""``python -m tools.hostile``: run hostile programs, say what they got at and how much their neighbour was slowed down.

A program that the busy machine did not let run is started again, so that all of them count. Exit code 1 when something
escaped, stayed, lasted too long, or never came to run.
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
from schemas.system.sandbox.jail import SANDBOXES, Sandbox, choose
from tools.hostile.run import HostileReport, run_programs

NEIGHBOUR = """
import sys, time
work = lambda: sum(i * i for i in range(300_000))
while True:
    began, computed = time.perf_counter(), time.process_time(); work()
    print(time.perf_counter() - began, time.process_time() - computed, flush=True); time.sleep(0.02)
"""


def main() -> int:
    """Run, count, print."""
    parser = argparse.ArgumentParser(prog="python -m tools.hostile", description=__doc__)
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
    total = HostileReport()
    for first in range(options.first, last, 200):
        report = run_programs(sandbox, range(first, min(first + 200, last)), options.workers)
        for name in ("programs", "seconds", "again"):
            setattr(total, name, getattr(total, name) + getattr(report, name))
        total.kinds += report.kinds
        total.ends += report.ends
        for name in ("escapes", "left", "late", "not_started"):
            getattr(total, name).extend(getattr(report, name))
        print(f"{total.programs} programs, {len(total.escapes)} escapes, {len(total.left)} left", flush=True)
    return _tell(sandbox.name, total)


def _tell(name: str, report: HostileReport) -> int:
    print(f"{name}: {report.programs} programs of {len(report.kinds)} kinds in {report.seconds:.0f} s")
    print(f"ends: {dict(report.ends)}; started again: {report.again}")
    for what in ("escapes", "left", "late", "not_started"):
        found = getattr(report, what)
        print(f"{what}: {len(found)} {found[:20] if found else ''}")
    return _verdict(report)


def _beside(sandbox: Sandbox, programs: range, workers: int) -> int:
    """Alternate between programs and none, and compare how long the neighbour takes for the same work.

    Its processor time is what programs take from it in the processor's caches, memory and kernel; by the clock it also
    waits for its turn, with whatever else runs on this machine.
    """
    with subprocess.Popen([sys.executable, "-S", "-c", NEIGHBOUR], stdout=subprocess.PIPE, text=True) as neighbour:
        times: dict[bool, list[tuple[float, float]]] = {True: [], False: []}
        worst = 0
        for first in range(programs.start, programs.stop, 10):
            for busy in (True, False):
                stopped = time.monotonic() + 3
                _drain(neighbour)
                if busy:
                    worst |= _verdict(run_programs(sandbox, range(first, first + 10), workers))
                else:
                    time.sleep(max(0.0, stopped - time.monotonic()))
                times[busy] += _drain(neighbour)
        neighbour.kill()
    for number, what in enumerate(("by the clock", "in processor time")):
        beside_s, alone_s = (statistics.mean(pair[number] for pair in times[busy]) for busy in (True, False))
        slower = 100 * (beside_s / alone_s - 1)
        print(f"{what}: {beside_s * 1000:.1f} ms beside programs, {alone_s * 1000:.1f} ms alone, {slower:+.1f} %")
    beside, alone = len(times[True]), len(times[False])
    print(f"pieces of work: {beside} beside {len(programs)} programs, {workers} at once; {alone} alone")
    return worst


def _verdict(report: HostileReport) -> int:
    return 1 if report.escapes or report.left or report.late or report.not_started else 0


def _drain(neighbour: subprocess.Popen[str]) -> list[tuple[float, float]]:
    data = b""
    assert neighbour.stdout is not None
    fd = neighbour.stdout.fileno()
    while select.select([fd], [], [], 0)[0]:
        data += os.read(fd, 1 << 16)
    numbers = [float(number) for number in data.split()]
    return list(zip(numbers[::2], numbers[1::2], strict=True))


if __name__ == "__main__":
    sys.exit(main())
