"""A folder as a tar archive that is made while it is sent: its size is known before, and nothing is written."""

import os
import tarfile
from collections.abc import Iterator, Sequence
from pathlib import Path

BLOCK = tarfile.BLOCKSIZE
PART = 1 << 20
END = b"\0" * (2 * BLOCK)


def tar_members(folder: Path) -> list[tarfile.TarInfo]:
    """Return the files of a folder, each with its size as it is now; below a folder of its name."""
    found = []
    for path in sorted(folder.rglob("*")):
        if path.is_file() and not path.is_symlink():
            member = tarfile.TarInfo(f"{folder.name}/{path.relative_to(folder).as_posix()}")
            known = path.stat()
            member.size, member.mtime, member.mode = known.st_size, int(known.st_mtime), 0o644
            found.append(member)
    return found


def tar_size(members: Sequence[tarfile.TarInfo]) -> int:
    """Return bytes of the archive of these files."""
    return sum(len(_head(member)) + -(-member.size // BLOCK) * BLOCK for member in members) + len(END)


def tar_stream(folder: Path, members: Sequence[tarfile.TarInfo]) -> Iterator[bytes]:
    """Yield the archive, part by part; OSError when a file is gone or has become shorter."""
    for member in members:
        yield _head(member)
        left = member.size
        with os.fdopen(os.open(folder.parent / member.name, os.O_RDONLY | os.O_NOFOLLOW), "rb") as file:
            while left:
                part = file.read(min(PART, left))
                if not part:
                    raise OSError(f"{member.name} has become shorter while it was sent")
                left -= len(part)
                yield part
        yield b"\0" * (-member.size % BLOCK)
    yield END


def _head(member: tarfile.TarInfo) -> bytes:
    return member.tobuf(tarfile.PAX_FORMAT)
