"""``python -m tools.turns``: walk, one layout after the other, and say what was seen; exit code 1 after a violation."""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

from tools.turns.planted import PLANTED
from tools.turns.walk import LAYOUTS, PRELOAD, Walk, context


def main() -> int:
    """Walk without planted faults, or with each of them until it is caught."""
    parser = argparse.ArgumentParser(prog="python -m tools.turns", description=__doc__)
    parser.add_argument("--turns", type=int, default=1000, help="of the trainer, in all layouts together (%(default)s)")
    parser.add_argument("--seconds", type=float, default=600, help="most seconds of a layout or fault (%(default)s)")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--calm", action="store_true", help="no kills and stops, to measure hand-overs")
    parser.add_argument("--planted", nargs="*", help="plant these faults, or all; each must be caught")
    options = parser.parse_args()
    context.set_forkserver_preload(list(PRELOAD))
    failed = False
    if options.planted is None:
        for layout in range(len(LAYOUTS)):
            walk = Walk(_folder(), options.seed + layout, layout, faults=not options.calm)
            result = walk.go(options.turns // len(LAYOUTS), options.seconds)
            print(f"{LAYOUTS[layout]}: {result.describe()}", *result.violations[:3], sep="\n  ", flush=True)
            failed |= bool(result.violations)
        return int(failed)
    for name in options.planted or PLANTED:
        result = Walk(_folder(), options.seed, 1, name).go(1_000_000, options.seconds)
        caught = f"caught after {result.seconds:.1f} s: {result.violations[0]}" if result.violations else "NOT CAUGHT"
        print(f"{name}: {caught}", flush=True)
        failed |= not result.violations
    return int(failed)


def _folder() -> Path:
    return Path(tempfile.mkdtemp(prefix="turns-"), "walk")


if __name__ == "__main__":
    sys.exit(main())
