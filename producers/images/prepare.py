"""Images of rows: what a column may hold of them, and where they stand in a conversation."""

import base64
import binascii
import io
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from producers.runner.environments import is_pillow_image, png_file
from schemas.errors import DataError
from schemas.messages import ChatMessage, ContentPart

MARK = "<image>"
"""Mark in a text for an image of its row, as in Geometry3K."""
MOVING = ("GIF", "WEBP", "PNG", "TIFF", "JPEG")
"""Formats whose frames can be taken; the last one only has one."""
VIDEOS = "mov,matroska,avi,mpegts"
"""Formats of videos, by FFmpeg's names; the first two are MP4 and WebM as well."""
MOST_BYTES = 1 << 30
"""Of the file of an image or a video."""
MOST_PIXELS = 178_956_970
"""Of a frame of a video, as Pillow allows an image: a file of a few bytes may claim frames of gigabytes."""
_NO_FRAMES = f"no frames can be read ({', '.join(MOVING)}, MP4, WebM, AVI and MPEG-TS have some)"
NO_DECODER = "to read the frames of a video (MP4, WebM, AVI, MPEG-TS), pip install 'tidemill[video]'"
_KINDS = "a path, bytes, a data: URL, or an image of the datasets library"


def load_image(value: Any, where: str, folder: Path, load: bool = True) -> bytes:
    """Load an image file; DataError, which begins with ``where``, if it is missing. load: False only looks for it."""
    if isinstance(value, bytes | bytearray | memoryview):
        return bytes(value)
    if isinstance(value, Mapping):
        held = value.get("bytes")
        held = value.get("path") if held is None else held
        if held is None:
            raise DataError(
                f"{where}: an image needs bytes or a path, it has {', '.join(map(repr, value)) or 'nothing'}"
            )
        return load_image(held, where, folder, load)
    if isinstance(value, str):
        return _load_text(value, where, folder, load)
    if is_pillow_image(value):
        return png_file(value)
    raise DataError(f"{where}: an image is {_KINDS}, not {type(value).__name__}")


def take_frames(data: bytes, count: int, where: str) -> list[bytes]:
    """Return at most ``count`` frames of a video or a moving picture, evenly spaced from first to last, as PNG files.

    A still picture is its only frame. DataError, which begins with ``where``, for a file that can't be read.
    """
    from PIL import Image as Pillow
    from PIL import UnidentifiedImageError

    try:
        with Pillow.open(io.BytesIO(data), formats=MOVING) as opened:
            frames = []
            for at in _spaced(getattr(opened, "n_frames", 1), count):
                opened.seek(at)
                frames.append(png_file(opened.convert("RGB")))
            return frames
    except UnidentifiedImageError:
        return _video_frames(data, count, where)
    except (OSError, ValueError, SyntaxError, EOFError) as error:
        raise DataError(f"{where}: {_NO_FRAMES}: {error}") from error


def _spaced(number: int, count: int) -> list[int]:
    """Return at most ``count`` of the numbers below ``number``, evenly spaced, the first and the last among them."""
    return sorted({round(k * (number - 1) / max(1, count - 1)) for k in range(count)})


def _video_frames(data: bytes, count: int, where: str) -> list[bytes]:
    try:
        import av
    except ImportError as error:
        raise DataError(f"{where}: {NO_DECODER}") from error
    try:
        # A playlist would name other files and addresses.
        with av.open(io.BytesIO(data), "r", options={"format_whitelist": VIDEOS}) as opened:
            if not opened.streams.video:
                raise DataError(f"{where}: {_NO_FRAMES}: it has no pictures")
            stream = opened.streams.video[0]
            stream.codec_context.options = {"max_pixels": str(MOST_PIXELS)}
            wanted = _spaced(sum(packet.size > 0 for packet in opened.demux(stream)), count)
            opened.seek(0)
            frames = [png_file(frame.to_image()) for at, frame in enumerate(opened.decode(stream)) if at in wanted]
    except av.FFmpegError as error:
        raise DataError(f"{where}: {_NO_FRAMES}: {error.strerror}") from error
    if not frames:
        raise DataError(f"{where}: {_NO_FRAMES}: it has no frame")
    return frames


def read_data_url(value: str, where: str) -> bytes:
    """Read the bytes of a base64 ``data:`` URL. DataError, which begins with ``where``, if it is not one."""
    head, _, body = value.partition(",")
    try:
        if not (head.startswith("data:") and head.endswith(";base64")):
            raise ValueError("it is not in base64")
        return base64.b64decode(body, validate=True)
    except (ValueError, binascii.Error) as error:
        raise DataError(f"{where}: the data: URL of an image can't be read: {error}") from error


def _load_text(value: str, where: str, folder: Path, load: bool) -> bytes:
    if value.startswith("data:"):
        return read_data_url(value, where)
    if "://" in value:
        raise DataError(f"{where}: the image {value[:100]} is not on this machine; an image is {_KINDS}")
    file = folder / Path(value).expanduser()
    try:
        # A named pipe would keep the feeder waiting, and a device would never end.
        if file.exists() and not file.is_file():
            raise ValueError("it is no regular file")
        if file.stat().st_size > MOST_BYTES:
            raise ValueError(f"it has {file.stat().st_size} bytes, at most {MOST_BYTES} are read")
        return file.read_bytes() if load else b""
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise DataError(f"{where}: the image {file} can't be read: {reason}") from error


def place_images(messages: list[ChatMessage], count: int, where: str) -> list[ChatMessage]:
    """Put places for ``count`` images into messages of text: at ``<image>``, else before the first text of the user.

    Messages that have places already stay as they are. DataError if there is another number of places.
    """
    if count and not any(message.images for message in messages):
        marked = [ChatMessage(message.role, _parts(message.text)) for message in messages]
        if any(message.images for message in marked):
            messages = [new if new.images else old for new, old in zip(marked, messages, strict=True)]
        else:
            first = next((at for at, message in enumerate(messages) if message.role == "user"), len(messages) - 1)
            parts = [*[ContentPart("image")] * count, ContentPart("text", messages[first].text)]
            messages = [*messages[:first], ChatMessage(messages[first].role, parts), *messages[first + 1 :]]
    places = sum(message.images for message in messages)
    if places != count:
        raise DataError(f"{where}: it has {count} images, and its messages have places for {places}")
    return messages


def repeat_places(messages: list[ChatMessage], counts: list[int]) -> list[ChatMessage]:
    """Return messages with so many places for images where each place is."""
    following = iter(counts)

    def repeated(part: ContentPart) -> list[ContentPart]:
        return [part] * next(following) if part.type == "image" else [part]

    return [
        ChatMessage(message.role, [each for part in message.content for each in repeated(part)])
        if isinstance(message.content, list)
        else message
        for message in messages
    ]


def _parts(text: str) -> list[ContentPart]:
    """Return the parts of a text with marks for images."""
    found: list[ContentPart] = []
    for at, piece in enumerate(text.split(MARK)):
        found += [ContentPart("image")] if at else []
        found += [ContentPart("text", piece)] if piece else []
    return found
