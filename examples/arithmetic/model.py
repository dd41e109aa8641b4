"""An untrained tiny Qwen2 with a character tokenizer, for `warm_start.model: model.py:build`.

Small enough to learn addition on two CPU cores, and an ordinary model folder to Hugging Face and vLLM.
"""

from __future__ import annotations

from pathlib import Path

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

CHARACTERS = "0123456789+="
SPECIALS = ["<pad>", "<eos>"]


def build_tokenizer() -> PreTrainedTokenizerFast:
    """One token for each character, no beginning-of-sequence token.

    Byte-level BPE without merges, since transformers loads the tokenizer of every qwen2 folder as byte-level BPE.
    """
    vocabulary = {token: index for index, token in enumerate([*SPECIALS, *CHARACTERS])}
    tokenizer = Tokenizer(models.BPE(vocabulary, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIALS])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>", model_max_length=64
    )


def build(folder: Path, seed: int) -> None:
    """Write config.json, model.safetensors and the tokenizer to ``folder``; the same seed gives the same weights."""
    tokenizer = build_tokenizer()
    config = Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=192,
        intermediate_size=384,
        num_hidden_layers=2,
        num_attention_heads=6,
        num_key_value_heads=6,
        max_position_embeddings=64,
        # Three times the usual scale: a model this narrow starts to learn in a third of the steps.
        initializer_range=0.06,
        # vLLM on the CPU keeps a stale packed head when tied embeddings are updated in flight.
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Qwen2ForCausalLM(config)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
