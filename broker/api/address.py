"""Where a run's control plane listens, and the token that it asks for. Loads no web server: commands and the
supervisor read it."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path

import structlog

from schemas.errors import ConfigError
from schemas.files import atomic_write

ADDRESS = "control.json"
"""File in the run's folder that says where, for those on the same machine."""
TOKEN = "TIDEMILL_CONTROL_TOKEN"
MIN_TOKEN = 16

log = structlog.get_logger()


def announce(folder: Path, url: str) -> None:
    """Write the URL into the run's folder; a folder that can't be written is only logged."""
    file = folder / ADDRESS
    try:
        atomic_write(file, json.dumps({"url": url, "pid": os.getpid()}))
    except OSError as error:
        log.warning("cannot say where the control plane listens", file=str(file), error=str(error))


def address_of(folder: Path) -> str | None:
    """Return the URL of the run's control plane, with a slash at its end; None when none is written."""
    try:
        found = json.loads((folder / ADDRESS).read_text(encoding="utf-8"))
        return str(found["url"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def withdraw(folder: Path, url: str) -> None:
    """Remove this control plane's address; another one's stays."""
    if address_of(folder) == url:
        (folder / ADDRESS).unlink(missing_ok=True)


def read_token(file: Path | None, environment: Mapping[str, str]) -> str | None:
    """Read the token from ``file`` or TIDEMILL_CONTROL_TOKEN(_FILE), None if unset; ConfigError: too short."""
    source = file or (Path(environment[f"{TOKEN}_FILE"]) if environment.get(f"{TOKEN}_FILE") else None)
    if source is not None:
        try:
            token = source.read_text(encoding="utf-8").strip()
        except OSError as error:
            raise ConfigError(f"cannot read the control plane's token from {source}: {error.strerror}") from error
    else:
        token = environment.get(TOKEN, "").strip()
    if not token and source is None:
        return None
    if len(token) < MIN_TOKEN or not token.isascii() or any(character.isspace() for character in token):
        raise ConfigError(
            f"the control plane's token must be {MIN_TOKEN} or more ASCII characters without spaces:"
            " make one with `openssl rand -hex 24`"
        )
    return token
