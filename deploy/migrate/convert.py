"""The command `tidemill convert`: another system's file in, a configuration of Tidemill out."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from deploy.migrate import areal, prime_rl, rlinf, trl, verl
from deploy.migrate.conversion import Conversion, ForeignSystem
from deploy.migrate.rules import FILL_IN
from schemas.errors import ConfigError

SYSTEMS: dict[str, ForeignSystem] = {
    "areal": areal.SYSTEM,
    "prime_rl": prime_rl.SYSTEM,
    "rlinf_control": rlinf.CONTROL,
    "rlinf": rlinf.SYSTEM,
    "verl-sft": verl.SFT,
    "verl": verl.SYSTEM,
    "trl-dpo": trl.DPO,
    "trl-sft": trl.SFT,
    "trl": trl.SYSTEM,
}
"""By the name that ``--from`` takes. The first that a file looks like reads it; TRL takes any mapping in YAML."""


def convert_file(*files: Path, system: str | None = None, processes: int | None = None) -> tuple[str, Conversion]:
    """Convert a script or configuration files, of which later ones count; returns the system's title, too. ConfigError.

    system: a name of SYSTEMS, by default what the first file looks like. processes: see Conversion.
    """
    texts = {file: _text(file) for file in files}
    file, text = next(iter(texts.items()))
    if system not in (None, *SYSTEMS):
        raise ConfigError(f"--from: {system!r} is not known, must be one of {', '.join(SYSTEMS)}")
    chosen = system or next((name for name, one in SYSTEMS.items() if one.looks_like(file, text)), None)
    if chosen is None:
        titles = ", ".join(one.title for one in SYSTEMS.values())
        raise ConfigError(f"{file} looks like a file of none of {titles}: there is nothing to convert")
    return SYSTEMS[chosen].title, convert_text(file, text, SYSTEMS[chosen], processes, texts)


def _text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read {file}: {getattr(error, 'strerror', None) or error}") from error


def convert_text(
    file: Path,
    text: str,
    system: ForeignSystem,
    processes: int | None = None,
    texts: Mapping[Path, str] | None = None,
) -> Conversion:
    """Convert the text of a file, whose path tells its name and what is beside it, or several texts. ConfigError."""
    found: dict[str, Any] = {}
    for one, inside in (texts or {file: text}).items():
        try:
            found |= system.read(one, inside)
        except (SyntaxError, ValueError, yaml.YAMLError) as error:
            raise ConfigError(f"cannot read {one}: {' '.join(str(error).split())}") from error
    done = _converted(file, found, system, processes)
    if len(done.unknown) == len(found):
        raise ConfigError(f"{file} has no setting that {system.title} knows: there is nothing to convert")

    def differs(others: Mapping[str, Any]) -> bool:
        try:
            other = _converted(file, others, system, processes)
        except ConfigError:
            return True
        return (other.config, other.to_do) != (done.config, done.to_do)

    done.finish(differs)
    return done


def _converted(file: Path, found: Mapping[str, Any], system: ForeignSystem, processes: int | None) -> Conversion:
    try:
        done = Conversion(found, system.rules, processes)
        system.convert(done)
        done.carry(late=True)
    except (TypeError, ValueError, AttributeError) as error:
        raise ConfigError(f"{file} holds a value of another type than {system.title} gives it: {error}") from error
    except ArithmeticError as error:
        raise ConfigError(f"{file} holds a number that can't be used, such as 0 samples of a group: {error}") from error
    if processes is not None and processes != done.get("trainer.processes"):
        done.set("trainer.processes", processes)
        done.config.pop("placement", None)
    if done.get("model.path") is None:
        done.set("model.path", FILL_IN)
        done.ask("model.path: a folder or a hub id")
    return done


def render(file: Path, system: str, done: Conversion) -> str:
    """Return the configuration as YAML, headed by what is left to do and what was left out."""
    missing = done.missing()
    then = f"{len(missing)} to fill in: {', '.join(missing)}" if missing else "Try it with: tidemill doctor"
    lines = [f"# Converted from {file.name} of {system}. {then}", *(f"# {note}" for note in done.notes())]
    order = ("run", "model", "warm_start", "train", "eval", "sampling", "reward", "flow", "generator", "trainer", "dpo")
    config = {name: done.config[name] for name in order if name in done.config} | done.config
    return "\n".join(lines) + "\n" + yaml.safe_dump(config, sort_keys=False, allow_unicode=True)
