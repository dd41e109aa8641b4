"""``python -m tools.chaos``: run the suite, print the table; exit code 1 when a promise was broken."""

from __future__ import annotations

import argparse
import json
import shutil
import signal
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from types import FrameType

from rich.console import Console

from tools.chaos import settings
from tools.chaos.judging.report import examine, show
from tools.chaos.run import Chaos, ChaosPlan
from tools.chaos.world import KINDS

EPILOG = """
A feeder, two generators with a scripted engine, two reward services, a trainer with a tiny real model and a real
server run as processes of their own, the network between them is a proxy, and faults hit all of it at random. Then
everything is healed, the run comes to rest, and the logs of all processes are held against the promises.
The seed fixes kinds, victims and lengths of the faults; what they meet depends on the machine's timing.
Seeds 0, 3, 6 ... send weights through files, 1, 4, 7 ... through the broker, 2, 5, 8 ... from peer to peer.
With --weights they go the way that it names; nccl broadcasts them, over gloo.
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Parse, run, judge."""
    options = parser().parse_args(arguments)
    if options.list:
        for fault in sorted(KINDS, key=lambda fault: fault.kind):
            print(f"{fault.kind:<30}{fault.weight}")
        return 0
    console = Console()
    signal.signal(signal.SIGTERM, _interrupt)
    folder = options.folder or Path(tempfile.mkdtemp(prefix="chaos-"))
    plan = ChaosPlan(
        folder.resolve(),
        options.minutes,
        options.seed,
        options.fault_every,
        _words(options.only),
        _words(options.skip),
        [
            *(settings.CURRICULUM if options.curriculum else ()),
            *([f"trainer.publish.transport={options.weights}"] if options.weights else ()),
            *options.config,
        ],
        options.workload,
        options.judge,
        options.turns,
        options.teacher,
        options.pictures,
    )
    if not plan.kinds():
        print(
            f"--only {options.only} and --skip {options.skip} leave no kind of fault; --list shows all", file=sys.stderr
        )
        return 2
    for part in ("evidence", "calls", "suite", "logs", "excerpts", "run", "broker", "turns"):
        shutil.rmtree(plan.folder / part, ignore_errors=True)
    chaos = Chaos(plan, console)
    try:
        chaos.go()
    except TimeoutError as error:
        print(f"chaos: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("interrupted; what was seen until then is not judged", file=sys.stderr)
        return 130
    result = examine(chaos)
    show(result, console)
    console.print(f"logs: {plan.folder}", highlight=False)
    if options.json:
        options.json.write_text(json.dumps(result, indent=1) + "\n")
    return 1 if result["violations"] else 0


def parser() -> argparse.ArgumentParser:
    """The command line."""
    found = argparse.ArgumentParser(
        prog="python -m tools.chaos", description="Random faults against a running system.", epilog=EPILOG
    )
    found.add_argument("--minutes", type=float, default=3.0, help="how long faults happen (%(default)s)")
    found.add_argument("--seed", type=int, default=1, help="of the faults and of the run (%(default)s)")
    found.add_argument(
        "--workload",
        choices=settings.WORKLOADS,
        default="both",
        help="what generators do: complete texts, serve agents, agents for every third task, programs as agents for"
        " every third task, or serve users who reward their conversations later (%(default)s)",
    )
    found.add_argument(
        "--weights", choices=("file", "redis", "peer", "nccl"), help="how weights travel; by the seed as a rule"
    )
    found.add_argument("--curriculum", action="store_true", help="few prompts, of which a curriculum skips many")
    found.add_argument(
        "--judge", action="store_true", help="a reward more, of a judge that refuses, talks nonsense and hangs"
    )
    found.add_argument(
        "--turns", action="store_true", help="generator-0 and the trainer share a GPU, which is imitated"
    )
    found.add_argument(
        "--teacher", action="store_true", help="a teacher more, in a server of its own that is killed and frozen"
    )
    found.add_argument(
        "--pictures", action="store_true", help="a vision model; every prompt has an image, and agents send more"
    )
    found.add_argument("--fault-every", type=float, default=1.6, help="mean seconds between faults (%(default)s)")
    found.add_argument("--folder", type=Path, help="where all files go; a new temporary folder by default")
    found.add_argument("--json", type=Path, help="write the result there too")
    found.add_argument("--only", default="", help="only kinds whose name has one of these, comma-separated")
    found.add_argument("--skip", default="", help="no kinds whose name has one of these, comma-separated")
    found.add_argument("--config", action="append", default=[], metavar="a.b=c", help="override of the configuration")
    found.add_argument("--list", action="store_true", help="list the kinds of faults and their weights")
    return found


def _words(text: str) -> list[str]:
    return [word.strip() for word in text.split(",") if word.strip()]


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


if __name__ == "__main__":
    sys.exit(main())
