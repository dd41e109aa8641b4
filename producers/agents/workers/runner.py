"""The process in which agents run: ``python runner.py``, with any Python from 3.9 and nothing but its standard library.

stdin is a socket: orders come in and what agents say goes out, as JSON lines; protocol.py describes both. What agents
print goes to stderr. Episodes are coroutines of one event loop, or threads where the agent is a plain function. A
thread watches the loop and tells which function blocks it. The process ends with its connection.
``python runner.py --check`` loads an agent, tells whether it can be called, and runs nothing.
"""

from __future__ import annotations

import asyncio
import codecs
import contextvars
import importlib
import importlib.util
import inspect
import json
import math
import os
import selectors
import socket
import sys
import threading
import time
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

PARAMETERS = ("task", "client", "base_url", "api_key", "episode")
BLOCKED_S = 1.0
"""An event loop that stands still for longer is reported."""
_LOOK_S, _TELL_S = 0.25, 0.5
_EPISODE: contextvars.ContextVar[int | None] = contextvars.ContextVar("tidemill_episode", default=None)
_OWN = os.getpid()


class RefusedError(Exception):
    """The agent can't be loaded, called, or understood; one line."""


# Loading.


class Agent:
    """What the user gave: a function, or a class that is built with the arguments.

    parameters: those of PARAMETERS that it takes, by name. coroutine: whether it is an async function.
    """

    def __init__(self, setup: dict[str, Any]) -> None:
        self.name, self._args = setup["run"], setup["args"]
        self._found: Any = find(self.name, Path(setup["base"]), setup["search"])
        owner: Any = self._found
        if inspect.isclass(owner):
            self._check_built(owner)
            run: Any = getattr(owner, "run", None)
            if not callable(run):
                raise RefusedError(f"{self.name}: the class has no method run")
            bound = isinstance(inspect.getattr_static(owner, "run"), (staticmethod, classmethod))
            function, given = run, {}
        elif callable(owner):
            bound, function, given = True, owner, dict(self._args)
        else:
            raise RefusedError(f"{self.name} must be a function or a class, is {type(owner).__name__}")
        inner = inspect.unwrap(function)
        if inspect.isasyncgenfunction(inner) or inspect.isgeneratorfunction(inner):
            raise RefusedError(f"{self.name}: run must return its result, it yields")
        self.coroutine = any(map(inspect.iscoroutinefunction, (inner, type(inner).__call__)))
        self.parameters = self._names(function, given, skip=0 if bound else 1)

    def build(self) -> Callable[..., Any]:
        """Return what is called for each episode, with ``parameters`` by name."""
        if not inspect.isclass(self._found):
            function, args = self._found, self._args
            return lambda **given: function(**args, **given)
        try:
            built: Any = self._found(**self._args)
        except (Exception, SystemExit) as error:
            raise RefusedError(f"{self.name} cannot be built: {describe(error)}") from error
        return built.run  # type: ignore[no-any-return]

    def _check_built(self, owner: Any) -> None:
        try:
            inspect.signature(owner).bind(**self._args)
        except TypeError as error:
            raise RefusedError(f"{self.name} cannot be built with args {self._args}: {error}") from None
        except ValueError:
            return

    def _names(self, function: Any, given: dict[str, Any], skip: int) -> tuple[str, ...]:
        """Which of PARAMETERS it takes; the first ``skip`` of its parameters are bound."""
        try:
            parameters = list(inspect.signature(function).parameters.values())[skip:]
        except ValueError:
            raise RefusedError(f"{self.name}: its parameters can't be read") from None
        allowed = ", ".join(PARAMETERS)
        by_name = {one.name for one in parameters if one.kind in (one.POSITIONAL_OR_KEYWORD, one.KEYWORD_ONLY)}
        for one in parameters:
            known = one.name in by_name and (one.name in PARAMETERS or one.name in given)
            if not known and one.default is one.empty and one.kind not in (one.VAR_KEYWORD, one.VAR_POSITIONAL):
                raise RefusedError(f"{self.name}: parameter {one.name} is none of {allowed}, nor in args")
        takes_any = any(one.kind is one.VAR_KEYWORD for one in parameters)
        for name in given:
            if name in PARAMETERS or not (name in by_name or takes_any):
                raise RefusedError(f"{self.name} takes no args {name!r} beside {allowed}")
        return tuple(name for name in PARAMETERS if name in by_name)


