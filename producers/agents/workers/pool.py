"""The worker processes of one generator, and the distribution of episodes over them.

An episode gets the process with the fewest episodes. If a process ends and it is unknown which of its episodes caused
it, none of them pays: they restart in processes with fewer others, in the end alone, and an episode that ends its
process alone has died by itself.
"""

import asyncio
import contextlib
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import structlog

from producers.agents.workers.command import CommandRunner
from producers.agents.workers.notes import Notes
from producers.agents.workers.process import START_TIMEOUT_S, AgentProcess
from producers.agents.workers.protocol import AgentJob, AgentResult
from producers.agents.workers.start import AgentProgram
from schemas.errors import ConfigError, InfraError

log = structlog.get_logger()

_STARTS = 3
"""The number of times that a process may end before it is ready; then the generator gives up."""
_MOST_CELLS = 4
"""The most processes that a pool adds for suspects."""


@dataclass(eq=False)
class _Cell:
    """A process for a limited number of suspects."""

    limit: int
    start: asyncio.Task[AgentProcess]
    episodes: int = 0


class AgentWorkers:
    """Runs episodes of an agent, a function or class (``run``) or a program (``command``), until it is closed."""

    keep_requests = False

    def __init__(
        self, agent: AgentProgram, clock: Callable[[], float] = time.monotonic, run_folder: Path | None = None
    ) -> None:
        """clock: seconds for deadlines; it may stand still during a pause. run_folder: hidden from sandboxed agents."""
        self._agent = agent
        self._settings = agent.settings
        self._clock = clock
        self._commands = CommandRunner(agent, clock, run_folder) if agent.command else None
        self._slots: list[asyncio.Task[AgentProcess]] = []
        self._suspects: dict[str, int] = {}
        self._cells: list[_Cell] = []
        self._cell_left = asyncio.Event()
        self._closed = False

    async def start(self) -> None:
        """Start the processes. ConfigError if the agent can't be loaded, InfraError if they can't be started."""
        if self._commands is not None:
            return
        self._slots = [asyncio.create_task(self._start()) for _ in range(self._settings.processes)]
        await asyncio.wait(self._slots)
        for slot in self._slots:
            if slot.exception() is not None:
                await self.close()
                await slot

    async def run(self, job: AgentJob, once: Notes | None = None) -> AgentResult:
        """Run an episode to its end; if this call is cancelled, so is the episode.

        once: results of ``episode.once`` in earlier attempts, to which new ones are added. InfraError if no process can
        be started for it.
        """
        notes = Notes() if once is None else once
        if self._commands is not None:
            return await self._commands.run(job)
        limit = self._suspects.pop(job.episode_id, None)
        if limit is not None:
            return await self._run_isolated(job, notes, limit)
        process = await self._place()
        return self._noted(job, process, await process.play(job, notes))

    async def close(self) -> None:
        """Kill all processes; running episodes are cut off."""
        self._closed = True
        if self._commands is not None:
            await self._commands.close()
        starts = [*self._slots, *(cell.start for cell in self._cells)]
        await asyncio.gather(*(_end(start, "the agents' processes were closed") for start in starts))
        self._cell_left.set()

    def _noted(self, job: AgentJob, process: AgentProcess, result: AgentResult) -> AgentResult:
        if result.kind == "neighbour" and process.suspects:
            self._suspects[job.episode_id] = max(1, process.suspects // 4)
            while len(self._suspects) > self._settings.episodes:
                # The oldest was not restarted.
                del self._suspects[next(iter(self._suspects))]
        return result

    async def _run_isolated(self, job: AgentJob, once: Notes, limit: int) -> AgentResult:
        """Run a suspect with fewer than ``limit`` others, which are suspects, too."""
        cell = await self._enter_cell(limit)
        try:
            process = await asyncio.shield(cell.start)
            return self._noted(job, process, await process.play(job, once))
        finally:
            cell.episodes -= 1
            if cell.episodes == 0:
                self._cells.remove(cell)
                await _end(cell.start, "its process is not needed any more")
            self._cell_left.set()

    async def _enter_cell(self, limit: int) -> _Cell:
        while not self._closed:
            for cell in self._cells:
                ended = cell.start.done() and (cell.start.exception() or not cell.start.result().usable)
                if cell.limit == limit and cell.episodes < limit and not ended:
                    cell.episodes += 1
                    return cell
            if len(self._cells) < _MOST_CELLS:
                self._cells.append(_Cell(limit, asyncio.create_task(self._start()), 1))
                return self._cells[-1]
            self._cell_left.clear()
            await self._cell_left.wait()
        raise InfraError("the agents' processes are closed")

    async def _start(self) -> AgentProcess:
        """Start a process; start it again if it is killed before it is ready, by hand or for lack of memory."""
        end, left = time.monotonic() + START_TIMEOUT_S, _STARTS
        while True:
            left -= 1
            try:
                return await AgentProcess.start(self._agent, self._clock)
            except InfraError as error:
                if not left or time.monotonic() >= end:
                    raise
                log.warning("an agent's process is started again", reason=str(error))

    async def _place(self) -> AgentProcess:
        """Return the process for an episode; ended processes are replaced here."""
        if self._closed:
            raise InfraError("the agents' processes are closed")
        for number, slot in enumerate(self._slots):
            if slot.done() and (slot.exception() is not None or not slot.result().usable):
                self._slots[number] = asyncio.create_task(self._start())
        ready = [slot.result() for slot in self._slots if slot.done()]
        if not ready:
            done, _ = await asyncio.wait(self._slots, return_when=asyncio.FIRST_COMPLETED)
            ready = [slot.result() for slot in done]
        return min(ready, key=lambda process: process.load)


async def _end(start: asyncio.Task[AgentProcess], reason: str) -> None:
    """Kill a process, or stop its start."""
    start.cancel()
    with contextlib.suppress(asyncio.CancelledError, ConfigError, InfraError):
        await (await start).kill(reason)
