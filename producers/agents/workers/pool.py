"""The worker processes of one generator, over which episodes are spread.

An episode gets the process with the fewest. When a process ends and nobody knows for which of its episodes, none of
them pays for it: they begin anew in processes with fewer others, in the end alone, and the one that ends its process
alone has died by itself.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import MutableMapping, Sequence
from pathlib import Path
from typing import Any

from producers.agents.workers.command import CommandRunner
from producers.agents.workers.process import AgentProcess, close_all
from producers.agents.workers.protocol import AgentJob, AgentResult
from schemas.config import AgentsConfig
from schemas.errors import ConfigError, InfraError


class AgentWorkers:
    """Runs episodes of an agent, a function or class (``run``) or a program (``command``)::

    workers = AgentWorkers("agent.py:run", None, {}, base, settings)
    await workers.start()
    result = await workers.run(job)
    await workers.close()
    """

    def __init__(
        self,
        run: str | None,
        command: Sequence[str] | None,
        args: dict[str, Any],
        base: Path,
        settings: AgentsConfig,
    ) -> None:
        self._run = run or ""
        self._args = args
        self._base = base
        self._settings = settings
        self._commands = CommandRunner(command, base, settings) if command else None
        self._slots: list[asyncio.Task[AgentProcess]] = []
        self._closed = False

    async def start(self) -> None:
        """Start the processes. ConfigError if the agent can't be loaded, InfraError if they can't be started."""
        if self._commands is not None:
            return
        self._slots = [self._start() for _ in range(self._settings.processes)]
        await asyncio.wait(self._slots)
        for slot in self._slots:
            if slot.exception() is not None:
                await self.close()
                await slot

    async def run(self, job: AgentJob, once: MutableMapping[str, str] | None = None) -> AgentResult:
        """Run an episode to its end; when this call is cancelled, so is the episode.

        once: results of ``episode.once`` in earlier attempts, JSON by name, to which new ones are added. InfraError if
        no process can be started for it.
        """
        kept = {} if once is None else once
        if self._commands is not None:
            return await self._commands.run(job)
        return await (await self._place()).play(job, kept)

    async def cancel(self, episode_id: str) -> None:
        """End an episode: its call returns ``cancelled``."""
        if self._commands is not None:
            self._commands.cancel(episode_id)
        for process in self._processes():
            process.cancel(episode_id)

    async def close(self) -> None:
        """Kill all processes; episodes that run are cut off."""
        self._closed = True
        if self._commands is not None:
            await self._commands.close()
        for slot in self._slots:
            slot.cancel()
        for slot in self._slots:
            with contextlib.suppress(asyncio.CancelledError, ConfigError, InfraError):
                await slot
        await close_all(self._processes())

    def _start(self) -> asyncio.Task[AgentProcess]:
        return asyncio.create_task(AgentProcess.start(self._run, self._args, self._base, self._settings))

    def _processes(self) -> list[AgentProcess]:
        return [slot.result() for slot in self._slots if slot.done() and not slot.cancelled() and not slot.exception()]

    async def _place(self) -> AgentProcess:
        """The process for an episode; ends are noticed here, and replaced."""
        if self._closed:
            raise InfraError("the agents' processes are closed")
        for number, slot in enumerate(self._slots):
            if slot.done() and (slot.exception() is not None or not slot.result().usable):
                self._slots[number] = self._start()
        usable = [process for process in self._processes() if process.usable]
        if not usable:
            done, _ = await asyncio.wait(self._slots, return_when=asyncio.FIRST_COMPLETED)
            usable = [next(iter(done)).result()]
        return min(usable, key=lambda process: process.load)
