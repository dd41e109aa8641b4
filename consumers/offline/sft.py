"""Supervised training on prompt and completion pairs, stopped by held-out accuracy.

Any Hugging Face causal language model can be trained; the result is what a run starts from (``warm_start``). Only
completion tokens and the end of sequence are learned. The model appears in its folder whole or not at all.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AutoTokenizer, PreTrainedModel

from consumers.offline.greedy import greedy
from consumers.offline.pairs import batches
from consumers.offline.provenance import DETAILS, settings_digest
from consumers.trainer.checkpoint.files import whole_folder
from consumers.trainer.distributed.ranks import Ranks
from consumers.trainer.model.hf_weights import named_weights, save_weights
from consumers.trainer.model.policy import DTYPES, load_model
from schemas.config import WarmStartConfig
from schemas.errors import ConfigError, DataError

Pair: TypeAlias = tuple[str, str]
Source: TypeAlias = str | Path | Callable[[Path, int], None]
WARMUP_STEPS = 20
FINISH_FACTOR = 0.1
"""Share of the learning rate that is left when the accuracy is about to reach its mark."""


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

    reached: whether that is the accuracy asked for. settings: digest of all that decides the outcome.
    """

    accuracy: float
    steps: int
    seconds: float
    reached: bool
    settings: str


def train_sft(
    out: Path,
    source: Source,
    examples: Sequence[Pair],
    heldout: Sequence[Pair],
    settings: WarmStartConfig,
    *,
    seed: int = 0,
    dtype: str = "float32",
    progress: Callable[[SftProgress], None] | None = None,
    trust_remote_code: bool = False,
    ranks: Ranks | None = None,
) -> SftResult:
    """Train until the greedy accuracy on ``heldout`` reaches ``settings.stop_accuracy`` and write the model to ``out``.

    source: a model folder or hub id, or a function (folder, seed) that writes an untrained model.
    examples, heldout: (prompt, completion) texts; a completion counts when it is reproduced exactly.
    dtype: of computing, and of the written model; what is trained is float32.
    ``out`` holds the model, its tokenizer and ``sft.json`` afterwards; it must not exist before.
    ranks: all of them call this, and have the folder of ``out``; rank 0 writes, and reports to ``progress``.
    ConfigError if there is nothing to learn from or the mark isn't reached within ``settings.max_steps``.
    """
    if not examples or not heldout:
        raise ConfigError(f"warm_start needs examples in both sets, has {len(examples)} and {len(heldout)}")
    ranks = ranks or Ranks()
    with whole_folder(out, "model.path", main=ranks.is_main) as aside:
        if callable(source) and ranks.is_main:
            source(aside, seed)
        # The others read what rank 0 has written.
        start = ranks.broadcast_text(str(aside if callable(source) else source))
        tokenizer = AutoTokenizer.from_pretrained(start, trust_remote_code=trust_remote_code)
        model = ranks.prepare(load_model(start, "float32", trust_remote_code), DTYPES[dtype])
        trainer = _Trainer(model, tokenizer, examples, heldout, settings, ranks)
        result = trainer.train(progress if ranks.is_main else None, seed, settings_digest(settings, seed, dtype))
        if not result.reached:
            raise ConfigError(
                f"warm start reached accuracy {result.accuracy:.2f} of {settings.stop_accuracy} within"
                f" warm_start.max_steps {settings.max_steps}: raise that or lower warm_start.stop_accuracy"
            )
        save_weights(model, named_weights(model), aside, dtype, main=ranks.is_main)
        if ranks.is_main:
            tokenizer.save_pretrained(aside)
            (aside / DETAILS).write_text(json.dumps(asdict(result), indent=2) + "\n", encoding="utf-8")
    return result


