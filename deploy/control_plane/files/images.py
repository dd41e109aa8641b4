"""Images that the policy was shown: those in a run's folder, and how they are served.

They come from agents, tools and environments, so they are served as PNG files only, and rejected if they are not.
"""

from pathlib import Path
from typing import Annotated, Any

from fastapi import Path as InPath
from fastapi.responses import Response

from deploy.control_plane.web.refusal import Refusal
from schemas.digests import DIGEST
from schemas.errors import DataError
from schemas.images import image_size

FOLDER = "samples/images"
KIND = "image/png"
ANSWER: dict[int | str, dict[str, Any]] = {200: {"content": {KIND: {"schema": {"type": "string", "format": "binary"}}}}}
"""The answer as the API's description has it."""

Digest = Annotated[str, InPath(pattern=f"^{DIGEST}$", description="Of the image, from a trajectory or a group.")]


def kept_image(folder: Path, digest: str) -> bytes | None:
    """Return the image that a trainer has kept in its run's folder; None if it was never kept, or is deleted."""
    try:
        return (folder / FOLDER / f"{digest}.png").read_bytes()
    except OSError:
        return None


def image_answer(digest: str, body: bytes | None) -> Response:
    """Return the response with an image. Refusal if there is no image, or the bytes are not an image."""
    if body is None:
        raise Refusal(404, f"the image {digest} is not in the pipeline, and not among those that are kept")
    try:
        image_size(body)
    except DataError as error:
        raise Refusal(404, f"{digest}: {error}") from error
    return Response(body, media_type=KIND)
