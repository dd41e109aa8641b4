"""``tidemill bench scale``: from ten to a thousand generators on one server.

Each simulated generator is a separate consumer that waits for tasks and for orders on its own connections. Instead of
computing it sleeps as long as its longest sample would take. The generators of a process share one thread, but send the
server the same commands as the threads of a real one. Lengths are log-normal, so a few groups take many times longer
than most. As in a real run, there are also a feeder, a no-op reward and an assembler, which may drop groups.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import redis

from benchmarks.harness.processes import BenchRole, RoleProcesses, ServerUsage, describe, serving
from benchmarks.harness.report import ResultRow, Table
from benchmarks.harness.workload import PipelineShape, TrajectoryPool, TrajectoryPools, begin, open_broker
from benchmarks.pipelines.tidemill import CLAIM, GROUPS_AT_ONCE, REWARDS_AT_ONCE, reference
from broker.client import Broker
from broker.flow.pipeline import ScoredSample
from broker.flow.run_control import RunControl
from consumers.trainer.group_buffer import GroupBuffer
from schemas.errors import InfraError
from schemas.messages import BatchRecord, Trajectory

T = TypeVar("T")
PROCESSES = 4
"""Processes among which the generators are distributed."""
DEADLINE_S = 120.0
BUCKETS = 24
"""Number of lengths for which arrays are prepared; lengths are rounded up to one of them."""
AWAITED = ("XREADGROUP", "XREAD", "XREVRANGE", "HGETALL")
"""Commands of waiting generators, whose replies are read once they have arrived."""


@dataclass(frozen=True)
class Lengths:
    """Generated tokens of a sample: log-normal, at most ``longest``. rate: tokens a second of one sample."""

    median: float = 400.0
    sigma: float = 0.8
    longest: int = 8192
    rate: float = 200.0

    def draw(self, rng: np.random.Generator, count: int) -> npt.NDArray[np.int64]:
        """Draw the lengths of ``count`` samples, int64 [count]."""
        lengths = rng.lognormal(np.log(self.median), self.sigma, count)
        return np.clip(lengths, 8, self.longest).astype(np.int64)


def flow_for(generators: int) -> PipelineShape:
    """Return a shape with 2.5 slots for each generator: one for the group in work, the others on their way."""
    return PipelineShape(samples=8, batch=max(2, generators // 4), staleness=9, commit_every=4)


class AnswerPending(Exception):
    """A command was sent on ``connection``; once that is readable, the same call again returns the reply."""

    def __init__(self, connection: Any) -> None:
        self.connection = connection


class PendingClient(redis.Redis):
    """A client whose AWAITED commands raise AnswerPending instead of waiting, one of each name at a time."""

    def __init__(self, pool: redis.ConnectionPool) -> None:
        super().__init__(connection_pool=pool)
        self.auto_close_connection_pool = True
        self.pending: dict[str, Any] = {}

    def execute_command(self, *args: Any, **options: Any) -> Any:
        """Run a command; the second call of an awaited one reads the reply to the first."""
        plain: Any = super()
        pool: Any = self.connection_pool
        if (name := args[0]) not in AWAITED:
            return plain.execute_command(*args, **options)
        if name not in self.pending:
            connection = self.pending[name] = pool.get_connection()
            connection.send_command(*args)
            raise AnswerPending(connection)
        connection = self.pending.pop(name)
        try:
            return plain.parse_response(connection, name, **options)
        finally:
            pool.release(connection)


def open_pending(url: str, run: str) -> Broker:
    """Open a broker for one of many clients in a thread: its AWAITED commands raise AnswerPending."""
    broker = open_broker(url, run)
    broker.connection.client = PendingClient(broker.connection.client.connection_pool)
    return broker


async def answer_of(call: Callable[[], T]) -> T:
    """Return the result of a call whose last command is an awaited one; meanwhile others run in this thread."""
    loop = asyncio.get_running_loop()
    while True:
        try:
            return call()
        except AnswerPending as sent:
            readable, socket = asyncio.Event(), sent.connection._get_socket().fileno()
            loop.add_reader(socket, readable.set)
            await readable.wait()
            loop.remove_reader(socket)


@dataclass
class GeneratorWork:
    """Work of generators. received: task id, time of its request, time of arrival. in_time: samples before the end."""

    received: list[tuple[int, float, float]] = field(default_factory=list)
    published: int = 0
    in_time: int = 0
    busy_s: float = 0.0


class Generators:
    """The generators of one process, in one thread."""

    def __init__(self, url: str, run: str, first: int, count: int, lengths: Lengths) -> None:
        brokers = [open_pending(url, run) for _ in range(count)]
        self._queues = [broker.task_queue(f"generator-{first + index}") for index, broker in enumerate(brokers)]
        self._orders = [broker.run_control for broker in brokers]
        self._lengths = lengths
        self._pools = TrajectoryPools(16, lengths.longest * 4 / 3, BUCKETS)
        self._first = first
        asyncio.run(self._connect())

    async def _connect(self) -> None:
        """Read tasks and orders once, because a generator's start is not measured."""
        looks = [answer_of(partial(queue.read, 1, 1)) for queue in self._queues]
        await asyncio.gather(*looks, *(answer_of(orders.order_position) for orders in self._orders))

    def run(self, job: str, seconds: float) -> dict[str, Any]:
        done = GeneratorWork()
        asyncio.run(self._run_all(time.monotonic() + seconds, done))
        return vars(done)

    async def _run_all(self, end: float, done: GeneratorWork) -> None:
        generating = [self._generate(index, end, done) for index in range(len(self._queues))]
        await asyncio.gather(*generating, *(self._follow(orders, end) for orders in self._orders))

    async def _follow(self, orders: RunControl, end: float) -> None:
        """Wait for orders, as a generator's pause does."""
        position = b""
        while time.monotonic() < end:
            if position:
                await answer_of(partial(orders.wait_order, position))
            position = await answer_of(orders.order_position)
            await answer_of(orders.read)

    async def _generate(self, index: int, end: float, done: GeneratorWork) -> None:
        queue, rng = self._queues[index], np.random.default_rng(self._first + index)
        wanted = time.monotonic()
        while time.monotonic() < end:
            deliveries = await answer_of(partial(queue.read, 1))
            if not deliveries:
                continue
            (delivery,) = deliveries
            task = delivery.message
            done.received.append((task.task_id, wanted, time.monotonic()))
            lengths = self._lengths.draw(rng, task.n)
            started = time.monotonic()
            # The engine computes; work in progress at the end of the run is cut short, and does not count as in time.
            seconds = float(lengths.max()) / self._lengths.rate
            await asyncio.sleep(max(0.0, min(seconds, end - started)))
            done.busy_s += time.monotonic() - started
            # The prompt has a quarter of a trajectory's tokens.
            pools = [self._pools.of(length * 4 // 3) for length in lengths.tolist()]
            samples = [pool.trajectory(task, index, delivery.version) for index, pool in enumerate(pools)]
            accepted = (await asyncio.to_thread(queue.publish, task.task_id, samples)).count("ok")
            done.published += accepted
            done.in_time += accepted if started + seconds < end else 0
            queue.release(delivery)
            wanted = time.monotonic()


class TimedFeeder:
    """A feeder that admits as soon as a slot is free, and records when each task was admitted."""

    def __init__(self, url: str, run: str, flow: PipelineShape) -> None:
        self._ledger = open_broker(url, run).ledger
        self._flow = flow
        self._pool = TrajectoryPool(64)

    def run(self, job: str, seconds: float) -> dict[str, Any]:
        end = time.monotonic() + seconds
        admitted: list[float] = []
        cursor = 0
        while time.monotonic() < end:
            position = self._ledger.change_position()
            while True:
                ids = range(cursor, cursor + GROUPS_AT_ONCE)
                admission = self._ledger.admit_all([self._pool.task(task_id, self._flow.samples) for task_id in ids])
                admitted += [time.monotonic()] * (admission.next - cursor)
                cursor = admission.next
                if admission.answer != "ok":
                    break
            self._ledger.wait_change(position, 200)
        return {"admitted": admitted}


class NoOpRewarder:
    """A reward service that scores at no cost until no trajectory comes after the end."""

    def __init__(self, url: str, run: str) -> None:
        self._queue = open_broker(url, run).score_queue("reward-0")
        self._pool = TrajectoryPool(16)

    def run(self, job: str, seconds: float) -> dict[str, Any]:
        end = time.monotonic() + seconds
        scored = 0
        while True:
            deliveries = self._queue.read(REWARDS_AT_ONCE, 500)
            answers = self._queue.publish([(item, self._pool.score(item.message)) for item in deliveries])
            scored += answers.count("ok")
            if not deliveries and time.monotonic() > end:
                return {"scored": scored}


class TimedAssembler:
    """A trainer that does not compute: it takes whole steps in admission order, and records when each slot was freed.

    drops: groups per second that it drops instead, as a trainer drops groups with equal rewards.
    """

    def __init__(self, url: str, run: str, flow: PipelineShape, drops: float) -> None:
        self._training = open_broker(url, run).trainer_session()
        begin(self._training, flow)
        self._buffer = GroupBuffer(window=1)
        self._flow = flow
        self._records: list[BatchRecord] = []
        self._groups: list[list[ScoredSample]] = []
        self._freed: list[float] = []
        self._drops = drops
        self._dropped = 0
        self._steps = 0
        self._last_task = -1
        self._tokens = 0

    def run(self, job: str, seconds: float) -> dict[str, Any]:
        self._began = time.monotonic()
        end = self._began + seconds + 1.5
        while time.monotonic() < end:
            outcomes = self._training.claim_scores(CLAIM)
            completed = sum(self._buffer.add(outcome) for outcome in outcomes)
            if completed:
                self._train_all()
            if not outcomes:
                self._training.wait_for_scores(200)
        self._training.commit_steps(self._records)
        return {
            "freed": self._freed,
            "steps": self._steps,
            "dropped": self._dropped,
            "trained": self._steps * self._flow.per_step,
            "tokens": self._tokens,
        }

    def _train_all(self) -> None:
        active = self._training.read_pipeline().slots
        ready = 0
        while ready < len(active) and self._buffer.is_complete(active[ready].task_id):
            ready += 1
        due = int(self._drops * (time.monotonic() - self._began)) - self._dropped
        dropped = min(ready, due)
        for slot in active[:dropped]:
            self._drop(self._buffer.take(slot.task_id))
        for start in range(dropped, ready - self._flow.batch + 1, self._flow.batch):
            self._train([self._buffer.take(slot.task_id) for slot in active[start : start + self._flow.batch]])

    def _drop(self, group: list[ScoredSample]) -> None:
        self._training.drop_group(group[0].task_id, "zero_variance", [outcome.scored_id for outcome in group])
        self._freed.append(time.monotonic())
        self._dropped += 1

    def _train(self, groups: list[list[ScoredSample]]) -> None:
        step = self._steps
        tasks = [self._last_task, *(group[0].task_id for group in groups)]
        if tasks != sorted(set(tasks)):
            raise InfraError(f"step {step} is out of admission order")
        self._last_task = tasks[-1]
        bodies = self._training.fetch_trajectories(
            [outcome.trajectory_id or b"" for group in groups for outcome in group]
        )
        for body in bodies:
            if not isinstance(body, Trajectory):
                raise InfraError(f"step {step} lost a sample")
            self._tokens += len(body.versions())
        record = BatchRecord(
            step=step, version=step, new_version=step + 1, groups=[reference(group) for group in groups]
        )
        self._training.journal_batch(record)
        self._training.complete_step(record)
        self._steps += 1
        self._freed += [time.monotonic()] * len(groups)
        self._records.append(record)
        if len(self._records) == self._flow.commit_every:
            self._training.commit_steps(self._records)
            self._records.clear()


SCALE = Table(
    "Scale: simulated generators on one server",
    {
        "generators": "{generators:,}",
        "busy": "{generators_busy:.0%}",
        "trajectories/s": "{trajectories_per_s:,.0f}",
        "broker CPU": "{broker_cpu:.1%}",
        "admission ms, p50 / p99": "{admission_ms_p50:.1f} / {admission_ms_p99:.1f}",
        "task ms, p50 / p99": "{task_ms_p50:.1f} / {task_ms_p99:.1f}",
    },
)
"""Results of a number of generators. task: from a generator's request to its task; admission: into a free slot."""


def measure(
    generators: int,
    seconds: float,
    aof: str,
    lengths: Lengths,
    url: str | None,
    tick: Callable[[float], None],
    drops: float = 0.0,
) -> ResultRow:
    """Measure one row: generators for a number of seconds, with a number of groups per second that are dropped.

    InfraError when a published sample is neither trained, dropped, nor waiting to be.
    """
    flow = flow_for(generators)
    run = f"bench-{secrets.token_hex(4)}"
    with serving(url, aof) as address:
        broker = open_broker(address, run)
        # The assembler creates the run; the others find it.
        makers: dict[str, Callable[[], BenchRole]] = {
            "assembler": partial(TimedAssembler, address, run, flow, drops),
            "feeder": partial(TimedFeeder, address, run, flow),
            "reward": partial(NoOpRewarder, address, run),
        }
        processes = min(PROCESSES, generators)
        for index in range(processes):
            first = index * generators // processes
            count = (index + 1) * generators // processes - first
            makers[f"generators-{index}"] = partial(Generators, address, run, first, count, lengths)
        try:
            with RoleProcesses(makers) as roles:
                before = ServerUsage.of(address)
                started = time.monotonic()
                shares = roles.run("scale", seconds, seconds + DEADLINE_S, tick)
                wall = time.monotonic() - started
                after = ServerUsage.of(address)
            state = broker.ledger.read_state()
            waiting = int(broker.connection.client.xlen(broker.connection.keys.trajectories))
            server = describe(address)
        finally:
            broker.purge()
    figures = {name: share.figures for name, share in shares.items()}
    workers = [figure for name, figure in figures.items() if name.startswith("generators-")]
    published = sum(worker["published"] for worker in workers)
    trained, dropped = figures["assembler"]["trained"], figures["assembler"]["dropped"] * flow.samples
    if not state.balanced or published != trained + dropped + waiting:
        ends = f"{trained} trained, {dropped} dropped, {waiting} left"
        raise InfraError(f"{published} samples published, {ends}: {state}")
    admitted = figures["feeder"]["admitted"]
    # From when a task existed and its generator requested one, to when it received it.
    handed = [
        max(0.0, got - max(wanted, admitted[task_id]))
        for worker in workers
        for task_id, wanted, got in worker["received"]
        if task_id < len(admitted)
    ]
    # Seconds from when a slot was freed to the admission into it. The first ``slots`` tasks found free ones.
    freed = zip(figures["assembler"]["freed"], admitted[flow.slots :], strict=False)
    frees = [max(0.0, moment - free) for free, moment in freed]
    cpu = sum(share.cpu_s for share in shares.values())
    server_cpu = after.cpu_s - before.cpu_s
    return SCALE.row(
        generators=generators,
        aof="as it is" if url else aof,
        server=server,
        seconds=wall,
        trajectories_per_s=sum(worker["in_time"] for worker in workers) / seconds,
        trained_tokens_per_s=figures["assembler"]["tokens"] / wall,
        broker_cpu=server_cpu / wall,
        broker_cpu_us_per_trajectory=server_cpu / max(1, published) * 1e6,
        client_cpu_us_per_trajectory=cpu / max(1, published) * 1e6,
        task_ms_p50=_percentile(handed, 50),
        task_ms_p99=_percentile(handed, 99),
        admission_ms_p50=_percentile(frees, 50),
        admission_ms_p99=_percentile(frees, 99),
        generators_busy=sum(worker["busy_s"] for worker in workers) / (generators * seconds),
        slots=flow.slots,
        steps=figures["assembler"]["steps"],
        drops_per_s=figures["assembler"]["dropped"] / wall,
        published=published,
        trained=trained,
        dropped=dropped,
        left=waiting,
    )


def _percentile(seconds: list[float], percent: float) -> float | None:
    return float(np.percentile(seconds, percent)) * 1000 if seconds else None