def find(path: str, base: Path, search: list[str] | None) -> Any:
    """Import ``file.py:name``, relative to ``base``, or ``package.module:name``."""
    if search is not None:
        sys.path[:] = search
    if str(base) not in sys.path:
        sys.path.insert(0, str(base))
    source, _, name = path.rpartition(":")
    try:
        module = _load_file((base / source).resolve()) if source.endswith(".py") else importlib.import_module(source)
    except (Exception, SystemExit) as error:
        reason = str(error) if isinstance(error, OSError) else describe(error)
        raise RefusedError(f"{path} cannot be imported: {reason}") from error
    try:
        return getattr(module, name)
    except AttributeError:
        raise RefusedError(f"{path}: {source} has no {name!r}") from None


def _load_file(file: Path) -> Any:
    if not file.is_file():
        raise OSError(f"no file {file}")
    name = file.stem
    try:
        taken = name in sys.modules or importlib.util.find_spec(name) is not None
    except (ImportError, ValueError):
        taken = False
    if taken and getattr(importlib.util.find_spec(name), "origin", None) != str(file):
        name = "tidemill_user_" + "_".join(file.with_suffix("").parts[-2:])
    spec = importlib.util.spec_from_file_location(name, file)
    if spec is None or spec.loader is None:
        raise OSError(f"{file} is no module")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def describe(error: BaseException) -> str:
    """Tell an exception as one line."""
    try:
        text = " ".join(str(error).split())
    except BaseException:  # noqa: BLE001 - user code: even the text of an exception may raise
        text = ""
    return one_line(f"{type(error).__name__}: {text}".rstrip(": "))


def one_line(text: str) -> str:
    """Shorten a text that is told to people."""
    return text[:400].encode("utf-8", "backslashreplace").decode()


def full_name(error: BaseException) -> str:
    """Module and name of an exception's type; built-in ones have no module."""
    kind = type(error)
    return kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"


# What an agent returns and says.


def number(value: Any, what: str) -> float:
    """Return a finite number; numpy's and torch's scalars are such, too."""
    if isinstance(value, (str, bytes)) or not hasattr(type(value), "__float__"):
        raise RefusedError(f"{what} must be a number, is {type(value).__name__}")
    found = float(value)
    if not math.isfinite(found):
        raise RefusedError(f"{what} must be finite, is {found}")
    return found


def read_outcome(value: Any) -> dict[str, Any]:
    """Read what an agent returned: None, a number, or a mapping of reward, turns, metrics, data."""
    if value is None:
        return {}
    if not isinstance(value, dict):
        return {"reward": number(value, "the result of run, if it is no dict and not None,")}
    unknown = sorted(str(key) for key in value if key not in ("reward", "turns", "metrics", "data"))
    if unknown:
        raise RefusedError(f"run returned {unknown[0]!r}: a dict may have reward, turns, metrics and data")
    found: dict[str, Any] = {}
    if value.get("reward") is not None:
        found["reward"] = number(value["reward"], "reward")
    for key in ("turns", "metrics"):
        if value.get(key) is not None:
            found[key] = numbers(value[key], key)
    if value.get("data") is not None:
        found["data"] = json.loads(json_text(value["data"], "data"))
        if not isinstance(found["data"], dict):
            raise RefusedError(f"data must be a dict, is {type(found['data']).__name__}")
    return found


def numbers(value: Any, what: str) -> dict[str, float]:
    """Return a mapping of names to finite numbers."""
    if not isinstance(value, dict):
        raise RefusedError(f"{what} must be a dict of numbers, is {type(value).__name__}")
    return {str(key): number(one, f"{what}[{key!r}]") for key, one in value.items()}


