"""ACL users of the broker's server, one for each role, with the URL that its services need."""

import json
import sys
from pathlib import Path
from urllib.parse import unquote, urlsplit

from broker.connection import acl
from broker.connection.keys import Keys
from schemas.config import TidemillConfig
from schemas.errors import ConfigError
from schemas.system.files import atomic_write

URL_FILE = "redis_url"
SERVER = "server"


def print_users(config: TidemillConfig, as_json: bool = False) -> None:
    """Print ACL lines on stdout, and user names with new passwords on stderr; as JSON, both on stdout."""
    keys = Keys(config.broker.prefix, config.run.name)
    passwords = acl.new_passwords()
    lines = list(acl.acl_lines(keys, passwords))
    if as_json:
        users = [{"role": role, "user": acl.user(role, keys), "password": word} for role, word in passwords.items()]
        print(json.dumps({"users": users, "acl": lines}))
        return
    print(*lines, sep="\n")
    for role, password in passwords.items():
        print(acl.user(role, keys), password, file=sys.stderr)


def write_users(config: TidemillConfig, folder: Path, url: str, as_json: bool = False) -> None:
    """Write a folder for each role with its URL, and one for the server with its users. ConfigError if that fails.

    url: of the server, without a user. Passwords that the folder already has are kept.
    """
    parts = urlsplit(url)
    if parts.scheme not in ("redis", "rediss", "unix") or "@" in parts.netloc:
        raise ConfigError(f"--url must be a redis://, rediss:// or unix:// URL without a user, {parts.scheme}: is not")
    keys = Keys(config.broker.prefix, config.run.name)
    drawn = acl.new_passwords()
    administrator = acl.new_password()
    try:
        passwords = {role: _password_of(folder / role / URL_FILE) or drawn[role] for role in acl.ROLES}
        password_file = folder / SERVER / "password"
        if password_file.is_file():
            administrator = password_file.read_text(encoding="utf-8").strip()
        atomic_write(password_file, f"{administrator}\n", private=True)
        lines = acl.acl_file_lines(keys, passwords, administrator)
        atomic_write(folder / SERVER / "users.conf", "".join(f"{line}\n" for line in lines))
        for role, password in passwords.items():
            place = f"{acl.user(role, keys)}:{password}@{parts.netloc}"
            atomic_write(folder / role / URL_FILE, f"{parts._replace(netloc=place).geturl()}\n", private=True)
    except OSError as error:
        raise ConfigError(f"cannot write users to {error.filename or folder}: {error.strerror}") from error
    if as_json:
        urls = {role: str(folder / role / URL_FILE) for role in acl.ROLES}
        print(json.dumps({"urls": urls, "users": str(folder / SERVER / "users.conf"), "password": str(password_file)}))


def _password_of(file: Path) -> str | None:
    if not file.is_file():
        return None
    return unquote(urlsplit(file.read_text(encoding="utf-8").strip()).password or "") or None
