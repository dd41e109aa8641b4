"""The check before a run that an agent can be loaded and called, in the interpreter that will run it."""

import os
import shutil

from producers.agents.workers.protocol import SAID, AgentReady, AgentRefused
from producers.agents.workers.start import AgentProgram, start_runner
from schemas.errors import ConfigError
from schemas.system.guarded_process import environment
from schemas.system.sandbox.jail import choose

CHECK_TIMEOUT_S = 20.0


def check_agent(agent: AgentProgram) -> None:
    """Raise ConfigError unless the agent can be loaded and takes its arguments.

    It is imported in its own process, but neither built nor called; of a command, only the program is looked up.
    """
    run, command, settings = agent.run, agent.command, agent.settings
    agent.check_sandbox()
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
        line = process.ask(setup, CHECK_TIMEOUT_S)
    except OSError:
        line = b""
    finally:
        how = process.kill()
    try:
        reply = SAID.decode(line)
    except ValueError:
        reply = None
    if isinstance(reply, AgentRefused):
        raise ConfigError(f"generator.workflow.args.run: {reply.error}")
    if not isinstance(reply, AgentReady):
        late = f"it is not loaded after {CHECK_TIMEOUT_S:g} s" if how == "SIGKILL" else f"its process ended with {how}"
        raise ConfigError(f"generator.workflow.args.run: {run} cannot be checked: {late}")
