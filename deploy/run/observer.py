"""The display of a run that this process supervises: the live view, the timeline, and alerts of the run.

``RunObserver`` hears the supervisor's changes and looks at the run as the control plane does, in threads: a broker that
does not answer never stops the supervisor.
"""

import os
import socket
import sys
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from rich.console import Console

from broker.client import Broker
from deploy.control_plane.address import address_of, own_token, page_link, read_token
from deploy.control_plane.alerts.run_watch import RunWatch
from deploy.control_plane.status.collector import PlannedRun
from deploy.control_plane.status.poller import REWARDS, StatusPoller, unreachable
from deploy.control_plane.web.sse import timeline_event
from deploy.logs import lossy
from deploy.supervisor.events import NAME, TimelineWriter
from deploy.supervisor.restart_policy import State
from deploy.supervisor.services import Change
from deploy.supervisor.supervisor import RunOutcome, ServiceView
from deploy.terminal.live import View
from deploy.terminal.page import History
from schemas.config import TidemillConfig
from schemas.control_api.history import TimelineEvent
from schemas.control_api.status import RunStatus, ServiceStatus
from schemas.errors import InfraError
from schemas.run_folder import CONTROL_TOKEN

POLL_EVERY_S = 0.5
QUIET_S = 3.0
"""If the broker takes longer than this to answer, the last status is shown, marked as waiting for the broker."""
EVENTS = 8
"""Newest events of the supervisor, and of other services, that are kept for the live view."""


class RunObserver:
    """The live view, the timeline and the alerts of one run."""

    def __init__(self, config: TidemillConfig) -> None:
        # A closed terminal or pipe must not end the run before its services have stopped in order.
        self.console = Console(file=lossy(sys.stdout))
        self.timeline = TimelineWriter()
        self.other_events: deque[TimelineEvent] = deque(maxlen=EVENTS)
        self._config = config
        self._own_events: deque[TimelineEvent] = deque(maxlen=EVENTS)
        self._alerts = RunWatch(config, lambda text, level: self.on_change(Change("up", text, level)), ends=False)
        self._view: View | None = None
        self._address: str | None = None

    def on_change(self, change: Change) -> None:
        """Show a change of the supervisor, and write it into the timeline."""
        event = TimelineEvent(
            id="",
            time=time.time(),
            name="service",
            service=change.service,
            level=change.level,
            text=change.text,
            data={},
        )
        self._own_events.append(event)
        self.timeline.put(change)
        if change.ends_run:
            # It is reported as the reason of the run's end in a moment.
            return
        if self._view is not None:
            self._view.report(event)
        elif change.level != "info":
            self.console.print(f"{change.service}: {change.text}", soft_wrap=True, highlight=False, markup=False)

    @contextmanager
    def polling(self, broker: Broker) -> Iterator[StatusPoller]:
        """Poll the run's status while the context is open; events of other services are kept for the view."""
        plan = PlannedRun.of(self._config)
        poller = StatusPoller(broker, plan, every_s=POLL_EVERY_S, measure_memory=False, keep_steps=REWARDS)
        # This process knows the events of its own supervisor already.
        poller.on_events = lambda events: self.other_events.extend(
            timeline_event(event) for event in events if event.event.data.get("by") != NAME
        )
        poller.start()
        try:
            yield poller
        finally:
            poller.stop()

    @contextmanager
    def live_view(self) -> Iterator[None]:
        """Show the run in the terminal while the context is open."""
        with View(self.console) as self._view:
            yield
        self._view = None

    def show(self, services: Sequence[ServiceView], poller: StatusPoller) -> RunStatus | None:
        """Update view and alerts. Return the newest status, or None before the first."""
        self._report_address()
        status = latest(poller)
        if status is None:
            return None
        self._alerts.observe(status)
        if self._view is not None:
            history = History(
                poller.rewards,
                poller.evaluations,
                sorted([*self.other_events.copy(), *self._own_events], key=lambda event: event.time),
                {service.name: service.restarts for service in services},
            )
            shown = status.model_copy(update={"services": with_processes(status.services, services)})
            self._view.show(shown, history, time.monotonic())
        return status

    @contextmanager
    def ending(self, outcome: RunOutcome) -> Iterator[None]:
        """Send the alert of the run's end; wait for it after what is done meanwhile."""
        self._alerts.ended(outcome.reason, str(outcome.cause) if outcome.cause is not None else "")
        yield
        self._alerts.close()

    def _report_address(self) -> None:
        """Report the address of the control plane, once for each address; the token is shown on a terminal only."""
        folder = self._config.folder
        url = address_of(folder)
        if url is None or url == self._address:
            return
        self._address = url
        token = None if read_token(self._config.control.token_file, os.environ) else own_token(folder)
        self.on_change(Change("control", f"listens at {url}"))
        if token is not None:
            shown = page_link(url, token) if self.console.is_terminal else f"its token is in {folder / CONTROL_TOKEN}"
            self.console.print(f"dashboard: {shown}", soft_wrap=True, highlight=False, markup=False)


def latest(poller: StatusPoller) -> RunStatus | None:
    """Return the newest status, marked as unreachable after QUIET_S without an answer, or None before the first."""
    try:
        status = poller.latest
    except InfraError:
        return None
    silent_s = time.monotonic() - poller.ticked
    if silent_s <= QUIET_S + POLL_EVERY_S or status.state == "unreachable":
        return status
    return unreachable(status, f"the broker has not answered for {silent_s:.0f} s")


def with_processes(beats: Sequence[ServiceStatus], services: Sequence[ServiceView]) -> list[ServiceStatus]:
    """Return the services by their heartbeats, and those without one as the supervisor knows them."""
    left = {beat.name: beat for beat in beats if beat.role != "supervisor"}
    merged = []
    for service in services:
        alive = service.state is State.RUNNING
        beat = left.pop(service.name, None)
        if beat is None or not alive:
            beat = ServiceStatus(
                name=service.name,
                role=service.role,
                host=socket.gethostname(),
                pid=service.pid or 0,
                state="starting" if alive and service.role != "broker" else str(service.state),
                version=None,
                silent_s=0.0,
                live=alive,
                paused=False,
                tokens_per_s=0.0,
                load=None,
                acknowledged={},
                figures={},
            )
        merged.append(beat)
    # Services that were started elsewhere and joined this run.
    return [*merged, *left.values()]
