"""``tidemill top``: a run in the terminal, once a second, from its control plane or its broker."""

import json
import os
import sys
import time
from contextlib import suppress

from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from deploy.client.client import Client
from deploy.terminal.page import EVENTS, History, page
from schemas.control_api.history import Evaluations, MetricsHistory, Timeline
from schemas.control_api.status import RunStatus
from schemas.errors import InfraError

EVERY_S = 1.0
REWARD = "reward/mean"
STEPS = 240
"""Newest steps whose rewards are drawn."""


def watch(client: Client) -> None:
    """Show the run until Ctrl-C; while neither control plane nor broker answers, show the error above the last page."""
    console = Console()
    status, history = read(client)
    shown = Live(page(status, history, console.height), console=console, screen=True, auto_refresh=False)
    with suppress(KeyboardInterrupt), shown as live:
        while True:
            live.refresh()
            time.sleep(EVERY_S)
            try:
                status, history = read(client)
                live.update(page(status, history, console.height))
            except InfraError as error:
                live.update(Group(Text(str(error), "bold red"), page(status, history, console.height - 1)))


def read(client: Client) -> tuple[RunStatus, History]:
    """Return what the page shows."""
    status = RunStatus.model_validate(client.get("/v1/status"))
    metrics = MetricsHistory.model_validate(client.get("/v1/metrics-history", name=REWARD, limit=STEPS, order="newest"))
    evaluations = Evaluations.model_validate(client.get("/v1/evaluations", order="newest")).evaluations
    timeline = Timeline.model_validate(client.get("/v1/timeline", limit=EVENTS, order="newest"))
    rewards = [reward for reward in metrics.series.get(REWARD, []) if reward is not None]
    return status, History(rewards, evaluations[::-1], timeline.events[::-1])


def stream(client: Client) -> None:
    """Print a status each second as a JSON line, until Ctrl-C or until the reader closes the pipe."""
    try:
        while True:
            print(json.dumps(client.get("/v1/status")), flush=True)
            time.sleep(EVERY_S)
    except (KeyboardInterrupt, BrokenPipeError):
        # What is left in the buffer has no reader.
        sys.stdout = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115
