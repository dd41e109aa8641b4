"""Small chat templates, one for each way in which real ones make it hard to join turns, over one tokenizer."""

import copy
import json
from pathlib import Path
from typing import Any

import numpy as np

from producers.conversation.chat_template import ChatTemplate
from producers.engines.base import Completion
from producers.tokenizer import HfTokenizer
from schemas.messages import FinishReason, Span

_TOOLS = "{% if tools %}<|im_start|>system\n{{ tools | tojson }}<|im_end|>\n{% endif %}"
_CALLS = (
    "{% for call in m.tool_calls or [] %}\n<tool_call>\n"
    '{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}\n</tool_call>'
    "{% endfor %}"
)
_THOUGHT = "{% if m.reasoning_content %}<think>\n{{ m.reasoning_content }}\n</think>\n\n{% endif %}"
_OTHERS = "<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n"
_HEADER = "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"

SOURCES = {
    "append only": _TOOLS
    + "{% for m in messages %}{% if m.role == 'assistant' %}<|im_start|>assistant\n"
    + _THOUGHT
    + "{{ m.content }}"
    + _CALLS
    + "<|im_end|>\n{% else %}"
    + _OTHERS
    + "{% endif %}{% endfor %}"
    + _HEADER,
    "old reasoning dropped": _TOOLS
    + "{% set ns = namespace(last=0) %}{% for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}"
    "{% endif %}{% endfor %}{% for m in messages %}{% if m.role == 'assistant' %}<|im_start|>assistant\n"
    "{% if loop.index0 > ns.last %}"
    + _THOUGHT
    + "{% endif %}{{ m.content }}"
    + _CALLS
    + "<|im_end|>\n{% else %}"
    + _OTHERS
    + "{% endif %}{% endfor %}"
    + _HEADER,
    "answers trimmed": "{% for m in messages %}<|im_start|>{{ m.role }}\n\n{{ m.content | trim }}"
    + _CALLS
    + "<|eot_id|>{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n\n{% endif %}",
    "space before answers": "{{ bos_token }}{% for m in messages %}{% if m.role == 'assistant' %} {{ m.content }}"
    "{% if m.tool_calls %}[CALLS]{{ m.tool_calls | map(attribute='function') | list | tojson }}{% endif %}</s>"
    "{% elif m.role == 'tool' %}[RESULT]{{ m.content }}[/RESULT]{% else %}[INST] {{ m.content }} [/INST]{% endif %}"
    "{% endfor %}",
    "two closing tokens": "{% for m in messages %}<|turn|><|{{ m.role }}|>{% if m.role == 'assistant' %}"
    "<|response|>{{ m.content }}"
    + _CALLS
    + "<|end_response|>{% else %}{{ m.content }}{% endif %}<|end_turn|>{% endfor %}"
    "{% if add_generation_prompt %}<|turn|><|assistant|><|response|>{% endif %}",
    "no closing token": "{% for m in messages %}{% if m.role == 'tool' %}<|observation|>\n{{ m.content }}{% else %}"
    "<|{{ m.role }}|>\n{{ m.content | trim }}"
    + _CALLS
    + "{% endif %}{% endfor %}{% if add_generation_prompt %}<|assistant|>\n{% endif %}",
    "last closing differs": "{% for m in messages %}{% if m.role == 'assistant' %}{% if m.tool_calls %}"
    "<|start|>assistant to={{ m.tool_calls[0].function.name }}<|message|>"
    "{{ m.tool_calls[0].function.arguments | tojson }}<|call|>{% else %}"
    "{% if m.thinking and loop.last and not add_generation_prompt %}"
    "<|start|>assistant<|channel|>analysis<|message|>{{ m.thinking }}<|end|>{% endif %}"
    "<|start|>assistant<|channel|>final<|message|>{{ m.content }}"
    "{% if loop.last and not add_generation_prompt %}<|return|>{% else %}<|end|>{% endif %}{% endif %}"
    "{% else %}<|start|>{{ m.role }}<|message|>{{ m.content | tojson if m.role == 'tool' else m.content }}<|end|>"
    "{% endif %}{% endfor %}{% if add_generation_prompt %}<|start|>assistant{% endif %}",
    "end of text at the end": "{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}"
    + _CALLS
    + "<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% else %}<|endoftext|>{% endif %}",
}
"""Source of each template by what it does."""

