"""Checks of sampling parameters and lengths that all engines share."""

from collections.abc import Mapping, Sequence
from typing import Any

from schemas.errors import ConfigError, DataError
from schemas.messages import Sampling

BENDING = ("logits_processors", "reasoning_config", "watermark_config")
"""Engine arguments that change the distribution that tokens are sampled from."""


def check_sampling(sampling: Sampling, allow_truncated: bool = False, args: Mapping[str, Any] | None = None) -> None:
    """Raise ConfigError if training on such samples would be biased; call it once at start, for training only.

    With top_p or top_k, engines report log-probabilities of the truncated, renormalised distribution, but the trainer
    computes those of the full one: every importance ratio is then wrong, by a factor that the data does not show.
    ``allow_truncated`` accepts that. args: of the engine.
    """
    if sampling.temperature == 0:
        raise ConfigError("sampling.temperature 0 is greedy: there is no distribution to train on, set it above 0")
    if allow_truncated:
        return
    for name, value, off, used in (
        ("top_p", sampling.top_p, "1.0", sampling.top_p < 1),
        ("top_k", sampling.top_k, "-1", sampling.top_k > 0),
    ):
        if used:
            raise ConfigError(
                f"sampling.{name} {value} cuts the distribution that is sampled from, so its log-probabilities are"
                f" not the policy's and training on them is biased: set sampling.{name} to {off}, or accept it with"
                " generator.allow_truncated"
            )
    for name in BENDING:
        if (args or {}).get(name):
            raise ConfigError(
                f"generator.args.{name} changes what is sampled, so that log-probabilities are not the policy's and"
                " training on them is biased: remove it, or accept it with generator.allow_truncated"
            )


def max_new_tokens(prompt: int, prefix: int, sampling: Sampling, max_length: int) -> int:
    """Return how many tokens may still be generated; 0 if the prefix has used up ``max_tokens``.

    prompt, prefix: lengths in tokens; the prefix counts as generated. DataError if there is no prompt, or no room for a
    single token.
    """
    if prompt < 1:
        raise DataError("the prompt is empty: a model needs at least one token to continue")
    left = max_length - prompt - prefix
    if left < 1 and prefix < sampling.max_tokens:
        if prefix:
            return 0
        raise DataError(f"prompt of {prompt} tokens leaves no room in model.max_length {max_length}")
    return max(0, min(sampling.max_tokens - prefix, left))


def check_vocabulary(ids: Sequence[int], size: int) -> None:
    """Raise DataError for an id outside a vocabulary of ``size`` ids, which could crash an engine."""
    wrong = next((token for token in ids if not 0 <= token < size), None)
    if wrong is not None:
        raise DataError(f"token id {wrong} is not in the model's vocabulary of {size}")
