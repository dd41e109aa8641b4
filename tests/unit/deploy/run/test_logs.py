"""Log lines: JSON where nobody reads along, with run and service on each, libraries included."""

from __future__ import annotations

import json
import subprocess
import sys

from deploy.supervisor.failures import _record

CODE = """
import logging, sys, structlog
from deploy.logs import configure_logging
from schemas.config import parse_config
config = parse_config({"run": {"name": "sums"}, "model": {"path": "x"}, "train": {"name": "arithmetic"},
                       "reward": {"terms": [{"name": "exact"}]}, "log": {"format": sys.argv[1]}})
configure_logging(config, "reward", "reward-0")
structlog.get_logger().info("scored", samples=3)
structlog.get_logger().debug("not shown")
logging.getLogger("some.library").warning("careful with %s", "that")
logging.getLogger("some.library").info("not shown")
raise ValueError("no such column")
"""


def run(form: str) -> list[str]:
    done = subprocess.run([sys.executable, "-c", CODE, form], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1
    return done.stderr.splitlines()


def test_json_lines_say_where_they_come_from() -> None:
    own, library, crash = [json.loads(line) for line in run("json")]
    assert (own["event"], own["samples"], own["level"]) == ("scored", 3, "info")
    assert (library["event"], library["logger"]) == ("careful with that", "some.library")
    for line in (own, library, crash):
        assert (line["run"], line["role"], line["service"]) == ("sums", "reward", "reward-0")


def test_the_last_words_of_a_crash_name_its_reason() -> None:
    assert _record(run("auto")[-1]) == "service crashed: ValueError: no such column"


def test_human_lines_are_short() -> None:
    first = run("human")[0]
    assert "scored" in first
    assert "samples=3" in first
    assert not first.startswith("{")


def test_a_log_that_can_not_be_written_ends_nothing() -> None:
    code = CODE.replace('raise ValueError("no such column")', 'print("went on")')
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-c", code, "json"],
            stdout=subprocess.PIPE,
            stderr=full,
            text=True,
            timeout=60,
            check=False,
        )
    assert (done.returncode, done.stdout) == (0, "went on\n")
