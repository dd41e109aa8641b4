"""One episode of the configured agent, through the real endpoint, answered by an engine without a model.

``tidemill doctor`` and ``tidemill agent`` play it, to show what the agent does before any weights are loaded: how many
rows its calls make, which of its settings are left aside, and whether an episode that was interrupted can be replayed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec
import numpy as np

from deploy.checks.finding import Finding
from deploy.checks.model_files import find_unmade
from producers.agents.episode import task_for_agent
from producers.agents.workers.pool import AgentWorkers
from producers.agents.workers.protocol import AgentJob, AgentResult
from producers.datasets.loading import build_dataset
from producers.engines.base import Completion, EngineSettings, ProgressCallback, PromptImage
from producers.engines.scripted import ScriptedEngine
from producers.images.placeholders import ImagePlaces
from producers.images.settings import image_settings
from producers.tasks import TaskLimits, make_task, prepare_images
from producers.tokenizer import HfTokenizer
from producers.workflows.base import (
    FailedSample,
    Kept,
    RolloutContext,
    WorkflowServices,
    find_workflow,
    running,
)
from producers.workflows.trajectory_builder import SampledCompletion
from schemas.config import TidemillConfig
from schemas.errors import ConfigError
from schemas.messages import FinishReason, Partial, Sampling, Span

TRIAL_S = 30.0
"""Deadline of the trial's episode; a tool that waits for something may reach it."""
ANSWER = "A trial answer."
LOCAL = "127.0.0.1:0"


class TrialEngine(ScriptedEngine):
    """Gives the same short answer to whatever it is asked."""

    def __init__(self, tokenizer: HfTokenizer, max_length: int) -> None:
        super().__init__(EngineSettings("none", "float32", max_length, 8))
        stop = sorted(tokenizer.stop_ids)[:1]
        self._answer = [*tokenizer.encode(ANSWER), *stop]

    async def generate(
        self,
        prompt_ids: Sequence[int],
        sampling: Sampling,
        n: int = 1,
        prefix: Sequence[int] = (),
        progress: ProgressCallback | None = None,
        images: Sequence[PromptImage] = (),
    ) -> list[Completion]:
        """See Engine."""
        ids = self._answer[: sampling.max_tokens]
        logprobs = np.full(len(ids), -1.0, dtype=np.float32)
        finish: FinishReason = "stop" if ids == self._answer else "length"
        return [Completion(list(ids), logprobs, [Span(0, 0, len(ids))], finish) for _ in range(n)]


@dataclass(frozen=True)
class Trial:
    """What became of the trial's episode. replayed: calls that a second start of the agent got from the first's."""

    sample: SampledCompletion | FailedSample
    replayed: int


def try_agent(config: TidemillConfig) -> Finding | str:
    """Play the trial, and say in one line what was found."""
    if unmade := find_unmade(config):
        return unmade
    trial = asyncio.run(play_trial(config))
    if isinstance(trial.sample, FailedSample):
        return Finding(
            "agent trial",
            "warn",
            trial.sample.reason,
            f"the policy answered {ANSWER!r} to everything: if the agent may raise then, this is no mistake",
        )
    found, calls = trial.sample, len(trial.sample.calls)
    rows = max(1, len(found.segments))
    text = f"{calls} calls, {rows} {'row' if rows == 1 else 'rows'}"
    if found.reward is not None:
        text += f", reward {found.reward:g}"
    if ignored := found.metrics.get("ignored_settings"):
        text += f", {ignored:g} sampling settings of the agent's were left aside"
    if trial.replayed < calls:
        return Finding(
            "agent trial",
            "warn",
            f"{text}; a second start got {trial.replayed} of its {calls} calls from the first",
            "the agent asks something else each time (a date, a random id), so interrupted episodes begin anew",
        )
    return f"{text}, a second start got all of them from the first"


async def play_trial(config: TidemillConfig, position: int = 0) -> Trial:
    """Play an example of the first training dataset twice: from its beginning, and with the first one's calls."""
    agents = config.generator.agents.model_copy(
        update={"deadline_s": min(TRIAL_S, config.generator.agents.deadline_s), "processes": 1, "address": LOCAL}
    )
    config = config.model_copy(update={"generator": config.generator.model_copy(update={"agents": agents})})
    tokenizer = HfTokenizer(config.model.path, config.model.trust_remote_code)
    settings = config.generator.workflow
    workflow = find_workflow(settings.name, settings.args, config.base)()
    engine = TrialEngine(tokenizer, config.model.max_length)
    example = build_dataset(config.train[0].at_levels()[0], config.base)[position]
    limits = TaskLimits(config.broker.max_message_bytes, image_settings(config))
    images = prepare_images(example.images, limits)
    task = make_task(position, "train", example, config.sampling.model_copy(update={"n": 1}), images=images)
    places = ImagePlaces.of(config)

    async def play(partials: list[Partial]) -> tuple[SampledCompletion | FailedSample, list[Partial]]:
        saved: list[Partial] = []

        def save(partial: Partial) -> Kept:
            saved.append(partial)
            return Kept()

        asked = msgspec.structs.replace(task, partials=partials)
        samples = workflow.run(RolloutContext(engine, tokenizer, asked, [0], save, places=places, files=limits.images))
        (found,) = [sample async for sample in samples]
        return found, saved

    async with running(workflow, WorkflowServices(engine, tokenizer, config)):
        first, saved = await play([])
        if isinstance(first, FailedSample) or not saved:
            return Trial(first, 0)
        second, _ = await play(saved[-1:])
    replayed = 0 if isinstance(second, FailedSample) else int(second.metrics.get("replayed", 0))
    return Trial(first, replayed)


async def play_elsewhere(config: TidemillConfig, base_url: str, api_key: str, position: int = 0) -> AgentResult:
    """Run the agent once on the training example at ``position``, against any server that it understands."""
    settings = config.generator.workflow
    if settings.name != "agent":
        raise ConfigError(f"generator.workflow.name {settings.name!r} is no agent: must be agent")
    agents = config.generator.agents.model_copy(update={"processes": 1})
    args = settings.args
    workers = AgentWorkers(args.get("run"), args.get("command"), args.get("args") or {}, config.base, agents)
    example = build_dataset(config.train[0].at_levels()[0], config.base)[position]
    limits = TaskLimits(config.broker.max_message_bytes, image_settings(config))
    images = prepare_images(example.images, limits)
    task = task_for_agent(make_task(position, "train", example, config.sampling, images=images), limits.images)
    await workers.start()
    try:
        return await workers.run(AgentJob(f"{position}-0", task, base_url, api_key, agents.deadline_s))
    finally:
        await workers.close()
