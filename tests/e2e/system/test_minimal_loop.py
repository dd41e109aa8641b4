"""examples/minimal_loop.py runs as it is and learns; nothing else of the tests is in its way."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.user_code.example_scripts import EXAMPLES, load_script

EXAMPLE = EXAMPLES / "minimal_loop.py"


def test_the_reward_rises(tmp_path: Path) -> None:
    command = [sys.executable, str(EXAMPLE), "--steps", "20", "--folder", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr[-2000:]
    rewards = [float(found) for found in re.findall(r"^step +\d+/20 +reward ([0-9.]+) ", done.stdout, re.MULTILINE)]
    assert len(rewards) == 20
    assert sum(rewards[-5:]) / 5 > sum(rewards[:5]) / 5 + 0.02


def test_help_says_what_it_does(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", [str(EXAMPLE), "--help"])
    with pytest.raises(SystemExit) as ended:
        load_script(EXAMPLE.name).main()
    assert ended.value.code == 0
    told = capsys.readouterr().out
    assert "--steps" in told
    assert "no broker" in told
