"""``tidemill export``: a checkpoint of a run as a model folder for transformers and vLLM, with its progress.

``tidemill replay``: says whether recorded batches, trained again, give the weights that the run has.
"""

import json
import os
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import Progress

from consumers.offline.replay import ReplayPlan, plan_replay, run_replay
from consumers.trainer.checkpoint.compare import Comparison
from consumers.trainer.checkpoint.convert import export_checkpoint, find_export
from consumers.trainer.checkpoint.store import WantedStep
from deploy.export.hub import CARD, push, write_card
from deploy.export.rollouts import RolloutReplay, check_rollouts
from deploy.logs import configure_logging
from deploy.services import torchrun
from schemas.config import TidemillConfig
from schemas.errors import ERROR_EXIT, OK_EXIT


def export_model(
    config: TidemillConfig,
    step: WantedStep,
    to: Path | None,
    adapter: bool = False,
    push_to: str | None = None,
    private: bool = False,
    as_json: bool = False,
) -> None:
    """Export and print one line, or JSON; what is done meanwhile goes to stderr.

    push_to: a repository of the Hugging Face hub that it goes to as well, without another export if the run's folder
    has one; private: whether a new repository is.
    """
    configure_logging(config, "export", "export")
    console = Console(stderr=True)
    began = time.monotonic()
    with console.status("export") as status:

        def stage(text: str) -> None:
            status.update(text)
            if not console.is_terminal:
                console.print(f"export: {text}", highlight=False, soft_wrap=True)

        path, folder = find_export(config, step, to, adapter)
        if push_to is None or to is not None or not (folder / CARD).is_file():
            path, folder = _export(config, step, to, stage, adapter)
        address = None
        if push_to is not None:
            stage(f"uploading to {push_to}")
            address = push(folder, push_to, private)
    size = sum(file.stat().st_size for file in folder.iterdir()) / 1e6
    if as_json:
        print(json.dumps({"folder": str(folder), "checkpoint": path.name, "megabytes": round(size, 1), "url": address}))
        return
    if address is not None:
        print(f"{address}: uploaded")
    print(f"{folder}: {path.name} in {config.model.dtype}, {size:.1f} MB, {time.monotonic() - began:.0f} s")


def exported_model(config: TidemillConfig, step: WantedStep, stage: Callable[[str], None]) -> Path:
    """Return the folder of a checkpoint's export in the run's folder; it is made unless it is there."""
    folder = find_export(config, step, None, False)[1]
    return folder if (folder / CARD).is_file() else _export(config, step, None, stage, False)[1]


def _export(
    config: TidemillConfig, step: WantedStep, to: Path | None, stage: Callable[[str], None], adapter: bool
) -> tuple[Path, Path]:
    path, folder = export_checkpoint(config, step, to, stage, adapter)
    write_card(config, folder, path.name, adapter)
    return path, folder


def replay_steps(
    config: TidemillConfig, run: str, first: int, last: int | None, as_json: bool = False, rollouts: bool = False
) -> int:
    """Replay, print a line or JSON, and return the exit code: 0 if the weights are bit-identical, else 1.

    run: as it was given, for the ranks that are started when the run had several. rollouts: generate the samples of the
    steps again, too, which must be equal as well; ConfigError without generator.exact.
    """
    configure_logging(config, "replay", "replay")
    if rollouts:
        check_rollouts(config)
    plan = plan_replay(config, first, last)
    if plan.world > 1 and not torchrun.is_rank():
        os.environ["OMP_NUM_THREADS"] = str(plan.threads)
        arguments = ["replay", run, "--from", str(first), "--to", str(plan.last)]
        arguments += [option for option, given in (("--json", as_json), ("--rollouts", rollouts)) if given]
        return torchrun.launch(plan.world, arguments, config.supervisor.grace_s)
    with RolloutReplay(config, plan) if rollouts else nullcontext() as generated:
        answer = _replay(config, plan, generated)
    if answer is None:
        return OK_EXIT
    found = {} if generated is None else {"rollouts": generated.as_json()}
    print(json.dumps(_as_json(plan, answer) | found) if as_json else _verdict(config, plan, answer))
    if generated is not None and not as_json:
        print(generated.verdict())
    return OK_EXIT if answer.equal and (generated is None or not generated.differs) else ERROR_EXIT


def _replay(config: TidemillConfig, plan: ReplayPlan, generated: RolloutReplay | None) -> Comparison | None:
    console = Console(stderr=True)
    with Progress(console=console, disable=not console.is_terminal) as bar:
        shown = bar.add_task("replay", total=plan.last - plan.first)

        def show_step(step: int) -> None:
            bar.advance(shown)
            if not console.is_terminal:
                print(f"replay: step {step}, up to {plan.last - 1}", file=sys.stderr)

        return run_replay(config, plan, show_step, None if generated is None else generated.before_step)


def _as_json(plan: ReplayPlan, answer: Comparison) -> dict[str, Any]:
    import torch

    return {
        "equal": answer.equal,
        "from": plan.first,
        "to": plan.last,
        "checkpoint": plan.goal.name,
        "tensors": answer.tensors,
        "differs": answer.differs,
        "torch": {"recorded": plan.torch, "here": torch.__version__},
    }


def _verdict(config: TidemillConfig, plan: ReplayPlan, answer: Comparison) -> str:
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
