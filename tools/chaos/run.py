"""A run of the suite: start the system, inject faults, let it settle, stop it."""

from __future__ import annotations

import random
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from benchmarks.rewards.server import FlakyJudge
from broker.connection.keys import Keys
from deploy.supervisor.process import Process
from tools.chaos import settings
from tools.chaos.agents import faults as faults_agents
from tools.chaos.faults import broker, floods, network, poison, processes, turns, user
from tools.chaos.judging.evaluations import unfinished
from tools.chaos.judging.evidence import EvidenceWriter, Log, read_logs
from tools.chaos.judging.oracle import SLACK_S, Loss, cursor, gather
from tools.chaos.judging.recovery import Hit
from tools.chaos.judging.surviving_steps import surviving_steps
from tools.chaos.judging.watch import Tail, Watch
from tools.chaos.outside import faults as faults_outside
from tools.chaos.outside.teacher import Teacher
from tools.chaos.outside.witness import WRONG
from tools.chaos.processes import Fleet, endpoint, free_port
from tools.chaos.proxy import Proxy
from tools.chaos.server import Server
from tools.chaos.service import FULL_DISK
from tools.chaos.turns import DIE_WAKING, SharedGpu
from tools.chaos.world import KINDS, Fault, Strike, World

MODULES = (processes, faults_agents, faults_outside, broker, floods, network, poison, turns, user)
"""Importing them fills KINDS."""
TICK_S = 0.02
LOOK_S = 0.2
STATUS_S = 2.0
UNDO_AGAIN_S = 0.2
WARM_UP_DEADLINE_S = 300.0
REST_DEADLINE_S = 120.0
USERS = (sys.executable, "-m", "tools.chaos.outside.users")
REST_LOOK_S = 3.0
MISBEHAVE = tuple(f"misbehave-{what}" for what in ("dataset", "workflow", "reward", "tracker", "agent"))


@dataclass(frozen=True)
class ChaosPlan:
    """Options of a run. only, skip: parts of names of kinds."""

    folder: Path
    minutes: float
    seed: int
    fault_every_s: float
    only: Sequence[str] = ()
    skip: Sequence[str] = ()
    overrides: Sequence[str] = ()
    workload: str = "both"
    judge: bool = False
    turns: bool = False
    teacher: bool = False
    pictures: bool = False

    def kinds(self) -> list[Fault]:
        """The kinds that may happen."""
        chosen = [fault for fault in KINDS if not self.only or any(word in fault.kind for word in self.only)]
        return [fault for fault in chosen if not any(word in fault.kind for word in self.skip)]


@dataclass
class _Active:
    hit: Hit
    undo: Callable[[], bool | None]
    due: float


