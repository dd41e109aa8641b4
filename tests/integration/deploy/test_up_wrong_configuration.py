"""``tidemill up`` whose configuration is wrong in a way that only a service can find: one line, at once."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from broker.connection.embedded import EmbeddedServer
from deploy.control_plane.files.run_folder import RunFolder
from deploy.services.main import command
from schemas.errors import CONFIG_EXIT

pytestmark = pytest.mark.integration
GRACE_S = 300
LAUNCHER = """
import sys
from deploy.run import up
from deploy.supervisor.process import Processes

OTHER = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up', flush=True); time.sleep(600)"
FEEDER = '''
import sys, time
others = ["trainer", "generator-0", "reward-0"]
deadline = time.monotonic() + 60
while time.monotonic() < deadline and not all("up" in open(f"{sys.argv[1]}/{name}.log").read() for name in others):
    time.sleep(0.02)
print("tidemill: no file data.jsonl", file=sys.stderr)
sys.exit(2)
'''

class Mine(Processes):
    '''Services that are stand-ins: the feeder finds a mistake, the others do not end when they are asked to.'''

    def launch(self, config, fresh=False):
        up.check = lambda config, here: None
        return up.run_up(config, self, fresh)

    def start(self, argv, name, role, log, environment, mark):
        argv = [sys.executable, "-c", FEEDER if role == "feeder" else OTHER, str(log.parent)]
        return super().start(argv, name, role, log, environment, mark)
"""


def test_a_wrong_configuration_ends_all_services_at_once_with_one_line_and_no_table(
    tmp_path: Path, server: EmbeddedServer
) -> None:
    (tmp_path / "mine.py").write_text(LAUNCHER)
    folder = tmp_path / "run"
    folder.mkdir()
    before = json.dumps({"exit_reason": "finished", "steps": 3})
    (folder / "summary.json").write_text(before)
    config = {
        "run": {"name": tmp_path.name.lower(), "folder": str(folder)},
        "model": {"path": "m"},
        "train": {"name": "arithmetic"},
        "reward": {"terms": [{"name": "exact"}]},
        "broker": {"url": server.url},
        "control": {"enabled": False},
        "supervisor": {"grace_s": GRACE_S},
        "launcher": {"name": "mine.py:Mine"},
    }
    file = tmp_path / "config.yaml"
    file.write_text(json.dumps(config))
    # Much less than the grace that services have.
    done = subprocess.run(command("up", str(file)), capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == CONFIG_EXIT, done.stdout + done.stderr
    log = folder / "logs" / "feeder.log"
    assert done.stderr == f"tidemill: feeder failed (exit code 2): no file data.jsonl [log: {log}]\n"
    assert "data.jsonl" not in done.stdout
    assert "accuracy" not in done.stdout
    # The run before has its summary still, kept aside; that of this one says why there is nothing else.
    assert (folder / "summary.json.1").read_text() == before
    left = RunFolder(folder).head()
    assert left is not None
    assert (left.state, left.cause) == ("failed", f"feeder failed (exit code 2): no file data.jsonl [log: {log}]")
