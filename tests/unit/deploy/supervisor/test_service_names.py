"""Services started by hand are named after their machine, each machine's differently."""

from __future__ import annotations

import socket

import pytest

from deploy.services.main import service_name


def test_machines_of_two_domains_have_services_of_two_names(monkeypatch: pytest.MonkeyPatch) -> None:
    names = set()
    for host in ("node.a", "node.b"):
        monkeypatch.setattr(socket, "gethostname", lambda host=host: host)
        names.add(service_name("generator"))
    assert names == {"generator-node.a", "generator-node.b"}


def test_a_role_with_one_member_gives_its_name() -> None:
    assert service_name("trainer") == "trainer"
    assert service_name("reward", "reward-7") == "reward-7"
