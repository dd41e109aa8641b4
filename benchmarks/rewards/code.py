"""Programs per second that the reward ``code`` scores, in each sandbox that works on this machine."""

from __future__ import annotations

import os
import resource
import time
from concurrent.futures import ThreadPoolExecutor

from benchmarks.harness.report import ResultRow, Table
from consumers.reward.rewards.programs.score import code
from schemas.system.sandbox.jail import SANDBOXES, why_not

CASES = 3
KINDS = {
    "calls": ("def double(n):\n    return 2 * n", [{"call": f"double({n})", "equals": 2 * n} for n in range(CASES)]),
    "stdin": ("print(2 * int(input()))", [{"stdin": str(n), "stdout": str(2 * n)} for n in range(CASES)]),
}
"""Programs and their cases: function calls share one start of the sandbox, cases with stdin have one each."""


CODE = Table(
    "Programs that the reward code runs",
    {
        "sandbox": "{sandbox}",
        "cases": "{cases}",
        "cases/s of a core": "{cases_per_s_per_core:.1f}",
        "ms of a program with three": "{program_ms:.0f}",
    },
    part="code",
)
"""One kind of cases in one sandbox."""


def sandboxes() -> list[str]:
    """Return the sandboxes that work on this machine."""
    return [name for name in SANDBOXES if name != "auto" and why_not(name) is None]


def measure_code(sandbox: str, kind: str, seconds: float) -> ResultRow:
    """Score correct programs for about this long, as many at once as there are processors.

    Cases a second and core are those a second of computing, of this process and of all that it started.
    """
    program, cases = KINDS[kind]
    workers = len(os.sched_getaffinity(0))
    began, computed_before = time.perf_counter(), _computed_s()

    def score(_: int) -> list[float]:
        found = []
        while time.perf_counter() - began < seconds:
            started = time.perf_counter()
            if code(program, cases=cases, sandbox=sandbox) != 1.0:
                raise RuntimeError(f"a right program has failed in the sandbox {sandbox}")
            found.append(time.perf_counter() - started)
        return found

    with ThreadPoolExecutor(workers) as pool:
        times = sorted(one for some in pool.map(score, range(workers)) for one in some)
    computed = _computed_s() - computed_before
    return CODE.row(
        sandbox=sandbox,
        cases=kind,
        programs=len(times),
        cases_per_s_per_core=len(times) * CASES / computed,
        program_ms=1000 * times[len(times) // 2],
    )


def _computed_s() -> float:
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(one.ru_utime + one.ru_stime for one in used)
