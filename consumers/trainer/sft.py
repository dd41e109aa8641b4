"""Supervised training on prompt and completion pairs, stopped by held-out accuracy.

It makes the model that a run starts from (``warm_start``) and trains any Hugging Face causal language
model. Only completion tokens and the end of sequence are learned. The result appears in its folder whole or not at all.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AutoTokenizer, PreTrainedModel

from consumers.trainer.folder import whole_folder
from consumers.trainer.greedy import greedy
from consumers.trainer.policy import load_model
from consumers.trainer.provenance import DETAILS, settings_digest
from schemas.config.models import WarmStartConfig
from schemas.errors import ConfigError, DataError

Pair: TypeAlias = tuple[str, str]
Source: TypeAlias = str | Path | Callable[[Path, int], None]
WARMUP_STEPS = 20
FINISH_FACTOR = 0.1
"""Share of the learning rate that is left when the accuracy is about to reach its mark."""


@dataclass(frozen=True)
class SftProgress:
    """One look at the model: loss is the mean over the steps since the last look."""

    step: int
    loss: float
    accuracy: float
    seconds: float


@dataclass(frozen=True)
class SftResult:
    """Held-out greedy accuracy of the written model, optimizer steps and wall time that it took."""

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
) -> SftResult:
    """Train until the greedy accuracy on ``heldout`` reaches ``settings.stop_accuracy`` and write the model to ``out``.

    source: a model folder or hub id, or a function (folder, seed) that writes an untrained model.
    examples, heldout: (prompt, completion) texts; a completion counts when it is reproduced exactly.
    ``out`` holds the model, its tokenizer and ``sft.json`` afterwards; it must not exist before.
    ConfigError if there is nothing to learn from or the mark isn't reached within ``settings.max_steps``.
    """
    if not examples or not heldout:
        raise ConfigError(f"warm_start needs examples in both sets, has {len(examples)} and {len(heldout)}")
    with whole_folder(out, "model.path") as aside:
        if callable(source):
            source(aside, seed)
        start = aside if callable(source) else source
        tokenizer = AutoTokenizer.from_pretrained(str(start), trust_remote_code=trust_remote_code)
        model = load_model(start, dtype, trust_remote_code)
        device = "cuda" if torch.cuda.is_available() else "cpu"
        trainer = _Trainer(model.to(device), tokenizer, examples, heldout, settings, seed)
        result = trainer.train(progress)
        if not result.reached:
            raise ConfigError(
                f"warm start reached accuracy {result.accuracy:.2f} of {settings.stop_accuracy} within"
                f" warm_start.max_steps {settings.max_steps}: raise that or lower warm_start.stop_accuracy"
            )
        model.save_pretrained(aside)
        tokenizer.save_pretrained(aside)
        (aside / DETAILS).write_text(json.dumps(asdict(result), indent=2) + "\n", encoding="utf-8")
    return result


class _Trainer:
    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: Any,
        examples: Sequence[Pair],
        heldout: Sequence[Pair],
        settings: WarmStartConfig,
        seed: int,
    ) -> None:
        self.model = model
        self.tokenizer = tokenizer
        self.settings = settings
        self.seed = seed
        self.examples = [self._ids(pair) for pair in examples]
        self.heldout = [self._ids(pair) for pair in heldout]
        self.optimizer = torch.optim.AdamW(
            model.parameters(), lr=settings.lr, betas=(0.9, 0.95), weight_decay=0.0, fused=True
        )

    def train(self, progress: Callable[[SftProgress], None] | None) -> SftResult:
        settings, started = self.settings, time.perf_counter()
        mark = settings.stop_accuracy
        accuracy, step, losses = 0.0, 0, list[Tensor]()
        next_look = settings.eval_every
        for batch in self._batches():
            step += 1
            losses.append(self._step(batch, self._lr(step, accuracy)))
            if step < next_look and step < settings.max_steps:
                continue
            accuracy = self._accuracy()
            if progress:
                mean = float(torch.stack(losses).mean())
                progress(SftProgress(step, mean, accuracy, time.perf_counter() - started))
            losses.clear()
            if accuracy >= mark or step >= settings.max_steps:
                break
            # Accuracy can jump by tenths within a few steps: look often when it is near.
            closeness = 10 if accuracy >= mark / 2 else 4 if accuracy >= mark / 4 else 1
            next_look = step + max(1, settings.eval_every // closeness)
        seconds = time.perf_counter() - started
        digest = settings_digest(settings, self.seed, str(self.model.dtype).removeprefix("torch."))
        return SftResult(accuracy, step, round(seconds, 2), accuracy >= mark, digest)

    def _ids(self, pair: Pair) -> tuple[list[int], list[int]]:
        """Prompt ids and completion ids, the latter with the end of sequence."""
        prompt, completion = (self.tokenizer(text, add_special_tokens=False).input_ids for text in pair)
        if not prompt or not completion:
            raise DataError(f"example {pair!r} has an empty prompt or completion")
        return prompt, [*completion, self.tokenizer.eos_token_id]

    def _batches(self) -> Iterator[list[tuple[list[int], list[int]]]]:
        """Endless batches, every epoch in a new order; the last of an epoch may be smaller."""
        generator = torch.Generator().manual_seed(self.seed)
        while True:
            order = torch.randperm(len(self.examples), generator=generator).tolist()
            for start in range(0, len(order), self.settings.batch_size):
                yield [self.examples[i] for i in order[start : start + self.settings.batch_size]]

    def _lr(self, step: int, accuracy: float) -> float:
        """Warm-up, then falling as the accuracy nears its mark, so that it isn't overshot."""
        left = max(0.0, 1.0 - accuracy / self.settings.stop_accuracy)
        return self.settings.lr * min(1.0, step / WARMUP_STEPS) * max(FINISH_FACTOR, min(1.0, 1.5 * left))

    def _step(self, batch: list[tuple[list[int], list[int]]], lr: float) -> Tensor:
        device = self.model.device
        longest = max(len(p) + len(c) for p, c in batch)
        tokens = torch.zeros(len(batch), longest, dtype=torch.int64)
        labels = torch.full((len(batch), longest), -100)
        for row, (prompt, completion) in enumerate(batch):
            end = len(prompt) + len(completion)
            tokens[row, :end] = torch.tensor(prompt + completion)
            labels[row, len(prompt) : end] = torch.tensor(completion)
        logits = self.model(input_ids=tokens[:, :-1].to(device), use_cache=False).logits
        loss = F.cross_entropy(logits.flatten(0, 1).float(), labels[:, 1:].flatten().to(device))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    def _accuracy(self) -> float:
        longest = max(len(completion) for _, completion in self.heldout)
        answers = greedy(self.model, [prompt for prompt, _ in self.heldout], longest, self.tokenizer.eos_token_id)
        right = sum(a == c[:-1] for a, (_, c) in zip(answers, self.heldout, strict=True))
        return right / len(self.heldout)
