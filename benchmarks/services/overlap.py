"""``tidemill bench overlap``: what asynchrony gains at the lengths of a reasoning run, on simulated GPUs.

The broker is real, with its ledger, queues and journal, and so are admission and the trainer's choice of groups;
engines and training take the time that ``ClusterRates`` say, ``speedup`` times as fast. For each cluster size and each
staleness, the simulation of deploy/planning finds the best layout, which is then run here. A sample carries its length
divided by TOKENS, so that two cores carry the tokens of a cluster.
"""

from __future__ import annotations

import asyncio
import heapq
import secrets
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import Any

from benchmarks.harness.processes import BenchRole, RoleProcesses, describe, serving
from benchmarks.harness.report import ResultRow, Table
from benchmarks.harness.workload import ENDLESS, PipelineShape, TrajectoryPools, open_broker
from benchmarks.pipelines.tidemill import CLAIM, reference
from benchmarks.services.layout_costs import colocated_step_s, losses
from benchmarks.services.scale import DEADLINE_S, NoOpRewarder, TimedFeeder, answer_of, open_pending
from broker.flow.pipeline import ScoredSample
from broker.flow.progress import TakeoverRequest
from broker.queues.consumer_group import Delivery
from consumers.trainer.group_buffer import GroupBuffer
from deploy.planning.cluster import ClusterLayout, ClusterRates, LengthMix
from deploy.planning.search import Plan, best
from schemas.errors import InfraError
from schemas.messages import BatchRecord, Task, Trajectory

TOKENS = 100
"""Simulated tokens for each token that a sample carries."""
SEARCHED = 32
"""Most GPUs for which a layout is searched; larger clusters get the scaled layout of SEARCHED."""
BUCKETS = 12
"""Number of sizes of samples for which arrays are prepared."""
SAMPLES = 8
FIRST = 3
"""Steps that fill the pipeline, which are not measured."""


@dataclass
class _Engine:
    """A simulated generator.

    clock: tokens of a sample that began with it. ends: clock and delivery of each running sample.
    """

    clock: float = 0.0
    at: float = 0.0
    ends: list[tuple[float, int]] = field(default_factory=list)
    changed: asyncio.Event = field(default_factory=asyncio.Event)


class SimulatedGenerators:
    """All generators of a layout in one thread, each a separate consumer."""

    def __init__(
        self, url: str, run: str, layout: ClusterLayout, rates: ClusterRates, mix: LengthMix, speedup: float
    ) -> None:
        brokers = [open_pending(url, run) for _ in range(layout.generators)]
        self._queues = [broker.task_queue(f"generator-{index}") for index, broker in enumerate(brokers)]
        self._rates, self._mix, self._speedup = rates, mix, speedup
        self._pools = TrajectoryPools(8, mix.longest / TOKENS, BUCKETS)
        self._usable: dict[int, float] = {}  # when the weights of a version are there

    def run(self, job: str, seconds: float) -> dict[str, Any]:
        return asyncio.run(self._run_all(time.monotonic() + seconds))

    async def _run_all(self, end: float) -> dict[str, Any]:
        published = await asyncio.gather(*(self._generate(index, end) for index in range(len(self._queues))))
        return {"published": sum(published)}

    async def _generate(self, index: int, end: float) -> int:
        engine = _Engine(at=time.monotonic())
        deliveries: dict[int, tuple[Delivery[Task], int]] = {}  # by task: samples left
        taking = asyncio.create_task(self._take(index, engine, deliveries, end))
        published = 0
        while time.monotonic() < end:
            engine.changed.clear()
            left = min(self._left_s(engine), end - time.monotonic())
            try:
                async with asyncio.timeout(max(0.0, left)):
                    await engine.changed.wait()
            except TimeoutError:
                pass
            self._advance(engine)
            while engine.ends and engine.ends[0][0] <= engine.clock + 1e-6:
                _, task_id = heapq.heappop(engine.ends)
                delivery, count = deliveries[task_id]
                deliveries[task_id] = (delivery, count - 1)
                if count == 1:
                    published += await self._publish(index, deliveries.pop(task_id)[0])
        taking.cancel()
        return published

    async def _take(
        self, index: int, engine: _Engine, deliveries: dict[int, tuple[Delivery[Task], int]], end: float
    ) -> None:
        """Take tasks whenever there is capacity, emptiest engines first, and start them once weights are new enough."""
        queue = self._queues[index]
        while time.monotonic() < end:
            if len(engine.ends) >= self._rates.most:
                await asyncio.sleep(0.01)
                continue
            for delivery in await answer_of(partial(queue.read, 1, 200)):
                task = delivery.message
                now = time.monotonic()
                there = now + (self._rates.publish_s / self._speedup if delivery.version else 0.0)
                await asyncio.sleep(max(0.0, self._usable.setdefault(delivery.version, there) - now))
                self._advance(engine)
                deliveries[task.task_id] = (delivery, task.n)
                for length in self._mix.of_group(task.task_id, task.n):
                    heapq.heappush(engine.ends, (engine.clock + float(length), task.task_id))
                engine.changed.set()

    async def _publish(self, index: int, delivery: Delivery[Task]) -> int:
        task, queue = delivery.message, self._queues[index]
        lengths = self._mix.of_group(task.task_id, task.n)
        pools = [self._pools.of(length / TOKENS) for length in lengths.tolist()]
        made = [pool.trajectory(task, sample, delivery.version) for sample, pool in enumerate(pools)]
        accepted = (await asyncio.to_thread(queue.publish, task.task_id, made)).count("ok")
        queue.release(delivery)
        return accepted

    def _token_s(self, engine: _Engine) -> float:
        return (self._rates.step_s + len(engine.ends) * self._rates.row_s) / self._speedup

    def _left_s(self, engine: _Engine) -> float:
        return (engine.ends[0][0] - engine.clock) * self._token_s(engine) if engine.ends else float("inf")

    def _advance(self, engine: _Engine) -> None:
        now = time.monotonic()
        if engine.ends:
            engine.clock += (now - engine.at) / self._token_s(engine)
        engine.at = now


