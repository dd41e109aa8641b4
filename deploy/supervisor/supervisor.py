"""Keeps the services of one machine running, and stops them in order; behind ``tidemill up``.

A service that dies is restarted (deploy/supervisor/restart_policy.py says when). If restarts cannot help, the run ends
with its root cause. No process is left behind, however this process ends (deploy/supervisor/process.py). One thread:
everything happens in ``poll``.
"""

import signal
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any, Literal, Self

from deploy.logs import lossy
from deploy.supervisor.failures import ServiceFailure, last_error, root_cause
from deploy.supervisor.process import OrphanReaper, Processes
from deploy.supervisor.restart_policy import RestartState, State
from deploy.supervisor.services import Change, Exit, RunningService, ServiceSpec, Starter
from schemas.config import SupervisorConfig
from schemas.errors import (
    CONFIG_EXIT,
    ERROR_EXIT,
    HOPELESS,
    INTERRUPTED_EXIT,
    OK_EXIT,
    RUN_FAILED_EXIT,
    ConfigError,
    InfraError,
)
from schemas.system import guard
from schemas.system.files import cut_log

TICK_S = 0.1
EXIT_CODES = {"finished": OK_EXIT, "failed": ERROR_EXIT, "stopped": INTERRUPTED_EXIT}
SWEEP_S = 3.0
"""How long to look for orphans of a killed guardian."""
LOGS_EVERY_S = 10.0
MOST_LOG_BYTES = 256 << 20
KILL_DEADLINE_S = 15.0


@dataclass(frozen=True)
class RunOutcome:
    """The end of a run: its reason, and for a failure its root cause."""

    reason: Literal["finished", "stopped", "failed"]
    cause: ServiceFailure | None = None

    @property
    def exit_code(self) -> int:
        """The exit code for this outcome; a root cause for which no restart helps passes its own code on."""
        code = ERROR_EXIT if self.cause is None else self.cause.exit.code
        return code if code in (CONFIG_EXIT, RUN_FAILED_EXIT) else EXIT_CODES[self.reason]

    def report(self) -> int:
        """Print the cause of a failure on stderr, and return the exit code."""
        if self.cause is not None:
            print(f"tidemill: {self.cause}", file=lossy(sys.stderr))
        return self.exit_code


@dataclass(frozen=True)
class ServiceView:
    """The present state of a service, for display."""

    name: str
    role: str
    state: State
    restarts: int
    pid: int | None


class _Service:
    def __init__(self, spec: ServiceSpec, lifecycle: RestartState, log: Path, rank: int) -> None:
        self.spec = spec
        self.lifecycle = lifecycle
        self.log = log
        self.rank = rank
        self.process: RunningService | None = None
        self.log_start = 0
        self.failure: ServiceFailure | None = None
        self.kill_at: float | None = None
        self.overdue = False


