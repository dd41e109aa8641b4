"""One worker process, from the generator's side.

It runs many episodes at once. An episode that reaches its deadline is asked to end. If it does not, because it blocks
the event loop, the process is killed with all its children, and its other episodes become ``neighbour``.
"""

import asyncio
import contextlib
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Self

import msgspec
import structlog

from producers.agents.workers.notes import Notes
from producers.agents.workers.protocol import (
    SAID,
    AgentJob,
    AgentNote,
    AgentReady,
    AgentRefused,
    AgentResult,
    Begin,
    Blocked,
    Cancel,
    Ended,
    Heard,
    Kind,
    Leaving,
    NoteKept,
    Ping,
    Pong,
    Report,
)
from producers.agents.workers.start import AgentProgram, start_runner
from schemas.errors import ConfigError, DataError, InfraError
from schemas.system.guarded_process import GuardedProcess

log = structlog.get_logger()
START_TIMEOUT_S = 60.0
CANCEL_S = 1.0
"""The time for an episode to end after it was asked to."""
LATE_S = 0.25
"""The longest delay in noticing a deadline that a pause has moved."""
PING_S, SILENT_S = 5.0, 20.0
"""How often a process is pinged, and how long it may be silent before it is killed."""
_READ_S = 0.25
LINGER_S = 10.0
"""How long code of an ended episode may keep running; then its process gets no new episodes."""
_MOST_BYTES = 1 << 26


@dataclass
class _RunningEpisode:
    job: AgentJob
    notes: Notes
    done: asyncio.Future[AgentResult]
    until: float
    told: Report
    timer: asyncio.TimerHandle | None = None
    ending: Kind | None = None
    heard: bool = False

    def finish(self, kind: Kind, error: str = "", error_type: str = "") -> None:
        told = self.told
        if not self.done.done():
            self.done.set_result(AgentResult(kind, told.reward, told.turns, told.metrics, told.data, error, error_type))


