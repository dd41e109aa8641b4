"""The plain workflow: one prompt, one completion per sample."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence

import numpy as np

from producers.engines.base import Completion, Engine
from producers.workflows.base import SampledCompletion, Tokenizer
from schemas.codec import Array
from schemas.messages import Partial, Span, Task, Turn

_Ended = list[tuple[int, Completion]]
_Hear = Callable[[tuple[int, Completion]], None]


class SingleTurn:
    """Samples all completions of the prompt in one request, which shares its prefix.

    A sample that another generator had begun goes on from what that one handed over or had saved: tokens,
    log-probabilities and versions are joined as if it had never moved.
    """

    async def run(
        self, engine: Engine, tokenizer: Tokenizer, task: Task, samples: Sequence[int]
    ) -> AsyncIterator[SampledCompletion | Partial]:
        prompt_ids = tokenizer.prompt_ids(task)
        prompt = tokenizer.decode(prompt_ids)
        partials = {part.sample: part for part in task.partials if len(part.tokens)}
        fresh = [index for index in samples if index not in partials]
        heard: asyncio.Queue[tuple[int, Completion] | asyncio.Task[_Ended]] = asyncio.Queue()
        jobs = [_begin(engine, prompt_ids, task, fresh, heard.put_nowait)] if fresh else []
        jobs += [
            _go_on(engine, prompt_ids, task, partials[index], heard.put_nowait)
            for index in samples
            if index in partials
        ]
        running = [asyncio.create_task(job) for job in jobs]
        for job in running:
            job.add_done_callback(heard.put_nowait)
        unfinished, told = len(running), set()
        try:
            while unfinished:
                news = await heard.get()
                if isinstance(news, asyncio.Task):
                    unfinished -= 1
                    ended = [found for found in news.result() if found[0] not in told]
                elif news[1].finish == "abort":
                    yield _partial(*news)
                    continue
                else:
                    ended = [news]
                for index, completion in ended:
                    told.add(index)
                    yield _sample(index, prompt_ids, completion, prompt, tokenizer)
        finally:
            for job in running:
                job.cancel()


async def _begin(engine: Engine, prompt_ids: list[int], task: Task, indices: Sequence[int], hear: _Hear) -> _Ended:
    def progress(k: int, completion: Completion) -> None:
        hear((indices[k], completion))

    completions = await engine.generate(prompt_ids, task.sampling, n=len(indices), progress=progress)
    return list(zip(indices, completions, strict=True))


async def _go_on(engine: Engine, prompt_ids: list[int], task: Task, part: Partial, hear: _Hear) -> _Ended:
    def progress(_: int, completion: Completion) -> None:
        hear((part.sample, join(part, completion)))

    prefix: list[int] = part.tokens.numpy().tolist()
    (new,) = await engine.generate(prompt_ids, task.sampling, prefix=prefix, progress=progress)
    return [(part.sample, join(part, new))]


def _partial(index: int, completion: Completion) -> Partial:
    return Partial(
        sample=index,
        tokens=Array.of(completion.tokens, "i4"),
        logprobs=Array.of(completion.logprobs, "f4"),
        spans=completion.spans,
    )


def join(part: Partial, new: Completion) -> Completion:
    """One completion out of what was handed over and what was generated after it."""
    offset = len(part.tokens)
    spans = list(part.spans)
    for span in new.spans:
        last = spans[-1] if spans else None
        if last is not None and last.version == span.version and last.end == span.start + offset:
            spans[-1] = Span(span.version, last.start, span.end + offset)
        else:
            spans.append(Span(span.version, span.start + offset, span.end + offset))
    return Completion(
        [*part.tokens.numpy().tolist(), *new.tokens],
        np.concatenate([part.logprobs.numpy(), new.logprobs]).astype(np.float32),
        spans,
        new.finish,
    )


def _sample(
    index: int, prompt_ids: list[int], completion: Completion, prompt: str, tokenizer: Tokenizer
) -> SampledCompletion:
    start, total = len(prompt_ids), len(prompt_ids) + len(completion.tokens)
    turns = [Turn("prompt", 0, start)]
    if completion.tokens:
        turns.append(Turn("assistant", start, total))
    return SampledCompletion(
        index=index,
        tokens=[*prompt_ids, *completion.tokens],
        loss_mask=[0] * start + [1] * len(completion.tokens),
        logprobs=[0.0] * start + completion.logprobs.tolist(),
        spans=[Span(span.version, span.start + start, span.end + start) for span in completion.spans],
        turns=turns,
        finish=completion.finish,
        prompt=prompt,
        completion=tokenizer.decode(completion.tokens),
    )
