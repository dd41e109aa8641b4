"""What trainer and generators gain on shared GPUs, in turns: simulated, beside splits of the same GPUs.

Rates are those of ``tidemill plan``. Each row is a layout, each column a bound on staleness. The first row is in tokens
a second, with the split as generators:trainer, the best of all splits and windows; all others are relative to it::

    python -m benchmarks.services.turns --gpus 8
"""

from __future__ import annotations

import argparse
from dataclasses import replace

from deploy.planning.cluster import ClusterLayout, ClusterRates, LengthMix
from deploy.planning.search import STEPS, Plan, best, in_turns, simulate, windows

SAMPLES = 8
STALENESS = (1, 2, 4, 8)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpus", type=int, default=8)
    parser.add_argument("--mean", type=float, default=6000, help="Tokens of an answer.")
    parser.add_argument("--longest", type=int, default=32_768)
    parser.add_argument("--publish", type=float, default=5.0, help="Seconds until generators have new weights.")
    parser.add_argument("--steps", type=int, default=60)
    settings = parser.parse_args()
    rates = ClusterRates(publish_s=settings.publish)
    mix = LengthMix(settings.mean, longest=settings.longest)
    columns = [column(settings.gpus, staleness, rates, mix, settings.steps) for staleness in STALENESS]
    print(f"| Tokens/s | {' | '.join(f'staleness {staleness}' for staleness in STALENESS)} |")
    print("| --- " * (len(STALENESS) + 1) + "|")
    for name in columns[0]:
        print(f"| {name} | {' | '.join(each[name] for each in columns)} |")


def column(gpus: int, staleness: int, rates: ClusterRates, mix: LengthMix, steps: int) -> dict[str, str]:
    """Return the cells of a column by the names of their rows."""
    layout = ClusterLayout(1, gpus - 1, SAMPLES * gpus, SAMPLES, staleness)
    batch, found = layout.batch, best(gpus, layout.batch, SAMPLES, staleness, rates, mix, STEPS).layout

    def split(trainers: int) -> Plan:
        own = replace(layout, generators=gpus - trainers, trainers=trainers)
        plans = [simulate(replace(own, window=window), rates, mix, steps) for window in windows(batch, staleness)]
        return max(plans, key=speed)

    splits = {n: split(n) for n in range(1, gpus)}
    shared = {n: in_turns(splits[gpus // 2], n, rates, mix, steps) for n in range(1, gpus + 1)}
    fastest = max(splits, key=lambda count: speed(splits[count]))
    planned = simulate(found, rates, mix, steps)
    turns = max(range(1, gpus), key=lambda count: speed(shared[count]))
    wrong = gpus * 3 // 4

    def relative(plan: Plan) -> str:
        return f"{speed(plan) / speed(splits[fastest]):.2f}"

    return {
        "best split": f"{speed(splits[fastest]):,.0f} ({gpus - fastest}:{fastest})",
        "the split that the plan names": f"{relative(planned)} ({found.generators}:{found.trainers})",
        "trainer on some, generators on all": f"{relative(shared[turns])} (trainer on {turns})",
        "both on all": relative(shared[gpus]),
        f"wrong split, {gpus - wrong}:{wrong}": relative(splits[wrong]),
        f"trainer on {wrong}, generators on all": relative(shared[wrong]),
    }


def speed(plan: Plan) -> float:
    """Return the tokens a second of a plan."""
    return plan.outcome.tokens_per_s


if __name__ == "__main__":
    main()
