"""Ends the processes of a spot machine in order once its cloud has announced that it takes the machine back.

The notice comes 30 s (Google Cloud, Azure) to 120 s (AWS) before the end. Asked to end, a generator returns its
unfinished samples, which others continue, and a trainer writes a checkpoint.

Sources: AWS, "Spot Instance interruption notices"; Google Cloud, "Preemptible VM instances", key instance/preempted;
Azure, "Scheduled Events for Linux VMs": they go to all machines of a scale set or an availability set.
"""

import json
import os
import signal
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from http.client import HTTPException
from urllib.error import HTTPError
from urllib.request import ProxyHandler, Request, build_opener

import structlog

from deploy.supervisor.process import MARK
from schemas.config import TidemillConfig
from schemas.system.lifecycle import StopFlag

LOOK_S = 2.0
TIMEOUT_S = 2.0
LOADING_S = 10.0
MAX_ANSWER = 65_536
AWS, GOOGLE = "http://169.254.169.254", "http://metadata.google.internal"

log = structlog.get_logger()


@dataclass(frozen=True)
class MetadataServer:
    """The server of a cloud that tells a machine of its end, at an address that only the machine reaches.

    path: what to ask for, with these headers. token_path: where a PUT gives a token for that, if one is needed.
    name_path: where the machine's name is, if the notices are those of all machines of its set.
    """

    base: str
    path: str
    headers: Mapping[str, str] = field(default_factory=dict)
    token_path: str | None = None
    name_path: str | None = None

    def read(self) -> str | None:
        """Return the notice, or None without one. OSError or HTTPException: the server can't be asked."""
        headers = dict(self.headers)
        if self.token_path is not None:
            asked = {"X-aws-ec2-metadata-token-ttl-seconds": "60"}
            token = self._ask(Request(self.base + self.token_path, headers=asked, method="PUT"))
            headers["X-aws-ec2-metadata-token"] = token or ""
        answer = self._ask(Request(self.base + self.path, headers=headers))
        if answer is None or not announces_end(answer, None):
            return None
        name = self._ask(Request(self.base + self.name_path, headers=headers)) if self.name_path is not None else None
        return answer if announces_end(answer, name) else None

    def _ask(self, request: Request) -> str | None:
        """Return the answer's text, None for 404."""
        try:
            # Not by a proxy, which has a metadata server of its own.
            with build_opener(ProxyHandler({})).open(request, timeout=TIMEOUT_S) as answer:
                return str(answer.read(MAX_ANSWER).decode(errors="replace")).strip()
        except HTTPError as error:
            if error.code == 404:
                return None
            raise


SERVERS: Mapping[str, MetadataServer] = {
    "aws": MetadataServer(AWS, "/latest/meta-data/spot/instance-action", token_path="/latest/api/token"),
    "gcp": MetadataServer(GOOGLE, "/computeMetadata/v1/instance/preempted", {"Metadata-Flavor": "Google"}),
    "azure": MetadataServer(
        AWS,
        "/metadata/scheduledevents?api-version=2020-07-01",
        {"Metadata": "true"},
        name_path="/metadata/instance/compute/name?api-version=2021-02-01&format=text",
    ),
}


def announces_end(answer: str, name: str | None) -> bool:
    """Return whether a metadata server says that the machine ``name``, or with None any machine, is taken back."""
    if answer.upper() in ("TRUE", "FALSE"):
        return answer.upper() == "TRUE"
    try:
        found = json.loads(answer)
    except ValueError:
        return False
    if not isinstance(found, dict):
        return False
    events = found.get("Events")
    kinds = [event.get("EventType") for event in (events if isinstance(events, list) else []) if _concerns(event, name)]
    return found.get("action") in ("terminate", "stop", "hibernate") or "Preempt" in kinds or "Terminate" in kinds


def _concerns(event: object, name: str | None) -> bool:
    """Return whether an event of Azure is for the machine of this name. One that names no machines is for any."""
    if not isinstance(event, dict) or name is None:
        return isinstance(event, dict)
    machines = event.get("Resources", [name])
    return isinstance(machines, list) and name.casefold() in (str(machine).casefold() for machine in machines)


class SpotNoticeWatch:
    """A thread that asks this process to end, as SIGTERM does, once the cloud announces its machine's end.

    The exit code of a trainer that ends so has it started again (StopFlag.unfinished_code).
    """

    def __init__(self, server: MetadataServer) -> None:
        self._server = server
        self._warned = False

    def start(self) -> None:
        """Ask from now on, every two seconds, until this process ends."""
        threading.Thread(target=self._watch, name="spot notice", daemon=True).start()

    def _watch(self) -> None:
        while (notice := self._look()) is None:
            time.sleep(LOOK_S)
        log.warning("this machine is taken back, its processes end in order", notice=notice)
        due = time.monotonic() + LOADING_S
        while signal.getsignal(signal.SIGTERM) is signal.SIG_DFL and time.monotonic() < due:
            # A process that is still loading its libraries does not know yet how to end well.
            time.sleep(LOOK_S)
        stop = StopFlag.installed()
        if stop is not None:
            stop.set()
        else:
            os.kill(os.getpid(), signal.SIGTERM)

    def _look(self) -> str | None:
        try:
            return self._server.read()
        except (OSError, HTTPException) as error:
            if not self._warned:
                log.warning(
                    "notices of the cloud can't be read, it is asked again", why=str(error), url=self._server.base
                )
                self._warned = True
            return None


def watch_spot_notices(config: TidemillConfig) -> None:
    """Watch for the end of this machine if ``supervisor.spot_notices`` names its cloud.

    The services of a supervisor leave it to their supervisor, and the other ranks of a machine to its first one.
    """
    cloud = config.supervisor.spot_notices
    if cloud is not None and MARK not in os.environ and os.environ.get("LOCAL_RANK", "0") == "0":
        SpotNoticeWatch(SERVERS[cloud]).start()
