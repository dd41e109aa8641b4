"""The start of a worker process: its interpreter, its environment, and the connection to it."""

import os
import sys
from pathlib import Path
from typing import Any

import msgspec

from producers import runner
from producers.agents.workers.protocol import AgentSetup
from schemas.config import AgentsConfig
from schemas.errors import ConfigError
from schemas.system.guarded_process import environment
from schemas.system.worker_process import WorkerProcess


def start_runner(
    run: str, args: dict[str, Any], base: Path, settings: AgentsConfig, option: str = ""
) -> tuple[WorkerProcess, bytes]:
    """Start a process for this agent; returns it, and the first line to send to it, without its end.

    ConfigError if there is no such interpreter, OSError if the system can't start it.
    """
    own = settings.python is None
    python = sys.executable if own else str(base / (settings.python or ""))
    if not os.access(python, os.X_OK):
        raise ConfigError(f"generator.agents.python: {python} is not a program that can be run")
    setup = AgentSetup(
        run=run,
        args=args,
        base=str(base.resolve()),
        search=list(sys.path) if own else None,
        memory_mb=settings.memory_mb,
    )
    program = [python, str(Path(runner.__file__).parent), "agents", *([option] if option else [])]
    return WorkerProcess(program, "agent-worker", environment(settings.env, own)), msgspec.json.encode(setup)
