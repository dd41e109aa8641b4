"""``tidemill replay``: says whether recorded batches, trained again, give the weights that the run has."""

from __future__ import annotations

import os
import sys

from rich.console import Console
from rich.progress import Progress

from consumers.trainer.comparison import Comparison
from consumers.trainer.replaying import Plan, plan_replay, run_replay
from deploy import ranks
from deploy.exits import ERROR_EXIT, OK_EXIT
from deploy.logs import configure_logging
from schemas.config import TidemillConfig


def replay_steps(config: TidemillConfig, run: str, first: int, last: int | None) -> int:
    """Replay and print one line; the exit code: 0 when all is equal to the bit, 1 when not.

    run: as it was given, for the ranks that are started when the run had several.
    """
    configure_logging(config, "replay", "replay")
    plan = plan_replay(config, first, last)
    if plan.world > 1 and not ranks.is_rank():
        os.environ["OMP_NUM_THREADS"] = str(plan.threads)
        arguments = ["replay", run, "--from", str(first), "--to", str(plan.last)]
        return ranks.launch(plan.world, arguments, config.supervisor.grace_s)
    answer = _replay(config, plan)
    if answer is None:
        return OK_EXIT
    print(_verdict(config, plan, answer))
    return OK_EXIT if answer.equal else ERROR_EXIT


def _replay(config: TidemillConfig, plan: Plan) -> Comparison | None:
    console = Console(stderr=True)
    with Progress(console=console, disable=not console.is_terminal) as bar:
        shown = bar.add_task("replay", total=plan.last - plan.first)

        def did(step: int) -> None:
            bar.advance(shown)
            if not console.is_terminal:
                print(f"replay: step {step}, up to {plan.last - 1}", file=sys.stderr)

        return run_replay(config, plan, did)


def _verdict(config: TidemillConfig, plan: Plan, answer: Comparison) -> str:
    start = plan.start.name if plan.start else config.model.path
    steps = f"steps {plan.first} to {plan.last - 1} of run {config.run.name}, trained again from {start},"
    if answer.equal:
        return f"equal: {steps} give {plan.goal.name} to the bit, {answer.tensors} tensors"
    name, gap = max(answer.differs.items(), key=lambda found: found[1])
    import torch

    elsewhere = "" if plan.torch == torch.__version__ else f"; PyTorch was {plan.torch} and is {torch.__version__}"
    return (
        f"NOT EQUAL: {steps} do not give {plan.goal.name}: {len(answer.differs)} of {answer.tensors} tensors differ,"
        f" most {name} by {gap:.3g}{elsewhere}"
    )
