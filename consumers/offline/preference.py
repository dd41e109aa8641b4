"""Training on pairs of answers, without generators: DPO and IPO of a policy, and a Bradley-Terry reward model.

Every rank has all pairs, and computes its share of each batch, in micro-batches of whole pairs. The model that comes
out appears in its folder whole or not at all, beside what it was measured at.
"""

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from transformers import AutoModelForSequenceClassification, PreTrainedModel

from consumers.offline.encoding import LoadTokenizer, Placeholders, PolicyTokenizer, pad
from consumers.offline.loop import (
    DEFAULT_LIMITS,
    MemoryLimits,
    MicroBatches,
    OfflineStep,
    answer_logprobs,
    batches,
    load_policy,
)
from consumers.offline.pairs import (
    PairIds,
    Preference,
    bradley_terry_loss,
    dpo_loss,
    encode,
    ipo_loss,
    preference_margin,
)
from consumers.trainer.checkpoint.files import whole_folder
from consumers.trainer.distributed.layout import check_model
from consumers.trainer.distributed.ranks import Ranks
from consumers.trainer.model.hf_weights import named_weights, save_weights
from consumers.trainer.model.parity import fix_rotary_frequencies, train_without_noise
from consumers.trainer.model.policy import DTYPES, Policy, read_model
from consumers.trainer.step.gradient_update import Schedule
from consumers.trainer.step.optimizers import build_optimizer
from schemas.config import DpoConfig, ModelConfig, PreferenceConfig, RewardModelConfig
from schemas.errors import ConfigError

DETAILS = "preferences.json"
"""File in the model's folder with the held-out result."""


@dataclass(frozen=True)
class PairwiseProgress:
    """Means over held-out pairs; accuracy is the share with the chosen answer ahead, margin how far it is ahead."""

    step: int
    loss: float
    accuracy: float
    margin: float
    seconds: float


Progress = Callable[[PairwiseProgress], None]


def train_on_pairs(
    model: ModelConfig,
    pairs: Sequence[Preference],
    heldout: Sequence[Preference],
    settings: DpoConfig | RewardModelConfig,
    *,
    load_tokenizer: LoadTokenizer,
    limits: MemoryLimits = DEFAULT_LIMITS,
    seed: int = 0,
    progress: Progress | None = None,
    ranks: Ranks | None = None,
    places: Placeholders | None = None,
) -> PairwiseProgress:
    """Train ``model.path`` on pairs and write what comes out to ``settings.out``; returns the last evaluation.

    By DPO, with the model itself as the reference, or with one score on its body, as a Hugging Face sequence classifier
    with one label, whose logit is the score of prompt and answer. load_tokenizer: loads the generators' tokenizer.
    ranks: all of them call this; rank 0 writes, and reports to ``progress``. places: of images, by DPO of a model that
    reads them.
    """
    ranks = ranks or Ranks()
    if isinstance(settings, RewardModelConfig) and ranks.layout.context > 1:
        raise ConfigError(
            f"trainer.parallel.context {ranks.layout.context}: a reward model reads whole sequences; set it to 1"
        )
    check_model(model.path, ranks.layout, model.trust_remote_code)
    name = "dpo" if isinstance(settings, DpoConfig) else "reward_model"
    with whole_folder(settings.out, f"{name}.out", main=ranks.is_main) as aside:
        tokenizer = load_tokenizer(model.path)
        # The head of a reward model is new.
        torch.manual_seed(seed)
        trained: Policy | PreTrainedModel
        losses: Callable[[Tensor], Tensor]
        if isinstance(settings, DpoConfig):
            trained, margins, packed = _prepare_dpo(model, limits, ranks, places)
            losses = partial(dpo_loss if settings.loss == "sigmoid" else ipo_loss, beta=settings.beta)
        else:
            trained, margins, packed = _prepare_scorer(model, limits, ranks, tokenizer)
            losses = bradley_terry_loss
        own, other = ([encode(tokenizer, pair, model.max_length, places) for pair in part] for part in (pairs, heldout))
        # Without packing, both rows of a pair are padded to the longer one.
        width: Callable[[Sequence[int]], int] = sum if packed else lambda lengths: 2 * max(lengths)
        cut = MicroBatches[PairIds](ranks, lambda pair: width([len(row.ids) for row in pair]), limits, packed)
        training = _PairwiseTraining(other, settings, cut, ranks, margins, losses, progress)
        result = training.run(trained, own, DTYPES[model.dtype], seed)
        whole = trained.causal_lm if isinstance(trained, Policy) else trained
        save_weights(whole, named_weights(trained), aside, model.dtype, ranks)
        if ranks.is_main:
            tokenizer.save(aside)
            (aside / DETAILS).write_text(json.dumps(asdict(result), indent=2) + "\n", encoding="utf-8")
    return result


Margins = Callable[[Sequence[PairIds]], Tensor]
"""From pairs to float32 [P], positive where the chosen answer is ahead."""


