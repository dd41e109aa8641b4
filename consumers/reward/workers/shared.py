"""A worker process of one term that has many calls in flight: an async function, or one of lists.

Which call made the process die, write nonsense, or say nothing for as long as a call may take is known only of one
that was alone in it. So those that shared it are called again, each alone: the one that is to blame is then excluded,
and no other. All but ``submit``, ``longest_wait_s`` and ``close`` happens in the event loop of the pool's thread.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from consumers.reward.rewards.signatures import RewardInput
from consumers.reward.rewards.terms import TermResult
from consumers.reward.workers.pool import MOST_BYTES, START_TIMEOUT_S, Job, Worker, WrongAnswer
from consumers.reward.workers.worker import PREFIX, Answer, Call, Setup, packed
from schemas.config import RewardTerm
from schemas.errors import InfraError
from schemas.system.guarded_process import CLOSE_TIMEOUT_S

T = TypeVar("T")
_ANSWER = msgspec.msgpack.Decoder(Answer)


@dataclass(eq=False)
class _Waiting:
    """A call that was asked for. begun: its future can't be cancelled any more. alone: it shared a worker that was
    lost. wrong: that worker wrote what was no answer."""

    job: Job[Any]
    begun: bool = False
    alone: bool = False
    wrong: bool = False


class SharedPool:
    """One worker, which calls one term on up to ``places`` samples at once. Thread-safe; used like a WorkerPool."""

    def __init__(
        self,
        terms: Sequence[RewardTerm],
        base: Path,
        index: int,
        places: int,
        timeout_s: float,
        start_timeout_s: float = START_TIMEOUT_S,
        env: Sequence[str] = (),
    ) -> None:
        """index: of the term. env: names of further environment variables that the worker sees."""
        self._index = index
        self._places = places
        self._timeout_s = timeout_s
        self._per_call_s = timeout_s + 3 * start_timeout_s
        self._worker = Worker(Setup.of(terms, base, [index], timeout_s), start_timeout_s, env)
        self._waiting: deque[_Waiting] = deque()
        self._flying: dict[int, _Waiting] = {}
        self._heard = 0.0
        self._open = 0
        self._counting = threading.Lock()
        self._closing = threading.Event()
        self._news = asyncio.Event()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._main, name=f"reward-worker-{terms[index].name}", daemon=True)
        self._thread.start()

    def submit(
        self, terms: list[int], sample: Callable[[], RewardInput], finish: Callable[[list[TermResult]], T]
    ) -> Future[T]:
        """Call the term on a sample; ``terms`` is its index. See WorkerPool.submit."""
        future: Future[T] = Future()
        future.add_done_callback(self._count_done)
        with self._counting:
            self._open += 1
        call = _Waiting(Job(terms, sample, finish, future))
        try:
            if self._closing.is_set():
                raise InfraError("the reward workers are closed")
            self._loop.call_soon_threadsafe(self._add, call)
        except RuntimeError:
            raise InfraError("the reward workers are closed") from None
        return future

    def longest_wait_s(self) -> float:
        """A bound on the time until everything submitted so far is done, seconds."""
        return (self._open + 1) * self._per_call_s

    def close(self) -> None:
        """Kill the worker; calls that wait get InfraError."""
        self._closing.set()
        self._worker.close()
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._news.set)
        self._thread.join(CLOSE_TIMEOUT_S)

    def _count_done(self, _: Future[Any]) -> None:
        with self._counting:
            self._open -= 1

    def _add(self, call: _Waiting) -> None:
        self._waiting.append(call)
        self._news.set()

    def _main(self) -> None:
        try:
            self._loop.run_until_complete(self._run())
        finally:
            self._loop.run_until_complete(self._loop.shutdown_default_executor())
            self._loop.close()

    async def _run(self) -> None:
        try:
            while not self._closing.is_set():
                try:
                    await asyncio.to_thread(self._worker.start)
                except InfraError as error:
                    await self._refuse_one(error)
                    continue
                await self._serve()
        finally:
            self._closing.set()
            await asyncio.to_thread(self._worker.kill)
            for call in (*self._flying.values(), *self._waiting):
                if call.begun or call.job.future.set_running_or_notify_cancel():
                    call.job.future.set_exception(InfraError("the reward workers were closed"))

    async def _refuse_one(self, error: InfraError) -> None:
        """Tell the next call that no worker starts."""
        while not self._waiting and not self._closing.is_set():
            self._news.clear()
            await self._news.wait()
        if self._waiting and not self._closing.is_set():
            call = self._waiting.popleft()
            if call.begun or call.job.future.set_running_or_notify_cancel():
                call.job.future.set_exception(error)

    async def _serve(self) -> None:
        """Serve calls for one life of the process."""
        reader, writer = await asyncio.open_connection(sock=self._worker.connection)
        listening = asyncio.create_task(self._listen(reader))
        listening.add_done_callback(lambda _: self._news.set())
        silent = False
        while not (self._closing.is_set() or listening.done() or silent):
            self._news.clear()
            self._send(writer)
            # The worker is not heard while it has nothing to do, so nobody waits for it then.
            limit = self._heard + self._timeout_s - self._loop.time() if self._flying else None
            try:
                async with asyncio.timeout(limit):
                    await self._news.wait()
            except TimeoutError:
                silent = bool(self._flying) and self._loop.time() >= self._heard + self._timeout_s
        wrong = listening.done() and not listening.cancelled() and isinstance(listening.exception(), WrongAnswer)
        listening.cancel()
        writer.transport.abort()
        how = await asyncio.to_thread(self._worker.kill)
        if self._closing.is_set():
            return
        if silent:
            result = TermResult(
                status="timeout",
                reason=f"no result within {self._timeout_s:g} s, its worker was killed",
                seconds=self._timeout_s,
            )
        elif wrong:
            result = TermResult(
                status="error", reason="its worker wrote what is no answer to this call, and was killed"
            )
        else:
            result = TermResult(status="error", reason=f"the worker process died: {how}")
        self._settle(result, wrong)

    def _settle(self, result: TermResult, wrong: bool) -> None:
        """Give a call that was alone its result, and have the others called again."""
        calls = list(self._flying.values())
        self._flying.clear()
        for call in reversed(calls):
            if len(calls) == 1 and (call.wrong or not wrong):
                self._finish(call, result)
            else:
                call.alone, call.wrong = True, call.wrong or wrong
                self._waiting.appendleft(call)

    def _send(self, writer: asyncio.StreamWriter) -> None:
        while self._waiting and len(self._flying) < self._places:
            call = self._waiting[0]
            if self._flying and (call.alone or any(other.alone for other in self._flying.values())):
                return
            self._waiting.popleft()
            if not call.begun and not call.job.future.set_running_or_notify_cancel():
                continue
            call.begun = True
            if not self._flying:
                self._heard = self._loop.time()
            number = self._worker.next_number()
            self._flying[number] = call
            writer.write(packed(Call(number, self._index, call.job.sample())))

    async def _listen(self, reader: asyncio.StreamReader) -> None:
        """Read answers until the connection ends. WrongAnswer when something else comes."""
        try:
            while True:
                (size,) = PREFIX.unpack(await reader.readexactly(PREFIX.size))
                if size > MOST_BYTES:
                    raise WrongAnswer
                data = await reader.readexactly(size)
                self._heard = self._loop.time()
                if not data:
                    continue
                answer = _ANSWER.decode(data)
                call = self._flying.pop(answer.number, None)
                if call is None:
                    raise WrongAnswer
                self._finish(call, answer.result)
                self._news.set()
        except msgspec.MsgspecError:
            raise WrongAnswer from None
        except (asyncio.IncompleteReadError, OSError):
            return

    def _finish(self, call: _Waiting, result: TermResult) -> None:
        call.job.future.set_result(call.job.finish([result]))
