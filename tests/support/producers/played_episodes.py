"""Loops of our own in tests: a tokenizer with a chat template, an engine that says what a script says, and one play."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import numpy as np

from producers.engines.base import Completion, Engine, EngineSettings, ProgressCallback, PromptImage
from producers.engines.scripted import ScriptedEngine
from producers.images.placeholders import ImagePlaceholders
from producers.tokenizer import HfTokenizer
from producers.workflows.base import FailedSample, RolloutContext, SaveDone, WorkflowServices, find_workflow, running
from producers.workflows.trajectory_builder import SampledCompletion
from schemas.config import TidemillConfig, parse_config
from schemas.messages import ChatMessage, Partial, Sampling, Span, Task
from schemas.messages.moments import Noted
from tests.support.models.chat_templates import SOURCES, STOPS, write_tokenizer

Says = Callable[[str], str]
END = "<|im_end|>"


def chat_tokenizer(folder: Path, name: str = "append only") -> HfTokenizer:
    """A tokenizer in ``folder`` with this chat template."""
    write_tokenizer(folder, stops=STOPS[name])
    (folder / "chat_template.jinja").write_text(SOURCES[name], encoding="utf-8")
    return HfTokenizer(str(folder))


class SpeakingEngine(ScriptedEngine):
    """Answers the text of each prompt with what ``says`` makes of it, and with the template's end of a turn.

    prompts: texts it was asked with; prefixes, seeds, images: of each. At an answer ``...`` it waits to be aborted,
    with the first ``cut`` tokens of what comes after the dots. A stop string ends an answer, and stays in it.
    length: as ``model.max_length``.
    """

    def __init__(self, tokenizer: HfTokenizer, says: Says, version: int = 3, cut: int = 0, length: int = 4096) -> None:
        super().__init__(EngineSettings("none", "float32", length, 8, version=version))
        self._tokenizer, self._says, self._cut = tokenizer, says, cut
        self.prompts: list[str] = []
        self.prefixes: list[list[int]] = []
        self.seeds: list[int | None] = []
        self.images: list[list[PromptImage]] = []
        self.waiting = asyncio.Event()

    async def generate(
        self,
        prompt_ids: Sequence[int],
        sampling: Sampling,
        n: int = 1,
        prefix: Sequence[int] = (),
        progress: ProgressCallback | None = None,
        images: Sequence[PromptImage] = (),
    ) -> list[Completion]:
        prompt = self._tokenizer.decode_all(prompt_ids)
        self.prompts.append(prompt)
        self.prefixes.append(list(prefix))
        self.seeds.append(sampling.seed)
        self.images.append(list(images))
        await asyncio.sleep(0)
        text = self._says(prompt)
        if text.startswith("..."):
            self.waiting.set()
            async with self._gate.held_closed():
                await self._gate.wait_open()
            ids = self._tokenizer.encode(text.removeprefix("..."))[: self._cut]
            return [self._completion(ids, "abort")]
        stopped = min((text.index(word) + len(word) for word in sampling.stop if word in text), default=None)
        ids = self._tokenizer.encode(text + END if stopped is None else text[:stopped])[len(prefix) :]
        cut = len(ids) > sampling.max_tokens
        return [self._completion(ids[: sampling.max_tokens], "length" if cut else "stop")]

    def _completion(self, ids: list[int], finish: Any) -> Completion:
        logprobs = np.full(len(ids), -0.5, np.float32)
        return Completion(ids, logprobs, [Span(self.version, 0, len(ids))] if ids else [], finish)


def loop_config(base: Path, name: str, args: dict[str, Any], **agents: Any) -> TidemillConfig:
    """A configuration in whose folder ``base`` the user's files lie."""
    data = {
        "model": {"path": str(base), "max_length": 4096},
        "train": {"name": "arithmetic"},
        "reward": {"terms": [{"name": "exact"}]},
        "generator": {"engine": "scripted", "workflow": {"name": name, "args": args}, "agents": agents},
    }
    return parse_config(data, base=base)


async def play(
    config: TidemillConfig,
    engine: Engine,
    tokenizer: HfTokenizer,
    task: Task,
    *,
    saved: list[Partial] | None = None,
    interrupted: asyncio.Event | None = None,
    placeholders: ImagePlaceholders | None = None,
    files: dict[str, bytes] | None = None,
    moments: dict[int, list[Noted]] | None = None,
) -> list[SampledCompletion | FailedSample]:
    """The samples of a task, as the configured workflow plays them, in the order of their indices."""
    chosen = config.generator.workflow
    workflow = find_workflow(chosen.name, chosen.args, config.base)()
    async with running(workflow, WorkflowServices(engine, tokenizer, config)):
        rollout = RolloutContext(
            engine, tokenizer, task, range(task.n), placeholders=placeholders, files=files or {}, moments=moments
        )
        if saved is not None:
            rollout = replace(rollout, save=keep_in(saved))
        if interrupted is not None:
            rollout = replace(rollout, interrupted=interrupted)
        samples = [sample async for sample in workflow.run(rollout)]
    return sorted(samples, key=lambda sample: sample.index)


def keep_in(saved: list[Partial]) -> Callable[[Partial], SaveDone]:
    """What keeps the states of growing samples in this list."""

    def save(partial: Partial) -> SaveDone:
        saved.append(partial)
        return SaveDone()

    return save


def chat_task(
    text: str,
    n: int = 1,
    task_id: int = 7,
    partials: Sequence[Partial] = (),
    kind: Literal["train", "eval"] = "train",
    **more: Any,
) -> Task:
    sampling = Sampling(**{"max_tokens": 400, **more})
    messages = [ChatMessage("user", text)]
    return Task(task_id=task_id, kind=kind, n=n, sampling=sampling, messages=messages, data={}, partials=list(partials))
