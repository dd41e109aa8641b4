"""Peak memory of one step of SFT, DPO and a reward model, beside the same step with all logits at once::

    python -m benchmarks.memory.offline_memory --rows 128 --tokens 512 --vocabulary 152000

The model is tiny and its vocabulary is not, so that what is measured is the output layer. Each step is a process of its
own; its peak is what the process has at most while it steps, less what it has before, model included. ``--whole`` adds
the plain way, in which all logits of the step stand in memory at once; it is refused where they would not fit.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import psutil
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel, Qwen2Config, Qwen2ForCausalLM, Qwen2ForSequenceClassification

from consumers.offline.encoding import DemonstrationIds, pad
from consumers.offline.loop import MemoryLimits, MicroBatches, OfflineStep, answer_logprobs
from consumers.offline.pairs import bradley_terry_loss, dpo_loss, preference_margin
from consumers.trainer.distributed.ranks import Ranks
from consumers.trainer.model.policy import Policy

KINDS = ("sft", "dpo", "reward-model")
Loss = Callable[[Sequence[list[DemonstrationIds]]], Tensor]
"""Of items of one row, or of the two rows of a pair."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kinds", nargs="*", choices=KINDS, default=list(KINDS))
    parser.add_argument("--rows", type=int, default=128)
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--vocabulary", type=int, default=152_000)
    parser.add_argument("--hidden", type=int, default=32)
    parser.add_argument("--micro-batch-tokens", type=int, default=MemoryLimits().micro_batch_tokens)
    parser.add_argument("--whole", action="store_true", help="all logits at once, as plain code has them")
    given = parser.parse_args()
    logits = 4 * given.rows * given.tokens * given.vocabulary
    if given.whole and 4 * logits > psutil.virtual_memory().available:
        parser.error(f"--whole: {logits / 1e9:.1f} GB of logits, of which there are about three at once: fewer --rows")
    spawn = multiprocessing.get_context("spawn")
    for kind in given.kinds:
        with spawn.Pool(1) as process:
            print(json.dumps(process.apply(measure, (kind, given))), flush=True)


def measure(kind: str, given: argparse.Namespace) -> dict[str, object]:
    """Take one step in this process."""
    torch.manual_seed(0)
    config = Qwen2Config(  # type: ignore[call-arg]  # num_labels is among its further settings
        vocab_size=given.vocabulary,
        hidden_size=given.hidden,
        intermediate_size=4 * given.hidden,
        num_hidden_layers=1,
        num_attention_heads=1,
        num_key_value_heads=1,
        tie_word_embeddings=True,
        pad_token_id=0,
        num_labels=1,
    )
    ranks = Ranks()
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(1, given.vocabulary, (given.rows, given.tokens), generator=generator).tolist()
    rows = [DemonstrationIds(row[:1], row[1:], [], {}) for row in ids]
    size = 1 if kind == "sft" else 2
    items = [rows[start : start + size] for start in range(0, len(rows), size)]
    model, loss, packed = _reward_model(config) if kind == "reward-model" else _language_model(kind, config, given)
    limits = MemoryLimits(given.rows * given.tokens if given.whole else given.micro_batch_tokens)
    micro_batches = MicroBatches[list[DemonstrationIds]](ranks, lambda item: given.tokens * len(item), limits, packed)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    step = OfflineStep(model, optimizer, micro_batches, ranks, torch.float32, 1.0)
    process = psutil.Process()
    before = process.memory_info().rss
    # So that the peak is that of what follows, as Linux counts it.
    Path("/proc/self/clear_refs").write_text("5")
    started = time.process_time()
    total = step.run(items, lambda some: loss(some) / len(items), lr=1e-3)
    peak = 1024 * int(Path("/proc/self/status").read_text().partition("VmHWM:")[2].split()[0])
    return {
        "kind": kind,
        "whole": given.whole,
        "rows": given.rows,
        "tokens": given.tokens,
        "vocabulary": given.vocabulary,
        "loss": round(total or 0.0, 4),
        "model_gb": round(sum(p.nbytes for p in model.parameters()) / 1e9, 3),
        "peak_gb": round((peak - before) / 1e9, 3),
        "logits_gb": round(4 * given.rows * given.tokens * given.vocabulary / 1e9, 2),
        "cpu_s": round(time.process_time() - started, 1),
    }


def _language_model(kind: str, config: Qwen2Config, given: argparse.Namespace) -> tuple[nn.Module, Loss, bool]:
    models = [Qwen2ForCausalLM(config) for _ in range(2 if kind == "dpo" else 1)]
    policies = [Policy(model) for model in models]

    def logprobs(index: int, items: Sequence[list[DemonstrationIds]]) -> Tensor:
        """Of every row's answer, [items, rows of an item]."""
        rows = [row for item in items for row in item]
        found = _plain_logprobs(models[index], rows) if given.whole else answer_logprobs(policies[index], rows)
        return found.view(len(items), -1)

    def loss(items: Sequence[list[DemonstrationIds]]) -> Tensor:
        own = logprobs(0, items)
        if kind == "sft":
            return -own.sum() / int(given.tokens)
        with torch.no_grad():
            known = logprobs(1, items)
        return dpo_loss(preference_margin(own[:, 0], own[:, 1], known[:, 0], known[:, 1]), 0.1).sum()

    return policies[0], loss, policies[0].packed


def _plain_logprobs(model: PreTrainedModel, rows: Sequence[DemonstrationIds]) -> Tensor:
    """``answer_logprobs`` with all logits at once."""
    tokens, _ = pad([row.prompt + row.answer for row in rows], 0)
    logits = model(input_ids=tokens, use_cache=False).logits[:, :-1].float()
    logprobs: Tensor = -F.cross_entropy(logits.transpose(1, 2), tokens[:, 1:], reduction="none").sum(-1)
    return logprobs


def _reward_model(config: Qwen2Config) -> tuple[nn.Module, Loss, bool]:
    scorer = Qwen2ForSequenceClassification(config)

    def loss(items: Sequence[list[DemonstrationIds]]) -> Tensor:
        tokens, _ = pad([row.prompt + row.answer for item in items for row in item], 0)
        scores = scorer(input_ids=tokens, use_cache=False).logits[:, 0].view(-1, 2)
        return bradley_terry_loss(scores[:, 0] - scores[:, 1]).sum()

    return scorer, loss, False


if __name__ == "__main__":
    main()