def _prepare_dpo(
    model: ModelConfig, limits: MemoryLimits, ranks: Ranks, places: Placeholders | None
) -> tuple[Policy, Margins, bool]:
    """Return the policy, its margins relative to the reference, and whether both are packed."""
    load = partial(load_policy, Policy, model, model.path, limits, ranks, places)
    policy = load("float32")
    limits.apply(policy.causal_lm)
    policy = ranks.prepare(policy, DTYPES[model.dtype])
    reference = ranks.prepare(load(model.dtype).requires_grad_(False), DTYPES[model.dtype])

    def margins(batch: Sequence[PairIds]) -> Tensor:
        with torch.no_grad():
            known = _pair_logprobs(reference, batch)
        if isinstance(reference, FSDPModule):
            # A pass without a gradient leaves the gathered embeddings and head behind.
            reference.reshard()
        return preference_margin(*_pair_logprobs(policy, batch), *known)

    return policy, margins, policy.packed and reference.packed


def _prepare_scorer(
    model: ModelConfig, limits: MemoryLimits, ranks: Ranks, tokenizer: PolicyTokenizer
) -> tuple[PreTrainedModel, Margins, bool]:
    """Return the model with one score, its margins, and that it is not packed."""
    scorer = _scorer(model, tokenizer, empty=not ranks.is_main)
    limits.apply(scorer)
    scorer = ranks.prepare(scorer, DTYPES[model.dtype])

    def margins(batch: Sequence[PairIds]) -> Tensor:
        rows = [row.ids for pair in batch for row in pair]
        tokens, own = pad(rows, scorer.config.get_text_config().pad_token_id)
        given = {"input_ids": tokens.to(scorer.device), "attention_mask": own.long().to(scorer.device)}
        scores: Tensor = scorer(**given, use_cache=False).logits[:, 0].float()
        chosen, rejected = scores[: len(rows)].view(-1, 2).unbind(-1)
        return chosen - rejected

    return scorer, margins, False


@dataclass
class _PairwiseTraining:
    """Training of a model on pairs, with evaluations on the held-out ones.

    losses: from margins to losses [P].
    """

    heldout: Sequence[PairIds]
    settings: PreferenceConfig
    cut: MicroBatches[PairIds]
    ranks: Ranks
    margins: Margins
    losses: Callable[[Tensor], Tensor]
    progress: Progress | None
    started: float = field(default_factory=time.perf_counter)
    last: PairwiseProgress = field(init=False)

    def run(self, model: nn.Module, pairs: Sequence[PairIds], dtype: torch.dtype, seed: int) -> PairwiseProgress:
        """Train, and return the last evaluation."""
        settings, optimizer = self.settings, self.settings.optimizer
        if not pairs or not self.heldout:
            raise ConfigError(f"preferences are needed in both sets, there are {len(pairs)} and {len(self.heldout)}")
        changing = build_optimizer(model, optimizer)
        step = OfflineStep(model, changing, self.cut, self.ranks, dtype, optimizer.max_grad_norm)
        schedule = Schedule(optimizer, optimizer.lr, settings.steps)
        first = min(settings.eval_every, settings.steps)
        step.train(batches(pairs, settings.batch_size, seed), self._loss, schedule.at, self._evaluate, first)
        return self.last

    def _loss(self, batch: Sequence[PairIds], pairs: Sequence[PairIds]) -> Tensor:
        """Compute these pairs' part of the mean loss of the batch."""
        return self.losses(self.margins(pairs)).sum() / len(batch)

    @torch.no_grad()
    def _evaluate(self, step: int, _: float) -> int | None:
        sums = torch.zeros(3, dtype=torch.float64)
        for pairs in self.cut.of(self.heldout):
            found = self.margins(pairs)
            sums += torch.stack([self.losses(found), (found > 0).to(found.dtype), found]).double().cpu().sum(-1)
        totals = self.ranks.all_reduce_sum(sums.tolist())
        loss, accuracy, margin = (total / len(self.heldout) for total in totals)
        self.last = PairwiseProgress(step, loss, accuracy, margin, round(time.perf_counter() - self.started, 2))
        if self.progress and self.ranks.is_main:
            self.progress(self.last)
        return min(step + self.settings.eval_every, self.settings.steps) if step < self.settings.steps else None


def _pair_logprobs(policy: Policy, batch: Sequence[PairIds]) -> tuple[Tensor, Tensor]:
    """Sum the log-probabilities of the chosen and of the rejected answers over their tokens: float32 [P] each."""
    sums = answer_logprobs(policy, [row for pair in batch for row in pair]).view(-1, 2)
    return sums[:, 0], sums[:, 1]


def _scorer(model: ModelConfig, tokenizer: PolicyTokenizer, empty: bool) -> PreTrainedModel:
    """Load the body of ``model.path`` with a new head for one score; ConfigError says what is wrong.

    empty: without weights, for a rank that gets them from another.
    """
    if tokenizer.pad_id is None or tokenizer.pad_id == tokenizer.eos_id:
        raise ConfigError(
            f"the tokenizer of model.path {model.path!r} needs a padding token of its own: a reward model reads its"
            " score at the last token that is not padding"
        )
    try:
        kind = AutoModelForSequenceClassification
        scorer = read_model(kind, model.path, torch.float32, model.trust_remote_code, empty, num_labels=1)
    except (OSError, ValueError) as error:
        raise ConfigError(f"model.path {model.path!r} cannot be loaded: {str(error).splitlines()[0]}") from error
    scorer.config.get_text_config().pad_token_id = tokenizer.pad_id
    fix_rotary_frequencies(scorer, model.path, model.max_length)
    return train_without_noise(scorer, model.path)
