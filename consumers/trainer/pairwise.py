"""Training on pairs of answers, without generators: DPO and IPO of a policy, and a Bradley-Terry reward model.

The model that comes out appears in its folder whole or not at all, beside what it was measured at.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForSequenceClassification, AutoTokenizer, PreTrainedModel

from consumers.trainer.folder import whole_folder
from consumers.trainer.optimizer import Schedule, build_optimizer
from consumers.trainer.policy import DTYPES, Policy, load_model
from consumers.trainer.preferences import bradley_terry_loss, dpo_loss, ipo_loss, preference_margin
from schemas.config.models import DpoConfig, ModelConfig, PreferenceConfig, RewardModelConfig
from schemas.errors import ConfigError, DataError

DETAILS = "preferences.json"
"""File in the model's folder with the held-out result."""


@dataclass(frozen=True)
class Preference:
    """Texts of a prompt, the better and the worse answer."""

    prompt: str
    chosen: str
    rejected: str


@dataclass(frozen=True)
class PairwiseProgress:
    """Of held-out pairs: loss is the mean, accuracy the share with the chosen answer ahead, margin how far (mean)."""

    step: int
    loss: float
    accuracy: float
    margin: float
    seconds: float


Progress = Callable[[PairwiseProgress], None]
_Ids = tuple[list[int], list[int], list[int]]
_Margins = Callable[[Sequence[_Ids]], Tensor]


def train_dpo(
    model: ModelConfig,
    pairs: Sequence[Preference],
    heldout: Sequence[Preference],
    settings: DpoConfig,
    *,
    seed: int = 0,
    progress: Progress | None = None,
) -> PairwiseProgress:
    """Train ``model.path`` with itself as the reference and write it to ``settings.out``; the last held-out look."""
    with whole_folder(settings.out, "dpo.out") as aside:
        tokenizer = AutoTokenizer.from_pretrained(model.path, trust_remote_code=model.trust_remote_code)
        policy, reference = (
            Policy(load_model(model.path, model.dtype, model.trust_remote_code)).to(_device()) for _ in range(2)
        )
        reference.requires_grad_(False)

        def margins(batch: Sequence[_Ids]) -> Tensor:
            with torch.no_grad():
                known = _answer_logprobs(reference, batch)
            return preference_margin(*_answer_logprobs(policy, batch), *known)

        def loss(margin: Tensor) -> Tensor:
            return (dpo_loss if settings.loss == "sigmoid" else ipo_loss)(margin, settings.beta)

        fit = _Fit(policy, tokenizer, pairs, heldout, settings, seed, model.max_length)
        result = fit.run(margins, loss, progress)
        _save(policy.causal_lm, tokenizer, aside, result)
    return result


def train_reward_model(
    model: ModelConfig,
    pairs: Sequence[Preference],
    heldout: Sequence[Preference],
    settings: RewardModelConfig,
    *,
    seed: int = 0,
    progress: Progress | None = None,
) -> PairwiseProgress:
    """Train a model with one score on the body of ``model.path`` and write it to ``settings.out``.

    It is a Hugging Face sequence classifier with one label, whose logit is the score of prompt and answer.
    """
    with whole_folder(settings.out, "reward_model.out") as aside:
        tokenizer = AutoTokenizer.from_pretrained(model.path, trust_remote_code=model.trust_remote_code)
        scorer = _scorer(model, tokenizer).to(_device())

        def margins(batch: Sequence[_Ids]) -> Tensor:
            rows = [prompt + answer for prompt, *answers in batch for answer in answers]
            chosen, rejected = _scores(scorer, rows).view(-1, 2).unbind(1)
            return chosen - rejected

        def loss(margin: Tensor) -> Tensor:
            return bradley_terry_loss(margin, torch.zeros_like(margin))

        fit = _Fit(scorer, tokenizer, pairs, heldout, settings, seed, model.max_length)
        result = fit.run(margins, loss, progress)
        _save(scorer, tokenizer, aside, result)
    return result


