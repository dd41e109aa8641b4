"""The sources that the command line asks about a run: its control plane, else its broker, with the same answers.

``--url`` names a broker and asks that; ``--control`` names a control plane and asks nothing else. A control plane that
answers is always preferred: it knows rates, which one look at a broker can't tell.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from http.client import HTTPException
from pathlib import Path
from typing import Any, Protocol
from urllib.error import HTTPError, URLError
from urllib.parse import urlencode
from urllib.request import ProxyHandler, Request, build_opener

from deploy.client import find
from deploy.client.find import whoami
from deploy.control_plane.address import address_of, read_token
from deploy.run_files import RUNS, named_config
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
from schemas.errors import InfraError, RefusedError, TidemillError

URL = "TIDEMILL_CONTROL_URL"
OVER = ("finished", "failed", "stopped")
ANSWER_S = 30.0


class NoControlPlane(InfraError):
    """No control plane of the run is known, or none answers."""


class Client:
    """The client of a control plane. ``get`` and ``send`` return what it answers, decoded."""

    def __init__(self, url: str, token: str | None) -> None:
        self.url = url.rstrip("/")
        self._token = token
        self._opener = build_opener(ProxyHandler({}))

    def get(self, path: str, **query: Any) -> Any:
        """RefusedError says why not; NoControlPlane when nobody answers."""
        given = {name: value for name, value in query.items() if value is not None}
        return self._ask("GET", f"{path}?{urlencode(given)}" if given else path, None, ANSWER_S)

    def send(self, method: str, path: str, body: Mapping[str, Any] | None = None, wait_s: float = 0.0) -> Any:
        """Like ``get``, for commands; wait_s: by how much longer the answer may take."""
        return self._ask(method, path, body, ANSWER_S + wait_s)

    def _ask(self, method: str, path: str, body: Mapping[str, Any] | None, timeout_s: float) -> Any:
        headers = {"Accept": "application/json", "X-Tidemill-By": whoami()}
        data = None
        if body is not None:
            headers["Content-Type"] = "application/json"
            data = json.dumps(body).encode()
        if self._token:
            headers["Authorization"] = f"Bearer {self._token}"
        request = Request(self.url + path, data, headers, method=method)
        try:
            with self._opener.open(request, timeout=timeout_s) as answer:
                return json.loads(answer.read())
        except HTTPError as error:
            raise _refusal(error) from error
        except (URLError, OSError, HTTPException, ValueError) as error:
            reason = getattr(error, "reason", error)
            raise NoControlPlane(f"the control plane at {self.url} does not answer: {reason}") from error


def _refusal(error: HTTPError) -> TidemillError:
    try:
        problem = json.loads(error.read())
        detail = str(problem["detail"])
    except (ValueError, KeyError, TypeError, OSError):
        detail = f"{error.code} {error.reason}"
    if error.code == 401:
        detail += "; the command line takes it from TIDEMILL_CONTROL_TOKEN or TIDEMILL_CONTROL_TOKEN_FILE"
    return InfraError(detail) if error.code >= 500 else RefusedError(detail)


def connect(run: str, url: str | None) -> Client:
    """The control plane of a run, by ``url``, TIDEMILL_CONTROL_URL, or the file it leaves in the run's folder."""
    config = named_config(run)
    folder = config.folder if config else RUNS / run
    found = url or os.environ.get(URL) or address_of(folder)
    if found is None:
        raise NoControlPlane(_nobody(run, folder))
    return Client(found, read_token(config.control.token_file if config else None, os.environ))


def _nobody(run: str, folder: Path) -> str:
    """Say why nobody takes orders for a run: it is over, or there is none of this name, or no control plane runs."""
    left = find.left_run(run)
    head = left.head() if left is not None else None
    if head is not None and head.state in OVER:
        return (
            f"run {run!r} is over, its state is {head.state}: `tidemill show {run}` tells how it went, `tidemill up`"
            " with its configuration goes on with it"
        )
    known = "" if head is not None else f"; runs here: {', '.join(one.name for one in find.left_heads()) or 'none'}"
    return (
        f"no control plane of run {run!r} is known: none has left its address in {folder}{os.sep}{known}; give"
        f" --control, set {URL}, or start one with `tidemill control CONFIG`"
    )


class Source(Protocol):
    """A control plane or a broker that can be asked about a run. Lists begin with the newest.

    RefusedError says why something is not done; InfraError that nobody answers.
    """

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
    broker = find.find(run, url, prefix)
    # Imported here: a control plane that answers needs nothing of the broker's client.
    from deploy.client.direct import Direct

    return Direct(broker, run)


class ControlPlane:
    """A source that asks a control plane over REST."""

    def __init__(self, client: Client) -> None:
        self._client = client

    def status(self) -> RunStatus:
        return RunStatus.model_validate(self._client.get("/v1/status"))

    def timeline(self, limit: int) -> Timeline:
        return Timeline.model_validate(self._client.get("/v1/timeline", limit=limit, order="newest"))

    def letters(self, limit: int) -> DeadLetters:
        return DeadLetters.model_validate(self._client.get("/v1/dead-letters", limit=limit, order="newest"))

    def letter(self, id: str) -> LetterDetail:
        return LetterDetail.model_validate(self._client.get(f"/v1/dead-letters/{id}"))

    def requeue(self, id: str) -> Accepted:
        return Accepted.model_validate(self._client.send("POST", f"/v1/dead-letters/{id}/requeue"))

    def drop(self, id: str) -> Accepted:
        return Accepted.model_validate(self._client.send("DELETE", f"/v1/dead-letters/{id}"))

    def trajectories(self, wanted: Mapping[str, Any]) -> Trajectories:
        return Trajectories.model_validate(self._client.get("/v1/trajectories", **wanted, order="newest"))

    def trajectory(self, task: int, sample: int) -> TrajectoryDetail:
        return TrajectoryDetail.model_validate(self._client.get(f"/v1/trajectories/{task}/{sample}"))

    def change(self, wanted: SettingsChange) -> Settings:
        body = wanted.model_dump(exclude_unset=True)
        return Settings.model_validate(self._client.send("PATCH", "/v1/settings", body))
