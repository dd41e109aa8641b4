"""The files of a model that a check looks at, without weights worth the name: made in a millisecond."""

import json
from pathlib import Path


def write_model_files(folder: Path, chat_template: str | None = None) -> Path:
    """A folder that looks like a Hugging Face model; returns it."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps({"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"]}))
    (folder / "tokenizer.json").write_text("{}")
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": chat_template}))
    (folder / "model.safetensors").write_bytes(b"")
    return folder
