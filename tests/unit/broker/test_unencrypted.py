"""What flows without TLS is said where a user has asked for TLS."""

from __future__ import annotations

import pytest
from structlog.testing import capture_logs

from broker.weights.transports.broadcast import warn_unencrypted


@pytest.mark.parametrize(("url", "lines"), [("rediss://broker:6379/0", 1), ("redis://broker:6379/0", 0)])
def test_a_line_says_that_broadcasts_have_no_tls_where_the_broker_has(url: str, lines: int) -> None:
    with capture_logs() as found:
        warn_unencrypted(url)
    assert len(found) == lines
    assert all("broadcasts of weights are not encrypted; set peer" in line["event"] for line in found)
