"""Images in the pipeline: each is stored once, when its task is admitted, and deleted with the last group that has it.

Tasks and trajectories name images by digest. A generator reads a task's images once for all its samples, the trainer
once for a group.
"""

from collections.abc import Iterable, Mapping, Sequence

from broker.connection.connection import RunData
from schemas.digests import digest
from schemas.messages import Task


class ImageStore(RunData):
    """Reads images of a run by their digests."""

    def fetch(self, digests: Iterable[str]) -> dict[str, bytes]:
        """Return the bytes of images by digest, without those that are missing or damaged."""
        names = list(dict.fromkeys(digests))
        bodies = self._connection.read_fields("reading images", self._keys.images, names)
        pairs = zip(names, bodies, strict=True)
        return {name: body for name, body in pairs if body is not None and digest(body) == name}


def image_args(task: object, images: Mapping[str, bytes]) -> Sequence[str | bytes]:
    """Return digest and bytes of each image of a task, each image once; () if ``task`` is not a task."""
    if not isinstance(task, Task) or not task.images:
        return ()
    names = dict.fromkeys(image.digest for image in task.images)
    return [part for name in names for part in (name, images[name])]