class _Fit:
    """Batches, optimizer, looks at the held-out pairs: what both trainers share."""

    def __init__(
        self,
        model: nn.Module,
        tokenizer: Any,
        pairs: Sequence[Preference],
        heldout: Sequence[Preference],
        settings: PreferenceConfig,
        seed: int,
        max_length: int,
    ) -> None:
        if not pairs or not heldout:
            raise ConfigError(f"preferences are needed in both sets, there are {len(pairs)} and {len(heldout)}")
        self.model = model
        self.settings = settings
        self.seed = seed
        self.pairs, self.heldout = ([_encode(tokenizer, pair, max_length) for pair in p] for p in (pairs, heldout))
        self.optimizer = build_optimizer(model.parameters(), settings.optimizer)
        self.schedule = Schedule(self.optimizer, settings.optimizer, settings.steps)

    def run(self, margins: _Margins, loss: Callable[[Tensor], Tensor], progress: Progress | None) -> PairwiseProgress:
        """``margins`` of pairs, positive where the chosen answer is ahead, and the ``loss`` of these."""
        started = time.perf_counter()
        batches = self._batches()
        for step in range(1, self.settings.steps + 1):
            value = loss(margins(next(batches))).mean()
            value.backward()  # type: ignore[no-untyped-call]
            norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.settings.optimizer.max_grad_norm)
            self.schedule.apply()
            if bool(torch.isfinite(norm)):
                self.optimizer.step()
            self.optimizer.zero_grad(set_to_none=True)
            self.schedule.advance()
            if progress and step % self.settings.eval_every == 0 and step < self.settings.steps:
                progress(self._look(step, margins, loss, started))
        last = self._look(self.settings.steps, margins, loss, started)
        if progress:
            progress(last)
        return last

    @torch.no_grad()
    def _look(self, step: int, margins: _Margins, loss: Callable[[Tensor], Tensor], started: float) -> PairwiseProgress:
        size = self.settings.batch_size
        found = torch.cat([margins(self.heldout[i : i + size]) for i in range(0, len(self.heldout), size)])
        return PairwiseProgress(
            step=step,
            loss=float(loss(found).mean()),
            accuracy=float((found > 0).float().mean()),
            margin=float(found.mean()),
            seconds=round(time.perf_counter() - started, 2),
        )

    def _batches(self) -> Iterator[list[_Ids]]:
        """Endless batches, every epoch in a new order; the last of an epoch may be smaller."""
        generator, size = torch.Generator().manual_seed(self.seed), self.settings.batch_size
        while True:
            order = torch.randperm(len(self.pairs), generator=generator).tolist()
            for start in range(0, len(order), size):
                yield [self.pairs[i] for i in order[start : start + size]]


def _encode(tokenizer: Any, pair: Preference, max_length: int) -> _Ids:
    """Ids of the prompt and of both answers, these with the end of sequence."""
    prompt, chosen, rejected = (
        list(tokenizer(text, add_special_tokens=False).input_ids) for text in (pair.prompt, pair.chosen, pair.rejected)
    )
    if not prompt:
        raise DataError(f"preference {pair!r} has an empty prompt")
    answers = [*chosen, tokenizer.eos_token_id], [*rejected, tokenizer.eos_token_id]
    longest = len(prompt) + max(map(len, answers))
    if longest > max_length:
        raise DataError(
            f"the preference of prompt {pair.prompt[:40]!r} has {longest} tokens, model.max_length {max_length}"
        )
    return prompt, *answers


def _answer_logprobs(policy: Policy, batch: Sequence[_Ids]) -> tuple[Tensor, Tensor]:
    """Sums of log-probabilities of the chosen and of the rejected answers, [P] each."""
    rows = [(prompt, answer) for prompt, *answers in batch for answer in answers]
    tokens, lengths = _padded([prompt + answer for prompt, answer in rows], 0, policy.device)
    starts = torch.tensor([len(prompt) for prompt, _ in rows], device=policy.device)
    positions = torch.arange(1, tokens.shape[1], device=policy.device)
    mask = (positions >= starts[:, None]) & (positions < lengths[:, None])
    sums = policy(tokens, tokens[:, 1:].contiguous(), mask).logprobs.sum(-1).view(-1, 2)
    return sums[:, 0], sums[:, 1]


def _scores(scorer: PreTrainedModel, rows: Sequence[list[int]]) -> Tensor:
    """The score of each row, [R] float32."""
    tokens, lengths = _padded(rows, scorer.config.get_text_config().pad_token_id, scorer.device)
    attention = torch.arange(tokens.shape[1], device=tokens.device) < lengths[:, None]
    scores: Tensor = scorer(input_ids=tokens, attention_mask=attention.long(), use_cache=False).logits[:, 0].float()
    return scores


def _padded(rows: Sequence[list[int]], pad: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Right-padded ids int64 [R, T], and lengths [R]."""
    lengths = torch.tensor([len(row) for row in rows])
    tokens = torch.full((len(rows), int(lengths.max())), pad, dtype=torch.int64)
    for number, row in enumerate(rows):
        tokens[number, : len(row)] = torch.tensor(row)
    return tokens.to(device), lengths.to(device)


def _scorer(model: ModelConfig, tokenizer: Any) -> PreTrainedModel:
    """The body of ``model.path`` with a new head for one score; ConfigError says what is wrong."""
    if tokenizer.pad_token_id is None or tokenizer.pad_token_id == tokenizer.eos_token_id:
        raise ConfigError(
            f"the tokenizer of model.path {model.path!r} needs a padding token of its own: a reward model reads its"
            " score at the last token that is not padding"
        )
    try:
        scorer = AutoModelForSequenceClassification.from_pretrained(
            model.path, num_labels=1, dtype=DTYPES[model.dtype], trust_remote_code=model.trust_remote_code
        )
    except (OSError, ValueError) as error:
        raise ConfigError(f"model.path {model.path!r} cannot be loaded: {str(error).splitlines()[0]}") from error
    scorer.config.get_text_config().pad_token_id = tokenizer.pad_token_id
    for module in scorer.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    return scorer.train()  # type: ignore[no-any-return]


def _device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


def _save(model: PreTrainedModel, tokenizer: Any, folder: Path, result: PairwiseProgress) -> None:
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    (folder / DETAILS).write_text(json.dumps(asdict(result), indent=2) + "\n", encoding="utf-8")
