"""A broker that is asked itself about a run, with the answers that a control plane would give."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from broker.client import Broker
from deploy.client.find import whoami
from deploy.control_plane.routes import views
from deploy.control_plane.routes.views import Search
from deploy.control_plane.status.collector import Collector, PlannedRun
from deploy.control_plane.web.paging import Page
from deploy.control_plane.web.refusal import Refusal
from schemas.control_api import (
    Accepted,
    DeadLetters,
    LetterDetail,
    RunStatus,
    Settings,
    SettingsChange,
    Timeline,
    Trajectories,
    TrajectoryDetail,
)
from schemas.errors import DataError, RefusedError


class Direct:
    """A source that reads the broker itself and answers as the control plane would answer."""

    NAME = "command line"

    def __init__(self, broker: Broker, run: str) -> None:
        self._broker = broker
        self._collector = Collector(broker, PlannedRun(run))

    def status(self) -> RunStatus:
        return self._collector.read()

    def timeline(self, limit: int) -> Timeline:
        return views.timeline(self._broker, Page(limit, order="newest"))

    def letters(self, limit: int) -> DeadLetters:
        return views.letters(self._broker, Page(limit, order="newest"))

    def letter(self, id: str) -> LetterDetail:
        with _refusals():
            return views.letter(self._broker, id)

    def requeue(self, id: str) -> Accepted:
        with _refusals():
            changed = views.requeue(self._broker, id, self.NAME, whoami())
        return views.requeued(changed, self.status().state)

    def drop(self, id: str) -> Accepted:
        with _refusals():
            views.drop(self._broker, id, self.NAME, whoami())
        return views.dropped(self.status().state)

    def trajectories(self, wanted: Mapping[str, Any]) -> Trajectories:
        search = dict(wanted)
        limit = int(search.pop("limit"))
        return views.trajectories(self._broker, Search(**search), Page(limit, order="newest"))

    def trajectory(self, task: int, sample: int) -> TrajectoryDetail:
        with _refusals():
            return views.trajectory(self._broker, task, sample, None)

    def change(self, wanted: SettingsChange) -> Settings:
        with _refusals():
            views.change(self._broker, wanted, self.NAME, whoami())
        return self.status().settings


@contextmanager
def _refusals() -> Iterator[None]:
    """Make a RefusedError of whatever the control plane would answer with a problem."""
    try:
        yield
    except (Refusal, DataError) as error:
        raise RefusedError(str(error)) from error
