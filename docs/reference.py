"""MkDocs hook: reference tables made from the source at build time, so that they are never out of date.

A page says ``<!-- reference: NAME -->`` where a table belongs; NAME is a key of ``REFERENCES``. With
``<!-- include: FILE -->`` it is a file of the repository's root.
"""

from __future__ import annotations

import ast
import importlib.util
import inspect
import itertools
import re
import types
import typing
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Literal

import msgspec
from pydantic import BaseModel, HttpUrl, IPvAnyNetwork
from pydantic.fields import FieldInfo

from broker.connection.keys import Keys
from broker.connection.scripts import body, names, script_files, source
from consumers.reward.rewards import REWARDS
from consumers.reward.rewards.signatures import FIELDS
from consumers.trainer.algorithms import ADVANTAGES, AGGREGATIONS, KL_ESTIMATORS, LOSSES
from deploy.launchers import LAUNCHERS
from deploy.migrate.convert import SYSTEMS
from deploy.migrate.rules import ConversionRule
from producers.datasets import DATASETS
from producers.engines import ENGINES
from producers.engines.base import ABILITIES
from producers.engines.http import TESTED
from producers.engines.http.engine import make_dialect
from producers.workflows import WORKFLOWS
from schemas import messages
from schemas.codec import Array, Message
from schemas.config import TidemillConfig
from schemas.metric_names import METRICS
from schemas.plugins import Registry

