"""Counts what `tidemill convert` makes of all examples of another system.

    python -m tools.convert_examples --system verl FOLDER_OF_ITS_REPOSITORY

An example is accepted if Tidemill takes the configuration as it is, incomplete if a name has to be filled in that the
notes ask for, malformed if the configuration is refused for anything else, and refused if there is no configuration.

What is lost in silence is found without the converter's own account of it. The settings of an example are read by
other means: bash itself runs a shell script in a sandbox that holds no program and prints the command line that the
script ends in. Each setting is then taken out, and changed. If neither makes a difference to the settings that the
converter reads, this one is lost; the converter itself names what it reads and what makes no difference to its result.
If the script comes out otherwise than its plain command line, it was misread.
"""

from __future__ import annotations

import argparse
import ast
import json
import re
import shlex
import subprocess
import sys
import tempfile
import tomllib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from deploy.checks.names import check_names
from deploy.migrate.conversion import Conversion, Unread
from deploy.migrate.convert import SYSTEMS, convert_text
from deploy.migrate.rules import FILL_IN
from deploy.migrate.shell import UNKNOWN, command_lines
from schemas.config import parse_config
from schemas.errors import ConfigError

MAIN = re.compile("main_ppo|fully_async_main|sft_trainer")
"""What verl's scripts start."""
RAW = re.compile(r"\$[({\w]|`")
"""Text of a shell that nothing evaluated."""
PRELUDE = r"""
command_not_found_handle() { printf '%s\x1f' "$@" >&9; printf '\x1e' >&9; }
PATH=/nowhere
exec 2>/dev/null
"""

Variant = tuple[str, str, str]
"""A setting, the example's text without it, and the text with another value of it."""


@dataclass(frozen=True)
class Examples:
    """The examples of a system: which files they are, their text without variables, and variants of that text."""

    files: Callable[[Path], list[Path]]
    plain: Callable[[Path], str]
    variants: Callable[[str], Iterator[Variant]]


def command_line(file: Path, timeout_s: float = 20) -> list[str]:
    """Return the command with most settings that bash starts for a script; nothing that it starts exists."""
    with tempfile.TemporaryDirectory() as folder:
        out, prelude = Path(folder, "out"), Path(folder, "prelude")
        out.touch()
        prelude.write_text(PRELUDE)
        box = ["bwrap", "--ro-bind", "/", "/", "--unshare-all", "--die-with-parent", "--tmpfs", "/mnt", "--clearenv"]
        box += [
            "--bind",
            folder,
            folder,
            "--chdir",
            "/mnt",
            "--setenv",
            "HOME",
            "~",
            "--setenv",
            "DEVICE",
            "gpu",
            "--setenv",
            "BASH_ENV",
        ]
        inside = f'exec 9>>{out}; exec /bin/bash "$0"'
        try:
            subprocess.run(
                [*box, str(prelude), "/bin/sh", "-c", inside, str(file.resolve())],
                stdin=subprocess.DEVNULL,
                capture_output=True,
                timeout=timeout_s,
                check=False,
            )
        except subprocess.TimeoutExpired:
            print(f"{file}: bash did not end within {timeout_s:g} s", file=sys.stderr)
        records = [line.split("\x1f")[:-1] for line in out.read_text(encoding="utf-8", errors="replace").split("\x1e")]
    words = [word.replace("/mnt", ".") for word in max(records, key=_settings)]
    # Where bash ends before the command, for lack of a program or a folder, the converter's own reading is varied.
    if any(MAIN.search(word) for word in words):
        return words
    return max(command_lines(file.read_text(encoding="utf-8")), key=_settings, default=[])


def _settings(words: list[str]) -> int:
    return sum(map(_is_setting, words))


def _is_setting(word: str) -> bool:
    return re.match(r"^[+~]{0,2}[a-z_]\w*(\.\w+)+=", word) is not None or word.startswith("--")


def _shell_variants(text: str) -> Iterator[Variant]:
    words = list({word.partition("=")[0]: word for word in shlex.split(text)}.values())
    # What comes before are options of the program that starts it on the machines.
    main = next((at for at, word in enumerate(words) if MAIN.search(word)), -1)
    for at, word in enumerate(words):
        key, equals, value = word.partition("=")
        if equals and at > main and _is_setting(word):
            yield (
                key,
                shlex.join(words[:at] + words[at + 1 :]),
                shlex.join([*words[:at], f"{key}={_another(value)}", *words[at + 1 :]]),
            )


