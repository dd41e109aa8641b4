"""Self-distillation: the policy reads its own sample once more after another prompt, as its own teacher.

The generator asks its engine as soon as a sample is finished, because no other process has the weights that sampled it.
The term ``teacher_self`` of the reward takes the answer from the sample's message.
"""

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import numpy as np

from producers.engines.base import Engine
from producers.tokenizer import HfTokenizer
from producers.workflows.trajectory_builder import SampledCompletion
from schemas.codec import Array
from schemas.errors import DataError, InfraError
from schemas.messages import ChatMessage, Task


async def ask_self(
    engine: Engine,
    tokenizer: HfTokenizer,
    task: Task,
    prompt_ids: Sequence[int],
    sample: SampledCompletion,
    args: Mapping[str, Any],
    within_s: float,
) -> tuple[Array | None, str]:
    """Return the log-probabilities of a sample's tokens after the other prompt, float32 [T], or the problem.

    args: of the term. within_s: how long the engine may take to answer. The weights are those of the sample's last
    token: if the engine gets others before it has answered, there is no answer.
    """
    version = max((span.version for span in sample.spans), default=-1)
    try:
        if task.sampling.temperature != 1:
            raise DataError(f"its temperature is {task.sampling.temperature:g}, must be 1 for log-probabilities")
        if len(sample.segments) > 1 or sample.tokens[: len(prompt_ids)] != list(prompt_ids):
            raise DataError("it is not one row that begins with the task's prompt")
        prompt = tokenizer.prompt_ids(other_prompt(task, **args))
        own = sample.tokens[len(prompt_ids) :]
        _check_version(engine, version)
        async with asyncio.timeout(within_s):
            found = await engine.logprobs([*prompt, *own])
        _check_version(engine, version)
    except TimeoutError:
        return None, f"the engine gave no log-probabilities within {within_s:g} s"
    except (DataError, InfraError) as error:
        return None, str(error)
    logprobs = np.zeros(len(sample.tokens), np.float32)
    logprobs[len(prompt_ids) :] = np.minimum(found[len(prompt) - 1 :], 0.0)
    return Array.of(logprobs, "f4"), ""


def _check_version(engine: Engine, version: int) -> None:
    if engine.version != version:
        raise DataError(f"weight version {version} was replaced by {engine.version} before it had judged the sample")


def other_prompt(task: Task, system: str | None = None, template: str | None = None) -> Task:
    """Return a task with another prompt.

    system: text of the system message, in front or in place of one. template: text of the prompt, or of the last
    message of a user, with ``{prompt}`` for what it was and ``{NAME}`` for fields of the row. DataError if the prompt
    is plain text and there is a system message, or if the template does not fit the row.
    """
    if task.messages is None:
        if system is not None or task.text is None:
            raise DataError("a system message needs a dataset of chat messages")
        return msgspec.structs.replace(task, text=_fill(template, task.text, task.data))
    messages = [*task.messages]
    if system is not None:
        messages = [ChatMessage("system", system), *messages[messages[0].role == "system" :]]
    at = max((place for place, message in enumerate(messages) if message.role == "user"), default=None)
    if template is not None and at is not None:
        messages[at] = ChatMessage("user", _fill(template, messages[at].text, task.data))
    return msgspec.structs.replace(task, messages=messages)


def _fill(template: str | None, prompt: str, data: Mapping[str, Any]) -> str:
    if template is None:
        return prompt
    try:
        return template.format_map({**data, "prompt": prompt})
    except (LookupError, ValueError, TypeError, AttributeError) as error:
        raise DataError(f"template {template!r} does not fit the row: {error!r}") from error