class AgentProcess:
    """A worker process. ``usable`` turns False when it ends or an episode in it ignores its cancellation."""

    def __init__(
        self,
        process: GuardedProcess,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._clock = clock
        self._process = process
        self._reader = reader
        self._writer = writer
        self._episodes: dict[int, _RunningEpisode] = {}
        self._count = 0
        self.suspects = 0
        """The number of episodes in the process when it ended by itself, if it is unknown which one caused it."""
        self._blocked: Blocked | None = None
        self._leaving: Leaving | None = None
        self._lingering: set[int] = set()
        self._worn = False
        self._killing: asyncio.Task[str] | None = None
        self._listening: asyncio.Task[None] | None = None
        self._watching: asyncio.Task[None] | None = None
        self._answered = asyncio.Event()
        self._keeping: set[asyncio.Task[None]] = set()

    @classmethod
    async def start(cls, agent: AgentProgram, clock: Callable[[], float] = time.monotonic) -> Self:
        """Start a process and wait until the agent is loaded.

        ConfigError if the agent can't be loaded, InfraError if the process does not start. clock: see AgentWorkers.
        """
        starting = asyncio.ensure_future(asyncio.to_thread(start_runner, agent))
        try:
            process, setup = await asyncio.shield(starting)
        except OSError as error:
            raise InfraError(f"an agent's process could not be started: {error}") from error
        except asyncio.CancelledError:
            await asyncio.to_thread((await starting)[0].kill)
            raise
        reader, writer = await asyncio.open_connection(sock=process.connection, limit=_MOST_BYTES)
        started = cls(process, reader, writer, clock)
        try:
            writer.write(setup + b"\n")
            reply = SAID.decode(await asyncio.wait_for(reader.readline(), START_TIMEOUT_S))
            if isinstance(reply, AgentRefused):
                raise ConfigError(f"generator.workflow.args.run: {reply.error}")
            if not isinstance(reply, AgentReady):
                raise ValueError(reply)
        except BaseException as error:
            how = await started.kill("closed")
            if isinstance(error, TimeoutError):
                raise InfraError(f"an agent's process was not ready within {START_TIMEOUT_S:g} s") from None
            if isinstance(error, OSError | ValueError):
                raise InfraError(f"an agent's process did not start: {how}") from error
            raise
        started._listening = asyncio.create_task(started._listen())
        started._watching = asyncio.create_task(started._watch())
        return started

    @property
    def load(self) -> int:
        """Number of running episodes."""
        return len(self._episodes)

    @property
    def usable(self) -> bool:
        """Whether it takes new episodes."""
        return self._killing is None and not self._worn

    async def play(self, job: AgentJob, notes: Notes) -> AgentResult:
        """Run an episode to its end. If this call is cancelled, so is the episode, and the call returns after it."""
        if not self.usable:
            return AgentResult("neighbour", error="its process ended before it began")
        loop = asyncio.get_running_loop()
        self._count += 1
        number = self._count
        until = self._clock() + job.deadline_s
        episode = self._episodes[number] = _RunningEpisode(job, notes, loop.create_future(), until, Report(number))
        self._send(
            Begin(
                episode=number,
                id=job.episode_id,
                attempt=job.attempt,
                deadline=time.time() + job.deadline_s,
                task=job.task,
                base_url=job.base_url,
                api_key=job.api_key,
                notes=dict(notes),
            )
        )
        self._await_deadline(number, 0.0)
        try:
            return await asyncio.shield(episode.done)
        except asyncio.CancelledError:
            self._end(number, "cancelled")
            await asyncio.wait({episode.done})
            raise
        finally:
            if episode.timer is not None:
                episode.timer.cancel()

    def _await_deadline(self, number: int, least_s: float = LATE_S) -> None:
        """End an episode at its deadline, which a pause delays."""
        if (episode := self._episodes.get(number)) is None:
            return
        left = episode.until - self._clock()
        if left <= 0:
            self._end(number, "deadline")
        else:
            episode.timer = asyncio.get_running_loop().call_later(max(left, least_s), self._await_deadline, number)

    async def kill(self, reason: str) -> str:
        """Kill the process with all its children; its episodes end as ``neighbour``. Returns how it ended."""
        how, episodes = await self._kill()
        for _, episode in episodes:
            episode.finish(episode.ending or "neighbour", reason)
        return how

    def _send(self, message: msgspec.Struct) -> None:
        self._writer.write(msgspec.json.encode(message) + b"\n")

    def _end(self, number: int, why: Kind) -> None:
        episode = self._episodes.get(number)
        if episode is None or episode.ending is not None:
            return
        episode.ending = why
        self._send(Cancel(number))
        asyncio.get_running_loop().call_later(CANCEL_S, self._check_end, number)

    def _check_end(self, number: int, again: bool = True) -> None:
        episode = self._episodes.get(number)
        if episode is None or self._killing is not None:
            return
        if not episode.heard and again:
            # Our own event loop may have been blocked: messages that arrived meanwhile are read first.
            asyncio.get_running_loop().call_later(_READ_S, self._check_end, number, False)
        elif episode.heard and self._blocked is None:
            # Its code keeps running, in a thread or because it ignores its cancellation. No caller waits for it.
            del self._episodes[number]
            episode.finish(episode.ending or "cancelled", _late(episode))
            self._lingering.add(number)
            asyncio.get_running_loop().call_later(LINGER_S, self._wear, number)
        else:
            self._keep_task(self._kill_stuck(self._blocked))

    async def _kill_stuck(self, blocked: Blocked | None) -> None:
        """Kill a blocked process, and attribute the fault to an episode, if known."""
        culprit = blocked.episode if blocked else None
        for number, episode in (await self._kill())[1]:
            if blocked is not None and number == culprit:
                error = f"it blocked the event loop of its process for {blocked.seconds:.0f} s, in {blocked.where}"
                episode.finish(episode.ending or "died", error)
            elif episode.ending == "cancelled" or (episode.ending and culprit is None):
                error = "its process stood still" + (f", in {blocked.where}" if blocked else "")
                episode.finish(episode.ending, f"{_late(episode)}, {error}")
            else:
                episode.finish("neighbour", "another episode blocked their process, which was killed")

    def _wear(self, number: int) -> None:
        if number in self._lingering and not self._worn:
            self._worn = True
            log.warning("an agent does not end; its process is replaced", episodes=self.load)
            self._kill_if_done()

    def _kill_if_done(self) -> None:
        if self._worn and not self._episodes:
            self._keep_task(self.kill("worn"))

    def _keep_task(self, work: Any) -> None:
        # An event loop keeps no reference to its tasks.
        self._ending = asyncio.ensure_future(work)

    async def _kill(self) -> tuple[str, list[tuple[int, _RunningEpisode]]]:
        """Kill the process; returns how it ended, and the episodes that were in it, for the caller to end."""
        if self._killing is None:
            self._killing = asyncio.create_task(asyncio.to_thread(self._process.kill))
            for task in (self._listening, self._watching):
                if task is not None and task is not asyncio.current_task():
                    task.cancel()
        how = await asyncio.shield(self._killing)
        self._writer.close()
        taken, self._episodes = list(self._episodes.items()), {}
        return how, taken

    async def _listen(self) -> None:
        wrong = ""
        try:
            while line := await self._reader.readline():
                self._obey(SAID.decode(line))
        except (msgspec.MsgspecError, ValueError):
            wrong = "it sent an invalid message"
        except OSError:
            pass
        self._listening = None
        self._keep_task(self._bury(wrong))

    async def _watch(self) -> None:
        """Ping the process regularly, and kill it if it does not answer, as when it is stopped."""
        while True:
            await asyncio.sleep(PING_S)
            self._answered.clear()
            self._send(Ping())
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._answered.wait(), SILENT_S)
            # Our own event loop may have been blocked: messages that arrived meanwhile are read first.
            await asyncio.sleep(_READ_S)
            if not self._answered.is_set():
                log.warning("an agent's process does not answer pings and is killed", episodes=self.load)
                await self._bury(f"it did not answer for {SILENT_S:g} s")
                return

    async def _bury(self, wrong: str) -> None:
        """End the episodes of a process that ended by itself or sent an invalid message."""
        ended, episodes = await self._kill()
        how = wrong or ended
        culprit = self._leaving.episode if self._leaving is not None else None
        if self._leaving is not None:
            how = f"{how}, {self._leaving.how}"
        if culprit is None and len(episodes) > 1:
            self.suspects = len(episodes)
        for number, episode in episodes:
            if number == culprit or len(episodes) == 1:
                episode.finish(episode.ending or "died", f"its process ended: {how}")
            elif culprit is not None:
                episode.finish(episode.ending or "neighbour", f"another episode ended their process: {how}")
            else:
                episode.finish(episode.ending or "neighbour", f"its process ended, with all in it: {how}")

    def _obey(self, message: Any) -> None:
        if isinstance(message, Pong):
            self._answered.set()
            return
        if isinstance(message, Blocked):
            if message.first:
                where, seconds = message.where, message.seconds
                log.warning("an agent blocks the event loop of its process", where=where, seconds=seconds)
            self._blocked = message
            return
        if isinstance(message, Leaving):
            self._leaving = message
            return
        episode = self._episodes.get(message.episode)
        if isinstance(message, Ended):
            self._lingering.discard(message.episode)
            if episode is not None:
                del self._episodes[message.episode]
                if episode.ending is not None:
                    episode.finish(episode.ending, _late(episode))
                elif message.kind == "cancelled":
                    episode.finish("raised", "CancelledError: it cancelled itself", "asyncio.CancelledError")
                else:
                    episode.finish(message.kind, message.error, message.error_type)
            self._kill_if_done()
        elif episode is None:
            if isinstance(message, AgentNote):
                # A plain function runs on after its episode's end, and waits for this.
                self._send(NoteKept(message.note, "the episode is over"))
        elif isinstance(message, Heard):
            episode.heard = True
            # If the loop is still blocked, the process reports it again within a second.
            self._blocked = None
        elif isinstance(message, Report):
            told = episode.told
            told.reward = told.reward if message.reward is None else message.reward
            told.turns.update(message.turns)
            told.metrics.update(message.metrics)
            told.data.update(message.data)
        elif isinstance(message, AgentNote):
            self._keeping.add(keeping := asyncio.create_task(self._keep_note(episode, message)))
            keeping.add_done_callback(self._keeping.discard)

    async def _keep_note(self, episode: _RunningEpisode, note: AgentNote) -> None:
        problem = ""
        try:
            await episode.notes.keep(note.name, note.value)
        except DataError as error:
            problem = str(error)
        self._send(NoteKept(note.note, problem))


def _late(episode: _RunningEpisode) -> str:
    if episode.ending == "deadline":
        return f"it did not end within {episode.job.deadline_s:g} s"
    return "it was cancelled"
