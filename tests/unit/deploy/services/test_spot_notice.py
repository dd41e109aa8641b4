"""Notices of the clouds that a spot machine is taken back."""

import json
import socket
import threading
from dataclasses import replace
from typing import get_args

import pytest

from deploy.services.spot_notice import SERVERS, SpotNoticeWatch, announces_end, watch_spot_notices
from schemas.config.deploy import SupervisorConfig
from tests.support.configurations import minimal_config
from tests.support.runs.programs import free_port
from tests.support.servers.metadata_server import NAME, events, metadata_server


@pytest.mark.parametrize("cloud", SERVERS)
def test_each_cloud_is_asked_as_it_documents(cloud: str) -> None:
    with metadata_server() as (base, asked, ended):
        server = replace(SERVERS[cloud], base=base)
        assert server.read() is None
        assert asked.is_set()
        ended.set()
        assert server.read()


@pytest.mark.parametrize("cloud", SERVERS)
def test_a_machine_that_is_in_no_cloud_is_an_error_to_tell(cloud: str) -> None:
    with pytest.raises(OSError, match="refused"):
        replace(SERVERS[cloud], base=f"http://127.0.0.1:{free_port()}").read()


def test_an_answer_that_is_no_http_does_not_end_the_watch() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:

        def answer() -> None:
            connection, _ = server.accept()
            with connection:
                connection.recv(4096)
                connection.sendall(b"what?\r\n\r\n")

        thread = threading.Thread(target=answer, daemon=True)
        thread.start()
        asked = replace(SERVERS["gcp"], base=f"http://127.0.0.1:{server.getsockname()[1]}")
        assert SpotNoticeWatch(asked)._look() is None, "it is asked again"
        thread.join(10)


@pytest.mark.parametrize(
    ("answer", "ends"),
    [
        ('{"action": "terminate", "time": "2026-11-25T08:22:00Z"}', True),
        ('{"action": "hibernate", "time": "2026-11-25T08:22:00Z"}', True),
        ("FALSE", False),
        ("TRUE", True),
        (json.dumps({"Events": [{"EventType": "Reboot"}]}), False),
        (json.dumps({"Events": [{"EventType": "Freeze"}, {"EventType": "Preempt"}]}), True),
        (json.dumps({"Events": "Preempt"}), False),
        (events("spot_7"), False),
        (events("spot_7", "SPOT_0"), True),
        (json.dumps({"Events": [{"EventType": "Preempt", "Resources": 3}]}), False),
        ("", False),
        ("[]", False),
        ("<html>not a metadata server</html>", False),
    ],
)
def test_only_the_end_of_this_very_machine_ends_its_processes(answer: str, ends: bool) -> None:
    assert announces_end(answer, NAME) is ends


def test_an_event_is_for_a_machine_without_a_name() -> None:
    assert announces_end(events("spot_7"), None)


def test_every_cloud_of_the_setting_is_known() -> None:
    (clouds, _) = get_args(SupervisorConfig.model_fields["spot_notices"].annotation)
    assert set(get_args(clouds)) == set(SERVERS)


@pytest.mark.parametrize(("rank", "local_rank", "watches"), [("8", "0", True), ("1", "1", False)])
def test_the_first_rank_of_each_machine_watches(
    rank: str, local_rank: str, watches: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 0 learns of the end of another machine only from a rank there."""
    started = []
    monkeypatch.setattr(SpotNoticeWatch, "start", lambda self: started.append(self))
    monkeypatch.setenv("RANK", rank)
    monkeypatch.setenv("LOCAL_RANK", local_rank)
    watch_spot_notices(minimal_config(supervisor={"spot_notices": "aws"}))
    assert bool(started) is watches
