"""Images that the policy was shown. Agents, tools and environments made them, so only PNG files are served."""

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


def image_answer(digest: str, folder: Path, stored: bytes | None = None) -> Response:
    """Return the response with ``stored``, or the image in the run's folder; Refusal if it is missing, or no image."""
    try:
        body = stored or (folder / FOLDER / f"{digest}.png").read_bytes()
        image_size(body)
    except OSError as error:
        text = f"the image {digest} is not in the pipeline, and not among those that are kept"
        raise Refusal(404, text) from error
    except DataError as error:
        raise Refusal(404, f"{digest}: {error}") from error
    return Response(body, media_type=KIND)
