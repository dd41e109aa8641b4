"""``tidemill eval``: a model's reward on the held-out prompts, by the same engine, workflow and reward
functions as in training, in one process and without a broker."""

from __future__ import annotations

import asyncio
import contextlib
import sys
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.progress import Progress

from consumers.reward.scorer import Scorer
from deploy.logs import configure_logging
from producers.datasets.loading import build_dataset
from producers.engines.base import Engine, EngineSettings
from producers.engines.factory import engine_name, make_engine
from producers.rendering.tokenizer import HfTokenizer
from producers.tasks import make_task
from producers.workflows.base import FailedSample, RolloutContext, WorkflowServices, find_workflow, running
from schemas.config import EvalConfig, TidemillConfig
from schemas.messages import Task, Trajectory


@dataclass(frozen=True)
class Evaluated:
    """mean: of the rewards of ``scored`` samples; ``failed`` ones have none."""

    mean: float
    scored: int
    failed: int


def evaluate_model(config: TidemillConfig, evaluation: EvalConfig, model: Path | None) -> None:
    """Evaluate the model in ``model`` (model.path when None) and print one line."""
    configure_logging(config, "eval", "eval")
    path = config.model.path if model is None else str(model)
    began = time.monotonic()
    result = asyncio.run(_evaluate(config, evaluation, path))
    print(
        f"{path}: held-out reward {result.mean:.4f} on {result.scored} samples, {result.failed} failed"
        f" ({engine_name(config.generator.engine)}, {time.monotonic() - began:.0f} s)"
    )
    if not result.scored:
        sys.exit(1)


async def _evaluate(config: TidemillConfig, evaluation: EvalConfig, path: str) -> Evaluated:
    dataset = build_dataset(evaluation.dataset, config.base)
    tasks = [make_task(index, "eval", dataset[index], evaluation.sampling) for index in range(len(dataset))]
    terms = evaluation.terms if evaluation.terms is not None else config.reward.terms
    settings = config.generator.workflow
    workflow = find_workflow(settings.name, settings.args, config.base)()
    tokenizer = HfTokenizer(path, config.model.trust_remote_code)
    console = Console(stderr=True)
    reward = config.reward
    scorer = Scorer(terms, config.base, reward.workers, reward.timeout_s, "eval", reward.env)
    try:
        async with (
            _started(config, path) as engine,
            running(workflow, WorkflowServices(engine, tokenizer, config)),
        ):
            room = asyncio.Semaphore(max(1, config.generator.max_samples // evaluation.sampling.n))
            with Progress(console=console, disable=not console.is_terminal) as bar:
                shown = bar.add_task("evaluating", total=len(tasks))

                async def answer(task: Task) -> list[Trajectory]:
                    async with room:
                        samples = workflow.run(RolloutContext(engine, tokenizer, task, range(task.n)))
                        found = [
                            sample.to_trajectory(task, config.run.name, "eval")
                            async for sample in samples
                            if not isinstance(sample, FailedSample)
                        ]
                    bar.advance(shown)
                    return found

                answered = await asyncio.gather(*(answer(task) for task in tasks))
        trajectories = [trajectory for group in answered for trajectory in group]
        scores = await asyncio.to_thread(scorer.score, trajectories)
    finally:
        scorer.close()
    rewards = [score.reward for score in scores if score.status == "ok"]
    asked = sum(task.n for task in tasks)
    return Evaluated(sum(rewards) / max(1, len(rewards)), len(rewards), asked - len(rewards))


@contextlib.asynccontextmanager
async def _started(config: TidemillConfig, path: str) -> AsyncIterator[Engine]:
    engine = make_engine(
        config.generator.engine,
        EngineSettings(
            model_path=path,
            dtype=config.model.dtype,
            max_length=config.model.max_length,
            max_samples=config.generator.max_samples,
            seed=config.run.seed,
            trust_remote_code=config.model.trust_remote_code,
            args=config.generator.args,
        ),
        config.base,
    )
    try:
        await engine.start()
        yield engine
    finally:
        await engine.close()
