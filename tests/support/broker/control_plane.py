"""A run's control plane in this process, and a client of it."""

import json
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Self
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import uvicorn

from broker.client import Broker
from deploy.control_plane.address import listen
from deploy.control_plane.app import make_app
from deploy.control_plane.routes.context import Context
from deploy.control_plane.server import server_settings
from deploy.control_plane.status.collector import PlannedRun
from deploy.control_plane.status.kubernetes import Deployments
from deploy.control_plane.status.poller import StatusPoller
from deploy.control_plane.web.sse import Hub
from schemas.config import parse_config

DEADLINE_S = 20.0
EVERY_S = 0.1
"""Pause between two looks at the run; also what its end takes."""


class ControlPlane:
    """A control plane that listens, and what one asks of it."""

    def __init__(
        self,
        broker: Broker,
        run: str,
        deployments: Deployments | None = None,
        model: str = "nowhere",
        folder: Path | None = None,
        token: str | None = None,
        reader: str | None = None,
        held_out: bool = False,
        live: dict[str, Any] | None = None,
        pools: dict[str, Any] | None = None,
        quota: int | None = None,
        **control: Any,
    ) -> None:
        held = {"eval": {"dataset": {"name": "arithmetic"}, "every": 50}} if held_out else {}
        config = parse_config(
            {
                **held,
                "run": {"name": run, "folder": str(folder or Path("runs") / "of-no-test")},
                "model": {"path": model},
                "train": {"name": "arithmetic"},
                "reward": {"terms": [{"name": "exact"}]},
                "generator": {"agents": {"live": live or {}}},
                "pools": pools or {},
                "supervisor": {"max_devices": quota},
                "control": control,
            }
        )
        self.broker = broker
        hub = Hub()
        self.socket = listen("127.0.0.1", 0, None)
        self.url = f"http://127.0.0.1:{self.socket.getsockname()[1]}"
        plan = PlannedRun.of(config)
        poller = StatusPoller(broker, plan, deployments, every_s=EVERY_S)
        app = make_app(Context(plan, "control", broker, poller, hub), token, read_token=reader)
        self.server = uvicorn.Server(server_settings(app, config.control))
        self.hub = hub
        self.thread = threading.Thread(target=self.server.run, args=([self.socket],), daemon=True)

    def __enter__(self) -> Self:
        self.thread.start()
        self.wait("the first look", lambda: self.ask("GET", "/readyz")[0] == 200)
        return self

    def __exit__(self, *_: object) -> None:
        self.hub.close()
        self.server.should_exit = True
        self.thread.join(DEADLINE_S)
        assert not self.thread.is_alive()
        self.socket.close()

    def ask(self, method: str, path: str, body: Any = None, **headers: str) -> tuple[int, Any]:
        data = None if body is None else json.dumps(body).encode()
        given = {"content-type": "application/json"} | {k.replace("_", "-"): v for k, v in headers.items()}
        request = Request(self.url + path, data, given, method=method)
        try:
            with urlopen(request, timeout=DEADLINE_S) as answer:
                return answer.status, json.loads(answer.read())
        except HTTPError as error:
            refusal, text = error, error.read()
        problem = json.loads(text)
        assert refusal.headers["content-type"] == "application/problem+json"
        assert problem["status"] == refusal.code
        return refusal.code, problem

    def wait(self, what: str, reached: Callable[[], bool]) -> None:
        deadline = time.monotonic() + DEADLINE_S
        while not reached():
            assert time.monotonic() < deadline, f"waited {DEADLINE_S} s for {what}"
            time.sleep(0.02)
