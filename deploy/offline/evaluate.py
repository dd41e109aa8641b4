"""``tidemill eval``: a model's reward on the held-out prompts, by the same engine, workflow and reward functions as in
training, in one process and without a broker. Of two models it says who earns more, as a share and in Elo points.
"""

import asyncio
import contextlib
import json
import math
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self

from rich.console import Console
from rich.progress import Progress

from broker.evaluations.results import DatasetResult
from consumers.reward.scorer import Scorer, check_reward
from deploy.logs import configure_logging
from producers.datasets.loading import build_dataset
from producers.engines.base import Engine, EngineSettings
from producers.engines.factory import engine_name, make_engine, prepare_engine
from producers.images.placeholders import ImagePlaceholders
from producers.images.settings import image_settings
from producers.prompt_meter import PromptMeter
from producers.tasks import TaskLimits, make_task
from producers.tokenizer import HfTokenizer
from producers.workflows.base import FailedSample, RolloutContext, WorkflowServices, find_workflow, running
from schemas.config import EvalConfig, RewardTerm, TidemillConfig
from schemas.messages import Task, Trajectory
from schemas.model_folder import find_tokens


@dataclass(frozen=True)
class HeldOut:
    """A dataset to evaluate: reward terms of its samples, the k of pass@k, tasks, and their images by digest."""

    label: str
    terms: list[RewardTerm]
    passes: list[int]
    tasks: list[Task]
    images: dict[str, bytes]


@dataclass(frozen=True)
class Duel:
    """A comparison of two models by the prompts both answered. Each gets half a win more, so that Elo stays finite."""

    wins: int
    ties: int
    losses: int

    @classmethod
    def of(cls, rewards: Sequence[float | None], others: Sequence[float | None]) -> Self:
        """Compare mean rewards by prompt, None where no sample was scored."""
        pairs = [(one, two) for one, two in zip(rewards, others, strict=True) if one is not None and two is not None]
        wins, losses = (sum(sign * (one - two) > 0 for one, two in pairs) for sign in (1, -1))
        return cls(wins, len(pairs) - wins - losses, losses)

    @property
    def share(self) -> float:
        """Share of the prompts that the first model wins, ties counted half."""
        return (self.wins + self.ties / 2 + 0.5) / (self.wins + self.ties + self.losses + 1)

    def elo(self) -> tuple[float, float, float]:
        """Return the first model's Elo lead, 400 * log10(p / (1 - p)), and Wilson's 95 % bounds; ties count half."""
        count, z = self.wins + self.ties + self.losses + 1, 1.96
        middle = (self.share + z * z / (2 * count)) / (1 + z * z / count)
        spread = z / (1 + z * z / count) * math.sqrt(self.share * (1 - self.share) / count + (z / (2 * count)) ** 2)
        low, lead, high = (400 * math.log10(p / (1 - p)) for p in (middle - spread, self.share, middle + spread))
        return lead, low, high

    def as_json(self) -> dict[str, Any]:
        """Return counts, Elo lead and its 95 % interval as plain data for JSON."""
        lead, low, high = (round(value, 1) for value in self.elo())
        return {"wins": self.wins, "ties": self.ties, "losses": self.losses, "elo": lead, "elo_95": [low, high]}

    def __str__(self) -> str:
        lead, low, high = self.elo()
        return f"{self.wins} won, {self.ties} tied, {self.losses} lost: Elo {lead:+.0f} ({low:+.0f} to {high:+.0f})"


def evaluate_model(
    config: TidemillConfig,
    evaluation: EvalConfig,
    model: Path | None,
    against: Path | None = None,
    as_json: bool = False,
) -> None:
    """Evaluate ``model``, or else model.path, and print one line for each dataset, or all as JSON.

    against: another model, with which it is compared prompt by prompt.
    """
    configure_logging(config, "eval", "eval")
    prepare_engine(config.generator.engine, config.model.kind == "vision")
    path = config.model.path if model is None else str(model)
    config = config.model_copy(update={"model": config.model.model_copy(update={"path": path})})
    began = time.monotonic()
    held_out = open_datasets(config, evaluation)
    for one in held_out:
        check_reward(one.terms, config.base)
    results, rewards = asyncio.run(_evaluate(config, held_out, path))
    others = asyncio.run(_evaluate(config, held_out, str(against)))[1] if against else []
    duels = {one.label: Duel.of(a, b) for one, a, b in zip(held_out, rewards, others, strict=False)}
    engine, seconds, datasets = engine_name(config.generator.engine), time.monotonic() - began, dict[str, Any]()
    for one, result in zip(held_out, results, strict=True):
        figures = result.figures(one.passes, config.has_accuracy)
        datasets[one.label] = {"samples": result.scored, "failed": result.failed, **figures}
        if as_json:
            continue
        name = f"{path}, {one.label}" if len(held_out) > 1 else path
        shown = [f"{each} {value:.4f}" for each, value in figures.items() if each.startswith(("accuracy", "pass@"))]
        print(
            f"{name}: held-out reward {result.mean:.4f} on {result.scored} samples, {result.failed} failed"
            f" ({engine}, {seconds:.0f} s){': ' if shown else ''}{', '.join(shown)}"
        )
        if against:
            print(f"{name} against {against}, by prompts: {duels[one.label]}")
    if as_json:
        found = {"model": path, "engine": engine, "seconds": round(seconds, 1), "datasets": datasets}
        duelled = {label: duel.as_json() for label, duel in duels.items()}
        print(json.dumps(found | ({"against": str(against), "duels": duelled} if against else {})))
    if not all(result.scored for result in results):
        sys.exit(1)


