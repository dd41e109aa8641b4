"""The program that runs agents. Episodes are coroutines of one event loop, or threads if the agent is a plain function.

The process ends with its connection. producers/agents/workers/protocol.py describes the messages.
"""

from __future__ import annotations

import asyncio
import contextvars
import inspect
import os
import socket
import sys
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from .agent import Agent, Clients
from .connection import OWN, GeneratorConnection, UserCodeError, describe, end_a_copy, end_process, one_line, place_of
from .outcome import AsyncEpisodeHandle, EpisodeHandle, PendingNotes, read_outcome
from .watch import LoopWatch, Selector

_EPISODE: contextvars.ContextVar[int | None] = contextvars.ContextVar("tidemill_episode", default=None)


def main(channel: socket.socket) -> None:
    """Load the agent that the first message names, and run its episodes; with ``--check`` only load it."""
    connection = GeneratorConnection(channel)
    setup = connection.receive()
    try:
        set_limits(setup["memory_mb"])
        agent = Agent(setup)
        if "--check" in sys.argv:
            if "client" in agent.parameters:
                Clients(agent.name, agent.coroutine)
            connection.send({"op": "ready"})
        else:
            Runner(agent, connection).run()
    except UserCodeError as error:
        connection.send({"op": "refused", "error": str(error)})


def set_limits(megabytes: int | None) -> None:
    """Limit the memory for data, so that larger allocations fail; allow as many connections as the system does."""
    import resource

    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    if megabytes is not None:
        resource.setrlimit(resource.RLIMIT_DATA, (megabytes << 20, megabytes << 20))


class AgentTask(asyncio.Task):  # type: ignore[type-arg]
    """A task that only its own episode can cancel: some agents cancel all tasks of their loop at the end."""

    owner: int | None = None

    def cancel(self, msg: Any = None) -> bool:
        return _EPISODE.get() in (None, self.owner) and super().cancel(msg)


