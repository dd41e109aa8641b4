"""One episode of the configured agent, through the real endpoint, with an engine that needs no model.

``tidemill doctor`` and ``tidemill agent`` run it to show what the agent does before any weights are loaded: how many
rows its calls make, which of its settings are ignored, and whether an interrupted episode can be replayed.
"""

import asyncio
import json
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from deploy.checks.finding import Finding
from deploy.checks.model_files import check_made
from deploy.logs import configure_logging
from producers.agents.episode import task_for_agent
from producers.agents.workers.pool import AgentWorkers
from producers.agents.workers.protocol import AgentJob, AgentResult
from producers.agents.workers.start import AgentProgram
from producers.datasets.loading import build_dataset
from producers.engines.base import Completion, EngineSettings
from producers.engines.scripted import ScriptedEngine
from producers.images.placeholders import ImagePlaceholders
from producers.images.settings import image_settings
from producers.tasks import TaskLimits, make_task
from producers.tokenizer import HfTokenizer
from producers.workflows.base import FailedSample, RolloutContext, SaveDone, WorkflowServices, find_workflow, running
from producers.workflows.trajectory_builder import SampledCompletion
from schemas.config import TidemillConfig
from schemas.errors import ERROR_EXIT, ConfigError
from schemas.messages import FinishReason, Partial, Sampling, Span, Task

DEADLINE_S = 30.0
"""Deadline of the episode. A tool that waits for something may reach it."""
ANSWER = "A test answer."
LOCAL = "127.0.0.1:0"


class FixedAnswerEngine(ScriptedEngine):
    """An engine that gives requests these answers one after the other, and the last one afterwards."""

    def __init__(self, tokenizer: HfTokenizer, max_length: int, answers: Sequence[str] = (ANSWER,)) -> None:
        super().__init__(EngineSettings("none", "float32", max_length, 8))
        stop = sorted(tokenizer.stop_ids)[:1]
        self._answers = [[*tokenizer.encode(answer), *stop] for answer in answers]
        self._given = 0

    async def generate(
        self, prompt_ids: Sequence[int], sampling: Sampling, n: int = 1, *_: Any, **__: Any
    ) -> list[Completion]:
        answer = self._answers[min(self._given, len(self._answers) - 1)]
        self._given += 1
        ids = answer[: sampling.max_tokens]
        logprobs = np.full(len(ids), -1.0, dtype=np.float32)
        finish: FinishReason = "stop" if ids == answer else "length"
        return [Completion(list(ids), logprobs, [Span(0, 0, len(ids))], finish) for _ in range(n)]


@dataclass(frozen=True)
class PlayedEpisode:
    """The result of an episode that was played twice. replayed: calls that the second time reused from the first."""

    sample: SampledCompletion | FailedSample
    replayed: int


def check_agent(config: TidemillConfig) -> Finding | str:
    """Play an episode of the configured agent twice, against a scripted policy, and return what was found."""
    played, warning = asyncio.run(play_episode(config)), partial(Finding, "agent episode", "warn")
    if isinstance(played.sample, FailedSample):
        advice = f"the policy answered {ANSWER!r} to every call: ignore this if the agent should then raise"
        return warning(played.sample.reason, advice)
    sample, calls = played.sample, len(played.sample.calls)
    rows = max(1, len(sample.segments))
    text = f"{calls} calls, {rows} {'row' if rows == 1 else 'rows'}"
    if sample.reward is not None:
        text += f", reward {sample.reward:g}"
        if all(term.name != "episode" for term in config.reward.terms):
            text += "; no reward term uses the reward that the agent returned"
            return warning(text, "set reward.terms to [], or add the term episode to it")
    if ignored := sample.metrics.get("ignored_settings"):
        text += f", {ignored:g} sampling settings of the agent are ignored"
    if played.replayed < calls:
        advice = "the agent's requests differ each time (a date, a random id), so an interrupted episode starts over"
        return warning(f"{text}; a replay reused {played.replayed} of its {calls} calls", advice)
    return f"{text}; a replay reused all of them"


async def play_episode(config: TidemillConfig, position: int = 0, answers: Sequence[str] = (ANSWER,)) -> PlayedEpisode:
    """Play an example of the first training dataset twice: from its beginning, then with the saved calls.

    answers: the policy's answers to the agent's calls, in order; the last one is repeated.
    """
    agents = config.generator.agents.model_copy(
        update={"deadline_s": min(DEADLINE_S, config.generator.agents.deadline_s), "processes": 1, "address": LOCAL}
    )
    config = config.model_copy(update={"generator": config.generator.model_copy(update={"agents": agents})})
    tokenizer = HfTokenizer(config.model.path, config.model.trust_remote_code)
    settings = config.generator.workflow
    workflow = find_workflow(settings.name, settings.args, config.base)()
    engine = FixedAnswerEngine(tokenizer, config.model.max_length, answers)
    task, files = _first_task(config, position)
    placeholders = ImagePlaceholders.of(config)

    async def play(partials: list[Partial]) -> tuple[SampledCompletion | FailedSample, list[Partial]]:
        saved: list[Partial] = []

        def save(partial: Partial) -> SaveDone:
            saved.append(partial)
            return SaveDone()

        asked = msgspec.structs.replace(task, partials=partials)
        samples = workflow.run(
            RolloutContext(engine, tokenizer, asked, [0], save, placeholders=placeholders, files=files)
        )
        (sample,) = [sample async for sample in samples]
        return sample, saved

    async with running(workflow, WorkflowServices(engine, tokenizer, config)):
        first, saved = await play([])
        if isinstance(first, FailedSample) or not saved:
            return PlayedEpisode(first, 0)
        second, _ = await play(saved[-1:])
    replayed = 0 if isinstance(second, FailedSample) else int(second.metrics.get("replayed", 0))
    return PlayedEpisode(first, replayed)