class Chaos:
    """``go`` runs the plan; afterwards ``hits``, ``losses``, ``fleet.exits`` and the evidence tell what happened."""

    def __init__(self, plan: ChaosPlan, console: Console) -> None:
        self.plan = plan
        self._console = console
        self._rng = random.Random(plan.seed)
        # A tenth of the requests refused, a twentieth answered without a verdict, and a few never.
        self.judge = FlakyJudge(
            0.1, 0.05, frozenset(range(100, 100_000, 400)), answers=(f"Score: {settings.JUDGE_SAYS:g}",)
        )
        judge_url = self.judge.__enter__().url if plan.judge else None
        self._teacher = Teacher(plan.folder) if plan.teacher else None
        teacher_url = self._teacher.url if self._teacher is not None else None
        wanted = settings.configuration(plan.folder, plan.seed, plan.workload, judge_url, teacher_url, plan.pictures)
        config = settings.prepare(plan.folder, wanted)
        self.server = Server(plan.folder / "broker")
        self.proxy = Proxy(self.server.socket)
        self.keys = Keys("tidemill", settings.RUN)
        # A user's address of a conversation must hold when the control plane is restarted.
        overrides = [f"run.seed={plan.seed}", f"control.port={free_port()}", *plan.overrides]
        self.fleet = Fleet(
            plan.folder, config, overrides, settings.LEASE_S, self.proxy.open, self.proxy.open, plan.workload
        )
        self.fleet.gpu = SharedGpu(plan.folder) if plan.turns else None
        flow = settings.flow(plan.workload)
        self.world = World(
            plan.folder,
            self.fleet,
            self.server,
            self.proxy,
            self.keys,
            settings.LEASE_S,
            settings.GROUPS,
            flow.samples,
            (flow.staleness + 1) * settings.GROUPS,
            flow.staleness,
            plan.workload,
            self._teacher,
        )
        self._users: Process | None = None
        self._own = EvidenceWriter(plan.folder / "suite", "suite")
        self._watch = Watch(self.server, self.keys, self._own)
        self._tail = Tail(plan.folder / "evidence")
        self._active: list[_Active] = []
        self._looked = self._said = 0.0
        self._last = "-"
        self._phase = "starting"
        self._began = time.monotonic()
        self.hits: list[Hit] = []
        self.losses: list[Loss] = []
        self.problems: list[str] = []
        self.missing: list[int] = []
        self.cursor = 0
        self.fault_seconds = self.faults_end = 0.0

    def go(self) -> None:
        """Everything up to the last process' end; nothing of it runs any more afterwards, whatever happens."""
        try:
            self.server.start()
            self.server.wait()
            if self._teacher is not None:
                self._teacher.start()
            for name, role in settings.services(self.plan.workload).items():
                self.fleet.start(role, name)
            if self.plan.workload == "live":
                log = self.plan.folder / "logs" / "users.log"
                self._users = Process([*USERS, str(self.plan.folder), str(self.plan.seed)], "users", log=log)
            self._until("the first trained steps", WARM_UP_DEADLINE_S, lambda: self._tail.counts["steps"] >= 3)
            self._rain()
            self._rest()
            self._phase = "stopping"
            self.fleet.stop(self._tick_quietly)
        finally:
            self.fleet.stop(lambda: None)
            for beside in (self._users, self._teacher):
                if beside is not None:
                    beside.kill()
            self.server.stop()
            self.proxy.close()
            if self.plan.judge:
                self.judge.__exit__(None, None, None)

    def logs(self) -> list[Log]:
        """The services' evidence."""
        return read_logs(self.plan.folder / "evidence")

    def _rain(self) -> None:
        self._phase = "faults"
        self._began = started = time.monotonic()
        end = started + 60 * self.plan.minutes
        next_at = started
        while time.monotonic() < end:
            self._tick()
            if time.monotonic() >= next_at:
                self._strike()
                next_at = time.monotonic() + self._rng.uniform(0.4, 1.6) * self.plan.fault_every_s
        self.fault_seconds = time.monotonic() - started

    def _strike(self) -> None:
        """One fault of a random kind that is possible now."""
        kinds = self.plan.kinds()
        while kinds:
            fault = self._rng.choices(kinds, [kind.weight for kind in kinds])[0]
            kinds.remove(fault)
            at = time.monotonic()
            self._spare_second_run(fault)
            strike = fault.strike(self.world, self._rng)
            if strike is not None:
                self._note(fault, strike, at)
                return

    def _spare_second_run(self, fault: Fault) -> None:
        """A server that is made to forget can't know which of two runs was the first: the second one ends before."""
        for guest in self.fleet.guests if isinstance(fault, broker.FORGETFUL) else ():
            if guest.asked == "intruder":
                guest.asked = "kill"
                guest.process.kill()

    def _note(self, fault: Fault, strike: Strike, at: float) -> None:
        hit = Hit(fault.kind, strike.target, at, at + strike.seconds)
        self.hits.append(hit)
        if strike.back_to is not None:
            self.losses.append(Loss(fault.kind, strike.back_to, time.monotonic()))
        self._last = f"{fault.kind} ({strike.target})"
        self._own.write(
            "fault",
            fault=fault.kind,
            target=strike.target,
            seconds=round(strike.seconds, 2),
            back_to=strike.back_to,
            **{f"_{name}": value for name, value in strike.detail.items()},
        )
        if strike.undo is not None:
            self._active.append(_Active(hit, strike.undo, at + strike.seconds))

    def _rest(self) -> None:
        """No more faults: everything is undone, and every task that was admitted must end."""
        self._phase = "coming to rest"
        for active in self._active:
            active.due = 0.0
        self.faults_end = faults_end = time.monotonic()
        self._tick()
        self._undo_leftovers()
        self.cursor = cursor(read_logs(self.plan.folder / "evidence", "feeder"), faults_end)
        looked = 0.0
        # The last conversation that was offered begins soon, and its reward may come at the end of its time.
        deadline_s = REST_DEADLINE_S + (2 * settings.REWARD_S if self.plan.workload == "live" else 0.0)
        while time.monotonic() < faults_end + deadline_s:
            self._tick()
            if time.monotonic() >= looked + REST_LOOK_S:
                self.missing = self._unfinished()
                looked = time.monotonic()
                if not self.missing and not self._unevaluated():
                    return
        shown = ", ".join(map(str, self.missing[:20]))
        if not self.missing:
            return
        self.problems.append(
            f"{len(self.missing)} tasks had not ended {deadline_s:.0f} s after the last fault: {shown}"
        )

    def _undo_leftovers(self) -> None:
        self.proxy.heal([*self.fleet.urls, *map(endpoint, self.fleet.endpoints)])
        for flag in (FULL_DISK, DIE_WAKING, WRONG, *MISBEHAVE):
            (self.plan.folder / flag).unlink(missing_ok=True)

    def _unfinished(self) -> list[int]:
        self._tail.read()
        missing = [task for task in range(self.cursor) if task not in self._tail.ended]
        if missing:
            return missing
        # Only now the exact answer, which takes seconds after an hour: what is in the surviving weights.
        logs = self.logs()
        steps, _ = surviving_steps([log for log in logs if log.role == "trainer"])
        done = {task for step in steps for task, *_ in step.samples} | gather(logs).ended.keys()
        return [task for task in range(self.cursor) if task not in done]

    def _unevaluated(self) -> list[int]:
        """Versions whose evaluation is still to end; those without a result are judged later."""
        logs = read_logs(self.plan.folder / "evidence", "feeder")
        return unfinished(self.plan.folder / "run", logs, self.forgotten, self.faults_end)

    @property
    def forgotten(self) -> list[tuple[float, float]]:
        """Return the spans of time whose writes the server may have forgotten."""
        kinds = {broker.DeleteKey.kind, broker.WrongType.kind}
        beside = [(0.0, hit.until) for hit in self.hits if hit.kind in kinds]
        return [*((loss.back_to - SLACK_S, loss.at) for loss in self.losses), *beside]

    def _until(self, what: str, deadline_s: float, condition: Callable[[], bool]) -> None:
        end = time.monotonic() + deadline_s
        while not condition():
            self._tick()
            if time.monotonic() > end:
                ends = "; ".join(f"{exit_.name}: {exit_.error}" for exit_ in self.fleet.exits[-3:])
                raise TimeoutError(f"no {what} after {deadline_s:.0f} s (logs in {self.plan.folder}): {ends}")

    def _tick_quietly(self) -> None:
        self._tail.read()

    def _tick(self) -> None:
        """Advance the run: undo faults that are due, restart dead services, observe, print."""
        now = time.monotonic()
        for active in [active for active in self._active if now >= active.due]:
            if active.undo() is False:
                active.due = now + UNDO_AGAIN_S
                continue
            self._active.remove(active)
            self._own.write("undone", fault=active.hit.kind, target=active.hit.target)
        if self.server.died():
            self.problems.append("the server died by itself")
            self.server.start()
        self.fleet.tick()
        if now >= self._looked + LOOK_S:
            self._looked = now
            self.server.sample()
            self._watch.look(self.fleet.device_seconds)
            self.world.cursor = self._watch.cursor
        if now >= self._said + STATUS_S:
            self._said = now
            self._tail.read()
            self._say(now)
        time.sleep(TICK_S)

    def _say(self, now: float) -> None:
        counts = self._tail.counts
        minutes, seconds = divmod(int(now - self._began), 60)
        line = (
            f"{self._phase} {minutes}:{seconds:02d} · {len(self.hits)} faults · {counts['published']:,} published,"
            f" {counts['trained']:,} trained in {counts['steps']:,} steps · {self.fleet.up()} of"
            f" {len(settings.services(self.plan.workload))} up · last {self._last}"
        )
        if self._console.is_terminal:
            self._console.print(f"\r{line[: self._console.width - 2]:<{self._console.width - 2}}", end="")
        else:
            print(line, file=sys.stderr, flush=True)