def json_text(value: Any, what: str) -> str:
    """Return the value as JSON."""
    try:
        return json.dumps(value, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise RefusedError(f"{what} must be JSON: {describe(error)}") from None


class Episode:
    """What a plain function is given as ``episode``.

    id: the same in every attempt, so names made of it find what an earlier one has left. attempt: 0, 1, ...
    deadline: Unix time, seconds.
    """

    def __init__(self, connection: Connection, order: dict[str, Any]) -> None:
        self.id: str = order["id"]
        self.attempt: int = order["attempt"]
        self.deadline: float = order["deadline"]
        self._number = order["episode"]
        self._notes: dict[str, str] = order["notes"]
        self._connection = connection
        self._locks: dict[str, Any] = {}

    def reward(self, value: Any, completion_id: str | None = None) -> None:
        """Set the reward of the episode, or of one answer of the policy by its id."""
        found = number(value, "reward")
        self._report({"reward": found} if completion_id is None else {"turns": {str(completion_id): found}})

    def metrics(self, **values: Any) -> None:
        """Keep numbers about this episode."""
        self._report({"metrics": numbers(values, "metrics")})

    def once(self, name: str, function: Callable[[], Any]) -> Any:
        """Do something that must not happen twice, and return its result, which has to be JSON.

        If the episode is begun anew, because its process or its generator was lost, the kept result is returned.
        """
        with self._locks.setdefault(name, threading.Lock()):
            if name not in self._notes:
                value = json_text(function(), f"the result of once({name!r})")
                self._keep(name, value).result()
                self._notes[name] = value
            return json.loads(self._notes[name])

    def _report(self, found: dict[str, Any]) -> None:
        self._connection.send({"op": "report", "episode": self._number, **found})

    def _keep(self, name: str, value: str) -> Future[None]:
        return self._connection.ask({"op": "note", "episode": self._number, "name": name, "value": value})


class AsyncEpisode(Episode):
    """What an async function is given as ``episode``."""

    async def once(self, name: str, function: Callable[[], Any]) -> Any:
        """Like that of a plain function's episode, to be awaited; ``function`` may be async."""
        async with self._locks.setdefault(name, asyncio.Lock()):
            if name not in self._notes:
                found = function()
                value = json_text(await found if inspect.isawaitable(found) else found, f"the result of once({name!r})")
                await asyncio.wrap_future(self._keep(name, value))
                self._notes[name] = value
            return json.loads(self._notes[name])


_MOST_BYTES = 60 << 20
"""Of a line; the generator reads no longer ones."""


def _escape_halves(error: UnicodeError) -> tuple[str, int]:
    """Replace half characters, which UTF-8 does not have, by the text of their escapes, within JSON."""
    assert isinstance(error, UnicodeEncodeError)
    return "".join(f"\\\\u{ord(half):04x}" for half in error.object[error.start : error.end]), error.end


codecs.register_error("tidemill.halves", _escape_halves)


class Connection:
    """The lines to and from the generator, for any thread. A copy of this process made by a fork has none."""

    def __init__(self, channel: socket.socket) -> None:
        self._channel = channel
        self._lock = threading.Lock()
        self._asked: dict[int, Future[None]] = {}
        self._count = 0

    def send(self, message: dict[str, Any]) -> None:
        """Send a line. It has to be JSON; RefusedError if it is too long. Half characters are sent as their escapes."""
        data = json.dumps(message, ensure_ascii=False).encode("utf-8", "tidemill.halves") + b"\n"
        if len(data) > _MOST_BYTES:
            raise RefusedError(f"what an agent says may have {_MOST_BYTES} bytes as JSON, this has {len(data)}")
        end_a_copy()
        with self._lock:
            try:
                self._channel.sendall(data)
            except OSError:
                # Nobody hears this process any more, and nobody waits for it.
                _end_process(1)

    def ask(self, message: dict[str, Any]) -> Future[None]:
        """Send a note; the future ends when it is kept, with RefusedError if it can't be."""
        answer: Future[None] = Future()
        with self._lock:
            self._count += 1
            note = self._count
        self._asked[note] = answer
        self.send({**message, "note": note})
        return answer

    def serve(self, obey: Callable[[dict[str, Any]], None]) -> None:
        """Read orders until the connection ends, and with it this process, whatever its agents do."""
        try:
            with self._channel.makefile("rb") as lines:
                for line in lines:
                    order = json.loads(line)
                    if order["op"] == "ping":
                        self.send({"op": "pong"})
                    elif order["op"] == "kept":
                        answer = self._asked.pop(order["note"])
                        if order["error"]:
                            answer.set_exception(RefusedError(order["error"]))
                        else:
                            answer.set_result(None)
                    else:
                        obey(order)
        finally:
            _end_process(1)


_end_process = os._exit


def end_a_copy() -> None:
    """End a copy of this process, which user code made by a fork and let come back here: it has nothing to say."""
    if os.getpid() != _OWN:
        _end_process(1)


class Clients:
    """Clients of the policy's endpoint, which share their connections: one made from nothing costs 20 ms."""

    def __init__(self, name: str, coroutine: bool) -> None:
        try:
            import openai
        except ImportError as error:
            raise RefusedError(
                f"{name} asks for client, and {sys.executable} has no openai: {describe(error)}"
            ) from None
        # The generator waits with its answer while it takes new weights; the episode's deadline is the limit.
        wait = openai.Timeout(None, connect=10.0)
        shared: Any
        if coroutine:
            shared = openai.DefaultAsyncHttpxClient(timeout=wait)
            self._make: Any = openai.AsyncOpenAI
            shared.aclose = _close_nothing_async
        else:
            shared = openai.DefaultHttpxClient(timeout=wait)
            self._make = openai.OpenAI
            shared.close = _close_nothing
        self._settings = {"http_client": shared, "timeout": wait}

    def client(self, base_url: str, api_key: str) -> Any:
        """A client of one session."""
        return self._make(base_url=base_url, api_key=api_key, **self._settings)


def _close_nothing() -> None:
    """An agent that closes its client leaves the connections to the others."""


async def _close_nothing_async() -> None:
    """An agent that closes its client leaves the connections to the others."""


# Running.


class Selector(selectors.DefaultSelector):
    """The event loop's selector, which notes when the loop began to work."""

    turn = 0
    busy_since: float | None = None

    def select(self, timeout: float | None = None) -> Any:
        end_a_copy()
        self.busy_since = None
        found = super().select(timeout)
        self.turn += 1
        self.busy_since = time.monotonic()
        return found


class AgentTask(asyncio.Task):  # type: ignore[type-arg]
    """A task of an episode, which no other one can cancel: some agents cancel all tasks of their loop at the end."""

    owner: int | None = None

    def cancel(self, msg: Any = None) -> bool:
        return _EPISODE.get() in (None, self.owner) and super().cancel(msg)


class Runner:
    """Runs the episodes of one process."""

    def __init__(self, agent: Agent, connection: Connection) -> None:
        self._agent = agent
        self._connection = connection
        self._selector = Selector()
        self._loop = asyncio.SelectorEventLoop(self._selector)
        self._running: dict[int, asyncio.Task[None]] = {}
        self._owners: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
        self._clients: Clients | None = None
        self._call: Callable[..., Any] = agent.build

    def run(self) -> None:
        """Say that all is ready and serve; never returns."""
        asyncio.set_event_loop(self._loop)
        self._loop.set_task_factory(self._make_task)
        try:
            self._loop.run_until_complete(self._build())
        except RefusedError as error:
            self._connection.send({"op": "refused", "error": str(error)})
            return
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=lambda: getattr(self._loop, "_ready", []).clear())
        os._exit = self._exit  # type: ignore[assignment]
        self._connection.send({"op": "ready"})
        threading.Thread(target=self._connection.serve, args=(self._obey,), name="orders", daemon=True).start()
        threading.Thread(target=self._watch, name="watch", daemon=True).start()
        while True:
            try:
                self._loop.run_forever()
            except (SystemExit, KeyboardInterrupt) as error:
                # An agent's own task or callback; the loop goes on for the others.
                sys.stderr.write(f"agent: {describe(error)} outside of its episode\n")
            except IndexError:
                # In a copy, whose work was taken from it.
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
        # In the thread that reads, so that it is heard while the loop is blocked.
        if order["op"] == "cancel":
            self._connection.send({"op": "heard", "episode": order["episode"]})
        self._loop.call_soon_threadsafe(self._begin if order["op"] == "begin" else self._cancel, order)

    def _begin(self, order: dict[str, Any]) -> None:
        number = order["episode"]
        _EPISODE.set(number)
        self._running[number] = self._loop.create_task(self._play(number, order))
        _EPISODE.set(None)

    def _cancel(self, order: dict[str, Any]) -> None:
        task = self._running.get(order["episode"])
        if task is not None:
            task.cancel()

    async def _play(self, number: int, order: dict[str, Any]) -> None:
        ended: dict[str, Any] = {"op": "ended", "episode": number, "kind": "returned"}
        try:
            value = await self._run_agent(order)
            end_a_copy()
            found = read_outcome(value)
            if found:
                self._connection.send({"op": "report", "episode": number, **found})
        except asyncio.CancelledError:
            ended["kind"] = "cancelled"
        except BaseException as error:  # noqa: BLE001 - user code may raise anything, to exit included
            ended.update(kind="raised", error=describe(error), error_type=full_name(error))
            if isinstance(error, RefusedError):
                ended["error"] = one_line(str(error))
        # What it has left running is over, too.
        for task, owner in list(self._owners.items()):
            if owner == number and task is not self._running[number]:
                task.cancel()
        del self._running[number]
        self._connection.send(ended)

    async def _run_agent(self, order: dict[str, Any]) -> Any:
        kind = AsyncEpisode if self._agent.coroutine else Episode
        given = {name: order.get(name) for name in self._agent.parameters}
        if "episode" in given:
            given["episode"] = kind(self._connection, order)
        if self._clients is not None:
            given["client"] = self._clients.client(order["base_url"], order["api_key"])
        if not self._agent.coroutine:
            return await self._in_thread(given)
        found = self._call(**given)
        return await found if inspect.isawaitable(found) else found

    async def _in_thread(self, given: dict[str, Any]) -> Any:
        """Call a plain function in a thread of its own, which nothing can end: its episode lasts until it returns."""
        done: Future[tuple[Any, BaseException | None]] = Future()
        context = contextvars.copy_context()

        def work() -> None:
            found: tuple[Any, BaseException | None]
            try:
                found = (context.run(self._call, **given), None)
            except BaseException as error:  # noqa: BLE001 - as above
                found = (None, error)
            end_a_copy()
            done.set_result(found)

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
        if os.getpid() == _OWN:
            self._connection.send({"op": "leaving", "episode": _EPISODE.get(), "how": f"os._exit({code})"})
        _end_process(code)

    def _watch(self) -> None:
        """Report the loop when it does nothing but one task, or one callback, for longer than BLOCKED_S."""
        begun, told, before = 0.0, 0.0, None
        while True:
            time.sleep(_LOOK_S)
            try:
                task = asyncio.current_task(self._loop)
                now, since = time.monotonic(), self._selector.busy_since
                seen = (self._selector.turn, id(task))
                if since is None or seen != before:
                    begun, told, before = now, 0.0, seen
                elif now - begun >= BLOCKED_S and now - told >= _TELL_S:
                    first, told = not told, now
                    owner = self._owners.get(task) if task is not None else None
                    where = blocking_line(threading.main_thread().ident)
                    seconds = round(now - begun, 2)
                    said = {"op": "blocked", "episode": owner, "where": where, "seconds": seconds, "first": first}
                    self._connection.send(said)
            except RuntimeError:
                # A dictionary of the loop has changed while it was looked at.
                continue


