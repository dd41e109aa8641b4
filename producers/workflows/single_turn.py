"""The plain workflow: one prompt, one completion per sample."""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence

from producers.engines.base import Completion
from producers.workflows.base import RolloutContext
from producers.workflows.trajectory_builder import SampledCompletion, TrajectoryBuilder

_OnTokens = Callable[[tuple[TrajectoryBuilder, Completion, bool]], None]
"""Called with a sample, its new tokens, and whether these are all."""


class SingleTurn:
    """Samples all completions of the prompt in one request, which shares its prefix.

    A sample that another generator began resumes from what that generator handed over or saved: tokens,
    log-probabilities and versions are joined as if it had never moved.
    """

    async def run(self, rollout: RolloutContext) -> AsyncIterator[SampledCompletion]:
        prompt = rollout.tokenizer.decode(rollout.prompt_ids)
        groups: list[list[TrajectoryBuilder]] = [[]]
        for index in rollout.indices:
            trajectory = TrajectoryBuilder(index, rollout.tokenizer).prompt(rollout.prompt_ids, prompt, rollout.images)
            if index in rollout.saved:
                groups.insert(0, [trajectory.resumed(rollout.saved[index])])
            elif rollout.sampling.seed is not None and groups[-1] and groups[-1][-1].index != index - 1:
                # The seeds of a request are those of samples that follow one another.
                groups.append([trajectory])
            else:
                groups[-1].append(trajectory)
        heard: asyncio.Queue[tuple[TrajectoryBuilder, Completion, bool] | asyncio.Task[None]] = asyncio.Queue()
        requests = [asyncio.create_task(_generate(rollout, group, heard.put_nowait)) for group in groups if group]
        for request in requests:
            request.add_done_callback(heard.put_nowait)
        unfinished = len(requests)
        try:
            while unfinished:
                news = await heard.get()
                if isinstance(news, asyncio.Task):
                    news.result()
                    unfinished -= 1
                    continue
                trajectory, completion, is_all = news
                if is_all:
                    yield trajectory.generated(completion).finish()
                else:
                    rollout.save(trajectory.partial(completion))
        finally:
            for request in requests:
                request.cancel()


async def _generate(rollout: RolloutContext, group: Sequence[TrajectoryBuilder], on_tokens: _OnTokens) -> None:
    """Send one request for samples that have the same tokens so far."""
    finished: set[int] = set()

    def progress(k: int, completion: Completion) -> None:
        if completion.finish != "abort":
            finished.add(k)
        on_tokens((group[k], completion, completion.finish != "abort"))

    prefix = group[0].tokens[len(rollout.prompt_ids) :]
    completions = await rollout.engine.generate(
        rollout.prompt_ids,
        rollout.sampling_of(group[0].index),
        n=len(group),
        prefix=prefix,
        progress=progress,
        **rollout.engine_images,
    )
    for k, completion in enumerate(completions):
        if k not in finished:
            on_tokens((group[k], completion, True))
