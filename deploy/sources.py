"""Where the command line asks about a run: its control plane, else its broker; one set of answers for both.

``--url`` names a broker and asks that; ``--control`` names a control plane and asks nothing else. A control plane that
answers is always preferred: it knows rates, which one look at a broker can't tell.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Protocol

from broker.api import answers
from broker.api.collect import Collector, Plan
from broker.api.problems import Refusal
from broker.api.readers import Search
from broker.client import Broker
from deploy import inspection
from deploy.rest import Client, NoControlPlane, connect, whoami
from schemas.errors import DataError, RefusedError
from schemas.status import (
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


class Source(Protocol):
    """What can be asked. RefusedError says why something is not done; InfraError that nobody answers."""

    def status(self) -> RunStatus: ...

    def timeline(self, limit: int) -> Timeline: ...

    def letters(self, limit: int) -> DeadLetters: ...

    def letter(self, id: str) -> LetterDetail: ...

    def requeue(self, id: str) -> Accepted: ...

    def drop(self, id: str) -> Accepted: ...

    def trajectories(self, wanted: Mapping[str, Any]) -> Trajectories: ...

    def trajectory(self, task: int, sample: int) -> TrajectoryDetail: ...

    def change(self, wanted: SettingsChange) -> Settings: ...


def open_source(run: str, control: str | None, url: str | None, prefix: str) -> Source:
    """The run's control plane if there is one that answers, else its broker; ConfigError when there is neither."""
    if url is None:
        try:
            client = connect(run, control)
            client.get("/v1/services")
            return ControlPlane(client)
        except NoControlPlane:
            if control is not None:
                raise
    return Direct(inspection.find(run, url, prefix), run)


class ControlPlane:
    """Over REST."""

    def __init__(self, client: Client) -> None:
        self._client = client

    def status(self) -> RunStatus:
        return RunStatus.model_validate(self._client.get("/v1/status"))

    def timeline(self, limit: int) -> Timeline:
        return Timeline.model_validate(self._client.get("/v1/timeline", limit=limit))

    def letters(self, limit: int) -> DeadLetters:
        return DeadLetters.model_validate(self._client.get("/v1/dead-letters", limit=limit))

    def letter(self, id: str) -> LetterDetail:
        return LetterDetail.model_validate(self._client.get(f"/v1/dead-letters/{id}"))

    def requeue(self, id: str) -> Accepted:
        return Accepted.model_validate(self._client.send("POST", f"/v1/dead-letters/{id}/requeue"))

    def drop(self, id: str) -> Accepted:
        return Accepted.model_validate(self._client.send("DELETE", f"/v1/dead-letters/{id}"))

    def trajectories(self, wanted: Mapping[str, Any]) -> Trajectories:
        return Trajectories.model_validate(self._client.get("/v1/trajectories", **wanted))

    def trajectory(self, task: int, sample: int) -> TrajectoryDetail:
        return TrajectoryDetail.model_validate(self._client.get(f"/v1/trajectories/{task}/{sample}"))

    def change(self, wanted: SettingsChange) -> Settings:
        body = wanted.model_dump(exclude_unset=True)
        return Settings.model_validate(self._client.send("PATCH", "/v1/settings", body))


class Direct:
    """From the broker itself, as the control plane would answer."""

    NAME = "command line"

    def __init__(self, broker: Broker, run: str) -> None:
        self._broker = broker
        self._collector = Collector(broker, Plan(run))

    def status(self) -> RunStatus:
        return self._collector.read()

    def timeline(self, limit: int) -> Timeline:
        return answers.timeline(self._broker, limit)

    def letters(self, limit: int) -> DeadLetters:
        return answers.letters(self._broker, limit)

    def letter(self, id: str) -> LetterDetail:
        with _refusals():
            return answers.letter(self._broker, id)

    def requeue(self, id: str) -> Accepted:
        with _refusals():
            changed = answers.requeue(self._broker, id, self.NAME, whoami())
        return answers.requeued(changed, self.status().state)

    def drop(self, id: str) -> Accepted:
        with _refusals():
            answers.drop(self._broker, id, self.NAME, whoami())
        return answers.dropped(self.status().state)

    def trajectories(self, wanted: Mapping[str, Any]) -> Trajectories:
        search = dict(wanted)
        limit = int(search.pop("limit"))
        return answers.trajectories(self._broker, Search(**search), limit)

    def trajectory(self, task: int, sample: int) -> TrajectoryDetail:
        with _refusals():
            return answers.trajectory(self._broker, task, sample, None)

    def change(self, wanted: SettingsChange) -> Settings:
        with _refusals():
            answers.change(self._broker, wanted, self.NAME, whoami())
        return self.status().settings


@contextmanager
def _refusals() -> Iterator[None]:
    """What the control plane would answer with a problem is a RefusedError here as there."""
    try:
        yield
    except (Refusal, DataError) as error:
        raise RefusedError(str(error)) from error