MARKER = re.compile(r"<!-- reference: (\w+) -->")
INCLUDED = re.compile(r"<!-- include: ([\w.]+) -->")
REGISTRIES: dict[str, Registry] = {
    "train.name": DATASETS,
    "reward.terms.name": REWARDS,
    "generator.engine": ENGINES,
    "generator.workflow.name": WORKFLOWS,
    "launcher.name": LAUNCHERS,
    "trainer.loss.name": LOSSES,
    "trainer.advantage.name": ADVANTAGES,
    "trainer.aggregation": AGGREGATIONS,
    "trainer.kl.estimator": KL_ESTIMATORS,
}
Definition = ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
OWN = frozenset({"self", "base", "settings", "_"})
OF_SAMPLES = frozenset({"answer", "reasoning_gym", *FIELDS})
"""Parameters of built-in choices that no configuration gives: those of Tidemill, and those that a sample has."""
KEY_NOTES = {
    "ctl": "hash: schema, leader_term, broker_lifetime, step, version, cursor, slots, batch, staleness, window, steps,"
    " own_steps, max_uncommitted, paused, state, run_id, run_folder, run_host, run_since",
    "leader_term": "string: the newest trainer's leader_term, which fences all others",
    "slots": "sorted set: task id by order of admission; its size is the number of slots held",
    "counts": "hash: admitted, skipped, trained, dropped:REASON, failed:REASON, samples and tokens",
    "groups": "hash: group size, kind, task entry and open samples of each group in the broker",
    "samples": "hash: TASK:SAMPLE to where it is, ENTRY/BODY, after `=` once it is scored; `-` when it failed",
    "tasks": "stream, consumer group `generators`: training tasks",
    "eval_tasks": "stream, consumer group `generators`: evaluation tasks, read first",
    "partials": "hash: TASK:SAMPLE to number and writer of the saved pieces of a sample, TASK:SAMPLE:N to each",
    "images": "hash: DIGEST to the bytes of an image, DIGEST:groups to how many groups in the pipeline have it",
    "trajectories": "stream, consumer group `reward`: finished samples, each with the name of its body",
    "bodies": "hash: BODY to a finished sample, whole, until it is trained or its group ends; TASK to an evaluation"
    " task, until its samples are made",
    "scored": "stream, consumer group `trainer`: outcomes; those of one group that came together are one entry",
    "dead": "stream, 1,000 entries: dead letters",
    "readmit": "sorted set: tasks that are admitted again before the cursor advances",
    "failed": "sorted set, 10,000 entries: groups that failed, which may be requeued",
    "prompts": "string: the curriculum's statistics, 4 bytes a prompt: solve rate in 1/255, groups up to 255, and the"
    " step of the last one in 1/16",
    "journal": "hash: step to the record of what it trains on, until a checkpoint covers it",
    "evals": "hash: VERSION:FIELD of each evaluation, the newest 1,000",
    "changes": "stream, 16 entries: wakes those who wait for room",
    "orders": "stream, 16 entries: wakes services that only follow users' orders, however many they are",
    "weights": "stream: manifests, the version is the entry's id",
    "chunks": "hash: VERSION:INDEX or VERSION:delta:INDEX to one chunk of a version, with the transport `redis`",
    "peers": "hash: PEER to the end of its lease and where it serves weights, with the transport `peer`; `key`, by"
    " which peers know one another",
    "roll": "hash: the last call of the trainer to those who take a version together, with the transport `nccl`: who is"
    " known, who answered, and the addresses by which they meet",
    "roll_answers": "stream: wakes the trainer, which waits for answers to its call",
    "roll_changes": "stream: wakes those who wait for the end of a call, or for an address",
    "rejections": "hash: generators that rejected the newest version and have no weights; whether any uses it",
    "events": "stream, 10,000 entries: the timeline",
    "metrics": "stream, 10,000 entries: one JSON object a step",
    "services": "hash: the last heartbeat of each service; one that was silent for long goes when another joins",
    "run_control": "hash: users' orders: pause, checkpoint, stop, replicas, by number; steps of a finished run",
    "eval_samples": "stream: texts and rewards of evaluations' samples, until the trainer has written them to samples/",
    "recent": "stream, 256 entries: trained samples, kept for reading",
    "counters": "hash: leases that expired, duplicates and zombies that were rejected, commits and their seconds",
    "live": "hash: users' conversations by id: sample, generator, tenant, reward; and under seat:SAMPLE the id",
    "live_seats": "zset: ids of samples that wait for a conversation, by the time at which they were offered",
    "live_begun": "zset: ids of conversations by their begin; the newest are kept",
    "questions": "list: users' questions to the current policy that no generator has taken yet",
    "answers": "stream: the newest answers to these",
}
"""Content of each key of broker/connection/keys.py; a new key without a line here fails the build."""


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Called by MkDocs for every page."""
    return MARKER.sub(
        lambda match: REFERENCES[match.group(1)](), INCLUDED.sub(lambda m: included(m.group(1)), markdown)
    )


def included(name: str) -> str:
    """A page that lies at the root of the repository, with its links as they are from docs/."""
    text = (Path(__file__).parents[1] / name).read_text(encoding="utf-8")
    return text.replace("](docs/", "](")


def table(heads: list[str], rows: list[list[str]]) -> str:
    """A Markdown table; pipes in cells are escaped."""
    lines = [heads, ["---"] * len(heads), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)


def abilities() -> str:
    """Abilities that engines may lack, and which do."""
    engines = {
        **{name: ENGINES.get(name).lacks for name in ENGINES.names if name != "http"},
        **{f"http, {dialect}": make_dialect(dialect).lacks for dialect in TESTED},
    }
    rows = [
        [
            f"`{ability}`",
            text,
            "; ".join(f"{name}: {lacks[ability]}" for name, lacks in engines.items() if ability in lacks),
        ]
        for ability, text in ABILITIES.items()
    ]
    return table(["Ability", "Is", "Lacking in"], rows)


def configuration() -> str:
    """Every section of the configuration with its settings."""
    owners = owning_paths()
    return "\n\n".join(_section(path, model, owners) for path, model in sections(TidemillConfig, "", owners))


def owning_paths() -> dict[type[BaseModel], str]:
    """Where each kind of section is described: at the highest level, where it is required rather than optional."""
    owners: dict[type[BaseModel], str] = {}
    level: list[tuple[str, type[BaseModel], bool]] = [("", TidemillConfig, True)]
    while level:
        level.sort(key=lambda place: not place[2])
        for path, model, _ in level:
            owners.setdefault(model, path)
        level = [
            (f"{path}.{name}".lstrip("."), inner, model.model_fields[name].is_required())
            for path, model, _ in level
            if owners[model] == path
            for name, inner in inner_sections(model)
        ]
    return owners


def inner_sections(model: type[BaseModel]) -> list[tuple[str, type[BaseModel]]]:
    """Fields of a section that are sections themselves."""
    return [(name, inner) for name, field in model.model_fields.items() if (inner := nested(field.annotation))]


def sections(
    model: type[BaseModel], path: str, owners: dict[type[BaseModel], str]
) -> Iterator[tuple[str, type[BaseModel]]]:
    """Dotted path and model of every section to describe, in the order of the file."""
    if owners[model] == path:
        yield path, model
        for name, inner in inner_sections(model):
            yield from sections(inner, f"{path}.{name}".lstrip("."), owners)


def nested(annotation: Any) -> type[BaseModel] | None:
    """The section that a field holds, alone, in a list or optional."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    return next((found for part in typing.get_args(annotation) if (found := nested(part))), None)


def _section(path: str, model: type[BaseModel], owners: dict[type[BaseModel], str]) -> str:
    rows = []
    for name, field in model.model_fields.items():
        inner, kind = nested(field.annotation), type_name(field.annotation, field)
        meaning = _in_one_line(field.description)
        if inner is not None:
            origin = typing.get_origin(field.annotation)
            many = "list of " if origin is list else "names, each with " if origin is dict else ""
            kind = f"{many}[{owners[inner]}](#{anchor(owners[inner])})"
            meaning = meaning or _in_one_line(inner.__doc__)
        rows.append([f"`{name}`", kind, default(field), meaning])
    title = f"### {path} {{ #{anchor(path)} }}" if path else "### The sections { #sections }"
    return f"{title}\n\n{_in_one_line(model.__doc__)}\n\n{table(['Setting', 'Type', 'Default', 'Meaning'], rows)}"


