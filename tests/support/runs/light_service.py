"""A service as a process that starts at once: ``python -m tests.support.runs.light_service ROLE CONFIG --name NAME``.

The product's own command; only the tokenizer is a byte tokenizer, since loading a real one imports PyTorch.
"""

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import IO

from deploy.cli import app
from deploy.services import finished_run, spot_notice
from schemas.system import guard
from tools.chaos.service import ByteTokenizer

SETTLED = "SETTLED_S"
METADATA = "METADATA_SERVER"
"""Variable with the address of a cloud's metadata server that is imitated."""


def start_service(
    role: str, config: Path, name: str, url: str, *options: str, output: IO[str] | None = None, **environment: str
) -> subprocess.Popen[bytes]:
    """Start one; it ends with its parent at the latest. output: of what it prints, by default that of its parent."""
    return subprocess.Popen(
        [sys.executable, "-m", "tests.support.runs.light_service", role, str(config), "--name", name, *options],
        env={**os.environ, "REDIS_URL": url, **environment},
        cwd=Path(__file__).parents[3],
        stdout=output,
        stderr=output,
    )


def main() -> None:
    from producers.generator import context

    finished_run.SETTLED_S = float(os.environ.get(SETTLED, finished_run.SETTLED_S))
    if METADATA in os.environ:
        servers = spot_notice.SERVERS.items()
        spot_notice.SERVERS = {cloud: replace(server, base=os.environ[METADATA]) for cloud, server in servers}
    guard.prctl(guard.PR_SET_PDEATHSIG, 9)
    assert hasattr(context, "HfTokenizer")
    setattr(context, "HfTokenizer", ByteTokenizer)  # noqa: B010 - the name is an import of that module's
    app.main()


if __name__ == "__main__":
    main()
