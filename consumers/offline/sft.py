"""Supervised training on prompt and completion pairs, stopped by held-out accuracy.

Any Hugging Face causal language model can be trained; the result is what a run starts from (``warm_start``). Only
completion tokens and the end of sequence are learned, after prompts as generators encode them. The model appears in its
folder whole or not at all.
"""

import json
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias, cast

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, register_fsdp_forward_method

from consumers.offline.encoding import (
    Demonstration,
    DemonstrationIds,
    LoadTokenizer,
    Placeholders,
    encode_demonstration,
)
from consumers.offline.loop import (
    DEFAULT_LIMITS,
    MemoryLimits,
    MicroBatches,
    OfflineStep,
    answer_logprobs,
    answer_tokens,
    batches,
    image_batch,
    load_policy,
)
from consumers.offline.provenance import settings_digest
from consumers.trainer.checkpoint.files import whole_folder
from consumers.trainer.data.packed import lay_out
from consumers.trainer.data.patches import ImageBatch
from consumers.trainer.distributed.layout import check_model
from consumers.trainer.distributed.ranks import Ranks
from consumers.trainer.model.hf_weights import named_weights, save_weights
from consumers.trainer.model.policy import DTYPES, Policy, last_hidden
from schemas.config import ModelConfig, WarmStartConfig
from schemas.errors import ConfigError
from schemas.model_folder import PROVENANCE, find_tokens

Source: TypeAlias = str | Path | Callable[[Path, int], None]
WARMUP_STEPS = 20
FINISH_FACTOR = 0.1
"""Share of the learning rate that is left as the accuracy reaches its mark."""


@dataclass(frozen=True)
class SftProgress:
    """An evaluation while training: loss is the mean over the steps since the last one, seconds since the start."""

    step: int
    loss: float
    accuracy: float
    seconds: float


@dataclass(frozen=True)
class SftResult:
    """Held-out greedy accuracy of the written model, and the optimizer steps and seconds that it took.

    settings: digest of all that decides the outcome.
    """

    accuracy: float
    steps: int
    seconds: float
    settings: str


def train_sft(
    model: ModelConfig,
    source: Source,
    examples: Sequence[Sequence[Any]],
    heldout: Sequence[Sequence[Any]],
    settings: WarmStartConfig,
    *,
    load_tokenizer: LoadTokenizer,
    limits: MemoryLimits = DEFAULT_LIMITS,
    seed: int = 0,
    progress: Callable[[SftProgress], None] | None = None,
    ranks: Ranks | None = None,
    base: Path | None = None,
    load_places: Callable[[str], Placeholders] | None = None,
) -> SftResult:
    """Train until the greedy accuracy on ``heldout`` reaches ``settings.stop_accuracy`` and write ``model.path``.

    Without that accuracy, train for ``settings.max_steps``. What is trained is float32, whatever ``model.dtype``.

    source: a model folder or hub id, or a function (folder, seed) that writes an untrained model.
    examples, heldout: parts of a Demonstration, whose answer counts when it is reproduced exactly.
    load_tokenizer: loads the generators' tokenizer. load_places: finds the places of images of a model that reads them.
    ``model.path`` holds the model, its tokenizer and ``sft.json`` afterwards; it must not exist before.
    base: folder of the files that settings name, whose content is part of the model's provenance.
    ranks: all of them call this, and have the folder of ``model.path``; rank 0 writes, and reports to ``progress``.
    ConfigError if there is nothing to learn from or the mark isn't reached within ``settings.max_steps``.
    """
    if not examples or not heldout:
        raise ConfigError(f"warm_start needs examples in both sets, has {len(examples)} and {len(heldout)}")
    ranks = ranks or Ranks()
    dtype = model.dtype
    with whole_folder(Path(model.path), "model.path", main=ranks.is_main) as aside:
        if callable(source) and ranks.is_main:
            source(aside, seed)
        # The others read what rank 0 has written.
        start = ranks.broadcast_text(str(aside if callable(source) else source))
        check_model(start, ranks.layout, model.trust_remote_code)
        tokenizer = load_tokenizer(start)
        places = None if load_places is None else load_places(start)
        only = find_tokens(start, model.output_tokens)
        encode = partial(encode_demonstration, tokenizer, max_length=model.max_length, places=places, allowed=only)
        own, other = ([encode(Demonstration(*one)) for one in part] for part in (examples, heldout))
        trained = load_policy(_Model, model, start, limits, ranks, places, "float32", only)
        limits.apply(trained.causal_lm)
        trained = ranks.prepare(trained, DTYPES[dtype])
        if isinstance(trained, FSDPModule):
            register_fsdp_forward_method(trained, "choices")
        reported = progress if ranks.is_main else None
        last = _Training(trained, other, settings, limits, ranks, reported).run(own, DTYPES[dtype], seed)
        digest = settings_digest(settings, seed, dtype, base)
        result = SftResult(last.accuracy, last.step, round(last.seconds, 2), digest)
        save_weights(trained.causal_lm, named_weights(trained), aside, dtype, ranks)
        if ranks.is_main:
            tokenizer.save(aside)
            (aside / PROVENANCE).write_text(json.dumps(asdict(result), indent=2) + "\n", encoding="utf-8")
    return result


