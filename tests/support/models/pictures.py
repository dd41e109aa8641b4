"""Pictures in tests: small ones of one colour, how a tiny model wants them, and that model's tokenizer."""

import base64
import io
from pathlib import Path
from typing import Any

from PIL import Image as Pillow

from producers.images.placeholders import ImagePlaceholders
from producers.tokenizer import HfTokenizer
from schemas.images import ImageSettings

PAD = 6
"""The token of a tiny vision model that stands for images."""
SETTINGS = ImageSettings(14, 2, 2, 28 * 28, 112 * 112, (0.5,) * 3, (0.5,) * 3)
PLACES = ImagePlaceholders(PAD, SETTINGS)


def picture(color: str | None = "red", width: int = 56, height: int = 56) -> bytes:
    """An image file of one colour, None: black and a bit for a pixel; 56 x 56 pixels are four tokens."""
    file = io.BytesIO()
    Pillow.new("RGB" if color else "1", (width, height), color or 0).save(file, "PNG")
    return file.getvalue()


def data_url(data: bytes, kind: str = "image/png") -> str:
    return f"data:{kind};base64,{base64.b64encode(data).decode()}"


def image_url(data: bytes) -> dict[str, Any]:
    """A part of a message in OpenAI's form."""
    return {"type": "image_url", "image_url": {"url": data_url(data)}}


def user(*parts: str | bytes) -> dict[str, Any]:
    """A user's message of texts and image files."""
    return {
        "role": "user",
        "content": [{"type": "text", "text": part} if isinstance(part, str) else image_url(part) for part in parts],
    }


def vision_tokenizer(folder: Path) -> HfTokenizer:
    """The tokenizer of a tiny vision model, with Qwen's chat template."""
    # Here, because vLLM's processes need something of ours to be there before the model libraries.
    from deploy.offline.tiny_model import byte_tokenizer
    from deploy.offline.tiny_vision_model import SPECIALS, TEMPLATE

    settings = {"pad_token": "<pad>", "bos_token": "<bos>", "eos_token": "<|im_end|>", "chat_template": TEMPLATE}
    byte_tokenizer(SPECIALS, **settings).save_pretrained(folder)
    (folder / "config.json").write_text('{"model_type": "llama"}', encoding="utf-8")
    return HfTokenizer(str(folder))
