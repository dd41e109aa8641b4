"""The lengths of prompts in tokens, for ``max_prompt_tokens`` and for ``tidemill doctor``."""

import importlib.util
from typing import Self

from broker.queues.dead_letters import UnusableTask
from producers.datasets.base import Dataset
from producers.images.placeholders import ImagePlaceholders
from producers.images.settings import image_settings
from producers.tasks import TaskLimits, task_of
from producers.tokenizer import HfTokenizer
from schemas.config import TidemillConfig
from schemas.errors import ConfigError, DataError


class PromptMeter:
    """Counts the tokens of prompts as generators encode them, those of images included."""

    def __init__(self, config: TidemillConfig) -> None:
        self._config = config
        self._images = image_settings(config)
        self._tokenizer = HfTokenizer(config.model.path, config.model.trust_remote_code)
        self._placeholders = ImagePlaceholders.of(config)

    @classmethod
    def of(cls, config: TidemillConfig) -> Self | None:
        """Return the meter if a dataset of the run has ``max_prompt_tokens``; ConfigError without transformers."""
        datasets = [*config.train, *(config.eval.dataset if config.eval else ())]
        if all(one.max_prompt_tokens is None for one in datasets):
            return None
        if importlib.util.find_spec("transformers") is None:
            raise ConfigError("max_prompt_tokens needs the package transformers: pip install 'tidemill[text]'")
        return cls(config)

    def __call__(self, dataset: Dataset, label: str, index: int) -> int:
        """Return the tokens of an example's prompt; DataError says why it can't be used."""
        limits = TaskLimits(self._config.broker.max_message_bytes, self._images)
        task = task_of(dataset, label, index, index, "train", self._config.sampling, limits)
        if isinstance(task, UnusableTask):
            raise DataError(task.reason)
        ids = self._tokenizer.prompt_ids(task)
        return len(ids if self._placeholders is None else self._placeholders.expand(ids, task.images)[0])
