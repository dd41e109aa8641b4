"""The C library's allocator, for processes that move messages: memory that was freed is kept for the next message.

By default, glibc takes memory for every large block from the system and returns it at once, so the system clears pages
for each read of many samples. That takes half of the processor time of such a process.
"""

import ctypes
import os

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
KEPT_BYTES = 32 << 20
"""Most memory that a process keeps at the end of its heap although it is free."""
LARGE_BYTES = 8 << 20
"""Blocks from here on are taken from the system, and go back to it."""
SETTINGS = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "GLIBC_TUNABLES")
"""Variables by which a user sets the same; then nothing is changed."""


def keep_freed_memory() -> bool:
    """Let this process keep freed memory, up to KEPT_BYTES; False if its C library can't, or a user has set it."""
    if any(name in os.environ for name in SETTINGS):
        return False
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError, TypeError):
        return False
    return bool(mallopt(M_TRIM_THRESHOLD, KEPT_BYTES) and mallopt(M_MMAP_THRESHOLD, LARGE_BYTES))
