"""A tiny random Qwen2 with a byte tokenizer, made in well under a second: a real model for tests."""

from __future__ import annotations

from pathlib import Path
from typing import Any

PAD, BOS, EOS = 0, 1, 2

CHAT_TEMPLATE = (
    "{% for message in messages %}<bos>{{ message['role'] }}:{{ message['content'] }}<eos>{% endfor %}"
    "{% if add_generation_prompt %}<bos>assistant:{% endif %}"
)


def make_tiny_model(
    folder: Path, seed: int = 0, hidden: int = 64, layers: int = 2, tied: bool = False, max_length: int = 1024
) -> Path:
    """Write config, weights (model.safetensors, float32) and tokenizer of a random model to ``folder``; returns it.

    The same seed gives the same weights. Embeddings are untied unless ``tied``.
    """
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    tokenizer = make_tokenizer()
    config = Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=hidden,
        intermediate_size=4 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=hidden // 32,
        num_key_value_heads=hidden // 32,
        max_position_embeddings=max_length,
        tie_word_embeddings=tied,
        bos_token_id=BOS,
        eos_token_id=EOS,
        pad_token_id=PAD,
        initializer_range=0.1,  # large, so that distributions are far from uniform and differ between seeds
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Qwen2ForCausalLM(config).to(torch.float32)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def make_tokenizer() -> Any:
    """A ``PreTrainedTokenizerFast`` with one token per byte and a chat template; <pad>, <bos>, <eos> are 0, 1, 2.

    Byte-level without merges: transformers loads the tokenizer of any qwen2 folder as
    byte-level BPE, whatever tokenizer_config.json says, so anything else would be changed by that.
    """
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    special = ["<pad>", "<bos>", "<eos>"]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({token: index for index, token in enumerate(special + alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", bos_token="<bos>", eos_token="<eos>")
    fast.chat_template = CHAT_TEMPLATE
    return fast
