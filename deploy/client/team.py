"""``tidemill team``: the runs of several control planes and brokers, which are asked at once, each with a deadline."""

from __future__ import annotations

import html
import json
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import redis
import yaml
from rich.console import Console
from rich.table import Table

from deploy.client.client import Client
from deploy.client.find import date, find
from deploy.client.transport import over_http
from schemas.errors import ConfigError, TidemillError
from schemas.urls import hide_password

if TYPE_CHECKING:
    from broker.connection.runs import RunInfo

Answer = list[dict[str, Any]] | str | None
"""Rows, or the error as text; None if the answer did not come in time."""

DEADLINE_S = 5.0
"""Seconds in which a place must have answered."""
AT_ONCE = 32
"""Places, and runs of a broker, that are asked at the same time."""
RUN_SHARE = 0.8
"""Share of that time in which each run of a broker must have been read."""
COLUMNS = ("owner", "run", "state", "step", "machine", "devices", "of", "device hours", "waited", "last order")
LOOKED_BACK = 200
"""Events of a run among which its last order is looked for."""
HOSTS = ("localhost", "127.0.0.1")
STYLE = "body{font:15px system-ui;margin:2em}td,th{text-align:left;padding:.3em 1em}.unreachable,.failed{color:#b00}"


class Place(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Where the runs of ``owner`` are: a control plane, with its ``token_file`` beside the team's file, or a broker."""

    owner: str
    control: str | None = None
    broker: str | None = None
    token_file: str | None = None

    @property
    def shown(self) -> str:
        """Its address as shown to users, without a password."""
        return hide_password(self.control or self.broker or "")


def read_places(file: Path) -> list[Place]:
    """Read a team's file, a list of places in YAML. ConfigError names the place and the field that is wrong."""
    try:
        found: Any = yaml.safe_load(file.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError(f"the team's file {file} cannot be read: {' '.join(str(error).split())}") from error
    try:
        places = msgspec.convert(found, list[Place])
    except msgspec.ValidationError as error:
        raise ConfigError(
            f"the team's file {file} must be a list of places with owner, control or broker, token_file: {error}"
        ) from error
    for number, place in enumerate(places):
        if (place.control is None) == (place.broker is None):
            raise ConfigError(f"the team's file {file}: place {number} ({place.owner}) needs either control or broker")
    return places


def look(places: list[Place], folder: Path, deadline_s: float = DEADLINE_S) -> list[dict[str, Any]]:
    """Return a row for each run, and one for each place that did not answer. folder: of token files."""
    asked = [partial(_rows, place, folder, deadline_s) for place in places]
    late = f"no answer within {deadline_s:g} s"
    answers = zip(places, _ask_all(asked, deadline_s), strict=True)
    return [row for place, answer in answers for row in _shown(place, answer, late)]


def _ask_all(questions: Sequence[Callable[[], list[dict[str, Any]]]], within_s: float) -> list[Answer]:
    """Ask all questions at once; return the rows or the error of each, and None for one that takes longer."""
    answers: list[Answer] = [None] * len(questions)
    end, numbers = time.monotonic() + within_s, iter(range(len(questions)))

    def ask() -> None:
        for number in numbers:
            try:
                answers[number] = questions[number]() if time.monotonic() < end else None
            except (TidemillError, redis.RedisError, OSError, ValueError, LookupError, TypeError) as error:
                answers[number] = " ".join(str(error).split())

    # Threads that the end of this process does not wait for.
    threads = [threading.Thread(target=ask, daemon=True) for _ in questions[:AT_ONCE]]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(max(0.0, end - time.monotonic()))
    return answers


def _shown(place: Place, answer: Answer, late: str, run: str | None = None) -> list[dict[str, Any]]:
    """Return the rows of an answer, or one row that says why there is no answer."""
    if isinstance(answer, list):
        return answer
    nothing = dict.fromkeys(("step", "steps", "machine", "devices", "max_devices", "device_hours", "last_order"))
    shown = {"owner": place.owner, "run": run, "state": "unreachable", "place": place.shown, "problem": answer or late}
    return [{**nothing, **shown, "waited_device_hours": None}]


def _rows(place: Place, folder: Path, deadline_s: float) -> list[dict[str, Any]]:
    """Return a row for each run at a place, from its status as the control plane answers it."""
    if place.control is not None:
        token = (folder / place.token_file).read_text(encoding="utf-8").strip() if place.token_file else None
        client = Client(place.control, token, lambda m, url, head, data, _: over_http(m, url, head, data, deadline_s))
        events = client.get("/v1/timeline", limit=LOOKED_BACK, order="newest")["events"]
        return [_row(place, client.get("/v1/status"), events)]
    from broker.connection.connection import check_server_now, open_client
    from broker.connection.runs import list_runs
    from deploy.control_plane.status.collector import PlannedRun
    from deploy.control_plane.status.poller import DirectStatus

    url = str(place.broker)
    check_server_now(url)

    def read(run: RunInfo) -> list[dict[str, Any]]:
        broker = find(run.name, url, run.prefix)
        noted = broker.events.page(LOOKED_BACK, None, newest=True)[0]
        events = [{**msgspec.to_builtins(each.event), "time": each.time} for each in noted]
        return [_row(place, DirectStatus(broker, PlannedRun(run.name)).refresh().model_dump(mode="json"), events)]

    runs = sorted(list_runs(open_client(url)), key=lambda run: (-run.changed, run.name))
    # A damaged run, or one of another version of Tidemill, delays no other; the place answers in time.
    answers = zip(runs, _ask_all([partial(read, run) for run in runs], deadline_s * RUN_SHARE), strict=True)
    return [row for run, answer in answers for row in _shown(place, answer, "cannot be read in time", run.name)]


def _row(place: Place, status: Mapping[str, Any], events: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return what is shown of a run. events: of its timeline, newest first."""
    order = next((event for event in events if "by" in event["data"] and event["name"] != "service"), None)
    live = [service for service in status["services"] if service["live"]]
    uses = status["ledger"]["devices"].values()
    held, waited = (sum(seconds.get(use, 0.0) for seconds in uses) for use in ("held", "wait"))
    machines = {service["role"]: service["host"] for service in reversed(live)}
    return {
        "owner": place.owner,
        "run": status["run"],
        "state": status["state"],
        "step": status["step"],
        "steps": status["steps"],
        "machine": machines.get("supervisor") or machines.get("trainer") or next(iter(machines.values()), ""),
        "devices": sum(service["devices"] for service in live),
        "max_devices": status["scaling"]["max_devices"],
        "device_hours": round(held / 3600, 2),
        "waited_device_hours": round(waited / 3600, 2),
        "place": place.shown,
        "problem": status["cause"],
        "last_order": order and {"time": order["time"], "by": order["data"]["by"], "text": order["text"]},
    }


def cells(row: Mapping[str, Any]) -> list[str]:
    """Return a row as texts, one for each of COLUMNS."""
    if row["state"] == "unreachable":
        return [row["owner"], row["run"] or row["place"], row["state"], row["problem"], *[""] * (len(COLUMNS) - 4)]
    held, waited = row["device_hours"], row["waited_device_hours"]
    share = f"{waited:.2f} h, {waited / held:.0%}" if held else "-"
    quota = "-" if row["max_devices"] is None else str(row["max_devices"])
    step, devices = f"{row['step']} of {row['steps']}", str(row["devices"])
    order = f"{date(row['last_order']['time'])} {row['last_order']['text']}" if row["last_order"] else "-"
    return [row["owner"], row["run"], row["state"], step, row["machine"], devices, quota, f"{held}", share, order]


def show(file: Path, as_json: bool) -> None:
    """Print the runs of a team."""
    rows = look(read_places(file), file.parent)
    if as_json:
        print(json.dumps(rows))
        return
    table = Table(*COLUMNS, box=None)
    for row in rows:
        table.add_row(*cells(row))
    Console().print(table)


def page(rows: list[dict[str, Any]], user: str = "") -> str:
    """Return the page of a team's runs. user: who looks at it."""
    head = "".join(f"<th>{name}" for name in COLUMNS)
    lines = [(row["state"], "".join(f"<td>{html.escape(cell)}" for cell in cells(row))) for row in rows]
    body = "".join(f'<tr class="{html.escape(state)}">{line}' for state, line in lines)
    total = sum(row["devices"] or 0 for row in rows)
    return (
        f'<!doctype html><meta charset="utf-8"><meta http-equiv="refresh" content="10"><title>Runs</title>'
        f"<style>{STYLE}</style><h1>{len(rows)} runs, {total} devices</h1><p>{html.escape(user)}</p>"
        f"<table><tr>{head}{body}</table>"
    )


def make_server(file: Path, port: int, user_header: str | None = None) -> ThreadingHTTPServer:
    """Return a server of the page on loopback; users of other machines reach it through a proxy.

    user_header: header in which the proxy names the user; a request without it is rejected.
    """
    places = read_places(file)

    class TeamHandler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            # A page of another site must not read this one under a name of its own.
            known = self.headers.get("Host", "").rpartition(":")[0] in HOSTS and self.path == "/"
            user = self.headers.get(user_header or "", "")
            status, text = (404, "not found") if not known else (403, f"the proxy names no user in {user_header}")
            if known and (user or user_header is None):
                status, text = 200, page(look(places, file.parent), user)
            body = text.encode()
            self.send_response(status)
            self.send_header("Content-Type", f"text/{'html' if status == 200 else 'plain'}; charset=utf-8")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: Any) -> None:
            """Say nothing of requests."""

    return ThreadingHTTPServer(("127.0.0.1", port), TeamHandler)


def serve(file: Path, port: int, user_header: str | None = None) -> None:
    """Serve the page until Ctrl-C."""
    with make_server(file, port, user_header) as server, suppress(KeyboardInterrupt):
        print(f"the runs are at http://127.0.0.1:{server.server_port}/, until Ctrl-C", flush=True)
        server.serve_forever()