def _another(value: str) -> str:
    """Return a value of the same kind as one that is written out."""
    if value.lower() in ("true", "false"):
        return str(value.lower() == "false")
    if re.fullmatch(r"-?\d+", value):
        return str(int(value) + 3 if int(value) >= 0 else 7)
    if re.fullmatch(r"-?\d+(\.\d*)?([eE][-+]?\d+)?", value):
        return str(float(value) / 2 or 0.25)
    return f"{value}x" if re.fullmatch(r"[\w./~-]+", value) else "other"


def _call_variants(text: str) -> Iterator[Variant]:
    """Take out each keyword of a call that makes a config or a trainer, in a Python script."""
    calls = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Call)]
    for number, call in enumerate(calls):
        name = ast.unparse(call.func).rpartition(".")[2]
        if re.fullmatch(r"(\w*(GRPO|RLOO|DPO|SFT)|Lora)(Config|Trainer)", name):
            for at, keyword in enumerate(call.keywords):
                if keyword.arg is not None:
                    without, changed = (_edited(text, number, at, drop) for drop in (True, False))
                    yield f"{name}.{keyword.arg}", without, changed


def _edited(text: str, number: int, at: int, drop: bool) -> str:
    tree = ast.parse(text)
    call = [node for node in ast.walk(tree) if isinstance(node, ast.Call)][number]
    if drop:
        del call.keywords[at]
    else:
        value = _another(ast.unparse(call.keywords[at].value))
        call.keywords[at].value = ast.parse(value if value[-1] != "x" else "other_value", mode="eval").body
    return ast.unparse(tree)


def _toml_variants(text: str) -> Iterator[Variant]:
    return _tree_variants(text, tomllib.loads, _toml)


def _toml(value: Any, top: bool = True) -> str:
    """Return a tree as TOML, a line for each of its sections."""
    if isinstance(value, dict):
        pairs = [f"{json.dumps(key)} = {_toml(one, False)}" for key, one in value.items()]
        return "\n".join(pairs) if top else "{" + ", ".join(pairs) + "}"
    return f"[{', '.join(_toml(one, False) for one in value)}]" if isinstance(value, list) else json.dumps(value)