class SimulatedTrainer:
    """The trainer with its choice of groups and its journal; a step takes a time by its tokens."""

    def __init__(
        self, url: str, run: str, layout: ClusterLayout, rates: ClusterRates, mix: LengthMix, speedup: float
    ) -> None:
        self._training = open_broker(url, run).trainer_session()
        self._training.take_over(
            TakeoverRequest(
                batch=layout.batch, staleness=layout.staleness, window=layout.window, steps=ENDLESS, max_uncommitted=4
            )
        )
        self._buffer = GroupBuffer(layout.window)
        self._layout, self._mix = layout, mix
        self._rate = rates.trained_tokens_per_s * layout.trainers * speedup
        self._taken: list[list[ScoredSample]] = []
        self._records: list[BatchRecord] = []
        self._ends: list[tuple[float, int, float]] = []  # of each step: when, tokens, seconds
        self._oldest = 0

    def run(self, job: str, seconds: float) -> dict[str, Any]:
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            outcomes = self._training.claim_scores(CLAIM)
            for outcome in outcomes:
                self._buffer.add(outcome)
            if self._assemble():
                self._train()
            elif not outcomes:
                self._training.wait_for_scores(50)
        self._training.commit_steps(self._records)
        return {"ends": self._ends, "oldest": self._oldest, "trained": len(self._ends) * self._layout.batch * SAMPLES}

    def _assemble(self) -> bool:
        taken = {group[0].task_id for group in self._taken}
        active = [slot for slot in self._training.read_pipeline().slots if slot.task_id not in taken]
        while len(self._taken) < self._layout.batch:
            slot = self._buffer.choose(active)
            if slot is None:
                return False
            active.remove(slot)
            self._taken.append(self._buffer.take(slot.task_id))
        return True

    def _train(self) -> None:
        began, step = time.monotonic(), len(self._ends)
        groups, self._taken = self._taken, []
        record = BatchRecord(
            step=step, version=step, new_version=step + 1, groups=[reference(group) for group in groups]
        )
        self._training.journal_batch(record)
        bodies = self._training.fetch_trajectories([one.trajectory_id or b"" for group in groups for one in group])
        for body in bodies:
            if not isinstance(body, Trajectory):
                raise InfraError(f"step {step} lost a sample")
            # Its tokens have the version with which its task was admitted; no sampled one can be older.
            self._oldest = max(self._oldest, step - int(body.versions().max()))
        if self._oldest > self._layout.staleness:
            raise InfraError(f"step {step} trains a sample {self._oldest} versions old: the bound was broken")
        tokens = sum(int(self._mix.of_group(group[0].task_id, SAMPLES).sum()) for group in groups)
        time.sleep(max(0.0, began + tokens / self._rate - time.monotonic()))
        self._training.complete_step(record)
        self._ends.append((time.monotonic(), tokens, tokens / self._rate))
        self._records.append(record)
        if len(self._records) == 4:
            self._training.commit_steps(self._records)
            self._records.clear()


