"""Where a run's control plane listens, and its token, made on loopback if users set none. Loads no web server."""

import json
import os
import secrets
import socket
import stat
from collections.abc import Mapping
from pathlib import Path
from urllib.parse import urlsplit

from schemas.errors import ConfigError
from schemas.run_folder import ADDRESS, CONTROL_TOKEN, read_object
from schemas.system.files import atomic_write
from schemas.system.processes import find_place, find_start
from schemas.urls import is_loopback, open_listener

TOKEN = "TIDEMILL_CONTROL_TOKEN"
READ_TOKEN = "TIDEMILL_CONTROL_READ_TOKEN"
"""Variable with a second token, for those who may read and order nothing."""
MIN_TOKEN = 16


def announce(folder: Path, url: str) -> None:
    """Write the URL into the run's folder, with the process that listens; a folder that can't be written is logged."""
    file = folder / ADDRESS
    own = os.getpid()
    process = {"pid": own, "started": find_start(own), "place": find_place()}
    try:
        atomic_write(file, json.dumps({"url": url, "url_elsewhere": _url_elsewhere(url), **process}))
    except OSError as error:
        # Imported here: those who only look for the address load no logging.
        import structlog

        structlog.get_logger().warning("cannot say where the control plane listens", file=str(file), error=str(error))


def address_of(folder: Path) -> str | None:
    """Return the URL of the run's control plane, with a slash at its end; None if none is written or it has ended.

    None, too, if it listens on the loopback of another machine.
    """
    # Once the process has ended, another user's program may have its port, and would be sent the token.
    found = read_object(folder / ADDRESS)
    url, pid, place = found.get("url"), found.get("pid"), found.get("place")
    here = find_place()
    ended = place and place == here and isinstance(pid, int) and find_start(pid) != found.get("started")
    if str(place or "").partition(":")[0] != here.partition(":")[0]:
        # Another boot. On its own loopback this machine has other programs, which would be sent the token.
        url = found.get("url_elsewhere")
    return None if url is None or ended else str(url)


def _url_elsewhere(url: str) -> str | None:
    """Return the URL by which other machines reach the listener at ``url``; None if it is on loopback."""
    parts = urlsplit(url)
    host = parts.hostname or ""
    if is_loopback(host):
        return None
    return f"http://{socket.gethostname()}:{parts.port}/" if host in ("0.0.0.0", "::") else url


def make_token(folder: Path) -> str:
    """Return the token that protects loopback if users set none; ConfigError if the run's folder can't keep it."""
    token = own_token(folder)
    if token is None:
        token = secrets.token_urlsafe(MIN_TOKEN)
        try:
            atomic_write(folder / CONTROL_TOKEN, f"{token}\n", private=True)
        except OSError as error:
            raise ConfigError(
                f"cannot write the control plane's token into {folder}: {error.strerror}; set {TOKEN} or {TOKEN}_FILE"
            ) from error
    return token


def own_token(folder: Path) -> str | None:
    """Return the token in the run's folder; None if there is none, or if others could read or write it."""
    try:
        with open(os.open(folder / CONTROL_TOKEN, os.O_RDONLY | os.O_NOFOLLOW), encoding="ascii") as file:
            found = os.fstat(file.fileno())
            private = stat.S_ISREG(found.st_mode) and found.st_uid == os.getuid() and not found.st_mode & 0o077
            token = file.read(256).strip() if private else ""
    except (OSError, ValueError):
        return None
    return token if len(token) >= MIN_TOKEN else None


def page_link(url: str, token: str | None) -> str:
    """Return the address that opens the dashboard: with the token in its fragment, which no server is sent."""
    return f"{url}#token={token}" if token else url


def withdraw(folder: Path, url: str) -> None:
    """Remove this control plane's address; the address of another stays."""
    if read_object(folder / ADDRESS).get("url") == url:
        (folder / ADDRESS).unlink(missing_ok=True)


def read_token(file: Path | None, environment: Mapping[str, str], variable: str = TOKEN) -> str | None:
    """Read the token from ``file``, from the file that ``variable``_FILE names, or from ``variable``; None if unset.

    ConfigError if the file can't be read, or if the token is too short or has spaces or non-ASCII characters.
    """
    source = file or (Path(environment[f"{variable}_FILE"]) if environment.get(f"{variable}_FILE") else None)
    if source is not None:
        try:
            token = source.read_text(encoding="utf-8").strip()
        except OSError as error:
            raise ConfigError(f"cannot read the control plane's token from {source}: {error.strerror}") from error
    else:
        token = environment.get(variable, "").strip()
    if not token and source is None:
        return None
    if len(token) < MIN_TOKEN or not token.isascii() or any(character.isspace() for character in token):
        raise ConfigError(
            f"the control plane's token must be {MIN_TOKEN} or more ASCII characters without spaces:"
            " make one with `openssl rand -hex 24`"
        )
    return token


def listen(host: str, port: int, token: str | None) -> socket.socket:
    """Return a listening socket; on loopback, a port that is taken is replaced by a free one.

    ConfigError if the address can't be used, or if other machines reach it and there is no token.
    """
    if token is None and not is_loopback(host):
        raise ConfigError(
            f"control.host {host} is reachable from other machines, so a token is needed: set {TOKEN},"
            f" {TOKEN}_FILE or control.token_file, or listen on 127.0.0.1"
        )
    try:
        return open_listener(host, port)
    except OSError as error:
        if port and is_loopback(host):
            return open_listener(host, 0)
        raise ConfigError(f"the control plane cannot listen on {host}:{port}: {error.strerror}") from error
