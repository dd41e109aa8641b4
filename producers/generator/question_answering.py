"""Answers of a generator to users' questions, with the capacity that its tasks leave.

A question waits for the capacity of one sample. Weights may change during its answer, as during any request; each token
names the version that sampled it.
"""

import asyncio

import numpy as np
import structlog

from producers.engines.base import Completion
from producers.generator.context import GeneratorContext
from producers.generator.task_loop import TaskLoop
from schemas.codec import Array
from schemas.errors import InfraError, TidemillError, describe_error, printable
from schemas.messages import Question, QuestionAnswer, Reply, Task, versions_of
from schemas.system.lifecycle import StopFlag, until_stopped

log = structlog.get_logger()
_LONGEST_REASON = 2000


class QuestionAnswering:
    """The loop that answers questions, one after another, when an order announces some."""

    def __init__(self, context: GeneratorContext, tasks: TaskLoop) -> None:
        self._context = context
        self._tasks = tasks
        self._questions = context.broker.questions

    async def run(self, stop: StopFlag) -> None:
        """Answer users' questions until ``stop`` is set."""
        seen = self._context.orders.control.asked
        while not stop:
            asked = await until_stopped(stop, self._context.orders.wait_question(seen))
            if stop or asked is None:
                return
            seen = asked
            while not stop and await self._context.updates.wait_ready():
                if not await until_stopped(stop, self._answer_one()):
                    break

    async def _answer_one(self) -> bool:
        """Take a question as soon as there is capacity, and answer it; return False if there is no question."""
        async with self._tasks.reserve(1):
            question = await asyncio.to_thread(self._questions.take)
            if question is None:
                return False
            now = await asyncio.to_thread(self._context.broker.heartbeats.read_clock)
            if now > question.until:
                return True
            await self._answer(question)
            return True

    async def _answer(self, question: Question) -> None:
        """Answer a question, or say why it can't be answered. Only an InfraError is the generator's own failure."""
        name = self._context.name
        try:
            answer = QuestionAnswer(id=question.id, generator=name, replies=await self._replies(question))
            await asyncio.to_thread(self._questions.answer, answer)
            return
        except InfraError:
            raise
        except (TidemillError, ValueError) as error:
            # The prompt or the answer is too long, or the chat template rejects the messages.
            reason = printable(" ".join(str(error).split()))
        except Exception as error:
            log.warning("a question failed", exc_info=error)
            reason = describe_error(error)
        refusal = QuestionAnswer(id=question.id, generator=name, error=reason[:_LONGEST_REASON])
        await asyncio.to_thread(self._questions.answer, refusal)

    async def _replies(self, question: Question) -> list[Reply]:
        task = Task(
            task_id=0,
            kind="eval",
            n=question.n,
            sampling=question.sampling,
            text=question.text,
            messages=question.messages,
        )
        ids = await asyncio.to_thread(self._context.tokenizer.prompt_ids, task)
        return list(map(self._reply, await self._context.engine.generate(ids, question.sampling, question.n)))

    def _reply(self, completion: Completion) -> Reply:
        return Reply(
            text=self._context.tokenizer.decode(completion.tokens),
            tokens=Array.of(completion.tokens, "i4"),
            logprobs=Array.of(np.asarray(completion.logprobs, dtype=np.float32), "f4"),
            versions=Array.of(versions_of(completion.spans, len(completion.tokens)), "i4"),
            finish=completion.finish,
        )
