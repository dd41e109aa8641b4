"""Images in the pipeline: each is stored once, when its task is admitted, and deleted with the last group that has it.

Tasks and trajectories name images by digest. A generator reads a task's images once for all its samples, the trainer
once for a group.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from broker.connection.connection import Connection
from schemas.digests import digest
from schemas.messages import Task

AT_ONCE = 64
"""Images read in one round trip."""


class ImageStore:
    """Reads images of a run by their digests."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def fetch(self, digests: Iterable[str]) -> dict[str, bytes]:
        """Return the bytes of images by digest, without those that are missing or damaged."""
        wanted, found = list(dict.fromkeys(digests)), dict[str, bytes]()
        key = self._connection.keys.images
        for first in range(0, len(wanted), AT_ONCE):
            names = wanted[first : first + AT_ONCE]
            bodies: Any = self._connection.run("reading images", lambda client, names=names: client.hmget(key, names))
            found |= {
                name: body
                for name, body in zip(names, bodies, strict=True)
                if body is not None and digest(body) == name
            }
        return found


def image_args(task: object, images: Mapping[str, bytes]) -> Sequence[str | bytes]:
    """Return digest and bytes of each image of a task, each image once; () if ``task`` is not a task."""
    if not isinstance(task, Task) or not task.images:
        return ()
    names = dict.fromkeys(image.digest for image in task.images)
    return [part for name in names for part in (name, images[name])]
