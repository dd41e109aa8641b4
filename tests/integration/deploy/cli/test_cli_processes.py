"""Processes of the command line: what they load, and how they end."""

import subprocess
import sys

import pytest

from tests.support.runs.command_line import run_tidemill


def test_the_version() -> None:
    """Also in a process of its own, whose exit code is the command's."""
    assert run_tidemill("--version").stdout.startswith("tidemill 0.")
    for arguments, code in (["--version"], 0), (["up", "none.yaml"], 2):
        command = [sys.executable, "-m", "deploy.cli", *arguments]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
        same = run_tidemill(*arguments)
        assert (done.returncode, done.stdout, done.stderr) == (code, same.stdout, same.stderr)


def test_help_loads_nothing_heavy() -> None:
    code = (
        "import sys\nfrom deploy.cli.app import app\n"
        "try: app(['--help'])\nexcept SystemExit: pass\n"
        "print([m for m in ('torch', 'transformers', 'vllm', 'numpy', 'redis', 'pydantic') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.stdout.splitlines()[-1] == "[]"


@pytest.mark.parametrize(
    ("modules", "heavy"),
    [
        pytest.param(
            "deploy.run.up, deploy.cli.orders, producers.feeder, producers.generator.service, consumers.reward.service",
            ("torch", "transformers", "vllm", "matplotlib"),
            id="what trains no model loads no library for models, nor what only the end of a run needs",
        ),
        pytest.param(
            "consumers.trainer.service, consumers.trainer.step.build",
            ("transformers", "peft", "vllm"),
            id="the trainer of a small policy loads no language models",
        ),
        pytest.param(
            "deploy.client.client, deploy.cli.app, deploy.terminal.top, deploy.run.up",
            ("fastapi", "uvicorn", "starlette"),
            id="a command loads no web server while a control plane answers",
        ),
    ],
)
def test_a_process_loads_only_what_it_uses(modules: str, heavy: tuple[str, ...]) -> None:
    code = f"import sys, {modules}\nprint([m for m in {heavy} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert done.stdout == "[]\n", done.stderr
