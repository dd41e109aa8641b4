"""Task messages from dataset examples and sampling settings, for the feeder and for evaluation without a broker."""

from __future__ import annotations

from producers.datasets.base import Example
from schemas.config import SamplingConfig
from schemas.messages import Kind, Sampling, Task


def make_sampling(settings: SamplingConfig) -> Sampling:
    """The message for the sampling settings."""
    return Sampling(
        temperature=settings.temperature,
        top_p=settings.top_p,
        top_k=settings.top_k,
        max_tokens=settings.max_tokens,
        stop=list(settings.stop),
    )


def make_task(
    task_id: int, kind: Kind, example: Example, sampling: SamplingConfig, dataset: str = "", level: int = -1
) -> Task:
    """The message for one example of the dataset with this label, at a level where it has some."""
    return Task(
        task_id=task_id,
        kind=kind,
        n=sampling.n,
        sampling=make_sampling(sampling),
        text=example.text,
        messages=example.messages,
        data=example.data,
        dataset=dataset,
        level=level,
    )
