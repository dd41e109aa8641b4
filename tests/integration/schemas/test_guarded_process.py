"""A guarded process: started and ended by a process with many open files."""

import asyncio
import os
import resource
import sys

import pytest

from schemas.system.guarded_process import GuardedProcess

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
MANY = 1100


def test_a_process_with_a_thousand_connections_can_start_another() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < 2 * MANY:
        pytest.skip(f"this machine allows {hard} open files")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 2 * MANY), hard))
    held = [os.open(os.devnull, os.O_RDONLY) for _ in range(MANY)]
    try:
        process = GuardedProcess([sys.executable, "-S", "-c", "raise SystemExit(7)"], "many files", {})
        asyncio.run(asyncio.wait_for(process.wait(), 30))
        assert process.exit_code == 7
        process.kill()
    finally:
        for one in held:
            os.close(one)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