class Runner:
    """Runs the episodes of one process."""

    def __init__(self, agent: Agent, connection: GeneratorConnection) -> None:
        self._agent = agent
        self._connection = connection
        self._notes = PendingNotes(connection)
        self._selector = Selector()
        self._loop = asyncio.SelectorEventLoop(self._selector)
        self._running: dict[int, asyncio.Task[None]] = {}
        self._owners: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
        self._clients: Clients | None = None
        self._call: Callable[..., Any] = agent.build

    def run(self) -> None:
        """Build the agent, report that it is ready, and run episodes; never returns."""
        asyncio.set_event_loop(self._loop)
        self._loop.set_task_factory(self._make_task)
        try:
            self._loop.run_until_complete(self._build())
        except UserCodeError as error:
            self._connection.send({"op": "refused", "error": str(error)})
            return
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=lambda: getattr(self._loop, "_ready", []).clear())
        os._exit = self._exit  # type: ignore[assignment]
        self._connection.send({"op": "ready"})
        threading.Thread(target=self._connection.serve, args=(self._obey,), name="orders", daemon=True).start()
        watch = LoopWatch(self._loop, self._selector, self._owner, self._report_block)
        threading.Thread(target=watch.run, name="watch", daemon=True).start()
        while True:
            try:
                self._loop.run_forever()
            except (SystemExit, KeyboardInterrupt) as error:
                # Raised by an agent's own task or callback; the loop continues for the others.
                sys.stderr.write(f"agent: {describe(error)} outside of its episode\n")
            except IndexError:
                # In a forked copy, whose callbacks were removed.
                end_a_copy()
                raise

    async def _build(self) -> None:
        if "client" in self._agent.parameters:
            self._clients = Clients(self._agent.name, self._agent.coroutine)
        self._call = self._agent.build()

    def _make_task(self, loop: asyncio.AbstractEventLoop, coroutine: Any, **given: Any) -> asyncio.Task[Any]:
        task = AgentTask(coroutine, loop=loop, **given)
        task.owner = _EPISODE.get()
        if task.owner is not None:
            self._owners[task] = task.owner
        return task

    def _obey(self, order: dict[str, Any]) -> None:
        # In the thread that reads, so that orders are answered while the loop is blocked.
        if order["op"] == "ping":
            self._connection.send({"op": "pong"})
        elif order["op"] == "kept":
            self._notes.settle(order)
        else:
            if order["op"] == "cancel":
                self._connection.send({"op": "heard", "episode": order["episode"]})
            self._loop.call_soon_threadsafe(self._begin if order["op"] == "begin" else self._cancel, order)

    def _begin(self, order: dict[str, Any]) -> None:
        number = order["episode"]
        _EPISODE.set(number)
        self._running[number] = self._loop.create_task(self._play(number, order))
        _EPISODE.set(None)

    def _cancel(self, order: dict[str, Any]) -> None:
        if task := self._running.get(order["episode"]):
            task.cancel()

    async def _play(self, number: int, order: dict[str, Any]) -> None:
        ended: dict[str, Any] = {"op": "ended", "episode": number, "kind": "returned"}
        try:
            value = await self._run_agent(order)
            end_a_copy()
            outcome = read_outcome(value)
            if outcome:
                self._connection.send({"op": "report", "episode": number, **outcome})
        except asyncio.CancelledError:
            ended["kind"] = "cancelled"
        except BaseException as error:  # noqa: BLE001 - user code may raise anything, to exit included
            ended.update(kind="raised", error=describe(error) + place_of(error), error_type=full_name(error))
            if isinstance(error, UserCodeError):
                ended["error"] = one_line(str(error))
        # Tasks that the episode left running end with it.
        for task, owner in list(self._owners.items()):
            if owner == number and task is not self._running[number]:
                task.cancel()
        del self._running[number]
        self._connection.send(ended)

    async def _run_agent(self, order: dict[str, Any]) -> Any:
        kind = AsyncEpisodeHandle if self._agent.coroutine else EpisodeHandle
        given = {name: order.get(name) for name in self._agent.parameters}
        if "episode" in given:
            given["episode"] = kind(self._connection, self._notes, order)
        if self._clients is not None:
            given["client"] = self._clients.client(order["base_url"], order["api_key"])
        if not self._agent.coroutine:
            return await self._in_thread(given)
        result = self._call(**given)
        return await result if inspect.isawaitable(result) else result

    async def _in_thread(self, given: dict[str, Any]) -> Any:
        """Call a plain function in its own thread. Nothing can stop it: its episode lasts until it returns."""
        done: Future[tuple[Any, BaseException | None]] = Future()
        context = contextvars.copy_context()

        def work() -> None:
            result: tuple[Any, BaseException | None]
            try:
                result = (context.run(self._call, **given), None)
            except BaseException as error:  # noqa: BLE001 - as above
                result = (None, error)
            end_a_copy()
            done.set_result(result)

        threading.Thread(target=work, daemon=True).start()
        waiting = asyncio.wrap_future(done)
        try:
            value, error = await asyncio.shield(waiting)
        except asyncio.CancelledError:
            await asyncio.wait({waiting})
            raise
        if error is not None:
            raise error
        return value

    def _exit(self, code: int) -> None:
        if os.getpid() == OWN:
            self._connection.send({"op": "leaving", "episode": _EPISODE.get(), "how": f"os._exit({code})"})
        end_process(code)

    def _owner(self, task: Any) -> int | None:
        return self._owners.get(task) if task is not None else None

    def _report_block(self, owner: int | None, where: str, seconds: float, first: bool) -> None:
        self._connection.send({"op": "blocked", "episode": owner, "where": where, "seconds": seconds, "first": first})


def full_name(error: BaseException) -> str:
    """Return module and name of an exception's type; built-in ones have no module."""
    kind = type(error)
    return kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"
