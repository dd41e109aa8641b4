"""Small random models: a Qwen2 of any size and a byte-level tokenizer, as a Hugging Face folder.

Examples, benchmarks and tests make their models here. They are ordinary model folders to transformers and vLLM.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM


def byte_tokenizer(specials: Sequence[str], characters: str | None = None, **settings: Any) -> PreTrainedTokenizerFast:
    """Return one token for each special token, then one for each of ``characters`` (ASCII), by default for each byte.

    settings: of PreTrainedTokenizerFast, such as pad_token, eos_token, chat_template. Byte-level BPE without merges,
    since transformers loads the tokenizer of every qwen2 folder as byte-level BPE, whatever its own files say.
    """
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet()) if characters is None else characters
    vocabulary = {token: index for index, token in enumerate([*specials, *alphabet])}
    tokenizer = Tokenizer(models.BPE(vocabulary, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in specials])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **settings)


def random_model(
    vocabulary: int, seed: int, *, hidden: int, intermediate: int, layers: int, heads: int, max_length: int, **more: Any
) -> Qwen2ForCausalLM:
    """Return a random float32 Qwen2; equal seeds give equal weights.

    more: other settings of Qwen2Config. By default embeddings are untied, and no token is special.
    """
    settings = {"tie_word_embeddings": False, "bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
    config = Qwen2Config(
        vocab_size=vocabulary,
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        max_position_embeddings=max_length,
        **(settings | {"num_key_value_heads": heads} | more),
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return Qwen2ForCausalLM(config)


def write_tiny_model(folder: Path, tokenizer: PreTrainedTokenizerFast, seed: int, **shape: Any) -> int:
    """Write a ``random_model`` of ``shape`` and its tokenizer to ``folder``; returns the number of parameters."""
    special = {f"{name}_token_id": getattr(tokenizer, f"{name}_token_id") for name in ("bos", "eos", "pad")}
    model = random_model(len(tokenizer), seed, **special, **shape)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return int(sum(parameter.numel() for parameter in model.parameters()))
