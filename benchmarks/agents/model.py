"""The tiny chat model of ``tidemill bench agents``, with a template like ChatML."""

from __future__ import annotations

import json
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast
from transformers.utils import logging

from benchmarks.agents.tool_use import LAST_ANSWER, TOOLS, tool_call, tool_result
from deploy.offline.tiny_model import write_tiny_model

END = "<|im_end|>"
TEMPLATE = (
    "{% if tools %}<|im_start|>system\nYou may call these functions:\n{% for tool in tools %}{{ tool | tojson }}\n"
    "{% endfor %}<|im_end|>\n{% endif %}{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content or '' }}"
    "{% for call in m.tool_calls or [] %}\n<tool_call>\n"
    '{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}\n</tool_call>'
    "{% endfor %}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def write_model(folder: Path, max_length: int) -> int:
    """Write a random Qwen2 of about a million parameters and a subword tokenizer; return the number of parameters."""
    logging.disable_progress_bar()
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    specials = ["<pad>", "<|im_start|>", END]
    trainer = trainers.BpeTrainer(
        vocab_size=700,
        special_tokens=specials,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    turns = [text for turn in range(8) for text in (tool_call(turn), tool_result(turn), LAST_ANSWER)]
    bpe.train_from_iterator([*turns, *map(json.dumps, TOOLS)], trainer)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=bpe, pad_token="<pad>", eos_token=END, additional_special_tokens=specials[1:2]
    )
    tokenizer.chat_template = TEMPLATE
    return write_tiny_model(
        folder, tokenizer, 0, hidden=128, intermediate=512, layers=4, heads=4, max_length=max_length
    )