def anchor(path: str) -> str:
    """The place of a section on its page."""
    return path.replace(".", "-").replace("_", "-")


def _in_one_line(documentation: str | None) -> str:
    return " ".join((documentation or "").split())


def type_name(annotation: Any, field: FieldInfo | None = None) -> str:
    """A readable type, with its limits: ``integer, 1 or more``."""
    limits = _limits(field) if field is not None else ""
    origin, parts = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is Literal:
        return ", ".join(f"`{part}`" for part in parts)
    if origin in (typing.Union, types.UnionType):
        return " or ".join(type_name(part) for part in parts if part is not type(None)) + limits
    if origin is typing.Annotated:
        return type_name(parts[0], parts[1] if isinstance(parts[1], FieldInfo) else None) + limits
    if origin is list:
        return f"list of {_plural(parts[0])}" + limits
    if origin is tuple:
        return f"{len(parts)} {_plural(parts[0])}"
    names: dict[Any, str] = {int: "integer", float: "number", str: "text", bool: "true or false", Path: "path"}
    names |= {HttpUrl: "URL", IPvAnyNetwork: "network"}
    return names.get(annotation, "mapping" if origin is dict else getattr(annotation, "__name__", "any")) + limits


def _plural(annotation: Any) -> str:
    """``integers, 0 or more``; a choice is named by what can be chosen."""
    name, comma, limits = type_name(annotation).partition(",")
    return f"{name}{comma}{limits}" if typing.get_origin(annotation) is Literal else f"{name}s{comma}{limits}"


def _limits(field: FieldInfo) -> str:
    words = {"ge": "{} or more", "gt": "over {}", "le": "at most {}", "lt": "below {}", "min_length": "at least {}"}
    found = [
        words[name].format(f"{getattr(limit, name):g}")
        for limit in field.metadata
        for name in words
        if getattr(limit, name, None) is not None
    ]
    return "".join(f", {text}" for text in found)


def default(field: FieldInfo) -> str:
    """The default as it would stand in YAML."""
    if field.is_required():
        return "required"
    value = field.get_default(call_default_factory=True)
    if isinstance(value, BaseModel):
        changed = {name: getattr(value, name) for name in sorted(value.model_fields_set)}
        return ", ".join(f"{k}: {v}" if isinstance(v, str) else f"{k}: {v:g}" for k, v in changed.items())
    if value is None:
        return "none"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float):
        return f"{value:g}"
    if isinstance(value, tuple):
        return f"[{', '.join(f'{part:g}' for part in value)}]"
    return f"`{value}`" if value not in ({}, []) else "empty"


def message_table() -> str:
    """Every message with its fields."""
    chapters = (messages.tasks, messages.trajectories, messages.batches, messages.weights, messages.telemetry)
    kinds = [
        kind
        for chapter in chapters
        for kind in vars(chapter).values()
        if inspect.isclass(kind) and kind.__module__ == chapter.__name__
    ]
    parts = []
    for kind in (k for k in kinds if issubclass(k, msgspec.Struct)):
        tag = f" (`{kind.__struct_config__.tag}`)" if issubclass(kind, Message) else ""
        rows = [[f"`{field.name}`", wire_type(field.type)] for field in msgspec.structs.fields(kind)]
        summary = inspect.cleandoc(kind.__doc__ or "").replace("\n\n", "<br>").replace("\n", " ")
        parts.append(f"### {kind.__name__}{tag}\n\n{summary}\n\n{table(['Field', 'Type'], rows)}")
    return "\n\n".join(parts)


def wire_type(annotation: Any) -> str:
    """The type of a message's field."""
    if annotation is Array:
        return "array"
    origin, parts = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is Literal:
        return ", ".join(f"`{part}`" for part in parts)
    if origin in (typing.Union, types.UnionType):
        return " or ".join("none" if part is type(None) else wire_type(part) for part in parts)
    if origin is list:
        return f"list of {wire_type(parts[0])}"
    if origin is dict:
        return f"map of {wire_type(parts[0])} to {wire_type(parts[1])}"
    return "any" if annotation is Any else str(annotation.__name__)


def key_table() -> str:
    """Every key of a run."""
    keys = Keys("tidemill", "demo")
    names = {name: value for name, value in vars(keys).items() if name != "base"}
    rows = [[f"`{value}`", KEY_NOTES[name]] for name, value in names.items()]
    return table(["Key", "What it holds"], rows)


