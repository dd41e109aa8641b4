"""A conversion of another system's settings, of which each is carried over or named with its value."""

import copy
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

from deploy.migrate.rules import FILL_IN, ConversionRule

COMPARED = ("grpo", "lite_ppo", "centered", "rloo", "max_rl")
"""Advantages that compare the samples of a group."""
SHELL, YAML = (".sh", ".bash"), (".yaml", ".yml")
"""How names of files end."""


def whole(key: str, value: Any) -> int:
    """Return the value of a setting that says how many; ValueError if it is another: a text can be multiplied, too."""
    if not isinstance(value, int | float) or value != value // 1:
        raise ValueError(f"{key} is {value!r}, not a whole number")
    return int(value)


class Unread(str):
    """Source of a value that only running the script could tell."""


class Reference(str):
    """Value of a setting that is the same as another setting, with what it stands for in ``value``."""

    value: Any = None


@dataclass
class Conversion:
    """The configuration so far, and what was not carried over.

    found: the other system's settings by key. processes: ranks that trained there, None if the user does not say.
    known: settings with known values, where references have the value they stand for. left_out: keys with the reason.
    unknown: keys of no rule. to_do: what is left to do.
    """

    found: Mapping[str, Any]
    rules: Iterable[ConversionRule]
    processes: int | None = None
    config: dict[str, Any] = field(default_factory=dict)
    left_out: dict[str, str] = field(default_factory=dict)
    unknown: list[str] = field(default_factory=list)
    to_do: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        """Carry over what a rule does by itself, and note what has no counterpart, is not known or can't be read."""
        self._by_key: dict[str, list[ConversionRule]] = {}
        for rule in self.rules:
            self._by_key.setdefault(rule.theirs, []).append(rule)
        plain = {key: value.value if isinstance(value, Reference) else value for key, value in self.found.items()}
        self.known = {key: value for key, value in plain.items() if value is not None and not isinstance(value, Unread)}
        self.carry(late=False)
        for key, value in self.found.items():
            found = self.rule(key)
            if isinstance(value, Unread) and (found is None or found.ours):
                ours = "the setting that you need" if found is None else found.ours
                self.ask(f"{key} is {value!s}, which only a run of the script tells: set {ours}")
            elif found is None:
                # The setting that a reference stands for is the one that is named.
                self.unknown += [] if isinstance(value, Reference) else [key]
            elif not found.ours and not isinstance(value, Reference):
                self.leave(found.note, key)

    def carry(self, late: bool) -> None:
        """Carry over by the rules in their order, of which those with a condition are late."""
        for rule in self.rules:
            value = self.known.get(rule.theirs, rule.default)
            if value is None or bool(rule.when) != late or (late and not self._applies(rule.when)):
                continue
            method = isinstance(rule.convert, str)
            ours = getattr(self, str(rule.convert))(value) if method else rule.converted(value)
            if ours == FILL_IN and isinstance(rule.convert, Mapping):
                names = ", ".join(str(name) for name in rule.convert if name != "other")
                own = "" if "optimizer" in rule.ours else "; it can be one of your own"
                self.leave(f"not one of {names}{own}", rule.theirs)
            for path in rule.ours.split(", "):
                self.set(path, ours)

    def _applies(self, when: str) -> bool:
        name, _, wanted = when.partition(": ")
        value = self.value(name) if name in self._by_key else self.get(name)
        return str(value).lower() in wanted.split() if wanted else bool(value)

    def rule(self, key: str) -> ConversionRule | None:
        """Return the first rule of a key: of its own, else of the innermost section."""
        parts = key.split(".")
        sections = (".".join([*parts[:length], "*"]) for length in range(len(parts) - 1, -1, -1))
        return next((self._by_key[name][0] for name in (key, *sections) if name in self._by_key), None)

    def value(self, key: str) -> Any:
        """Return a setting's value there, by default its rule's."""
        return self.known.get(key, self._by_key[key][0].default)

    def count(self, key: str) -> int:
        """Return a setting that says how many; ValueError names it if it is no whole number."""
        return whole(key, self.value(key))

    def within(self, *sections: str) -> list[str]:
        """Return the keys that the file sets below these sections, each with a dot at its end."""
        return [key for key in self.known if key.startswith(sections)]

    def get(self, path: str) -> Any:
        """Return ``a.b.c`` of the configuration, None if it is not set."""
        node: Any = self.config
        for name in path.split("."):
            node = node.get(name) if isinstance(node, dict) else None
        return node

    def set(self, path: str, value: Any) -> None:
        """Set ``a.b.c`` of the configuration, unless the value is None; in a list ``a.0``, in order."""
        if value is None:
            return
        *sections, name = path.split(".")
        node: Any = self.config
        for section in sections[: -1 if name.isdecimal() else None]:
            node = node.setdefault(section, {})
        if name.isdecimal():
            listed = node.setdefault(sections[-1], [])
            listed[int(name) :] = [value, *listed[int(name) + 1 :]]
        else:
            node[name] = value

    def missing(self, node: Any = None, path: str = "") -> list[str]:
        """Return the settings that hold FILL_IN, by their paths."""
        node = node if path else self.config
        if not isinstance(node, dict):
            return [path] if FILL_IN in str(node) else []
        return [one for name, value in node.items() for one in self.missing(value, f"{path}.{name}".lstrip("."))]

    def ask(self, text: str) -> None:
        """Note something that is left for users to do or to decide."""
        self.to_do.append(text)

    def leave(self, reason: str, *keys: str) -> None:
        """Note why settings are not carried over, those of them that the file has."""
        self.left_out.update((key, reason) for key in keys if key in self.found)

    def set_steps(self, epochs: str, section: str = "trainer") -> None:
        """Deal with the epochs, which end a training unless a rule carried its steps over."""
        steps = f"{section}.{'max_steps' if section == 'warm_start' else 'steps'}"
        if self.get(steps) is None:
            count = self.value(epochs)
            batch = "prompts / trainer.batch_groups" if section == "trainer" else f"rows / {section}.batch_size"
            self.ask(f"{steps}: {count:g} epochs ({epochs}) are {count:g} * {batch} steps")

    def share_of_steps(self, share: float) -> int | None:
        """Return the steps of a warm-up that takes a share of all, unless a number of them is set."""
        path, steps = "trainer.optimizer.warmup_steps", self.get("trainer.steps")
        if not share or self.get(path) is not None:
            return None
        if not isinstance(share, int | float):
            raise ValueError(f"the warm-up's share of all steps is {share!r}, not a number")
        if steps is None:
            self.ask(f"{path}: {share:g} of trainer.steps")
        return None if steps is None else round(share * steps)

    def over_lr(self, rate: Any, section: str = "trainer.optimizer") -> float | None:
        """Return the learning rate that the schedule ends at as a share of the peak."""
        peak = self.get(f"{section}.lr")
        return min(1.0, float(rate) / float(peak)) if rate and peak else None

    def set_engine(self, engine: str | None) -> None:
        """Set the engine; that of SGLang is its server."""
        self.set("generator.engine", "http" if engine == "sglang" else engine)
        if engine == "sglang":
            self.set("generator.http.dialect", "sglang")
            self.ask(
                "generator.engine: http starts SGLang, which needs pip install 'tidemill[sglang]'; without it set"
                " engine to vllm, and remove http and args"
            )

    def set_advantage(self, name: str, keeps: bool | None = None) -> str:
        """Set the advantage, raw for groups of one, and whether groups of equal rewards are kept; returns its name."""
        if name in COMPARED and self.get("sampling.n") == 1:
            self.ask(f"sampling.n is 1, so that {name} compares nothing: trainer.advantage.name is raw")
            name = "raw"
        self.set("trainer.advantage.name", name)
        if name in COMPARED:
            self.set("trainer.advantage.keep_zero_variance", keeps)
        return name

    def set_datasets(self, path: str, datasets: list[dict[str, Any]]) -> None:
        """Set the datasets of training, or held-out ones, of which rules set when they are evaluated, and how."""
        self.set(path, datasets[0] if len(datasets) == 1 else datasets)

    def datasets(self) -> list[dict[str, Any]]:
        """Return the datasets of training, then the held-out ones."""
        found = [self.get("train"), self.get("eval.dataset")]
        return [item for some in found for item in (some if isinstance(some, list) else [some]) if item]

    def set_offline(self, section: str, train: dict[str, Any], held_out: dict[str, Any], longest: str) -> None:
        """Set the datasets of a training without samples, and the sections that every configuration has."""
        self.set(f"{section}.dataset", train)
        self.set(f"{section}.eval", held_out)
        if reads_images(self.get("warm_start.model") or self.get("model.path")):
            self.set("model.kind", "vision")
            self.config.get("trainer", {}).pop("parallel", None)
            train["args"]["image"] = held_out["args"]["image"] = "images"
        self.set("train", copy.deepcopy(train))
        self.set("reward.terms", [{"name": "exact"}])
        # No sample is drawn, but a configuration's sampling has to leave room for a prompt.
        self.set("sampling.max_tokens", max(1, self.value(longest) // 2))

    def truncate(self, top_p: str, top_k: str) -> None:
        """Sample from a part of the distribution, unless both leave all of it; a top_k of a million keeps all."""
        p, k = self.known.get(top_p, 1), self.known.get(top_k, -1)
        keeps_k = 0 < k < 1_000_000
        if p < 1 or keeps_k:
            self.set("sampling.top_p", p)
            self.set("sampling.top_k", k if keeps_k else -1)
            self.set("generator.allow_truncated", True)

    def read_images(self, column: str) -> None:
        """Make the policy a model that reads images, from this column of each dataset, without what it refuses."""
        self.set("model.kind", "vision")
        for one in self.datasets():
            one["args"]["image"] = column
        self.config.get("trainer", {}).pop("parallel", None)
        if self.get("generator.engine") == "transformers":
            self.set("generator.engine", "vllm")

    def finish(self, differs: Callable[[Mapping[str, Any]], bool]) -> None:
        """Name each setting of which another value makes no difference to ``differs``, so that no rule can lose one."""
        for key, value in self.found.items():
            rule = self.rule(key)
            if rule is None or key in self.left_out or isinstance(value, Unread | Reference) or value in rule.idle:
                continue
            early = [one for one in self._by_key[rule.theirs] if not one.when]
            is_gone = bool(early) and all(one.convert and one.converted(value) is None for one in early)
            if is_gone or not any(differs({**self.found, key: other}) for other in others(value)):
                self.leave(f"not carried over; see {rule.ours}" + (f" ({rule.note})" if rule.note else ""), key)

    def notes(self) -> list[str]:
        """Return the notes, a line each: what is left to do, then what was left out."""
        # By the section and the reason, which is empty of a setting that is not known.
        groups: dict[tuple[str, str], list[str]] = {}
        for key, reason in (*self.left_out.items(), *((key, "") for key in self.unknown)):
            written = f"{key}={' '.join(str(self.found[key]).split())}"
            groups.setdefault((key.rpartition(".")[0], reason), []).append(written)
        return [f"To do: {text}" for text in self.to_do] + [
            f"Left out: {', '.join(one)}: {reason}" if reason else f"Not known, left out: {', '.join(one)}"
            for (_, reason), one in groups.items()
        ]


def others(value: Any) -> tuple[Any, ...]:
    """Return other values of the same kind, two if the conversion of one may come out the same, as by rounding."""
    if isinstance(value, bool):
        return (not value,)
    if isinstance(value, int):
        return (value + 3, 2 * value + 1) if value >= 0 else (7,)
    if isinstance(value, float):
        return (value / 2 or 0.25, 2 * value + 1)
    return (f"{value}x", f"x{value}") if isinstance(value, str) else (type(value)(),)


class Signs(NamedTuple):
    """What tells whose a file is: how its name ends, patterns that its text has all of, and a word that it lacks."""

    endings: tuple[str, ...]
    patterns: tuple[str, ...] = ()
    lacks: str = ""


@dataclass(frozen=True)
class ForeignSystem:
    """Another system that configurations are converted from.

    signs: of its files, each one enough. read: the settings of a file and its text by key, with `Unread` for what only
    running it could tell; ConfigError, ValueError. convert: carries over what rules alone can't; TypeError, ValueError,
    AttributeError for a value of a wrong type.
    """

    title: str
    rules: tuple[ConversionRule, ...]
    signs: tuple[Signs, ...]
    read: Callable[[Path, str], Mapping[str, Any]]
    convert: Callable[[Conversion], None]

    def looks_like(self, file: Path, text: str) -> bool:
        """Whether a file with this text is one of its own; continued lines of a shell script count as one."""
        text = text.replace("\\\n", " ") if file.suffix in SHELL else text
        possible = (one for one in self.signs if file.suffix in one.endings and not (one.lacks and one.lacks in text))
        return any(all(re.search(pattern, text, re.M) for pattern in one.patterns) for one in possible)


def reads_images(model: Any) -> bool:
    """Whether a model's name says that it is of a family that reads images."""
    return re.search(r"VL|(?<![a-z])vl(?![a-z])", str(model)) is not None


def parquet(file: str, **args: Any) -> dict[str, Any]:
    """Return the dataset of a Parquet file: its folder, with the file's name as the split."""
    path = PurePosixPath(file)
    return {"name": "hf", "args": {"path": str(path.parent), "split": path.stem, **args}}