STOPS = {
    "append only": ["<|im_end|>"],
    "old reasoning dropped": ["<|im_end|>"],
    "answers trimmed": ["<|eot_id|>"],
    "space before answers": ["</s>"],
    "two closing tokens": ["<|end_response|>"],
    "no closing token": ["<|user|>", "<|observation|>"],
    "last closing differs": ["<|return|>", "<|call|>"],
    "end of text at the end": ["<|end|>", "<|endoftext|>"],
}
"""Tokens that end an answer with it."""

SPECIALS = [
    "<|endoftext|>", "<bos>", "<|im_start|>", "<|im_end|>", "<|eot_id|>", "</s>", "[INST]", "[/INST]", "[CALLS]",
    "[RESULT]", "[/RESULT]", "<|turn|>", "<|system|>", "<|user|>", "<|assistant|>", "<|tool|>", "<|response|>",
    "<|end_response|>", "<|end_turn|>", "<|observation|>", "<|start|>", "<|channel|>", "<|message|>", "<|end|>",
    "<|return|>", "<|call|>",
]  # fmt: skip

TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Adds.",
        "parameters": {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}},
    },
}


def write_tokenizer(folder: Path, specials: list[str] = SPECIALS, stops: list[str] | None = None) -> Path:
    """A byte-level BPE tokenizer with some merges, so that a text has more than one cut into tokens."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=600,
        special_tokens=specials,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator([_PROSE], trainer)
    eos = specials[0]
    PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        eos_token=eos,
        pad_token=eos,
        bos_token="<bos>" if "<bos>" in specials else eos,
        additional_special_tokens=specials,
    ).save_pretrained(folder)
    config = {"eos_token_id": [bpe.token_to_id(stop) for stop in stops or []]}
    (folder / "generation_config.json").write_text(json.dumps(config), encoding="utf-8")
    (folder / "config.json").write_text('{"model_type": "llama"}', encoding="utf-8")
    return folder


class StoppingTemplate(ChatTemplate):
    """A chat template whose answers end with the given tokens."""

    def __init__(self, tokenizer: HfTokenizer, source: str, stops: list[str]) -> None:
        own = copy.copy(tokenizer)
        own.hf = copy.copy(tokenizer.hf)
        own.hf.chat_template = source
        super().__init__(own)
        self.stops = stops
        self.stop_ids = frozenset(tokenizer.hf.convert_tokens_to_ids(stops))


def named_template(tokenizer: HfTokenizer, name: str) -> StoppingTemplate:
    return StoppingTemplate(tokenizer, SOURCES[name], STOPS[name])


def sampled(ids: list[int], finish: FinishReason = "stop", version: int = 1) -> Completion:
    """A completion of these ids, each with a log-probability of its own."""
    logprobs = -np.arange(1, len(ids) + 1, dtype=np.float32) / 100
    return Completion(ids, logprobs, [Span(version, 0, len(ids))] if ids else [], finish)


def tool_call(id: str = "call00001", name: str = "add", **arguments: Any) -> dict[str, Any]:
    return {"id": id, "type": "function", "function": {"name": name, "arguments": json.dumps(arguments)}}


_PROSE = (
    "the answer is that and the sum of two numbers is a number, so what is it then? I look it up and tell you. "
    '{"name": "add", "arguments": {"a": 1, "b": 2}} <tool_call>\n</tool_call> <think>\n\n</think>\n\n user assistant '
    "system tool there these those them then thing thinking something nothing anything reasoning reason seasons " * 3
)
