"""Killable worker processes for reward functions that may block, hang or crash.

A worker whose call is past its deadline is killed with everything it started, and replaced; calls that wait are neither
failed nor charged for it. schemas/system/guarded_process.py says what a worker takes with it, and what it sees.
Nothing is pickled.
"""

from __future__ import annotations

import queue
import socket
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

import msgspec

from consumers.reward.rewards.signatures import RewardInput
from consumers.reward.rewards.terms import TermResult
from consumers.reward.workers.worker import PREFIX, Answer, Call, Ready, Setup, packed
from schemas.config import RewardTerm
from schemas.errors import InfraError
from schemas.system.guarded_process import CLOSE_TIMEOUT_S, GuardedProcess, environment

T = TypeVar("T")
START_TIMEOUT_S = 60.0
LOAD_TIMEOUT_S = 900.0
"""For a worker that loads what its function needs before its first call."""
_READY, _ANSWER = msgspec.msgpack.Decoder(Ready), msgspec.msgpack.Decoder(Answer)
"""Made before there are threads: msgspec crashes when several look at a type for the first time."""
MOST_BYTES = 1 << 16
"""More than any answer has."""
_PROGRAM = [sys.executable, "-P", "-m", "consumers.reward.workers.worker"]


class WrongAnswer(Exception):
    """The worker's connection has something else than the answer to this call."""


class WorkerEnded(Exception):
    """The worker process is gone; the text says how it ended."""


@dataclass(frozen=True)
class Job(Generic[T]):
    """Terms (by index) to call on a sample in this order, until a call fails.

    sample: makes the functions' input when a worker is free; what waits is no larger than its message.
    finish: makes the future's result of the calls' results.
    """

    terms: list[int]
    sample: Callable[[], RewardInput]
    finish: Callable[[list[TermResult]], T]
    future: Future[T]


class WorkerPool:
    """A number of workers, each with a thread that feeds it. Thread-safe::

    pool = WorkerPool(terms, base, size=2, timeout_s=15.0)
    outcomes = pool.submit([0, 2], lambda: sample, list).result(pool.longest_wait_s())
    pool.close()
    """

    def __init__(
        self,
        terms: Sequence[RewardTerm],
        base: Path,
        size: int,
        timeout_s: float,
        start_timeout_s: float = START_TIMEOUT_S,
        env: Sequence[str] = (),
        serves: Sequence[int] | None = None,
    ) -> None:
        """env: names of further environment variables that the workers see. serves: which terms are called, or all."""
        if size < 1:
            raise ValueError(f"a pool needs 1 worker or more, has {size}")
        self._timeout_s = timeout_s
        self._start_timeout_s = start_timeout_s
        serves = range(len(terms)) if serves is None else serves
        self._term_count = len(serves)
        self._jobs: queue.SimpleQueue[Job[Any] | None] = queue.SimpleQueue()
        self._closing = threading.Event()
        setup = Setup.of(terms, base, serves, timeout_s)
        self._workers = [Worker(setup, start_timeout_s, env) for _ in range(size)]
        self._threads = [
            threading.Thread(target=self._serve, args=(worker,), name=f"reward-worker-{i}", daemon=True)
            for i, worker in enumerate(self._workers)
        ]
        for thread in self._threads:
            thread.start()

    def submit(
        self, terms: list[int], sample: Callable[[], RewardInput], finish: Callable[[list[TermResult]], T]
    ) -> Future[T]:
        """Call terms, by index, on a sample; ``finish`` gets the results in their order, up to the first that failed.

        The future can be cancelled until a worker takes it. InfraError if the pool is closed; the future raises it if
        no worker starts.
        """
        if self._closing.is_set():
            raise InfraError("the reward workers are closed")
        future: Future[T] = Future()
        self._jobs.put(Job(terms, sample, finish, future))
        return future

    def longest_wait_s(self) -> float:
        """A bound on the time until everything submitted so far is done, seconds."""
        per_job = self._term_count * self._timeout_s + 3 * self._start_timeout_s
        return (self._jobs.qsize() + len(self._workers)) * per_job

    def close(self) -> None:
        """Kill the workers; calls that wait get InfraError."""
        self._closing.set()
        for worker in self._workers:
            worker.close()
        for _ in self._threads:
            self._jobs.put(None)
        for thread in self._threads:
            thread.join(CLOSE_TIMEOUT_S)
        while True:
            try:
                job = self._jobs.get_nowait()
            except queue.Empty:
                break
            if job is not None and job.future.set_running_or_notify_cancel():
                job.future.set_exception(InfraError("the reward workers were closed"))

    def _serve(self, worker: Worker) -> None:
        self._try_start(worker)
        while not self._closing.is_set():
            job = self._jobs.get()
            if job is None:
                break
            if job.future.set_running_or_notify_cancel():
                try:
                    job.future.set_result(job.finish(self._run(worker, job)))
                except InfraError as error:
                    job.future.set_exception(error)
            if not self._closing.is_set():
                self._try_start(worker)
        worker.kill()

    def _run(self, worker: Worker, job: Job[Any]) -> list[TermResult]:
        outcomes: list[TermResult] = []
        sample = job.sample()
        for term in job.terms:
            worker.start()
            outcomes.append(self._call(worker, term, sample))
            if outcomes[-1].status != "ok":
                break
        return outcomes

    def _call(self, worker: Worker, term: int, sample: RewardInput) -> TermResult:
        started = time.perf_counter()
        try:
            try:
                return worker.call(term, sample, self._timeout_s)
            except WrongAnswer:
                # Perhaps an earlier call's code wrote it: this one is called again, by a worker that is new.
                worker.kill()
                worker.start()
                return worker.call(term, sample, self._timeout_s)
        except WrongAnswer:
            worker.kill()
            reason = "its worker wrote what is no answer to this call, and was killed"
            return TermResult(status="error", reason=reason, seconds=time.perf_counter() - started)
        except TimeoutError:
            worker.kill()
            reason = f"no result within {self._timeout_s:g} s, its worker was killed"
            return TermResult(status="timeout", reason=reason, seconds=time.perf_counter() - started)
        except WorkerEnded as error:
            if self._closing.is_set():
                raise InfraError("the reward workers were closed") from error
            return TermResult(status="error", reason=str(error), seconds=time.perf_counter() - started)

    def _try_start(self, worker: Worker) -> None:
        # Ahead of the next call, so that none waits for it; a failure is told to the call that needs the worker.
        try:
            worker.start()
        except InfraError:
            return