def open_datasets(config: TidemillConfig, evaluation: EvalConfig) -> list[HeldOut]:
    """Return the tasks of every dataset of the evaluation, numbered through."""
    found: list[HeldOut] = []
    measure = PromptMeter.of(config)
    for one in evaluation.dataset:
        dataset, sampling = build_dataset(one, config.base, measure), evaluation.sampling_of(one)
        first = sum(len(before.tasks) for before in found)
        limits = TaskLimits(config.broker.max_message_bytes, image_settings(config))
        tasks = [
            make_task(first + i, "eval", dataset[i], sampling, one.label, limits=limits) for i in range(len(dataset))
        ]
        terms = evaluation.terms_of(one)
        terms = [term for term in config.reward.terms if term.is_reward] if terms is None else terms
        found.append(HeldOut(one.label, terms, one.passes(sampling.n), tasks, limits.images))
    return found


async def _evaluate(
    config: TidemillConfig, held_out: list[HeldOut], path: str
) -> tuple[list[DatasetResult], list[list[float | None]]]:
    """Return the result of each dataset, and the mean reward of each prompt, None where no sample was scored."""
    settings = config.generator.workflow
    workflow = find_workflow(settings.name, settings.args, config.base)()
    tokenizer = HfTokenizer(path, config.model.trust_remote_code)
    console = Console(stderr=True)
    tasks = [task for one in held_out for task in one.tasks]
    placeholders = ImagePlaceholders.of(config)
    files = {digest: body for one in held_out for digest, body in one.images.items()}
    async with started_engine(config, path) as engine, running(workflow, WorkflowServices(engine, tokenizer, config)):
        room = asyncio.Semaphore(max(1, config.generator.max_samples // max(task.n for task in tasks)))
        with Progress(console=console, disable=not console.is_terminal) as bar:
            shown = bar.add_task("evaluating", total=len(tasks))

            async def answer(task: Task) -> list[Trajectory]:
                async with room:
                    samples = workflow.run(
                        RolloutContext(engine, tokenizer, task, range(task.n), placeholders=placeholders, files=files)
                    )
                    found = [sample async for sample in samples if not isinstance(sample, FailedSample)]
                if "training" in engine.lacks:
                    # The engine returns no log-probabilities, and no score needs them.
                    found = [replace(sample, logprobs=[0.0] * len(sample.logprobs)) for sample in found]
                bar.advance(shown)
                return [sample.to_trajectory(task, config.run.name, "eval") for sample in found]

            answered = iter(await asyncio.gather(*(answer(task) for task in tasks)))
    scored = [await _score(config, one, [next(answered) for _ in one.tasks]) for one in held_out]
    return [result for result, _ in scored], [rewards for _, rewards in scored]


async def _score(
    config: TidemillConfig, held_out: HeldOut, groups: list[list[Trajectory]]
) -> tuple[DatasetResult, list[float | None]]:
    """Return the result of a dataset whose prompts were answered with these samples, and the rewards by prompt."""
    reward = config.reward.model_copy(update={"terms": held_out.terms})
    trajectories = [trajectory for group in groups for trajectory in group]
    async with Scorer(reward, config.base) as scorer:
        scores = await scorer.score_all(trajectories)
    following = iter(scores)
    scored_groups = [[score for _ in group if (score := next(following)).status == "ok"] for group in groups]
    scored = [score for group in scored_groups for score in group]
    lengths = [t.loss_mask.data.count(1) for t, score in zip(trajectories, scores, strict=True) if score.status == "ok"]
    asked = sum(task.n for task in held_out.tasks)
    rewards = [sum(score.reward for score in group) / len(group) if group else None for group in scored_groups]
    result = DatasetResult(
        n=asked,
        scored=len(scored),
        failed=asked - len(scored),
        mean=sum(score.reward for score in scored) / max(1, len(scored)),
        length=sum(lengths) / len(lengths) if lengths else None,
        prompts=Counter((len(group), sum(score.correct for score in group)) for group in scored_groups),
    )
    return result, rewards


@contextlib.asynccontextmanager
async def started_engine(config: TidemillConfig, path: str, live: bool = False) -> AsyncIterator[Engine]:
    """Hold the configured engine, started with the model in ``path``; live: for weights that the run publishes."""
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
            http=config.generator.http,
            images=image_settings(config),
            lora=config.trainer.lora if live else None,
            frozen_vision=live and config.model.kind == "vision" and config.model.freeze_vision,
            output_tokens=find_tokens(path, config.model.output_tokens),
        ),
        config.base,
    )
    try:
        await engine.start()
        yield engine
    finally:
        await engine.close()