def blocking_line(thread: int | None) -> str:
    """The function of users' code that a thread is in, with its file and line."""
    frame: Any = sys._current_frames().get(thread or 0)
    library = os.path.dirname(os.__file__)
    innermost = frame
    while frame is not None:
        file = frame.f_code.co_filename
        if not (file.startswith((library, "<frozen")) or "site-packages" in file or file == __file__):
            break
        frame = frame.f_back
    frame = frame or innermost
    return "" if frame is None else f"{frame.f_code.co_name} ({frame.f_code.co_filename}:{frame.f_lineno})"


def set_limits(megabytes: int | None) -> None:
    """Let allocations beyond so many megabytes of data fail, and allow as many connections as the system does."""
    import resource

    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    if megabytes is not None:
        resource.setrlimit(resource.RLIMIT_DATA, (megabytes << 20, megabytes << 20))


def main() -> None:
    """Entry point."""
    # The folder of this file, which Python puts there, has nothing for users' code.
    sys.path[:] = [folder for folder in sys.path if Path(folder or ".").resolve() != Path(__file__).resolve().parent]
    channel = socket.socket(fileno=os.dup(0))
    os.set_inheritable(channel.fileno(), False)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(2, 1)
    connection = Connection(channel)
    setup = json.loads(channel.makefile("rb").readline())
    try:
        set_limits(setup["memory_mb"])
        agent = Agent(setup)
        if "--check" in sys.argv:
            if "client" in agent.parameters:
                Clients(agent.name, agent.coroutine)
            connection.send({"op": "ready"})
        else:
            Runner(agent, connection).run()
    except RefusedError as error:
        connection.send({"op": "refused", "error": str(error)})


if __name__ == "__main__":
    main()
