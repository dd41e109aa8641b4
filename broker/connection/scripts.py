"""The broker's Lua: each script is atomic, and reaches only the keys that it declares in its KEYS line."""

import functools
import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import redis

from broker.connection.keys import Keys

DECLARES = "-- KEYS: "
PRELUDE = "prelude"
_DEFINED = re.compile(r"^local (?:function )?([\w, ]+)", re.MULTILINE)
OTHER_RUN = b"other_run"
"""Reply to a caller whose run does not have the name, or has lost it: nothing was done."""


@dataclass(frozen=True)
class LuaScript:
    """A script of lua/, ready for one run. keys: those that it declares. reads: whether it writes nothing."""

    text: str
    sha: str
    keys: list[str]
    reads: bool

    @classmethod
    def named(cls, name: str, keys: Keys) -> Self:
        """Load a script, with the shared prelude before its body."""
        text = source(name)
        sha = hashlib.sha1(text.encode(), usedforsecurity=False).hexdigest()
        return cls(text, sha, keys.named(declared(name)), reads_only(name))

    def call(self, client: redis.Redis, args: tuple[Any, ...]) -> Any:
        """Run the script; if the server does not have it, load it first."""
        try:
            return self.send(client, args)
        except redis.exceptions.NoScriptError:
            client.script_load(self.text)
            return self.send(client, args)

    def send(self, client: redis.Redis, args: Sequence[Any]) -> Any:
        """Run it, or queue it in a pipeline; a script that only reads runs with read permission on its keys."""
        run = client.evalsha_ro if self.reads else client.evalsha
        return run(self.sha, len(self.keys), *self.keys, *args)


def names() -> list[str]:
    """List the scripts."""
    return sorted(name for name in script_files() if name != PRELUDE)


@functools.cache
def script_files() -> dict[str, Path]:
    """Return the files below lua/ by script name; names are unique across the folders."""
    files = sorted((Path(__file__).parents[1] / "lua").rglob("*.lua"))
    by_name = {file.stem: file for file in files}
    if len(by_name) < len(files):
        raise ValueError("two Lua scripts have the same name")
    return by_name


def declared(name: str) -> list[str]:
    """List the keys that a script may use, as attributes of Keys in capitals."""
    for line in body(name).splitlines():
        if line.startswith(DECLARES):
            return line.removeprefix(DECLARES).split()
    raise ValueError(f"script {name} declares no keys")


def source(name: str) -> str:
    """Assemble a script: its shebang if any, its keys as locals, the parts of the prelude that it uses, its body."""
    text = body(name)
    shebang = ""
    if text.startswith("#!"):
        shebang, _, text = text.partition("\n")
        shebang += "\n"
    keys = declared(name)
    numbered = ", ".join(f"KEYS[{index}]" for index in range(1, len(keys) + 1))
    return f"{shebang}local {', '.join(keys)} = {numbered}\n{_used_prelude(text)}\n{text}"


def _used_prelude(text: str) -> str:
    """Select the paragraphs of the prelude that a script uses, because each call creates all functions again."""
    used: list[str] = []
    for paragraph in reversed(body(PRELUDE).split("\n\n")):
        defined = [name for names in _DEFINED.findall(paragraph) for name in names.replace(",", " ").split()]
        if any(re.search(rf"\b{name}\b", part) for name in defined for part in (text, *used)):
            used.insert(0, paragraph)
    return "\n\n".join(used)


def reads_only(name: str) -> bool:
    """Return whether the script is flagged, so that the server rejects writes by it."""
    return "no-writes" in body(name).partition("\n")[0]


def body(name: str) -> str:
    """Read the file of a script."""
    return script_files()[name].read_text(encoding="utf-8")
