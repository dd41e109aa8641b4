"""Makes a tiny untrained Qwen2 with a byte tokenizer and a chat template: a stand-in for trying things out.

    python examples/gsm8k/make_tiny_model.py runs/tiny-qwen2

It learns nothing of mathematics, but every part of a run works with it, on any machine.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from deploy.offline.tiny_model import byte_tokenizer, write_tiny_model

SPECIALS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def build(folder: Path, seed: int = 0) -> None:
    """Write config.json, model.safetensors and the tokenizer to ``folder``: a token for each byte, Qwen's chat markers.

    The same seed gives the same weights.
    """
    tokenizer = byte_tokenizer(
        SPECIALS,
        pad_token="<|endoftext|>",
        eos_token="<|im_end|>",
        model_max_length=4096,
        chat_template=CHAT_TEMPLATE,
    )
    write_tiny_model(folder, tokenizer, seed, hidden=64, intermediate=128, layers=2, heads=2, max_length=4096)


def main() -> None:
    parser = argparse.ArgumentParser(description="Make a tiny untrained model.")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    build(arguments.folder, arguments.seed)
    print(f"wrote {arguments.folder}")


if __name__ == "__main__":
    main()
