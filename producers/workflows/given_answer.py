"""Samples that are answers of the dataset, for supervised training beside samples that the policy generates."""

from collections.abc import AsyncIterator

import numpy as np

from producers.engines.base import Completion
from producers.tokenizer import HfTokenizer
from producers.workflows.base import RolloutContext
from producers.workflows.trajectory_builder import SampledCompletion, TrajectoryBuilder
from schemas.errors import DataError
from schemas.messages import Span


async def give_answer(
    rollout: RolloutContext, tokenizer: HfTokenizer, field: str, max_length: int
) -> AsyncIterator[SampledCompletion]:
    """Yield each sample of a task as the text in ``field`` of its data, with the token that ends a sampled answer.

    Its tokens are those of `tidemill sft` for the same prompt and answer. They count as of the version that the engine
    has now, and their log-probabilities, which nothing reads, are 0. DataError if there is no such text, or if it is
    longer than the model reads.
    """
    answer = rollout.task.data.get(field)
    if not isinstance(answer, str) or not answer:
        raise DataError(f"the row has no text in {field!r}, which reward.terms names as the answer to train")
    messages = rollout.task.messages
    end = tokenizer.eos_id if messages is None else tokenizer.closing_id(messages)
    tokens = [*tokenizer.encode(answer), end]
    if (length := len(rollout.prompt_ids) + len(tokens)) > max_length:
        raise DataError(f"prompt and given answer have {length} tokens, more than model.max_length {max_length}")
    spans = [Span(rollout.engine.version, 0, len(tokens))]
    given = Completion(tokens, np.zeros(len(tokens), np.float32), spans, "stop")
    for index in rollout.indices:
        sample = TrajectoryBuilder(index, tokenizer).prompt(rollout.prompt_ids, images=rollout.images)
        yield sample.generated(given).finish(completion=answer)