def _tree_variants(
    text: str, loads: Callable[[str], Any] = yaml.safe_load, dumps: Callable[[Any], str] = yaml.safe_dump
) -> Iterator[Variant]:
    """Take out each leaf of a YAML or TOML file."""

    def leaves(node: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
        for name, value in node.items():
            if isinstance(value, dict) and value:
                yield from leaves(value, (*path, name))
            else:
                yield (*path, name)

    for path in leaves(loads(text)):
        texts = []
        for drop in (True, False):
            tree = node = loads(text)
            for name in path[:-1]:
                node = node[name]
            value = node.pop(path[-1])
            if not drop:
                node[path[-1]] = yaml.safe_load(_another(str(value)))
            texts.append(dumps(tree))
        without, changed = texts
        yield ".".join(map(str, path)), without, changed


def _holding(pattern: str, *words: str) -> Callable[[Path], list[Path]]:
    """Return a search for the files of a pattern that hold one of the words."""
    return lambda folder: [
        file for file in sorted(folder.glob(pattern)) if any(word in file.read_text(errors="replace") for word in words)
    ]


EXAMPLES = {
    "prime_rl": Examples(
        _holding("*/**/*.toml", "[orchestrator"), lambda file: file.read_text(encoding="utf-8"), _toml_variants
    ),
    "rlinf": Examples(
        _holding("examples/[ar][eg]*/**/*.yaml", "\nalgorithm:"), lambda file: file.read_text(), _tree_variants
    ),
    "rlinf_control": Examples(
        _holding("examples/embodiment/config/*.yaml", "\nalgorithm:"),
        lambda file: file.read_text(),
        _tree_variants,
    ),
    "areal": Examples(
        _holding("examples/**/*.yaml", "\ntrial_name:"), lambda file: file.read_text(encoding="utf-8"), _tree_variants
    ),
    "verl": Examples(
        _holding("[ev]*/**/*.sh", "main_ppo", "fully_async_main"),
        lambda file: shlex.join(word for word in command_line(file) if UNKNOWN not in word),
        _shell_variants,
    ),
    "verl-sft": Examples(
        _holding("[ev]*/**/*.sh", "sft_trainer"),
        lambda file: shlex.join(word for word in command_line(file) if UNKNOWN not in word),
        _shell_variants,
    ),
    "trl-sft": Examples(
        _holding("examples/scripts/**/*.py", " SFTTrainer("), lambda file: file.read_text(), _call_variants
    ),
    "trl": Examples(
        _holding("examples/scripts/**/*.py", "GRPOTrainer(", "RLOOTrainer("),
        lambda file: file.read_text(),
        _call_variants,
    ),
    "trl-dpo": Examples(
        _holding("examples/scripts/**/*.py", " DPOTrainer("), lambda file: file.read_text(), _call_variants
    ),
}
"""By the system's name in deploy.migrate.convert.SYSTEMS."""


def outcome(done: Conversion) -> tuple[str, str]:
    """Return what became of an example, with the reason."""
    text = yaml.safe_dump(done.config)
    if RAW.search(text):
        return "malformed", f"holds text of a shell: {RAW.search(text)}"
    try:
        check_names(parse_config(json.loads(json.dumps(done.config))))
    except ConfigError as error:
        return ("incomplete" if FILL_IN in str(error) else "malformed"), str(error)
    missing = done.missing()
    return ("incomplete", f"{', '.join(missing)} to fill in") if missing else ("accepted", "")


def measure(file: Path, system: str) -> dict[str, Any]:
    """Return the outcome of one example, and the settings that were lost or misread."""
    examples = EXAMPLES[system]

    def read(text: str) -> Mapping[str, Any] | None:
        try:
            return SYSTEMS[system].read(file, text)
        except (ConfigError, SyntaxError, ValueError, yaml.YAMLError):
            return None

    try:
        done = convert_text(file, file.read_text(encoding="utf-8"), SYSTEMS[system])
    except ConfigError as error:
        return {"outcome": "refused", "why": str(error), "lost": [], "misread": []}
    kind, why = outcome(done)
    plain = examples.plain(file)
    base = read(plain)
    if base is None:
        return {"outcome": kind, "why": why, "lost": [], "misread": ["its plain command line is refused"]}
    lost = [key for key, *texts in examples.variants(plain) if all(read(text) == base for text in texts)]
    return {"outcome": kind, "why": why, "lost": lost, "misread": _misread(done, base), "notes": len(done.notes())}


def _misread(done: Conversion, plain: Mapping[str, Any]) -> list[str]:
    """Return the settings that bash reads otherwise, less those that only a run tells."""
    known = {key for key, value in done.found.items() if not isinstance(value, Unread)}
    return sorted(key for key in {*known, *(plain.keys() - done.found)} if done.found.get(key) != plain.get(key))


def main() -> None:
    """Print a line for each example that is not accepted or loses something, then the counts."""
    parser = argparse.ArgumentParser(description="Convert all examples of another system, and count the outcomes.")
    parser.add_argument("folder", type=Path, help="a checkout of the system's repository")
    parser.add_argument("--system", choices=sorted(EXAMPLES), required=True)
    parser.add_argument("--json", action="store_true", help="print everything as JSON")
    given = parser.parse_args()
    # The parser in C: there are thousands of variants.
    yaml.SafeLoader, yaml.SafeDumper = yaml.CSafeLoader, yaml.CSafeDumper  # type: ignore[misc, assignment]
    files = EXAMPLES[given.system].files(given.folder)
    found = {str(file.relative_to(given.folder)): measure(file, given.system) for file in files}
    if given.json:
        print(json.dumps(found, indent=1))
        return
    for name, one in found.items():
        if one["why"] or one["lost"] or one["misread"]:
            print(f"{name}: {one['outcome']} {one['why']}; lost {one['lost']}; misread {one['misread']}")
    kinds = Counter(one["outcome"] for one in found.values())
    print(f"{len(found)} examples: " + ", ".join(f"{count} {kind}" for kind, count in kinds.most_common()))
    print(f"lost in silence: {sum(len(one['lost']) for one in found.values())} settings", end=" ")
    print(f"of {sum(bool(one['lost']) for one in found.values())} examples", end="; ")
    print(f"misread: {sum(bool(one['misread']) for one in found.values())} examples")


if __name__ == "__main__":
    main()
