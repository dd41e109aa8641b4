"""The control plane's client for the command line: where it is, what it answers, and why it refuses."""

from __future__ import annotations

import getpass
import json
import os
import socket
from collections.abc import Mapping
from http.client import HTTPException
from pathlib import Path
from typing import Any
from urllib.error import HTTPError, URLError
from urllib.parse import urlencode
from urllib.request import ProxyHandler, Request, build_opener

from broker.api.address import address_of
from broker.api.server import read_token
from deploy.inspection import RUNS
from schemas.config import TidemillConfig, load_config
from schemas.errors import InfraError, RefusedError, TidemillError

URL = "TIDEMILL_CONTROL_URL"
ANSWER_S = 30.0


def whoami() -> str:
    """Who gives an order, for the timeline."""
    try:
        user = getpass.getuser()
    except (KeyError, OSError):
        # A container's user may have no name.
        user = str(os.getuid())
    return f"{user}@{socket.gethostname()}"


class NoControlPlane(InfraError):
    """None is known, or none answers."""


class Client:
    """One control plane. ``get`` and ``send`` return what it answers, decoded."""

    def __init__(self, url: str, token: str | None) -> None:
        self.url = url.rstrip("/")
        self._token = token
        self._opener = build_opener(ProxyHandler({}))

    def get(self, path: str, **query: Any) -> Any:
        """RefusedError says why not; NoControlPlane when nobody answers."""
        given = {name: value for name, value in query.items() if value is not None}
        return self._ask("GET", f"{path}?{urlencode(given)}" if given else path, None, ANSWER_S)

    def send(self, method: str, path: str, body: Mapping[str, Any] | None = None, wait_s: float = 0.0) -> Any:
        """``get`` for orders; wait_s: how long the answer may take longer."""
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
    config: TidemillConfig | None = None
    if run.endswith((".yaml", ".yml")):
        config = load_config(run)
    folder = config.folder if config else RUNS / run
    found = url or os.environ.get(URL) or address_of(folder)
    if found is None:
        raise NoControlPlane(
            f"no control plane of run {run!r} is known: none has left its address in {folder}{os.sep}; give --control,"
            f" set {URL}, or start one with `tidemill control CONFIG`"
        )
    return Client(found, read_token(_token_file(config), os.environ))


def _token_file(config: TidemillConfig | None) -> Path | None:
    return config.control.token_file if config else None
