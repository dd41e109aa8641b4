"""Killable worker processes for reward functions that may block, hang or crash.

A worker that is silent for as long as a call may take is killed with everything it started, and replaced; calls that
wait neither fail nor are charged for it. If several calls shared the worker, the one that silenced it, killed it or
wrote nonsense is not known. Each of them is then called again, alone, and the culprit is excluded.
schemas/system/guarded_process.py says what ends with a worker, and what a worker sees. Nothing is pickled.
"""

import asyncio
import sys
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Self

import msgspec

from consumers.reward.rewards.signatures import RewardInput
from consumers.reward.rewards.terms import TermResult
from consumers.reward.workers.worker import WorkerCall, WorkerReady, WorkerReply, WorkerSetup
from schemas.errors import InfraError
from schemas.messages import ScoreStatus
from schemas.system.guarded_process import environment
from schemas.system.worker_process import BadReply, WorkerProcess, frame, read_message

START_TIMEOUT_S = 60.0
LOAD_TIMEOUT_S = 900.0
"""For a worker that loads what its function needs before its first call."""
MAX_REPLY_BYTES = 1 << 22
"""Room for the log-probabilities of a million tokens."""
_READY, _REPLY = msgspec.msgpack.Decoder(WorkerReady), msgspec.msgpack.Decoder(WorkerReply)
_PROGRAM = [sys.executable, "-P", "-m", "consumers.reward.workers.worker"]
_CLOSED = "the reward workers are closed"
_NO_REPLY = "something that is not a reply"


@dataclass(eq=False)
class _Call:
    """A call of a term, by its index. sample: makes the function's input when a worker takes the call.

    begun: a worker has taken a call of its sample. alone: it shared a worker that was lost, so it is called again
    alone. bad_reply: that worker sent something that is no reply.
    """

    term: int
    sample: Callable[[], RewardInput]
    begun: bool
    result: asyncio.Future[TermResult] = field(default_factory=lambda: asyncio.get_running_loop().create_future())
    started: float = 0.0
    alone: bool = False
    bad_reply: bool = False

    def fail(self, error: Exception) -> None:
        if not self.result.done():
            self.result.set_exception(error)

    def finish(self, result: TermResult) -> None:
        if not self.result.done():
            self.result.set_result(result)


class WorkerPool:
    """Worker processes with up to ``capacity`` calls in flight in each::

        async with WorkerPool(setup, workers=2) as pool:
            result = await pool.call(0, lambda: sample)

    env: names of further environment variables that the workers see.
    """

    def __init__(
        self,
        setup: WorkerSetup,
        workers: int,
        capacity: int = 1,
        start_timeout_s: float = START_TIMEOUT_S,
        env: Sequence[str] = (),
    ) -> None:
        self.capacity = workers * capacity
        self._closed = False
        self._waiting: deque[_Call] = deque()
        self._workers = [_Worker(setup, self._waiting, capacity, start_timeout_s, env) for _ in range(workers)]
        self._running: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> Self:
        self._running = [asyncio.create_task(worker.run()) for worker in self._workers]
        for task in self._running:
            task.add_done_callback(self._drop_all)
        return self

    async def __aexit__(self, *_: object) -> None:
        """Kill the workers; calls that wait raise InfraError."""
        self._closed = True
        for worker in self._workers:
            worker.close()
        await asyncio.gather(*self._running)

    async def call(self, term: int, sample: Callable[[], RewardInput], begun: bool = False) -> TermResult:
        """Call a term, by its index. InfraError if no worker starts, or if the pool is closed.

        begun: a worker has called another term on this sample, so this call comes before those that wait.
        """
        if self._closed:
            raise InfraError(_CLOSED)
        call = _Call(term, sample, begun)
        (self._waiting.appendleft if begun else self._waiting.append)(call)
        for worker in self._workers:
            worker.news.set()
        return await call.result

    def cancel_waiting(self) -> None:
        """Cancel the calls of samples that no worker has begun."""
        for call in self._waiting:
            if not call.begun:
                call.result.cancel()

    def _drop_all(self, _: asyncio.Task[None]) -> None:
        # A worker's task ends when the pool is closed, or by a bug: nothing may wait for it then.
        self._closed = True
        while self._waiting:
            self._waiting.popleft().fail(InfraError(_CLOSED))


