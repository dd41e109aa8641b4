"""Scaling on Kubernetes: sets the replicas of a run's Deployments through the API server, as the pod's service account.

Plain HTTPS to the scale subresource, checked against the cluster's own CA; the token is read for each request,
because Kubernetes replaces it. The Role in deploy/kubernetes/run/control.yaml is all that it needs.
"""

from __future__ import annotations

import json
import os
import ssl
import threading
from collections.abc import Mapping
from http.client import HTTPException
from pathlib import Path
from typing import Any
from urllib.error import HTTPError, URLError
from urllib.request import HTTPSHandler, ProxyHandler, Request, build_opener

import structlog

from deploy.control_plane.web.refusal import Refusal
from schemas.control_api.status import Scaling
from schemas.errors import InfraError, TidemillError

ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
"""Where Kubernetes mounts a service account: token, ca.crt and namespace."""
ANSWER_S = 5.0
EVERY_S = 5.0
"""Seconds between two readings of the numbers of replicas."""
MAX_ANSWER_BYTES = 1 << 20

log = structlog.get_logger()


class Deployments:
    """The Deployments of a run's services, by role. ``scaling`` is the last reading; ``scale`` asks and changes."""

    def __init__(self, url: str, account: Path, names: Mapping[str, str]) -> None:
        """url: of the API server. account: folder of the service account. names: Deployment of each role."""
        self._url = url.rstrip("/")
        self._account = account
        self._names = dict(names)
        self._counts: dict[str, int] = {}
        self._reason = "the Kubernetes API server has not been asked yet"
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._follow, name="deployments", daemon=True)

    @classmethod
    def here(
        cls, names: Mapping[str, str], environment: Mapping[str, str] = os.environ, account: Path = ACCOUNT
    ) -> Deployments | None:
        """Make one for the cluster that this process runs in; None outside of one, or without a service account."""
        host, port = environment.get("KUBERNETES_SERVICE_HOST"), environment.get("KUBERNETES_SERVICE_PORT", "443")
        if not host or not (account / "token").is_file():
            return None
        return cls(f"https://{f'[{host}]' if ':' in host else host}:{port}", account, names)

    def start(self) -> None:
        """Read the numbers of replicas every few seconds, in a thread."""
        self._thread.start()

    def stop(self) -> None:
        """The thread is a daemon and may hang on a server that is gone."""
        self._stop.set()
        self._thread.join(1.0)

    @property
    def scaling(self) -> Scaling:
        """Scaling as last read from the API server."""
        counts = self._counts
        return Scaling(possible=bool(counts), by="kubernetes", replicas=counts, refusal="" if counts else self._reason)

    def scale(self, role: str, replicas: int) -> bool:
        """Set the number of replicas; False if it was so already. Refusal says what the cluster does not allow."""
        if self.replicas(role) == replicas:
            return False
        found = _count(self._ask("PATCH", role, {"spec": {"replicas": replicas}}))
        if found != replicas:
            raise InfraError(f"Kubernetes has set {found} replicas for Deployment {self._names[role]}, not {replicas}")
        self._counts = {**self._counts, role: replicas}
        return True

    def replicas(self, role: str) -> int:
        """Read the wanted number of replicas of a role's Deployment."""
        return _count(self._ask("GET", role))

    def refresh(self) -> None:
        """Read the replicas of all roles; a role that the service account may not read is left out."""
        counts, refused = {}, []
        for role in self._names:
            try:
                counts[role] = self.replicas(role)
            except Refusal as refusal:
                refused.append(str(refusal))
        self._counts, self._reason = counts, "; ".join(refused)

    def _follow(self) -> None:
        while not self._stop.is_set():
            try:
                self.refresh()
            except TidemillError as error:
                if str(error) != self._reason:
                    log.warning("cannot look at the Deployments", error=str(error))
                self._counts, self._reason = {}, str(error)
            self._stop.wait(EVERY_S)

    def _ask(self, method: str, role: str, body: Any = None) -> Any:
        name, namespace = self._names[role], self._read("namespace")
        headers = {"Accept": "application/json", "Authorization": f"Bearer {self._read('token')}"}
        data = None
        if body is not None:
            headers["Content-Type"] = "application/merge-patch+json"
            data = json.dumps(body).encode()
        path = f"/apis/apps/v1/namespaces/{namespace}/deployments/{name}/scale"
        request = Request(self._url + path, data, headers, method=method)
        try:
            context = ssl.create_default_context(cafile=str(self._account / "ca.crt"))
            opener = build_opener(ProxyHandler({}), HTTPSHandler(context=context))
            with opener.open(request, timeout=ANSWER_S) as answer:
                return json.loads(answer.read(MAX_ANSWER_BYTES))
        except HTTPError as error:
            error.close()
            raise _refusal(error.code, name, namespace, method) from error
        except (URLError, OSError, HTTPException, ValueError) as error:
            reason = getattr(error, "reason", error)
            raise InfraError(f"the Kubernetes API server at {self._url} does not answer: {reason}") from error

    def _read(self, name: str) -> str:
        try:
            return (self._account / name).read_text(encoding="utf-8").strip()
        except OSError as error:
            text = f"cannot read the service account's {name} in {self._account}: {error.strerror}"
            raise InfraError(text) from error


def _count(scale: Any) -> int:
    """Return the replicas in a Scale object; a missing field means zero."""
    try:
        return int(scale["spec"].get("replicas", 0))
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise InfraError("the Kubernetes API server answered with something that is no Scale") from error


def _refusal(status: int, name: str, namespace: str, method: str) -> TidemillError:
    """Turn an HTTP error of the API server into one of ours, which says what to do."""
    which = f"Deployment {name} in namespace {namespace}"
    if status in (401, 403):
        verb = "look at" if method == "GET" else "scale"
        return Refusal(
            409,
            f"Kubernetes does not let the control plane {verb} {which}: its Role (deploy/kubernetes/run/control.yaml)"
            " names those that it may; one with an autoscaler is the autoscaler's",
        )
    if status == 404:
        return Refusal(409, f"there is no {which}: control.deployments says how a role's is called")
    return InfraError(f"the Kubernetes API server answered {status} for {which}")
