"""The broker's Lua: each script is atomic, and reaches only the keys that it declares in its KEYS line."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from importlib import resources
from typing import Any

import redis

from broker.keys import Keys

DECLARES = "-- KEYS: "
PRELUDE = "prelude"


@dataclass(frozen=True)
class Script:
    """One of lua/*.lua, ready for one run. keys: those it declares, in its order."""

    text: str
    sha: str
    keys: list[str]

    @classmethod
    def named(cls, name: str, keys: Keys) -> Script:
        """The script with the shared prelude before its body."""
        text = source(name)
        return cls(text, hashlib.sha1(text.encode(), usedforsecurity=False).hexdigest(), keys.named(declared(name)))

    def call(self, client: redis.Redis, args: tuple[Any, ...]) -> Any:
        """Run it; the server is given the text when it doesn't know it."""
        try:
            return client.evalsha(self.sha, len(self.keys), *self.keys, *args)
        except redis.exceptions.NoScriptError:
            client.script_load(self.text)
            return client.evalsha(self.sha, len(self.keys), *self.keys, *args)


def names() -> list[str]:
    """All scripts."""
    files = (file.name.removesuffix(".lua") for file in (resources.files("broker") / "lua").iterdir())
    return sorted(name for name in files if name != PRELUDE)


def declared(name: str) -> list[str]:
    """Names of the keys that a script may use, as attributes of Keys in capitals."""
    for line in _read(name).splitlines():
        if line.startswith(DECLARES):
            return line.removeprefix(DECLARES).split()
    raise ValueError(f"script {name} declares no keys")


def source(name: str) -> str:
    """Text of one script: its shebang if it has one, its keys as locals, the prelude, its own body."""
    body = _read(name)
    shebang = ""
    if body.startswith("#!"):
        shebang, _, body = body.partition("\n")
        shebang += "\n"
    keys = declared(name)
    numbered = ", ".join(f"KEYS[{index}]" for index in range(1, len(keys) + 1))
    return f"{shebang}local {', '.join(keys)} = {numbered}\n{_read(PRELUDE)}\n{body}"


def _read(name: str) -> str:
    return (resources.files("broker") / "lua" / f"{name}.lua").read_text(encoding="utf-8")
