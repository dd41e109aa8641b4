"""The broker's Lua: each script is atomic, and reaches only the keys that it declares in its KEYS line."""

from __future__ import annotations

import functools
import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import redis

from broker.connection.keys import Keys

DECLARES = "-- KEYS: "
PRELUDE = "prelude"
_DEFINED = re.compile(r"^local (?:function )?([\w, ]+)", re.MULTILINE)
OTHER_RUN = b"other_run"
"""Answer to a caller whose run does not have the name (any more): nothing was done."""


@dataclass(frozen=True)
class Script:
    """A script of lua/, ready for one run. keys: those it declares, in its order. reads: whether it writes nothing."""

    text: str
    sha: str
    keys: list[str]
    reads: bool

    @classmethod
    def named(cls, name: str, keys: Keys) -> Script:
        """The script with the shared prelude before its body."""
        text = source(name)
        sha = hashlib.sha1(text.encode(), usedforsecurity=False).hexdigest()
        return cls(text, sha, keys.named(declared(name)), reads_only(name))

    def call(self, client: redis.Redis, args: tuple[Any, ...]) -> Any:
        """Run it; the server is given the text when it doesn't know it."""
        try:
            return self.send(client, args)
        except redis.exceptions.NoScriptError:
            client.script_load(self.text)
            return self.send(client, args)

    def send(self, client: redis.Redis, args: Sequence[Any]) -> Any:
        """Run it, or queue it in a pipeline. A user who may only read its keys may run one that only reads."""
        run = client.evalsha_ro if self.reads else client.evalsha
        return run(self.sha, len(self.keys), *self.keys, *args)


def names() -> list[str]:
    """All scripts."""
    return sorted(name for name in script_files() if name != PRELUDE)


@functools.cache
def script_files() -> dict[str, Path]:
    """Return the files below lua/ by its name without the ending; names are unique, folders are for readers only."""
    files = sorted((Path(__file__).parents[1] / "lua").rglob("*.lua"))
    by_name = {file.stem: file for file in files}
    if len(by_name) < len(files):
        raise ValueError("two Lua scripts have the same name")
    return by_name


def declared(name: str) -> list[str]:
    """Names of the keys that a script may use, as attributes of Keys in capitals."""
    for line in body(name).splitlines():
        if line.startswith(DECLARES):
            return line.removeprefix(DECLARES).split()
    raise ValueError(f"script {name} declares no keys")


def source(name: str) -> str:
    """Text of one script: its shebang if it has one, its keys as locals, what it uses of the prelude, its own body."""
    text = body(name)
    shebang = ""
    if text.startswith("#!"):
        shebang, _, text = text.partition("\n")
        shebang += "\n"
    keys = declared(name)
    numbered = ", ".join(f"KEYS[{index}]" for index in range(1, len(keys) + 1))
    return f"{shebang}local {', '.join(keys)} = {numbered}\n{_used_prelude(text)}\n{text}"


def _used_prelude(text: str) -> str:
    """The paragraphs of the prelude that a script uses: each call of a script makes all its functions anew."""
    used: list[str] = []
    for paragraph in reversed(body(PRELUDE).split("\n\n")):
        defined = [name for names in _DEFINED.findall(paragraph) for name in names.replace(",", " ").split()]
        if any(re.search(rf"\b{name}\b", part) for name in defined for part in (text, *used)):
            used.insert(0, paragraph)
    return "\n\n".join(used)


def reads_only(name: str) -> bool:
    """Whether the server makes sure that the script writes nothing."""
    return "no-writes" in body(name).partition("\n")[0]


def body(name: str) -> str:
    """Text of one file as it lies there."""
    return script_files()[name].read_text(encoding="utf-8")