class Worker:
    """A worker process, started again when it was killed. All methods but ``close`` belong to one thread."""

    def __init__(self, setup: Setup, start_timeout_s: float, env: Sequence[str] = ()) -> None:
        self._setup = setup
        self._env = env
        self._calls = 0
        self._start_timeout_s = start_timeout_s
        self._lock = threading.Lock()
        self._closed = False
        self._process: GuardedProcess | None = None
        self._connection: socket.socket | None = None

    def start(self) -> None:
        """Start the process unless it runs; InfraError if it is not ready in time."""
        if self._connection is not None:
            return
        with self._lock:
            if self._closed:
                raise InfraError("the reward workers are closed")
            try:
                self._start()
            except OSError as error:
                # A pool whose threads died of it would take work and never do it.
                raise InfraError(f"a reward worker could not be started: {error}") from error
        try:
            error_text = self._exchange(self._setup, self._start_timeout_s, _READY).error
        except TimeoutError:
            self.kill()
            raise InfraError(f"a reward worker did not start within {self._start_timeout_s:g} s") from None
        except WorkerEnded as error:
            raise InfraError(f"a reward worker did not start: {error}") from error
        except WrongAnswer:
            self.kill()
            raise InfraError("a reward worker did not start: it wrote what is no answer") from None
        if error_text:
            self.kill()
            raise InfraError(f"a reward worker cannot start: {error_text}")

    def call(self, term: int, sample: RewardInput, timeout_s: float) -> TermResult:
        """Call a term. TimeoutError past the deadline and WrongAnswer: kill the worker then. WorkerEnded: it died."""
        number = self.next_number()
        answer = self._exchange(Call(number, term, sample), timeout_s, _ANSWER)
        if answer.number != number:
            raise WrongAnswer
        return answer.result

    def next_number(self) -> int:
        """The number of a new call."""
        self._calls += 1
        return self._calls

    @property
    def connection(self) -> socket.socket:
        """The connection to the process; InfraError if it is gone."""
        if self._connection is None:
            raise InfraError("the reward workers are closed")
        return self._connection

    def kill(self) -> str:
        """Kill the process with all that it started; returns how the process ended."""
        with self._lock:
            process, self._process = self._process, None
            connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()
        return "it is gone" if process is None else process.kill()

    def close(self) -> None:
        """Kill the process and start no other; from any thread."""
        with self._lock:
            self._closed = True
            if self._process is not None:
                # The worker's own thread sees the end of the connection and reaps it.
                self._process.order_kill()

    def _start(self) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            self._process = GuardedProcess(
                _PROGRAM, "reward-worker", environment(self._env), stdin=theirs.fileno(), stdout=theirs.fileno()
            )
        self._connection = ours

    def _exchange(self, message: Any, timeout_s: float, expected: msgspec.msgpack.Decoder[T]) -> T:
        connection = self._connection
        if connection is None:
            raise WorkerEnded("the worker is not running")
        deadline = time.monotonic() + timeout_s
        try:
            connection.settimeout(timeout_s)
            connection.sendall(packed(message))
            (size,) = PREFIX.unpack(_receive(connection, PREFIX.size, deadline))
            if size > MOST_BYTES:
                raise WrongAnswer
            return expected.decode(_receive(connection, size, deadline))
        except TimeoutError:
            raise
        except msgspec.MsgspecError:
            raise WrongAnswer from None
        except OSError:
            raise WorkerEnded(f"the worker process died: {self.kill()}") from None


def _receive(connection: socket.socket, size: int, deadline: float) -> bytes:
    parts = bytearray()
    while len(parts) < size:
        left = deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError
        connection.settimeout(left)
        part = connection.recv(size - len(parts))
        if not part:
            raise ConnectionResetError
        parts += part
    return bytes(parts)