class _Trainer:
    """The training loop: optimizer steps, and an evaluation now and then, more often as the accuracy nears its mark."""

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: Any,
        examples: Sequence[Pair],
        heldout: Sequence[Pair],
        settings: WarmStartConfig,
        ranks: Ranks,
    ) -> None:
        self.model = model
        self.tokenizer = tokenizer
        self.settings = settings
        self.ranks = ranks
        self.examples = [self._ids(pair) for pair in examples]
        self.heldout = [self._ids(pair) for pair in heldout]
        self.optimizer = torch.optim.AdamW(
            model.parameters(), lr=settings.lr, betas=(0.9, 0.95), weight_decay=0.0, fused=True
        )

    def train(self, progress: Callable[[SftProgress], None] | None, seed: int, digest: str) -> SftResult:
        settings, started = self.settings, time.perf_counter()
        mark = settings.stop_accuracy
        accuracy, step, losses = 0.0, 0, list[Tensor]()
        next_look = settings.eval_every
        for batch in batches(self.examples, settings.batch_size, seed):
            step += 1
            losses.append(self._step(batch, self._lr(step, accuracy)))
            if step < next_look and step < settings.max_steps:
                continue
            accuracy = self._accuracy()
            mean = self.ranks.all_reduce_sum([float(torch.stack(losses).sum())])[0] / len(losses)
            if progress:
                progress(SftProgress(step, mean, accuracy, time.perf_counter() - started))
            losses.clear()
            if accuracy >= mark or step >= settings.max_steps:
                break
            # Accuracy can jump by tenths within a few steps: look often when it is near.
            closeness = 10 if accuracy >= mark / 2 else 4 if accuracy >= mark / 4 else 1
            next_look = step + max(1, settings.eval_every // closeness)
        seconds = time.perf_counter() - started
        return SftResult(accuracy, step, round(seconds, 2), accuracy >= mark, digest)

    def _ids(self, pair: Pair) -> tuple[list[int], list[int]]:
        """Prompt ids and completion ids, the latter with the end of sequence."""
        prompt, completion = (self.tokenizer(text, add_special_tokens=False).input_ids for text in pair)
        if not prompt or not completion:
            raise DataError(f"example {pair!r} has an empty prompt or completion")
        return prompt, [*completion, self.tokenizer.eos_token_id]

    def _lr(self, step: int, accuracy: float) -> float:
        """Warm-up, then falling as the accuracy nears its mark, so that it isn't overshot."""
        left = max(0.0, 1.0 - accuracy / self.settings.stop_accuracy)
        return self.settings.lr * min(1.0, step / WARMUP_STEPS) * max(FINISH_FACTOR, min(1.0, 1.5 * left))

    def _step(self, batch: list[tuple[list[int], list[int]]], lr: float) -> Tensor:
        """Update the weights; returns this rank's share of the mean loss of the batch's completion tokens."""
        device, count = self.model.device, sum(len(completion) for _, completion in batch)
        own, weights = self.ranks.local_share(batch)
        longest = max(len(p) + len(c) for p, c in own)
        tokens = torch.zeros(len(own), longest, dtype=torch.int64)
        labels = torch.full((len(own), longest), -100)
        for row, ((prompt, completion), weight) in enumerate(zip(own, weights, strict=True)):
            end = len(prompt) + len(completion)
            tokens[row, :end] = torch.tensor(prompt + completion)
            if weight:
                labels[row, len(prompt) : end] = torch.tensor(completion)
        logits = self.model(input_ids=tokens[:, :-1].to(device), use_cache=False).logits
        targets = labels[:, 1:].flatten().to(device)
        loss = F.cross_entropy(logits.flatten(0, 1).float(), targets, reduction="sum") / count
        self.ranks.backward(loss)
        self.ranks.clip_grad_norm(self.model.parameters(), 1.0)
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    def _accuracy(self) -> float:
        """Accuracy on all held-out prompts, of which each rank answers its share."""
        longest = max(len(completion) for _, completion in self.heldout)
        own, weights = self.ranks.local_share(self.heldout)
        prompts = [prompt for prompt, _ in own]
        answers = greedy(self.model, prompts, longest, self.tokenizer.eos_token_id, all_ended=self._all)
        right = sum(w for a, (_, c), w in zip(answers, own, weights, strict=True) if a == c[:-1])
        return self.ranks.all_reduce_sum([right])[0] / len(self.heldout)

    def _all(self, this: bool) -> bool:
        """True if ``this`` is true on every rank."""
        return not self.ranks.all_reduce_max([float(not this)])[0]