class Supervisor:
    """Services with restarts, scaling and an orderly end.

    Life cycle::

        with Supervisor(config.supervisor, folder / "logs") as supervisor:
            supervisor.add(ServiceSpec("trainer", argv, finishes=True))
            supervisor.add_role("generator", lambda index: ServiceSpec(...), count=2)
            outcome = supervisor.run(show)
            supervisor.stop()
    """

    def __init__(
        self,
        policy: SupervisorConfig,
        logs: Path,
        on_change: Callable[[Change], None] = lambda change: None,
        starter: Starter | None = None,
    ) -> None:
        """starter: starts the services, on this machine by default."""
        self._starter = starter or Processes()
        self._policy = policy
        self._logs = logs
        self._logs_due = 0.0
        self._on_change = on_change
        self._services: dict[str, _Service] = {}
        self._factories: dict[str, Callable[[int], ServiceSpec]] = {}
        self._orphans = OrphanReaper()
        self._started = 0
        self.interrupts = 0
        """Number of SIGINT, SIGTERM and SIGHUP that have arrived."""
        self._stopping = False
        self._asked_to_end = False
        self._kept: frozenset[str] = frozenset()
        self._sweep_until = 0.0
        self._handlers: dict[signal.Signals, Any] = {}
        logs.mkdir(parents=True, exist_ok=True)
        # Orphans of killed guardians come to this process instead of init.
        guard.prctl(guard.PR_SET_CHILD_SUBREAPER, 1)

    def __enter__(self) -> Self:
        """Count interrupts instead of dying of them, until the end of the block."""
        signals = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
        self._handlers = {number: signal.signal(number, self._on_signal) for number in signals}
        return self

    def __exit__(self, *_: object) -> None:
        try:
            self.kill()
        finally:
            for number, handler in self._handlers.items():
                signal.signal(number, handler)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        # Of a terminal that is closed, the kernel and the shell report the hang-up, which is one request to stop.
        if number != signal.SIGHUP or not self.interrupts:
            self.interrupts += 1

    def end(self) -> None:
        """Let ``run`` return as if it had been interrupted."""
        self._asked_to_end = True

    @property
    def services(self) -> list[ServiceView]:
        """All services, present and past, in the order of their first start."""
        return [
            ServiceView(
                s.spec.name, s.spec.role, s.lifecycle.state, s.lifecycle.restarts, s.process.pid if s.process else None
            )
            for s in self._services.values()
        ]

    def add(self, spec: ServiceSpec) -> None:
        """Start a service and keep it running. ConfigError if one of this name runs already."""
        old = self._services.get(spec.name)
        if old is not None and old.process is not None:
            raise ConfigError(f"service {spec.name!r} is already running")
        lifecycle = RestartState(self._policy, finishes=spec.finishes, may_leave=not spec.essential)
        self._started += 1
        service = _Service(spec, lifecycle, self._logs / f"{spec.name}.log", self._started)
        # A service that cannot be started at all is not added.
        self._start(service, time.monotonic())
        self._services[spec.name] = service

    def add_role(self, role: str, factory: Callable[[int], ServiceSpec], count: int) -> None:
        """Start ``count`` replicas; ``factory`` makes the spec of 0, 1, ... role: as in ``ServiceSpec.scaled_as``."""
        self._factories[role] = factory
        self.scale(role, count)

    def scale(self, role: str, count: int) -> None:
        """Start or stop replicas of a role until ``count`` of them live. Does not wait for those that stop."""
        factory = self._factories.get(role)
        if factory is None:
            roles = ", ".join(sorted(self._factories)) or "none"
            raise ConfigError(f"role {role!r} cannot be scaled, these can: {roles}")
        if count < 0:
            raise ConfigError(f"cannot scale {role} to {count}: it must be 0 or more")
        live = [s for s in self._services.values() if s.spec.scaled_as == role and _lives(s)]
        for service in live[count:]:
            self._ask(service)
        index = 0
        while len(live) < count:
            spec = factory(index)
            index += 1
            old = self._services.get(spec.name)
            if old is None or (old.process is None and not _lives(old)):
                self.add(spec)
                live.append(self._services[spec.name])

    def replicas(self, role: str) -> int:
        """Return the number of services of a role that run or are about to be restarted."""
        return sum(s.spec.scaled_as == role and _lives(s) for s in self._services.values())

    def run(self, on_tick: Callable[[], None] = lambda: None) -> RunOutcome:
        """Supervise until the run is over, or a signal or ``end`` asks for that; then ``stop`` what still runs."""
        while True:
            outcome = self.poll()
            if outcome is not None:
                return outcome
            if self.interrupts or self._asked_to_end:
                return RunOutcome("stopped")
            on_tick()
            time.sleep(TICK_S)

    def poll(self, now: float | None = None) -> RunOutcome | None:
        """Do what is due. Return the outcome if the run is over."""
        now = time.monotonic() if now is None else now
        for service in list(self._services.values()):
            self._collect(service, now)
            if now >= self._logs_due and cut_log(service.log, MOST_LOG_BYTES):
                service.log_start = 0
            if service.kill_at is not None and now >= service.kill_at:
                service.overdue = True
                self._kill(service)
            may_start = not self._stopping or service.spec.name in self._kept
            if service.lifecycle.state is State.WAITING and now >= service.lifecycle.due and may_start:
                self._restart(service, now)
        if now >= self._logs_due:
            self._logs_due = now + LOGS_EVERY_S
        if now < self._sweep_until:
            self._orphans.sweep(self._guards())
        if self._finished:
            return RunOutcome("finished")
        if any(s.lifecycle.state is State.FAILED and self._is_fatal(s) for s in self._services.values()):
            unrecovered = [s.failure for s in self._services.values() if s.failure and not s.lifecycle.healthy(now)]
            return RunOutcome("failed", root_cause(unrecovered))
        return None

    def stop(self, keep: Sequence[str] = (), at_once: bool = False) -> None:
        """Stop all services but those in ``keep``, in their order, or together once the run is finished.

        SIGTERM, then SIGKILL to their process trees after ``grace_s``; a further interrupt, or ``at_once``, kills now.
        """
        # Only the kept services may be restarted while the others stop.
        self._stopping, self._kept = True, frozenset(keep)
        # The first interrupt asked for this stop. A second one that has come since must count.
        already = min(self.interrupts, 1)
        mine = [s for s in self._services.values() if s.spec.name not in self._kept]
        if at_once:
            for service in mine:
                self._kill(service)
        # In a finished run no service needs another any more.
        stages: dict[int, list[_Service]] = {}
        for service in mine:
            stages.setdefault(0 if self._finished else service.spec.stop_order, []).append(service)
        for _, stage in sorted(stages.items()):
            for service in stage:
                self._ask(service)
            while any(s.process for s in stage):
                if self.interrupts > already:
                    for service in self._services.values():
                        self._kill(service)
                self.poll()
                time.sleep(TICK_S)

    def kill(self) -> None:
        """Kill all that still runs, at once, and wait until it is gone."""
        for service in self._services.values():
            self._kill(service)
        deadline = time.monotonic() + KILL_DEADLINE_S
        while any(s.process for s in self._services.values()) or self._orphans.sweep(self._guards()):
            for service in self._services.values():
                self._collect(service, time.monotonic())
            if time.monotonic() > deadline:
                names = ", ".join(s.spec.name for s in self._services.values() if s.process)
                raise InfraError(f"still alive {KILL_DEADLINE_S:.0f} s after SIGKILL: {names or 'orphans of the run'}")
            time.sleep(0.01)

    def _start(self, service: _Service, now: float) -> None:
        service.log_start = service.log.stat().st_size if service.log.exists() else 0
        service.kill_at, service.overdue = None, False
        service.process = self._starter.start(
            service.spec.argv,
            service.spec.name,
            service.spec.role,
            None if service.spec.shared_output else service.log,
            service.spec.environment,
            self._orphans.mark,
        )
        again = service.lifecycle.restarts > 0
        service.lifecycle.started(now)
        self._on_change(Change(service.spec.name, "restarted" if again else "started"))

    def _restart(self, service: _Service, now: float) -> None:
        try:
            self._start(service, now)
        except InfraError as error:
            # The machine may lack memory or processes for a while: this is one more failure of this service alone.
            service.lifecycle.started(now)
            service.lifecycle.exited(ERROR_EXIT, now)
            self._note_failure(service, Exit(ERROR_EXIT), now, str(error))

    def _collect(self, service: _Service, now: float) -> None:
        ended = service.process.poll() if service.process else None
        if ended is None:
            return
        if service.process and service.process.orphaned:
            # Its children become children of this process a moment later.
            self._orphans.orphaned(service.process.guard_pid)
            self._sweep_until = now + SWEEP_S
        service.process = None
        asked = service.lifecycle.state is State.STOPPING
        state = service.lifecycle.exited(ended.code, now)
        if state is State.WAITING and ended.code == OK_EXIT:
            text = f"ended, restarts in {service.lifecycle.due - now:.0f} s"
            self._on_change(Change(service.spec.name, text))
        elif state in (State.WAITING, State.FAILED):
            self._note_failure(service, ended, now)
        elif asked and service.overdue:
            text = f"did not end within {self._policy.grace_s:g} s, killed"
            self._on_change(Change(service.spec.name, text, "warning"))
        else:
            self._on_change(Change(service.spec.name, str(state)))

    def _note_failure(self, service: _Service, ended: Exit, now: float, line: str = "") -> None:
        lifecycle = service.lifecycle
        line = line or last_error(service.log, service.log_start, ended.code)
        failure = ServiceFailure(service.spec.name, ended, now, service.rank, line, service.log)
        if lifecycle.failing_since == now or service.failure is None:
            service.failure = failure
        reason = f": {line}" if line else ""
        if lifecycle.state is State.WAITING:
            text = f"{ended}{reason}; restart {lifecycle.restarts} in {lifecycle.due - now:.1f} s"
            self._on_change(Change(service.spec.name, text, "warning"))
            return
        why = "" if ended.code in HOPELESS else f" after {lifecycle.restarts} restarts"
        ends_run = ended.code in (CONFIG_EXIT, RUN_FAILED_EXIT) and self._is_fatal(service)
        self._on_change(Change(service.spec.name, f"{ended}{reason}; not restarted{why}", "error", ends_run))

    def _is_fatal(self, service: _Service) -> bool:
        if service.spec.optional:
            return False
        if service.spec.essential:
            return True
        alive = [s for s in self._services.values() if s.spec.role == service.spec.role and _lives(s)]
        code = service.failure.exit.code if service.failure is not None else ERROR_EXIT
        # All replicas read the same configuration: if it is wrong for one, it is wrong for all, unless one works: then
        # a file has changed since, or this machine lacks something, and the run continues without this replica.
        works = code == CONFIG_EXIT and any(s.lifecycle.settled(time.monotonic()) for s in alive)
        return not alive or (code in HOPELESS and not works)

    def _ask(self, service: _Service) -> None:
        asked_before = service.lifecycle.state is State.STOPPING
        service.lifecycle.asked()
        if service.process and not asked_before:
            service.process.terminate()
            service.kill_at = time.monotonic() + self._policy.grace_s

    @property
    def _finished(self) -> bool:
        return any(s.lifecycle.state is State.FINISHED for s in self._services.values())

    def _kill(self, service: _Service) -> None:
        service.lifecycle.asked()
        service.kill_at = None
        if service.process:
            service.process.kill()

    def _guards(self) -> set[int]:
        return {s.process.guard_pid for s in self._services.values() if s.process}


def _lives(service: _Service) -> bool:
    return service.lifecycle.state in (State.RUNNING, State.WAITING)
