"""The chat templates of real models, which an installed trl carries as files, over one tokenizer."""

import importlib.util
import re
from pathlib import Path

from producers.tokenizer import HfTokenizer
from tests.support.models.chat_templates import StoppingTemplate, write_tokenizer

STOPS = {
    "cohere": ["<|END_OF_TURN_TOKEN|>"],
    "cohere2": ["<|END_RESPONSE|>"],
    "deepseek": ["<｜end▁of▁sentence｜>"],
    "diffusion_gemma": ["<turn|>", "<|tool_response>"],
    "gemma": ["<end_of_turn>"],
    "gemma4": ["<turn|>", "<|tool_response>"],
    "glm": ["<|user|>", "<|observation|>"],
    "gptoss": ["<|return|>", "<|call|>"],
    "idefics": ["<end_of_utterance>"],
    "llama": ["<|eot_id|>"],
    "llava": ["</s>"],
    "muse": ["<|eot|>"],
    "phi": ["<|end|>"],
    "smolvlm": ["<end_of_utterance>"],
}
"""Tokens that end an answer, by how the names of a family's templates begin; <|im_end|> for all others."""

SPECIAL = re.compile(
    r'<\|[^|<>\s]{1,40}\|>|<｜[^｜]{1,40}｜>|</?s>|\[/?[A-Z_]{3,20}\]|<(?:start|end)_of_\w+>|<\|[a-z_"]+>|<[a-z_"]+\|>'
)


def template_files() -> list[Path]:
    """None where trl is not installed."""
    found = importlib.util.find_spec("trl")
    folders = [Path(place) / "chat_templates" for place in (found and found.submodule_search_locations) or ()]
    return sorted(file for folder in folders for file in folder.glob("*.jinja"))


def write_common_tokenizer(folder: Path, files: list[Path]) -> Path:
    """One tokenizer that has the special tokens of all templates."""
    sources = [file.read_text(encoding="utf-8") for file in files]
    special = {token for source in sources for token in SPECIAL.findall(source)} | {"</s>"}
    names = ["<|endoftext|>", "<bos>", *sorted(special - {"<|endoftext|>", "<bos>"})]
    return write_tokenizer(folder, names)


def stops_of(file: Path) -> list[str]:
    """Tokens with which the template's model ends an answer, the last of them one that calls tools."""
    family = max((name for name in STOPS if file.stem.startswith(name)), key=len, default="")
    return STOPS.get(family, ["<|im_end|>"])


def real_template(tokenizer: HfTokenizer, file: Path) -> StoppingTemplate:
    return StoppingTemplate(tokenizer, file.read_text(encoding="utf-8"), stops_of(file))
