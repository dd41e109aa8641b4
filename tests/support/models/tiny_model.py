"""A tiny random Qwen2 with a byte tokenizer, made in well under a second: a real model for tests."""

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
    from transformers.utils import logging

    from deploy.offline.tiny_model import write_tiny_model

    logging.disable_progress_bar()
    write_tiny_model(
        folder,
        make_tokenizer(),
        seed,
        hidden=hidden,
        intermediate=4 * hidden,
        layers=layers,
        heads=hidden // 32,
        max_length=max_length,
        tie_word_embeddings=tied,
        initializer_range=0.1,  # large, so that distributions are far from uniform and differ between seeds
    )
    return folder


def add_bos(folder: Path) -> Path:
    """Have the tokenizer in ``folder`` begin every text with <bos>, as those of Llama and Gemma do; returns it."""
    from tokenizers.processors import TemplateProcessing
    from transformers import PreTrainedTokenizerFast

    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
    template = TemplateProcessing(single="<bos> $A", pair="<bos> $A $B", special_tokens=[("<bos>", BOS)])
    tokenizer.backend_tokenizer.post_processor = template
    tokenizer.save_pretrained(folder)
    return folder


def make_tokenizer() -> Any:
    """A ``PreTrainedTokenizerFast`` with one token per byte and a chat template; <pad>, <bos>, <eos> are 0, 1, 2."""
    from deploy.offline.tiny_model import byte_tokenizer

    special = {"pad_token": "<pad>", "bos_token": "<bos>", "eos_token": "<eos>"}
    return byte_tokenizer(list(special.values()), chat_template=CHAT_TEMPLATE, **special)
