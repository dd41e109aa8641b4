"""Answers of a generator to questions of people, on what room it has beside its tasks.

A question waits until samples of training leave room, and takes one place. New weights may come in under it, as under
any request; each token says which version sampled it.
"""

from __future__ import annotations

import asyncio
from contextlib import AbstractAsyncContextManager
from typing import Protocol

import numpy as np
import structlog

from producers.engines.base import Completion
from producers.generator.rollout import GeneratorContext
from schemas.codec import Array
from schemas.errors import DataError, InfraError
from schemas.messages import Question, QuestionAnswer, Reply, Task, versions_of
from schemas.system.lifecycle import StopFlag, until_stopped

log = structlog.get_logger()


class Places(Protocol):
    """The places of a generator, which tasks and questions share."""

    def places(self, samples: int) -> AbstractAsyncContextManager[None]:
        """Wait for room for so many samples, and hold it."""
        ...


class QuestionAnswering:
    """Takes questions when it is woken by an order, one after another, and answers each."""

    def __init__(self, context: GeneratorContext, room: Places) -> None:
        self._context = context
        self._room = room
        self._questions = context.broker.questions

    async def run(self, stop: StopFlag) -> None:
        """Answer until stop."""
        seen = self._context.pause.control.asked
        while not stop:
            asked = await until_stopped(stop, self._context.pause.wait_question(seen))
            if stop or asked is None:
                return
            seen = asked
            while not stop and await self._context.updates.wait_ready():
                if not await until_stopped(stop, self._answer_one()):
                    break

    async def _answer_one(self) -> bool:
        """Take a question as soon as there is room, and answer it; False without one."""
        async with self._room.places(1):
            question = await asyncio.to_thread(self._questions.take)
            if question is None:
                return False
            now = await asyncio.to_thread(self._context.broker.heartbeats.read_clock)
            if now > question.until:
                return True
            answer = await self._answer(question)
            await asyncio.to_thread(self._questions.answer, answer)
            return True

    async def _answer(self, question: Question) -> QuestionAnswer:
        name = self._context.name
        try:
            task = Task(
                task_id=0,
                kind="eval",
                n=question.n,
                sampling=question.sampling,
                text=question.text,
                messages=question.messages,
            )
            ids = await asyncio.to_thread(self._context.tokenizer.prompt_ids, task)
            completions = await self._context.engine.generate(ids, question.sampling, question.n)
        except InfraError:
            raise
        except (DataError, ValueError) as error:
            # The prompt is too long, or the chat template refuses it.
            return QuestionAnswer(id=question.id, generator=name, error=" ".join(str(error).split()))
        return QuestionAnswer(id=question.id, generator=name, replies=[self._reply(one) for one in completions])

    def _reply(self, completion: Completion) -> Reply:
        return Reply(
            text=self._context.tokenizer.decode(completion.tokens),
            tokens=Array.of(completion.tokens, "i4"),
            logprobs=Array.of(np.asarray(completion.logprobs, dtype=np.float32), "f4"),
            versions=Array.of(versions_of(completion.spans, len(completion.tokens)), "i4"),
            finish=completion.finish,
        )
