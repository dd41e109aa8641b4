"""Notices of a run by HTTP or a command, delivered in threads; a failure is logged and added to the timeline."""

import json
import subprocess
import threading
import time
from collections.abc import Callable, Mapping
from http.client import HTTPException
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

import structlog

from schemas.config.deploy import NotifyConfig, Occasion

SEND_S = 10.0
"""Most seconds that one delivery may take."""
TRIES = 3
RETRY_S = 1.0

log = structlog.get_logger()


class Notifier:
    """Delivers notices of the occasions that ``notify.events`` names."""

    def __init__(
        self, settings: NotifyConfig, base: Path, on_failure: Callable[[str], None] = lambda text: None
    ) -> None:
        """base: folder in which the command runs. on_failure: called, in a thread, with the reason for a failed one."""
        self._settings, self._base, self._on_failure = settings, base, on_failure
        self._threads: list[threading.Thread] = []

    def tell(self, event: Occasion, notice: Mapping[str, Any]) -> None:
        """Deliver a notice of an event in a thread; returns at once."""
        if event not in self._settings.events:
            return
        body = json.dumps(notice).encode()
        for setting, way in ((self._settings.webhook, self._post), (self._settings.command, self._run)):
            if setting:
                thread = threading.Thread(target=self._deliver, args=(way, body), name="notify", daemon=True)
                self._threads.append(thread)
                thread.start()

    def wait(self, seconds: float = SEND_S) -> None:
        """Wait until everything is delivered, at most so long."""
        deadline = time.monotonic() + seconds
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))

    def _deliver(self, way: Callable[[bytes], str | None], body: bytes) -> None:
        for attempt in range(TRIES):
            time.sleep(RETRY_S * attempt)
            problem = way(body)
            if problem is None:
                return
        log.warning("a notice was not delivered", problem=problem)
        self._on_failure(f"a notice was not delivered: {problem}")

    def _post(self, body: bytes) -> str | None:
        """Return why delivery failed, or None. The address may hold a secret and is left out."""
        request = Request(str(self._settings.webhook), body, {"Content-Type": "application/json"}, method="POST")
        try:
            with urlopen(request, timeout=SEND_S):
                return None
        except (OSError, HTTPException, ValueError) as error:
            # HTTPError, which urllib raises for an answer of 400 and more, is an OSError too.
            return f"notify.webhook: {getattr(error, 'reason', error)}"

    def _run(self, body: bytes) -> str | None:
        command = self._settings.command or []
        try:
            done = subprocess.run(command, input=body, capture_output=True, timeout=SEND_S, cwd=self._base)
        except (OSError, subprocess.SubprocessError) as error:
            return f"notify.command: {error}"
        said = done.stderr.decode(errors="replace").strip().splitlines()[-1:]
        return None if done.returncode == 0 else f"notify.command: exit code {done.returncode} {' '.join(said)}".strip()