class _Worker:
    """One worker process at a time, and the calls in it. waiting: the pool's calls. news: wakes what feeds it."""

    _process: WorkerProcess | None = None
    _reader: asyncio.StreamReader
    _writer: asyncio.StreamWriter

    def __init__(
        self, setup: WorkerSetup, waiting: deque[_Call], capacity: int, start_timeout_s: float, env: Sequence[str]
    ) -> None:
        self.news = asyncio.Event()
        self._setup, self._waiting, self._capacity = setup, waiting, capacity
        self._start_timeout_s, self._env = start_timeout_s, env
        self._closed = False
        self._calls: dict[int, _Call] = {}
        self._number = 0
        self._heard = 0.0

    async def run(self) -> None:
        """Serve calls until the worker is closed, in one process after the other."""
        needed = False
        try:
            while not self._closed:
                try:
                    # Ahead of the next call. If this fails, that call tries again, and gets the error of its attempt.
                    await self._start()
                except InfraError as error:
                    if needed and self._waiting and not self._closed:
                        self._waiting.popleft().fail(error)
                    else:
                        await self._wait_for_call()
                    needed = not needed
                else:
                    needed = False
                    await self._serve()
        finally:
            for call in self._calls.values():
                call.fail(InfraError(_CLOSED))

    def close(self) -> None:
        """Kill the process and start no other."""
        self._closed = True
        self.news.set()
        if self._process is not None:
            self._process.order_kill()

    async def _wait_for_call(self) -> None:
        while not (self._waiting or self._closed):
            self.news.clear()
            await self.news.wait()

    async def _start(self) -> None:
        """Start a process. InfraError if it is not ready in time."""
        try:
            process = self._process = WorkerProcess(_PROGRAM, "reward-worker", environment(self._env))
        except OSError as error:
            raise InfraError(f"a reward worker could not be started: {error}") from error
        self._reader, self._writer = await asyncio.open_connection(sock=process.connection)
        try:
            async with asyncio.timeout(self._start_timeout_s):
                self._writer.write(frame(self._setup))
                ready = await read_message(self._reader, _READY, MAX_REPLY_BYTES)
            if ready is not None and not ready.error:
                return
            problem = f"cannot start: {ready.error if ready else _NO_REPLY}"
        except TimeoutError:
            problem = f"did not start within {self._start_timeout_s:g} s"
        except BadReply:
            problem = f"did not start: it sent {_NO_REPLY}"
        except (asyncio.IncompleteReadError, OSError):
            problem = ""
        ended = await self._kill()
        raise InfraError(f"a reward worker {problem or f'did not start: its process died: {ended}'}")

    async def _serve(self) -> None:
        """Feed calls to the process until it is lost, then settle the calls that were in it."""
        timeout_s = self._setup.timeout_s
        loop = asyncio.get_running_loop()
        listening = asyncio.create_task(self._listen())
        listening.add_done_callback(lambda _: self.news.set())
        silent = False
        while not (self._closed or listening.done() or silent):
            self.news.clear()
            self._send()
            try:
                # A worker without a call says nothing.
                async with asyncio.timeout_at(self._heard + timeout_s if self._calls else None):
                    await self.news.wait()
            except TimeoutError:
                silent = bool(self._calls) and loop.time() >= self._heard + timeout_s
        bad_reply = listening.done() and listening.result()
        listening.cancel()
        ended = await self._kill()
        if silent:
            self._settle("timeout", f"no result within {timeout_s:g} s, its worker was killed")
        elif bad_reply:
            self._settle("error", f"its worker sent {_NO_REPLY}, and was killed", bad_reply=True)
        elif not self._closed:
            self._settle("error", f"the worker process died: {ended}")

    def _send(self) -> None:
        while self._waiting and len(self._calls) < self._capacity:
            call = self._waiting[0]
            if self._calls and (call.alone or any(other.alone for other in self._calls.values())):
                return
            self._waiting.popleft()
            if call.result.done():
                continue
            call.begun, call.started = True, asyncio.get_running_loop().time()
            if not self._calls:
                self._heard = call.started
            self._number += 1
            self._calls[self._number] = call
            self._writer.write(frame(WorkerCall(self._number, call.term, call.sample())))

    async def _listen(self) -> bool:
        """Read replies until the connection ends; return whether something else came."""
        try:
            while True:
                reply = await read_message(self._reader, _REPLY, MAX_REPLY_BYTES)
                self._heard = asyncio.get_running_loop().time()
                if reply is not None:
                    call = self._calls.pop(reply.number, None)
                    if call is None:
                        return True
                    call.finish(reply.result)
                    self.news.set()
        except BadReply:
            return True
        except (asyncio.IncompleteReadError, OSError):
            return False

    def _settle(self, status: ScoreStatus, reason: str, bad_reply: bool = False) -> None:
        """Give a call that was alone its result, and have the others called again.

        The code of an earlier call may have sent a bad reply, so a call fails by its second one.
        """
        calls = list(self._calls.values())
        self._calls.clear()
        for call in reversed(calls):
            if len(calls) == 1 and (call.bad_reply or not bad_reply):
                seconds = asyncio.get_running_loop().time() - call.started
                call.finish(TermResult(status=status, reason=reason, seconds=seconds))
            else:
                call.alone, call.bad_reply = True, call.bad_reply or bad_reply
                self._waiting.appendleft(call)

    async def _kill(self) -> str:
        self._writer.transport.abort()
        return await asyncio.to_thread(self._process.kill) if self._process is not None else ""