OVERLAP = Table(
    "Tokens trained a second, simulated and on a real broker",
    {
        "GPUs": "{gpus}",
        "staleness": "{staleness}",
        "generate : train": "{generators} : {trainers}",
        "window": "{window}",
        "tokens/s": "{tokens_per_s:,.0f}",
        "on the broker": "{measured_tokens_per_s:,.0f}",
        "times staleness 0": "{times_staleness_0:.2f}",
        "times all GPUs in turns": "{times_colocated:.2f}",
        "trainer busy": "{trainer_busy:.0%}",
        "oldest, on the broker": "{oldest}, {measured_oldest}",
    },
)
"""The simulation of a cluster's best layout, and what a real broker made of it, if that was measured.

Seconds are the cluster's; on the broker they passed ``speedup`` times as fast. lost_s: of a step, by cause.
"""


def layout_for(gpus: int, groups: int, staleness: int, rates: ClusterRates, mix: LengthMix) -> Plan:
    """Find the best layout of a cluster for a number of groups per step and GPU."""
    few = min(gpus, SEARCHED)
    plan = best(few, groups * few, SAMPLES, staleness, rates, mix)
    if few == gpus:
        return plan
    from deploy.planning.simulation import Simulation

    one, factor = plan.layout, gpus // few
    window = one.window if one.window == 1 else one.window * factor
    layout = replace(
        one, generators=gpus - one.trainers * factor, trainers=one.trainers * factor, batch=groups * gpus, window=window
    )
    return Plan(layout, Simulation(layout, rates, mix).run(6))


def simulate(gpus: int, groups: int, staleness: int, rates: ClusterRates, mix: LengthMix) -> tuple[Plan, ResultRow]:
    """Return the simulation's row: the best layout, its throughput, and where time is lost."""
    plan = layout_for(gpus, groups, staleness, rates, mix)
    layout, outcome = plan.layout, plan.outcome
    tokens = outcome.tokens / outcome.steps
    together = colocated_step_s(layout, rates, mix, 2)
    return plan, OVERLAP.row(
        gpus=gpus,
        staleness=staleness,
        generators=layout.generators,
        trainers=layout.trainers,
        window=layout.window,
        groups=layout.batch,
        step_s=outcome.step_s,
        tokens_per_s=outcome.tokens_per_s,
        tokens_per_s_colocated=tokens / together,
        times_colocated=outcome.tokens_per_s / (tokens / together),
        trainer_busy=outcome.trainer_busy,
        generators_busy=outcome.generators_busy,
        oldest=outcome.oldest,
        lost_s=asdict(losses(plan, rates, mix, 6)) if gpus <= SEARCHED else None,
    )


def measure(
    row: ResultRow,
    plan: Plan,
    rates: ClusterRates,
    mix: LengthMix,
    steps: int,
    speedup: float,
    url: str | None,
    tick: Callable[[float], None],
) -> ResultRow:
    """Run a plan on a real broker for a number of steps after the first, and return its row with the results.

    InfraError if a sample is older than the bound.
    """
    layout = plan.layout
    run = f"bench-{secrets.token_hex(4)}"
    # The first steps wait for a whole pipeline.
    seconds = (steps + FIRST + layout.staleness + 1) * plan.outcome.step_s / speedup + 5
    flow = PipelineShape(samples=SAMPLES, batch=layout.batch, staleness=layout.staleness, commit_every=4)
    shared = (layout, rates, mix, speedup)
    with serving(url, "everysec") as address:
        broker = open_broker(address, run)
        makers: dict[str, Callable[[], BenchRole]] = {
            "trainer": partial(SimulatedTrainer, address, run, *shared),
            "feeder": partial(TimedFeeder, address, run, flow),
            "reward": partial(NoOpRewarder, address, run),
            "generators": partial(SimulatedGenerators, address, run, *shared),
        }
        try:
            with RoleProcesses(makers) as roles:
                shares = roles.run("overlap", seconds, seconds + DEADLINE_S, tick)
            state, server = broker.ledger.read_state(), describe(address)
        finally:
            broker.purge()
    if not state.balanced:
        raise InfraError(f"the ledger is out of balance: {state}")
    trainer = shares["trainer"].figures
    ends = trainer["ends"][FIRST - 1 :]
    if len(ends) < 2:
        raise InfraError(
            f"only {len(trainer['ends'])} steps in {seconds:.0f} s: give a lower --speedup or more --steps"
        )
    wall = (ends[-1][0] - ends[0][0]) * speedup
    return OVERLAP.row(
        **row.values,
        server=server,
        speedup=speedup,
        measured_steps=len(ends) - 1,
        measured_step_s=wall / (len(ends) - 1),
        measured_tokens_per_s=sum(tokens for _, tokens, _ in ends[1:]) / wall,
        measured_trainer_busy=sum(spent for _, _, spent in ends[1:]) * speedup / wall,
        measured_oldest=trainer["oldest"],
        cpu_s={name: round(share.cpu_s, 1) for name, share in shares.items()},
    )
