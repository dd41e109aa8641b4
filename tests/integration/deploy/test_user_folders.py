"""A user's folders that are named like packages of Tidemill: services, ranks and workers don't take them for these."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from deploy.services.main import command
from tests.support.runs.up_runs import make_decoys

pytestmark = pytest.mark.integration
RANKS = 'import sys; from deploy.services.torchrun import launch; sys.exit(launch(2, ["--version"], 5))'


@pytest.mark.parametrize("argv", [command("--version"), [sys.executable, "-P", "-c", RANKS]], ids=["service", "ranks"])
def test_processes_start_beside_folders_named_like_our_packages(argv: list[str], tmp_path: Path) -> None:
    done = subprocess.run(argv, cwd=make_decoys(tmp_path), capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stderr[-2000:]
    assert "tidemill 0.1" in done.stdout
