"""``tidemill team``: runs of several control planes and brokers beside one another, and those that do not answer."""

import json
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import pytest
import yaml

from broker.client import Broker
from broker.connection.embedded import EmbeddedServer
from broker.device_clock import DeviceClock
from broker.heartbeat import HeartbeatThread
from deploy.client.team import AT_ONCE, Place, look, make_server, read_places
from schemas.errors import ConfigError
from tests.support.broker.control_plane import ControlPlane
from tests.support.broker.trainer_sessions import take_over
from tests.support.runs.command_line import run_tidemill

pytestmark = pytest.mark.integration


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedServer]:
    """A server of its own: it holds no runs of other tests, some of them damaged."""
    with EmbeddedServer(tmp_path_factory.mktemp("team")) as server:
        yield server


def write(folder: Path, places: list[dict[str, str]]) -> Path:
    file = folder / "team.yaml"
    file.write_text(yaml.safe_dump(places))
    return file


def test_a_team_sees_all_its_runs_and_what_does_not_answer(
    make_broker: Callable[..., Broker], server: EmbeddedServer, tmp_path: Path
) -> None:
    first, second = make_broker("team-first", prefix="team"), make_broker("team-second")
    for broker in (first, second):
        take_over(broker)
    damaged = make_broker("team-damaged", prefix="team")
    take_over(damaged)
    slots = damaged.connection.keys.slots
    damaged.connection.client.delete(slots)
    damaged.connection.client.set(slots, "no sorted set")
    (tmp_path / "token").write_text("secret\n")
    with (
        socket.socket() as silent,
        ControlPlane(first, "team-first", token="secret", quota=8) as api,
        HeartbeatThread(first, "generator-0", "generator", lambda: ("running", 0, {}), clock=DeviceClock(4)),
        HeartbeatThread(second, "trainer", "trainer", lambda: ("running", 0, {}), clock=DeviceClock(2)),
    ):
        silent.bind(("127.0.0.1", 0))
        silent.listen(5)
        # First: what reads the damaged run continues in this process, and logs to its output.
        printed = json.loads(
            run_tidemill("team", str(write(tmp_path, [{"owner": "<b>", "control": api.url}])), "--json").stdout
        )
        assert [row["owner"] for row in printed] == ["<b>"]
        file = write(
            tmp_path,
            [
                {"owner": "ann", "control": api.url, "token_file": "token"},
                {"owner": "ben", "control": f"http://127.0.0.1:{silent.getsockname()[1]}"},
                {"owner": "cem", "broker": "redis://:hidden@127.0.0.1:1/0"},
                {"owner": "dia", "control": api.url},
                {"owner": "eve", "broker": server.url},
            ],
        )

        def devices() -> dict[str | None, int | None]:
            places = read_places(file)
            return {row["run"]: row["devices"] for row in look([places[0], places[4]], tmp_path)}

        api.wait("heartbeats", lambda: (devices().get("team-first"), devices().get("team-second")) == (4, 2))
        rows = look(read_places(file), tmp_path, deadline_s=3.0)
        seen = {(row["owner"], row["run"]): row for row in rows}
        ann = seen["ann", "team-first"]
        assert (ann["devices"], ann["max_devices"], ann["state"]) == (4, 8, "starting")
        assert seen["eve", "team-second"]["devices"] == 2
        assert ("eve", "team-first") in seen, "a broker shows all its runs"
        assert seen["eve", "team-damaged"]["state"] == "unreachable"
        for owner, why in (("ben", " "), ("cem", "127.0.0.1:1"), ("dia", "token")):
            row = seen[owner, None]
            assert (row["state"], row["devices"]) == ("unreachable", None)
            assert why in row["problem"]
        assert "hidden" not in json.dumps(rows)
        check_page(write(tmp_path, [{"owner": "<b>", "control": api.url}]))


def test_more_runs_than_are_asked_at_once_are_all_shown(make_broker: Callable[..., Broker], tmp_path: Path) -> None:
    for number in range(AT_ONCE + 8):
        take_over(make_broker(f"many-{number}", prefix="many"))
    url = make_broker().connection.url
    rows = look([Place("ann", broker=url)], tmp_path, deadline_s=60.0)
    assert {f"many-{number}" for number in range(AT_ONCE + 8)} <= {
        row["run"] for row in rows if row["state"] == "starting"
    }


def check_page(file: Path) -> None:
    with make_server(file, 0) as pages:
        thread = threading.Thread(target=pages.serve_forever, daemon=True)
        thread.start()
        url = f"http://127.0.0.1:{pages.server_port}/"
        try:
            with urlopen(url, timeout=20) as answer:
                text = answer.read().decode()
            assert "&lt;b&gt;" in text
            assert "<b>" not in text
            assert "unreachable" in text
            with pytest.raises(HTTPError, match="404"):
                urlopen(Request(url, headers={"Host": "evil.example:80"}), timeout=20)
        finally:
            pages.shutdown()
            thread.join(20)


@pytest.mark.parametrize(
    ("places", "text"),
    [
        ([{"owner": "ann"}], r"place 0 \(ann\) needs either control or broker"),
        ([{"owner": "ann", "control": "http://a", "broker": "redis://b"}], "needs either control or broker"),
        ([{"control": "http://a"}], r"missing required field `owner` - at `\$\[0\]`"),
        ([{"owner": "ann", "url": "http://a"}], "unknown field `url`"),
        ({"owner": "ann"}, "must be a list of places"),
    ],
)
def test_a_wrong_file_is_refused_in_one_line(tmp_path: Path, places: list[dict[str, str]], text: str) -> None:
    with pytest.raises(ConfigError, match=text) as refused:
        read_places(write(tmp_path, places))
    assert "\n" not in str(refused.value)