def _first_task(config: TidemillConfig, position: int) -> tuple[Task, Mapping[str, bytes]]:
    """Return the task, of one sample, of an example of the first training dataset, and its images by digest."""
    example = build_dataset(config.train[0].at_levels()[0], config.base)[position]
    limits = TaskLimits(config.broker.max_message_bytes, image_settings(config))
    sampling = config.sampling.model_copy(update={"n": 1})
    return make_task(position, "train", example, sampling, limits=limits), limits.images


async def play_on_server(config: TidemillConfig, base_url: str, api_key: str, position: int = 0) -> AgentResult:
    """Run the agent once on the training example at ``position``, against the server at ``base_url``."""
    settings = config.generator.workflow
    if settings.name != "agent":
        raise ConfigError(f"generator.workflow.name must be agent, is {settings.name!r}")
    agents = config.generator.agents.model_copy(update={"processes": 1})
    args = settings.args
    program = AgentProgram(args.get("run"), args.get("command"), args.get("args") or {}, config.base, agents)
    workers = AgentWorkers(program)
    task = task_for_agent(*_first_task(config, position))
    await workers.start()
    try:
        return await workers.run(AgentJob(f"{position}-0", task, base_url, api_key, agents.deadline_s))
    finally:
        await workers.close()


def run_agent(
    config: TidemillConfig, base_url: str | None, api_key: str, example: int, answers: Path | None, as_json: bool
) -> None:
    """Run the agent on one example and print the result; exit code 1 if it fails.

    Without ``base_url``, the agent talks to the real endpoint in front of an engine without a model, and its
    conversation is printed, too. answers: a file of that engine's answers, one JSON string a line.
    """
    given = _read_answers(answers) if answers is not None else [ANSWER]
    if base_url is None:
        check_made(config)
    configure_logging(config, "agent", "agent")
    began = time.monotonic()
    messages: list[dict[str, Any]] = []
    said: dict[str, Any] = {}
    if base_url is not None:
        result = asyncio.run(play_on_server(config, base_url, api_key, example))
        failed = result.kind != "returned"
        said = {"reward": result.reward, "turns": result.turns, "metrics": result.metrics, "data": result.data}
        reason = f"{result.kind}: {result.error}" if result.error else result.kind
    else:
        played, reason = asyncio.run(play_episode(config, example, given)), "returned"
        sample, failed = played.sample, isinstance(played.sample, FailedSample)
        if isinstance(sample, FailedSample):
            reason = sample.reason
        else:
            messages, rows = sample.data.get("messages", []), max(1, len(sample.segments))
            said = {"reward": sample.reward, "rows": rows, "replayed": played.replayed, "metrics": sample.metrics}
    seconds = round(time.monotonic() - began, 1)
    if as_json:
        print(json.dumps({"failed": failed, "reason": reason, "seconds": seconds, "messages": messages, **said}))
    else:
        for message in messages:
            print(_line(message))
        print(f"agent {reason} after {seconds} s")
        for name, value in said.items():
            if value not in (None, {}):
                print(f"{name}: {json.dumps(value)}")
    if failed:
        sys.exit(ERROR_EXIT)


def _read_answers(file: Path) -> list[str]:
    """Read a file of answers; ConfigError names the line that is wrong."""
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
    except (OSError, ValueError) as error:
        raise ConfigError(f"--answers {file} can't be read: {error}") from None
    found: list[str] = []
    for number, line in enumerate(lines, start=1):
        try:
            answer = json.loads(line) if line.strip() else ""
        except ValueError:
            answer = None
        if not isinstance(answer, str):
            raise ConfigError(f'--answers {file}, line {number}: must be a JSON string, such as "7 + 5 = 12"')
        found += [answer] if line.strip() else []
    if not found:
        raise ConfigError(f'--answers {file} is empty: give one JSON string a line, such as "7 + 5 = 12"')
    return found


def _line(message: dict[str, Any]) -> str:
    calls = [f"{call['function']['name']}({call['function']['arguments']})" for call in message.get("tool_calls") or []]
    content = message.get("content") or ""
    text = content if isinstance(content, str) else json.dumps(content)
    return f"{message['role']:>9}: {' '.join([text, *calls]).strip()}"
