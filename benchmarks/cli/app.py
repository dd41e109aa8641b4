"""The ``tidemill bench`` command, of all benchmarks."""

from __future__ import annotations

import typer

from benchmarks.cli.pipeline import app as pipeline
from benchmarks.cli.services import app as services

app = typer.Typer(name="bench", no_args_is_help=True)
app.add_typer(pipeline)
app.add_typer(services)


@app.callback()
def set_up_logs() -> None:
    """Measure the broker, weights on their way, generation, agents, rewards, the control plane, a trainer's step."""
    import logging
    import sys

    import structlog

    # Standard output is the result's.
    structlog.configure(
        wrapper_class=structlog.make_filtering_bound_logger(logging.WARNING),
        logger_factory=structlog.WriteLoggerFactory(file=sys.stderr),
    )