def script_table() -> str:
    """Every Lua script with its own comment."""
    rows = []
    for name in sorted(names(), key=lambda name: (script_files()[name].parent.name, name)):
        lines = body(name).splitlines()
        comment = " ".join(line[2:].strip() for line in lines if line.startswith("-- ") and "KEYS:" not in line)
        under_pressure = "yes" if "allow-oom" in source(name).splitlines()[0] else "no"
        rows.append([script_files()[name].parent.name, f"`{name}`", comment, under_pressure])
    return table(["Folder", "Script", "Arguments and effect", "Runs when memory is full"], rows)


def plugin_table() -> str:
    """Built-in names by setting, each with its arguments and the first paragraph of its documentation."""
    rows = []
    for setting, registry in REGISTRIES.items():
        for number, name in enumerate(registry.names):
            found = definition(registry._paths[name])
            text = " ".join((ast.get_docstring(found) or "").split("\n\n")[0].split())
            given = ", ".join(f"`{argument}`" for argument in arguments(found))
            rows.append([f"`{setting}`" if number == 0 else "", f"`{name}`", text, given])
    return table(["Setting", "Name", "What it is", "Arguments"], rows)


def definition(path: str) -> Definition:
    """The source of ``module:name``, read without importing the module and what it needs."""
    module, _, name = path.partition(":")
    spec = importlib.util.find_spec(module)
    if spec is None or spec.origin is None:
        raise LookupError(f"no module {module}")
    tree = ast.parse(Path(spec.origin).read_text(encoding="utf-8"))
    for node in tree.body:
        if isinstance(node, Definition) and node.name == name:
            bases = [ast.unparse(base) for base in getattr(node, "bases", [])]
            imports = [one for one in tree.body if isinstance(one, ast.ImportFrom)]
            # The options of a launcher are a dataclass of their own.
            found = [f"{one.module}:{base.name}" for one in imports for base in one.names if base.name in bases]
            if found and found[0].endswith("Options"):
                return definition(found[0])
            if isinstance(node, ast.ClassDef) and node.decorator_list:
                # A dataclass has the fields of its bases, too.
                node.body += itertools.chain.from_iterable(definition(base).body for base in found)
            return node
    raise LookupError(f"{module} has no {name}")


def arguments(found: Definition) -> list[str]:
    """Keys that ``args`` may hold: ``name=default``, or the name alone of one that has to be given."""
    made = next((part for part in found.body if isinstance(part, ast.FunctionDef) and part.name == "__init__"), None)
    if isinstance(found, ast.ClassDef) and made is None:
        # The fields of a dataclass.
        fields = [part for part in found.body if isinstance(part, ast.AnnAssign)]
        pairs = [(ast.unparse(part.target), part.value) for part in fields if "ClassVar" not in ast.unparse(part)]
    else:
        given = (made or found).args
        late = [None] * (len(given.args) - len(given.defaults)) + given.defaults
        pairs = [(one.arg, value) for one, value in zip(given.args, late, strict=True) if made or value is not None]
        pairs += [(one.arg, value) for one, value in zip(given.kwonlyargs, given.kw_defaults, strict=True)]
    pairs = [(name, value) for name, value in pairs if name not in OWN and (value or name not in OF_SAMPLES)]
    return [f"{name}={ast.unparse(value)}" if value else name for name, value in pairs]


def metric_table() -> str:
    """Every metric of a step, with what it is for."""
    rows = [[f"`{name.replace('{}', 'NAME')}`", text] for name, text in METRICS.items()]
    return table(["Name", "What it is, and what to look at it for"], rows)


def migration_table(rules: tuple[ConversionRule, ...]) -> str:
    """The conversion of each setting of another system; those without a counterpart last."""
    with_one = [[f"`{rule.theirs}`", f"`{rule.ours}`", _changes(rule)] for rule in rules if rule.ours]
    without = [[f"`{rule.theirs}`", "-", rule.note] for rule in rules if not rule.ours]
    return table(["There", "Here", "Note"], with_one + without)


def _changes(rule: ConversionRule) -> str:
    """How a setting's value changes: by the rule's note, by a table of values, and by the other system's default."""
    names = rule.convert.items() if isinstance(rule.convert, Mapping) else ()
    named = (f"{theirs}" if theirs == ours else f"{theirs}: {ours}" for theirs, ours in names if theirs != "other")
    choices = ", ".join(named)
    default = "" if rule.default is None else f"{rule.default} there by default"
    return "; ".join(filter(None, (rule.note, choices, default)))


REFERENCES: dict[str, Callable[[], str]] = {
    "abilities": abilities,
    "metrics": metric_table,
    "configuration": configuration,
    "messages": message_table,
    "keys": key_table,
    "scripts": script_table,
    "plugins": plugin_table,
    **{name: partial(migration_table, system.rules) for name, system in SYSTEMS.items()},
}
