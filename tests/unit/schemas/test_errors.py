"""Errors of user code and of broker URLs are one line, and show no password."""

import sys
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from broker.connection.connection import check_server_now, open_client
from broker.connection.embedded import wait_ready
from schemas.config import parse_config
from schemas.errors import ConfigError, InfraError, describe_error
from schemas.plugins import load
from schemas.urls import hide_password

SECRET, USER = "pAssw0rd", "alice"
FORMS = [
    f"redis://{USER}:{SECRET}@127.0.0.1:1/0",
    f"redis://:{SECRET}@127.0.0.1:1/0?socket_timeout=1",
    f"redis://127.0.0.1:1/0?username={USER}&password={SECRET}",
    f"redis://127.0.0.1:1/0?password={SECRET}#{SECRET}",
    f"redis://127.0.0.1:1/0?db=0&p%61ssword={SECRET}&protocol=3",
    f"redis://127.0.0.1:1/0?password=x@{SECRET}",
    f"rediss://{USER}:{SECRET}@127.0.0.1:1/0?ssl_password={SECRET}",
    f"unix:///nowhere/broker.sock?username={USER}&password={SECRET}&db=0",
    f"unix://{USER}:{SECRET}@/nowhere/broker.sock",
]
"""What redis-py takes."""
WRONG = [
    f"{USER}:{SECRET}@127.0.0.1:6379",
    f"http://{USER}:{SECRET}@127.0.0.1:1/0",
    f"redis://{USER}:{SECRET}/{SECRET}@127.0.0.1:1/0",
    f"redis://{USER}:{SECRET}?{SECRET}@127.0.0.1:1/0",
    f"redis://{USER}:{SECRET}#{SECRET}@127.0.0.1:1/0",
    f"redis://127.0.0.1:1/0?db=x&password={SECRET}",
]
"""What it refuses."""
BOTH = f"redis://{USER}:{SECRET}@127.0.0.1:1/0?password={SECRET}"


class Mute(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no text")


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (KeyError("x"), "KeyError: 'x'"),
        (ValueError("two\n  lines"), "ValueError: two lines"),
        (ValueError(), "ValueError"),
        (ValueError("half \ud800"), r"ValueError: half \ud800"),
        (Mute(), "Mute"),
    ],
    ids=["key", "lines", "empty", "surrogate", "mute"],
)
def test_an_exception_is_told_in_one_line_that_can_be_sent(error: Exception, line: str) -> None:
    assert describe_error(error) == line


def test_a_long_text_is_cut() -> None:
    assert len(describe_error(ValueError("x" * 10_000))) == 400


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        ("import sys\nsys.exit(0)\n", "SystemExit: 0"),
        ("raise SystemExit('usage: mine.py FILE')\n", "SystemExit: usage: mine.py FILE"),
        ("raise ValueError('two\\nlines')\n", "ValueError: two lines"),
    ],
)
def test_a_module_that_fails_at_its_import_is_a_wrong_configuration(tmp_path: Path, code: str, reason: str) -> None:
    (tmp_path / "mine.py").write_text(code)
    with pytest.raises(ConfigError) as refused:
        load("mine.py:reward", "reward", tmp_path)
    assert str(refused.value) == f"reward 'mine.py:reward' cannot be imported: {reason}"


@pytest.fixture
def path_of_modules(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever a test adds to where modules are looked for goes with it."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    for name in ("helper_beside", "json"):
        monkeypatch.delitem(sys.modules, name, raising=False)


@pytest.mark.usefixtures("path_of_modules")
def test_a_file_may_import_others_beside_it_also_when_it_is_called(tmp_path: Path) -> None:
    (tmp_path / "helper_beside.py").write_text("TWO = 2\n")
    (tmp_path / "late_helper_beside.py").write_text("THREE = 3\n")
    (tmp_path / "mine.py").write_text(
        "from helper_beside import TWO\n\n\n"
        "def reward():\n    from late_helper_beside import THREE\n    return TWO + THREE\n"
    )
    assert load("mine.py:reward", "reward", tmp_path)() == 5


@pytest.mark.usefixtures("path_of_modules")
def test_a_file_beside_takes_the_name_of_nothing_that_is_installed(tmp_path: Path) -> None:
    (tmp_path / "json.py").write_text("raise ValueError('the wrong one')\n")
    (tmp_path / "uses_json.py").write_text("import json\nreward = json.dumps\n")
    assert load("uses_json.py:reward", "reward", tmp_path)([1]) == "[1]"


@pytest.mark.parametrize("url", [*FORMS, *WRONG, BOTH])
def test_neither_user_nor_password_is_left_of_a_url(url: str) -> None:
    assert SECRET not in hide_password(url)
    assert USER not in hide_password(url)


@pytest.mark.parametrize("url", FORMS)
def test_redis_py_finds_the_password_in_each_of_these_forms(url: str) -> None:
    given = open_client(url).connection_pool.connection_kwargs
    assert SECRET in str(given.get("password"))


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("redis://h:6379/0", "redis://h:6379/0"),
        ("unix:///run/broker.sock?db=2", "unix:///run/broker.sock?db=2"),
        ("rediss://u:p@h:1/0?ssl_ca_certs=ca.pem", "rediss://***@h:1/0?ssl_ca_certs=ca.pem"),
        ("redis://h:1/0?db=1&password=p&protocol=3", "redis://h:1/0?db=1&password=***&protocol=3"),
    ],
)
def test_what_tells_where_the_server_is_stays(url: str, shown: str) -> None:
    assert hide_password(url) == shown
    assert urlsplit(shown).scheme == urlsplit(url).scheme


@pytest.mark.parametrize("url", [*FORMS, *WRONG])
def test_errors_about_a_server_that_cannot_be_used_hold_no_password(url: str) -> None:
    with pytest.raises(ConfigError) as refused:
        check_server_now(url)
    assert SECRET not in str(refused.value)
    assert USER not in str(refused.value)


def test_a_server_that_does_not_come_up_is_named_without_its_password() -> None:
    with pytest.raises(InfraError) as failed:
        wait_ready(f"unix:///nowhere/broker.sock?password={SECRET}", 0.0)
    assert SECRET not in str(failed.value)


@pytest.mark.parametrize("section", [FORMS[0], {"url": {"at": FORMS[0]}}, {"prefix": FORMS[2]}])
def test_a_url_in_the_wrong_place_of_the_configuration_is_shown_without_its_password(section: object) -> None:
    data = {"model": {"path": "m"}, "train": {"name": "jsonl"}, "reward": {"terms": [{"name": "exact"}]}}
    with pytest.raises(ConfigError, match="broker") as refused:
        parse_config({**data, "broker": section})
    assert SECRET not in str(refused.value)
