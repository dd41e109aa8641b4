"""A file of lines that grows while it is read: each line is read once."""

import os
from collections.abc import Iterator
from pathlib import Path

LARGEST = 64 << 20
"""A line of more bytes is left out."""


class GrowingFile:
    """A file of lines; ``read`` gives those that came since the last call, with their place in the file."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._end = 0
        self._too_large = False
        """Whether the bytes at ``_end`` belong to a line that is left out."""
        self._identity: tuple[int, int] | None = None

    def read(self) -> Iterator[tuple[int, bytes]]:
        """Yield new whole lines, each with the byte at which it begins; nothing of a missing file.

        A file that was replaced or cut is read from its begin, after ``(-1, b"")``.
        """
        try:
            stream = self.path.open("rb")
        except OSError:
            return
        with stream:
            known = os.fstat(stream.fileno())
            if self._identity not in (None, (known.st_dev, known.st_ino)) or known.st_size < self._end:
                self._end, self._too_large = 0, False
                yield -1, b""
            self._identity = (known.st_dev, known.st_ino)
            stream.seek(self._end)
            while line := stream.readline(LARGEST):
                whole, left_out = line.endswith(b"\n"), self._too_large
                if not whole and not left_out and len(line) < LARGEST:
                    # It is being written.
                    return
                begin, self._end = self._end, self._end + len(line)
                self._too_large = not whole
                if whole and not left_out:
                    yield begin, line
