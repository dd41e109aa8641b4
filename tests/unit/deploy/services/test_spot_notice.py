"""Notices of the clouds that a spot machine is taken back."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import get_args

import pytest

from deploy.services.spot_notice import SERVERS, announces_end
from schemas.config.deploy import SupervisorConfig
from tests.support.runs.metadata_server import metadata_server
from tests.support.runs.programs import free_port


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
        ("", False),
        ("[]", False),
        ("<html>not a metadata server</html>", False),
    ],
)
def test_only_an_end_ends_the_processes(answer: str, ends: bool) -> None:
    assert announces_end(answer) is ends


def test_every_cloud_of_the_setting_is_known() -> None:
    (clouds, _) = get_args(SupervisorConfig.model_fields["spot_notices"].annotation)
    assert set(get_args(clouds)) == set(SERVERS)