class _Model(Policy):
    """The model in training, which answers, too."""

    def choices(self, tokens: Tensor, targets: Tensor, mask: Tensor, images: ImageBatch | None) -> Tensor:
        """Return whether each row's masked targets are the most likely tokens, bool [R]; tensors as in ``forward``.

        They are what the model would say exactly if it would say all of them.
        """
        layout = lay_out(tokens[:, :-1], mask)
        features = layout.states_of(last_hidden(self.causal_lm, self.vision, tokens[:, :-1], images, layout))
        logits = cast(nn.Module, self.causal_lm.get_output_embeddings())(features)
        allowed, aims = self._allowed(layout.own_of(targets))
        wrong = (logits if allowed is None else logits[:, allowed]).argmax(-1) != aims
        return ~layout.spread(wrong).any(-1)


@dataclass
class _Training:
    """Training with evaluations now and then, more often as the accuracy nears its mark."""

    model: _Model
    heldout: Sequence[DemonstrationIds]
    settings: WarmStartConfig
    limits: MemoryLimits
    ranks: Ranks
    progress: Callable[[SftProgress], None] | None
    started: float = field(default_factory=time.perf_counter)
    best: float = 0.0
    last: SftProgress = field(init=False)

    def run(self, examples: Sequence[DemonstrationIds], dtype: torch.dtype, seed: int) -> SftProgress:
        """Train, and return the last evaluation; ConfigError if its accuracy is not the one that was asked for."""
        settings = self.settings
        optimizer = torch.optim.AdamW(
            self.model.parameters(), lr=settings.lr, betas=(0.9, 0.95), weight_decay=0.0, fused=True
        )
        cut = MicroBatches[DemonstrationIds](self.ranks, lambda row: len(row.ids), self.limits, self.model.packed)
        step = OfflineStep(self.model, optimizer, cut, self.ranks, dtype, max_grad_norm=1.0)
        first = min(settings.eval_every, settings.max_steps)
        step.train(batches(examples, settings.batch_size, seed), self._loss, self._lr, self._evaluate, first)
        if self.last.accuracy < (settings.stop_accuracy or 0):
            raise ConfigError(
                f"warm start reached accuracy {self.last.accuracy:.2f} of {settings.stop_accuracy} within"
                f" warm_start.max_steps {settings.max_steps}: raise that or lower warm_start.stop_accuracy"
            )
        return self.last

    def _loss(self, batch: Sequence[DemonstrationIds], rows: Sequence[DemonstrationIds]) -> Tensor:
        """Compute these rows' part of the mean loss of the batch's completion tokens."""
        return -answer_logprobs(self.model, rows).sum() / sum(len(row.answer) for row in batch)

    def _evaluate(self, step: int, loss: float) -> int | None:
        settings, accuracy = self.settings, self._accuracy()
        self.best = max(self.best, accuracy)
        self.last = SftProgress(step, loss, accuracy, time.perf_counter() - self.started)
        if self.progress:
            self.progress(self.last)
        mark = settings.stop_accuracy or math.inf
        if accuracy >= mark or step >= settings.max_steps:
            return None
        # Accuracy can jump by tenths within a few steps: evaluate often near the mark.
        closeness = 10 if accuracy >= mark / 2 else 4 if accuracy >= mark / 4 else 1
        return min(step + max(1, settings.eval_every // closeness), settings.max_steps)

    def _lr(self, step: int) -> float:
        """Return the learning rate: a warm-up, then a fall as the best accuracy so far, or the step, nears its mark.

        It does not rise again if the accuracy falls, which would make an unstable training less stable.
        """
        mark = self.settings.stop_accuracy
        left = max(0.0, 1.0 - (self.best / mark if mark else step / self.settings.max_steps))
        return self.settings.lr * min(1.0, step / WARMUP_STEPS) * max(FINISH_FACTOR, min(1.0, 1.5 * left))

    def _accuracy(self) -> float:
        """Measure the accuracy on all held-out prompts, of which each rank answers its share."""
        longest = max(len(row.answer) for row in self.heldout)
        own, weights = self.ranks.local_share(self.heldout)
        # Of all ranks' prompts: each needs as many forward passes as the others.
        rows = self.limits.micro_batch_tokens // (longest + max(len(row.prompt) for row in self.heldout))
        size = min(512, max(1, rows))
        chosen = [hit for start in range(0, len(own), size) for hit in self._choose(own[start : start + size])]
        right = sum(weight for hit, weight in zip(chosen, weights, strict=True) if hit)
        return self.ranks.all_reduce_sum([right])[0] / len(self.heldout)

    @torch.no_grad()
    def _choose(self, rows: Sequence[DemonstrationIds]) -> list[bool]:
        """Return whether each answer is the one that the model would give at temperature 0."""
        tokens, mask, _ = (each.to(self.model.device) for each in answer_tokens(rows))
        found: list[bool] = self.model.choices(tokens, tokens[:, 1:], mask, image_batch(self.model, rows)).tolist()
        return found
