"""The ``tidemill`` command as a user calls it, in this process: another one takes longer to start than to run."""

import contextlib
import functools
import io
import sys
from dataclasses import dataclass
from pathlib import Path
from unittest.mock import patch

import typer

from deploy.cli.app import app, main

build = functools.cache(typer.main.get_command)
"""Builds the tree of commands once for all tests, which takes longer than most of them."""


@dataclass(frozen=True)
class Finished:
    """What a command left: its exit code and what it printed."""

    returncode: int
    stdout: str
    stderr: str


def run_tidemill(*arguments: str, answer: str = "", cwd: Path | None = None) -> Finished:
    """Run ``tidemill`` with these arguments in the folder ``cwd`` and ``answer`` as its standard input.

    An exception that the command does not turn into a message and an exit code is raised here.
    """
    stdout, stderr = io.StringIO(), io.StringIO()
    with (
        patch.object(typer.main, "get_command", build),
        patch.object(sys, "argv", ["tidemill", *arguments]),
        patch.object(sys, "stdin", io.StringIO(answer)),
        contextlib.chdir(cwd or "."),
        contextlib.redirect_stdout(stdout),
        contextlib.redirect_stderr(stderr),
    ):
        try:
            main()
            code = 0
        except SystemExit as ending:
            code = ending.code if isinstance(ending.code, int) else int(ending.code is not None)
    return Finished(code, stdout.getvalue(), stderr.getvalue())


def command_names() -> set[str]:
    """The names of all commands, without ``tidemill``."""
    return set(build(app).commands)  # type: ignore[attr-defined]
