"""The client of a run's control plane, over HTTP or, if none answers, over the run's broker in this process.

A control plane that answers is preferred: it knows rates, which a single reading of the broker can't show.
"""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

from deploy.client import find
from deploy.client.find import whoami
from deploy.client.transport import NoControlPlane, Transport, over_http
from deploy.control_plane.address import TOKEN, address_of, own_token, read_token
from schemas.control_api.base import OVER
from schemas.errors import InfraError, RefusedError, TidemillError
from schemas.run_folder import CONTROL_TOKEN, RUNS, named_config
from schemas.system.lifecycle import importing

URL = "TIDEMILL_CONTROL_URL"
ANSWER_S = 30.0


class Client:
    """The client of a control plane. ``get`` and ``send`` return what it answers, decoded."""

    def __init__(self, url: str, token: str | None, transport: Transport = over_http) -> None:
        self.url = url.rstrip("/")
        self._token = token
        self._transport = transport

    def get(self, path: str, **query: Any) -> Any:
        """Read. RefusedError gives the reason of a rejection; NoControlPlane if no control plane answers."""
        given = {name: value for name, value in query.items() if value is not None}
        return self._ask("GET", f"{path}?{urlencode(given)}" if given else path, None, ANSWER_S)

    def send(self, method: str, path: str, body: Mapping[str, Any] | None = None, wait_s: float = 0.0) -> Any:
        """Give an order, with the errors of ``get``. wait_s: by how much longer the answer may take."""
        return self._ask(method, path, body, ANSWER_S + wait_s)

    def _ask(self, method: str, path: str, body: Mapping[str, Any] | None, timeout_s: float) -> Any:
        headers = {"Accept": "application/json", "X-Tidemill-By": whoami()}
        data = None
        if body is not None:
            headers["Content-Type"] = "application/json"
            data = json.dumps(body).encode()
        if self._token:
            headers["Authorization"] = f"Bearer {self._token}"
        status, answer = self._transport(method, self.url + path, headers, data, timeout_s)
        if status >= 400:
            raise _refusal(status, answer)
        try:
            return json.loads(answer)
        except ValueError as error:
            raise NoControlPlane(f"the server at {self.url} is not a control plane: {error}") from error


def _refusal(status: int, answer: bytes) -> TidemillError:
    try:
        detail = str(json.loads(answer)["detail"])
    except (ValueError, KeyError, TypeError):
        detail = f"the control plane answers with status {status}"
    if status == 401:
        detail += f"; the command line takes it from {TOKEN}, {TOKEN}_FILE, or, for the user who started the run,"
        detail += f" {CONTROL_TOKEN} in the run's folder"
    return InfraError(detail) if status >= 500 else RefusedError(detail)


def connect(run: str, url: str | None) -> Client:
    """Return a client of a run's control plane by ``url``, TIDEMILL_CONTROL_URL, or the file in its folder."""
    config = named_config(run)
    folder = config.folder if config else RUNS / run
    own = address_of(folder)
    found = url or os.environ.get(URL) or own
    if found is None:
        raise NoControlPlane(_why_not(run, folder))
    token = read_token(config.control.token_file if config else None, os.environ)
    if token is None and own is not None and found.rstrip("/") == own.rstrip("/"):
        token = own_token(folder)
    return Client(found, token)


def _why_not(run: str, folder: Path) -> str:
    """Explain why a run takes no orders: it has finished, does not exist, or has no control plane."""
    head = left.head() if (left := find.finished_run(run)) else None
    if head is not None and head.state in OVER:
        ways = f"`tidemill show {run}` prints a report, `tidemill up` with its configuration resumes it"
        return f"run {run!r} is {head.state}: {ways}"
    known = "" if head is not None else f"; runs here: {', '.join(one.name for one in find.list_heads()) or 'none'}"
    return (
        f"run {run!r} has no control plane: there is no address in {folder}{os.sep}{known}; give"
        f" --control, set {URL}, or start one with `tidemill control CONFIG`"
    )


def open_client(run: str, control: str | None, url: str | None, prefix: str) -> Client:
    """Return a client of the run's control plane if one answers, else of its broker; ConfigError without either."""
    if url is None:
        try:
            client = connect(run, control)
            client.get("/v1/services")
            return client
        except NoControlPlane:
            if control is not None:
                raise
    # Imported here: with a control plane that answers, a command loads neither a web server nor the broker's client.
    with importing():
        broker = find.find(run, url, prefix)
        from deploy.client.in_process import in_process
        from deploy.control_plane.status.collector import PlannedRun

    config = named_config(run)
    plan = PlannedRun.of(config) if config else PlannedRun(run, folder=RUNS / run)
    return Client("http://in-process", None, in_process(broker, plan))
