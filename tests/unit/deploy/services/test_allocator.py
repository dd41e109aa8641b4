"""A process that moves messages keeps the memory that it frees."""

from __future__ import annotations

import subprocess
import sys

import pytest

READS = """
import resource, sys
from deploy.services.allocator import keep_freed_memory
if sys.argv[1] == "keep":
    keep_freed_memory()
def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt
def read():
    return [bytes(100_000) for _ in range(64)]
read()
began = faults()
for _ in range(20):
    read()
print(faults() - began)
"""


def count_page_faults(how: str) -> int:
    done = subprocess.run([sys.executable, "-c", READS, how], capture_output=True, text=True, timeout=60, check=True)
    return int(done.stdout)


@pytest.mark.skipif(sys.platform != "linux", reason="of glibc")
def test_messages_read_again_and_again_take_no_new_pages_from_the_system(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "GLIBC_TUNABLES"):
        monkeypatch.delenv(name, raising=False)
    assert count_page_faults("default") > 10_000
    assert count_page_faults("keep") < 1_000


def test_a_users_own_setting_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    from deploy.services.allocator import keep_freed_memory

    monkeypatch.setenv("MALLOC_TRIM_THRESHOLD_", "131072")
    assert keep_freed_memory() is False
