"""The start of a worker process, and the check before a run that it can load the agent, in the same interpreter."""

import os
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from producers import runner
from producers.agents.workers.protocol import SAID, AgentReady, AgentRefused, AgentSetup
from schemas.config import AgentsConfig
from schemas.errors import ConfigError
from schemas.system.guarded_process import environment
from schemas.system.sandbox.jail import choose
from schemas.system.worker_process import WorkerProcess

CHECK_TIMEOUT_S = 20.0


@dataclass(frozen=True)
class AgentProgram:
    """A user's agent: a function or a class (``run``) that is built with ``args``, or a program (``command``).

    base: folder of the configuration. ConfigError if a sandbox is set and the agent is a function, which would run
    outside of it.
    """

    run: str | None
    command: Sequence[str] | None
    args: dict[str, Any]
    base: Path
    settings: AgentsConfig

    def __post_init__(self) -> None:
        if self.settings.sandbox != "none" and not self.command:
            raise ConfigError(
                "generator.agents.sandbox holds for agents that are programs: give generator.workflow.args.command"
            )


def start_runner(agent: AgentProgram, option: str = "") -> tuple[WorkerProcess, bytes]:
    """Start a process for this function or class; returns it, and the first line to send to it, without its end.

    ConfigError if there is no such interpreter, OSError if the system can't start it.
    """
    settings = agent.settings
    own = settings.python is None
    python = sys.executable if own else str(agent.base / (settings.python or ""))
    if not os.access(python, os.X_OK):
        raise ConfigError(f"generator.agents.python: {python} is not a program that can be run")
    setup = AgentSetup(
        run=agent.run or "",
        args=agent.args,
        base=str(agent.base.resolve()),
        search=list(sys.path) if own else None,
        memory_mb=settings.memory_mb,
    )
    program = [python, str(Path(runner.__file__).parent), "agents", *([option] if option else [])]
    return WorkerProcess(program, "agent-worker", environment(settings.env, own)), msgspec.json.encode(setup)


def check_agent(agent: AgentProgram) -> None:
    """Raise ConfigError unless the agent can be loaded and takes its arguments.

    It is imported in its own process, but neither built nor called; of a command, only the program is looked up.
    """
    run, command, settings = agent.run, agent.command, agent.settings
    if settings.sandbox != "none":
        choose(settings.sandbox)
    if command:
        program = str(agent.base / command[0]) if os.sep in command[0] else command[0]
        if shutil.which(program, path=environment(settings.env).get("PATH")) is None:
            raise ConfigError(f"generator.workflow.args.command: {command[0]!r} is not a program that can be run")
        return
    try:
        process, setup = start_runner(agent, "--check")
    except OSError as error:
        raise ConfigError(f"generator.workflow.args.run: {run} cannot be checked: {error}") from error
    try:
        reply = SAID.decode(process.ask(setup, CHECK_TIMEOUT_S))
    except (OSError, ValueError):
        reply = None
    finally:
        how = process.kill()
    if isinstance(reply, AgentRefused):
        raise ConfigError(f"generator.workflow.args.run: {reply.error}")
    if not isinstance(reply, AgentReady):
        late = f"it is not loaded after {CHECK_TIMEOUT_S:g} s" if how == "SIGKILL" else f"its process ended with {how}"
        raise ConfigError(f"generator.workflow.args.run: {run} cannot be checked: {late}")
