"""A script for one of TRL's trainers, read from its source: the script is not run, since that would train.

Settings are in the calls of a config and of the trainer, in the defaults of argparse, and in the command that the text
shows. Reward functions and tools are copied into a file of their own, with what they need of the script.
"""

import ast
import builtins
import math
import re
import shlex
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from deploy.migrate.conversion import Conversion, Unread
from deploy.migrate.hydra import find_above, parse_value, read_yaml
from deploy.migrate.rules import read_words
from deploy.migrate.shell import UNKNOWN

CONFIGS = ("GRPOConfig", "RLOOConfig", "AsyncGRPOConfig", "DPOConfig", "SFTConfig")
Function = ast.FunctionDef | ast.AsyncFunctionDef
Binding = Function | ast.ClassDef | ast.Assign | ast.Import | ast.ImportFrom
COUNTED = ("num_processes", "nproc_per_node", "nnodes")
WORDS = read_words("trl")


class ScriptSource:
    """What a script's source tells: calls by the function's name, what names stand for, and options by default."""

    def __init__(self, file: Path, text: str) -> None:
        self.file = file
        nodes = list(ast.walk(ast.parse(text, file.name)))
        self.calls: dict[str, ast.Call] = {}
        self.assigned: dict[str, list[ast.expr]] = {}
        self.fields: dict[str, ast.expr] = {}
        self.options: dict[str, Any] = {}
        imports = [node for node in nodes if isinstance(node, ast.ImportFrom) and not node.level]
        self.imported = {alias.asname or alias.name: one.module or "" for one in imports for alias in one.names}
        for node in nodes:
            if isinstance(node, ast.Call):
                self.calls.setdefault(_name(node), node)
                self._add_option(node)
            elif isinstance(node, ast.Assign):
                for target in node.targets:
                    self._add_assigned(target, node.value)

    def _add_option(self, call: ast.Call) -> None:
        default = next((word.value for word in call.keywords if word.arg == "default"), None)
        if _name(call) == "add_argument" and default is not None and isinstance(call.args[0], ast.Constant):
            self.options[str(call.args[0].value).lstrip("-").replace("-", "_")] = self.value(default)

    def _add_assigned(self, target: ast.expr, value: ast.expr) -> None:
        if isinstance(target, ast.Name):
            self.assigned.setdefault(target.id, []).append(value)
        elif isinstance(target, ast.Tuple):
            for one in target.elts:
                self._add_assigned(one, value)
        elif isinstance(target, ast.Attribute) and ast.unparse(target.value).endswith("args"):
            self.fields[target.attr] = value

    def stands_for(self, node: ast.expr) -> list[Any]:
        """Return what a name is assigned, or an expression itself."""
        return self.assigned.get(node.id, [node]) if isinstance(node, ast.Name) else [node]

    def value(self, node: ast.expr, depth: int = 8) -> Any:
        """Return the value of an expression, or its source where only a run tells it."""
        with suppress(ValueError, TypeError):
            return ast.literal_eval(node)
        if isinstance(node, ast.Name) and depth and len(self.assigned.get(node.id, ())) == 1:
            found = self.value(self.assigned[node.id][0], depth - 1)
            return Unread(ast.unparse(node)) if isinstance(found, Unread) else found
        if isinstance(node, ast.Attribute):
            owner = ast.unparse(node.value)
            if owner.endswith("args") and not isinstance(self.options.get(node.attr, Unread()), Unread):
                return self.options[node.attr]
            if owner == "torch":
                return node.attr
        return Unread(ast.unparse(node))

    def keywords(self, call: ast.Call) -> Iterator[tuple[str, ast.expr]]:
        """Yield the keyword arguments of a call, and of a dictionary that is written out and given as ``**name``."""
        for word in call.keywords:
            made = self.assigned.get(ast.unparse(word.value), [])
            if word.arg is None and len(made) == 1 and isinstance(made[0], ast.Dict | ast.Call):
                yield from self.entries(made[0])
            else:
                yield word.arg or f"**{ast.unparse(word.value)}", word.value

    def entries(self, node: ast.expr) -> Iterator[tuple[str, ast.expr]]:
        """Yield the entries of a dictionary that is written out, as ``{...}`` or ``dict(...)``."""
        if isinstance(node, ast.Dict):
            pairs = zip(node.keys, node.values, strict=True)
            yield from ((str(key.value), value) for key, value in pairs if isinstance(key, ast.Constant))
        elif isinstance(node, ast.Call) and _name(node) == "dict":
            yield from ((word.arg, word.value) for word in node.keywords if word.arg is not None)

    def loads(self, node: ast.AST, seen: frozenset[str] = frozenset()) -> ast.Call | None:
        """Return the call of ``load_dataset`` that an expression comes from."""
        for one in ast.walk(node):
            if isinstance(one, ast.Call) and _name(one) == "load_dataset":
                return one
            if isinstance(one, ast.Name) and one.id not in seen:
                for value in self.assigned.get(one.id, []):
                    if (found := self.loads(value, seen | {one.id})) is not None:
                        return found
        return None


def _name(node: ast.AST) -> str:
    """Return the name of the function that is called, empty of what is no call."""
    return ast.unparse(node.func).rpartition(".")[2] if isinstance(node, ast.Call) else ""


def read_flags(words: Iterable[str]) -> dict[str, Any]:
    """Return ``--key value`` of a command line by key: True without a value, a list of several."""
    found: dict[str, list[str]] = {}
    key = ""
    for word in words:
        if word.startswith("--"):
            key, equals, value = word[2:].replace("-", "_").partition("=")
            found[key] = [value] if equals else []
        elif key:
            found[key].append(word.rstrip(","))
    texts = {key: [" ".join(one)] if UNKNOWN in "".join(one) else one for key, one in found.items()}
    parsed = {key: [parse_value(text) for text in one] or [True] for key, one in texts.items()}
    return {key: values if len(values) > 1 else values[0] for key, values in parsed.items()}


def process_count(file: Path, flags: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``num_processes`` as the flags of a launcher, or accelerate's file above ``file``, tell it."""
    named = str(flags.get("config_file") or flags.get("accelerate_config") or "")
    config = find_above(file, named)
    inside = {} if config is None else read_yaml(config)
    count = flags.get("num_processes", inside.get("num_processes", WORDS["shipped"].get(named)))
    if "nproc_per_node" in flags:
        sizes = [flags["nproc_per_node"], flags.get("nnodes", 1)]
        count = math.prod(sizes) if all(type(one) is int for one in sizes) else Unread(" * ".join(map(str, sizes)))
    return {} if count is None else {"num_processes": count}


def launch_flags(file: Path, words: Sequence[str]) -> dict[str, Any]:
    """Return the flags of what starts a script, ``launch.NAME``, and ``num_processes`` if they tell it."""
    given = read_flags(words)
    alone = bool(words) and words[-1].rpartition("/")[2].startswith("python")
    rest = {f"launch.{name}": value for name, value in given.items() if name not in COUNTED}
    return rest | ({"num_processes": 1} if alone else process_count(file, given))


def shown_flags(file: Path, text: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the flags of the longest command in a script's text that starts it, and those of its launcher."""
    shown: tuple[dict[str, Any], dict[str, Any]] = {}, {}
    for line in re.sub(r"\s*\\\n[\s#]*", " ", text).splitlines():
        try:
            words = shlex.split(line) if file.name in line else []
        except ValueError:
            continue
        if at := next((at for at, word in enumerate(words) if word.rpartition("/")[2] == file.name), 0):
            found = read_flags(words[at + 1 :]), launch_flags(file, words[:at])
            shown = max(shown, found, key=lambda one: (len(one[0]), len(one[1])))
    return shown


def read_script(file: Path, text: str, flags: dict[str, Any] | None = None) -> dict[str, Any] | None:
    """Return the settings of a script with these flags, by default those that it shows, None without a config."""
    source = ScriptSource(file, text)
    made = next((name for name in CONFIGS if name in source.calls), None)
    parsed = next((call for name, call in source.calls.items() if name in ("TrlParser", "HfArgumentParser")), None)
    taken = [name for name in CONFIGS if parsed is not None and re.search(rf"\b{name}\b", ast.unparse(parsed))]
    if made is None and not taken:
        return None
    found: dict[str, Any] = {"trainer": (made or taken[0]).removesuffix("Config")}
    shown, launched = shown_flags(file, text) if flags is None else (flags, {})
    found |= launched
    if made is None:
        source.options |= shown
        found |= shown | {"shown_flags": len(shown)} if flags is None else shown
    given = ({} if made is None else dict(source.keywords(source.calls[made]))) | source.fields
    init = given.pop("model_init_kwargs", None)
    found |= {key: source.value(value) for key, value in given.items()}
    for key, value in source.entries(init) if init is not None else ():
        found.setdefault({"torch_dtype": "dtype", "revision": "model_revision"}.get(key, key), source.value(value))
    found.pop("model_init_kwargs", None)
    trainers = [name.replace("Config", "Trainer") for name in CONFIGS]
    if trainer := next((source.calls[name] for name in trainers if name in source.calls), None):
        found |= _trainer_arguments(source, trainer)
    # What the command line does not set has TRL's default there.
    unset = {key for key, value in found.items() if isinstance(value, Unread) and re.fullmatch(r"\w+_args\.\w+", value)}
    return {key: value for key, value in found.items() if parsed is None or key not in unset}


def _trainer_arguments(source: ScriptSource, call: ast.Call) -> dict[str, Any]:
    given = dict(zip(WORDS["positions"], call.args, strict=False)) | dict(source.keywords(call))
    found: dict[str, Any] = {key: ast.unparse(value) for key, value in given.items()}
    if "model" in given:
        found["model"], loaded = source.value(given["model"]), source.stands_for(given["model"])[0]
        if isinstance(found["model"], Unread) and _name(loaded) == "from_pretrained" and loaded.args:
            found["model"] = source.value(loaded.args[0])
        if found["model"] == source.options.get("model_name_or_path"):
            # The command's setting is the one that is named.
            del found["model"]
    for key, kind in (("reward_funcs", "reward"), ("tools", "tool")):
        if key in given:
            first = source.stands_for(given[key])[0]
            listed = first if isinstance(first, ast.List) else given[key]
            items = listed.elts if isinstance(listed, ast.List | ast.Tuple) else [listed]
            found[key] = [_function(item, source, kind) for item in items]
    makers = (*CONFIGS, "parse_args_and_config", "parse_args_into_dataclasses")
    if "args" not in given:
        found["args"] = "missing"
    elif any(_name(one) in makers for one in source.stands_for(given["args"])):
        del found["args"]
    for key in ("eval_dataset", "peft_config", "quantization_config"):
        if found.get(key) == "None":
            del found[key]
    rows = given.get("train_dataset")
    loads = (None if rows is None else source.loads(rows)) or source.calls.get("load_dataset")
    if loads is not None:
        found |= _dataset(source, loads)
        if rows is not None and source.stands_for(rows) == [loads]:
            del found["train_dataset"]
    return found | _adapter(source, found.pop("peft_config", None))


def _dataset(source: ScriptSource, call: ast.Call) -> dict[str, Any]:
    given = [*zip(("path", "name"), call.args, strict=False), *((word.arg, word.value) for word in call.keywords)]
    named = {name: source.value(value) for name, value in given}
    found: dict[str, Any] = {"dataset_name": named.get("path"), "dataset_config": named.get("name")}
    splits = named.get("split", "train")
    splits = splits if isinstance(splits, list) else [splits]
    found |= dict(zip(("dataset_train_split", "dataset_test_split"), splits, strict=False))
    if found["dataset_name"] == "json" and named.get("data_files"):
        found["data_files"] = named["data_files"]
    return found


def _adapter(source: ScriptSource, config: str | None) -> dict[str, Any]:
    if config is None:
        return {}
    if "LoraConfig" not in source.calls:
        # What get_peft_config makes of the command line's settings has their names.
        return {} if "get_peft_config" in config else {"peft_config": Unread(config)}
    given = {key: source.value(value) for key, value in source.keywords(source.calls["LoraConfig"])}
    return {"use_peft": True} | {WORDS["lora"].get(key, key): value for key, value in given.items()}


def _function(node: ast.expr, source: ScriptSource, kind: str) -> str:
    """Return a function by its name: TRL's own, one of a file beside the script, or one to move out of the script."""
    if isinstance(node, ast.Constant):
        return str(node.value)
    name = ast.unparse(node.func if isinstance(node, ast.Call) else node)
    module = source.imported.get(name, "")
    if module.startswith("trl"):
        return name
    beside = Path(*module.split(".")).with_suffix(".py") if module else None
    if beside is not None and (source.file.parent / beside).is_file():
        return f"{beside.as_posix()}:{name}"
    return f"{source.file.stem}_{kind}s.py:{name if name.isidentifier() else 'FILL_IN'}"


def move_functions(script: Path, done: Conversion, folder: Path) -> list[Path]:
    """Write the functions that the conversion of a Python script names to files in ``folder``; returns these files.

    A file that exists stays as it is. The notes then name what a function needs and the file lacks.
    """
    written = []
    for name in dict.fromkeys(re.findall(rf"\b{re.escape(script.stem)}_(?:reward|tool)s\.py(?=:)", str(done.config))):
        functions = list(dict.fromkeys(re.findall(rf"\b{re.escape(name)}:(\w+)", str(done.config))))
        text, lacks = copy_functions(script.read_text(encoding="utf-8"), functions)
        if not text or (folder / name).exists():
            continue
        (folder / name).write_text(f"# Copied from {script.name} by tidemill convert.\n{text}", encoding="utf-8")
        written.append(folder / name)
        done.to_do = [note for note in done.to_do if not note.startswith(f"{name}: move the")]
        if lacks:
            done.ask(f"{name}: add {', '.join(lacks)}, which only a run of {script.name} makes")
    return written


def copy_functions(text: str, names: Sequence[str]) -> tuple[str, list[str]]:
    """Return the source of functions of a script and of what they need, and the names it lacks; empty without them."""
    tree = ast.parse(text)
    bound = dict(_bindings(tree, set(names)))
    if not all(isinstance(bound.get(name), Function) for name in names):
        return "", []
    copied, lacks, due = dict[str, Binding](), set[str](), list(names)
    while due:
        name = due.pop()
        found = bound[name]
        if isinstance(found, ast.Assign) and not _is_plain(found.value, bound):
            lacks.add(name)
        elif name not in copied:
            copied[name] = found
            due += [one for one in _needs(found) if one in bound]
    statements = {_text(node, text, name): node.lineno for name, node in copied.items()}
    ordered = sorted(statements, key=lambda one: (not one.startswith(("import ", "from ")), statements[one]))
    return "\n".join(["from __future__ import annotations", *ordered, ""]), sorted(lacks)


def _bindings(node: ast.AST, wanted: set[str]) -> Iterator[tuple[str, Binding]]:
    """Yield what names stand for at the top of a script, and around a wanted function within another."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, Function | ast.ClassDef):
            yield child.name, child
            if any(isinstance(one, Function) and one.name in wanted for one in child.body):
                yield from _bindings(child, wanted)
        elif isinstance(child, ast.Import | ast.ImportFrom):
            yield from (((alias.asname or alias.name).partition(".")[0], child) for alias in child.names)
        elif isinstance(child, ast.Assign):
            targets = (one for target in child.targets for one in ast.walk(target))
            yield from ((one.id, child) for one in targets if isinstance(one, ast.Name))
        elif isinstance(child, ast.If | ast.Try | ast.With):
            yield from _bindings(child, wanted)


def _needs(node: Binding) -> list[str]:
    """Return the names that a statement uses and does not bind itself."""
    names = [one for one in ast.walk(node) if isinstance(one, ast.Name)]
    own = {one.id for one in names if isinstance(one.ctx, ast.Store)}
    own |= {one.arg for one in ast.walk(node) if isinstance(one, ast.arg)}
    return [one.id for one in names if one.id not in own]


def _is_plain(value: ast.expr, bound: dict[str, Binding]) -> bool:
    """Whether a value is made of constants, other names and calls of Python's own functions and libraries."""
    calls = [one.func for one in ast.walk(value) if isinstance(one, ast.Call)]
    called = [one.id for func in calls for one in ast.walk(func) if isinstance(one, ast.Name)]
    return all(_is_library(bound[name]) if name in bound else hasattr(builtins, name) for name in called)


def _is_library(node: Binding) -> bool:
    modules = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
    modules += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
    return bool(modules) and all(module.partition(".")[0] in sys.stdlib_module_names for module in modules)


def _text(node: Binding, text: str, name: str) -> str:
    if isinstance(node, ast.Import | ast.ImportFrom):
        names = [alias for alias in node.names if (alias.asname or alias.name).partition(".")[0] == name]
        if isinstance(node, ast.Import):
            return ast.unparse(ast.Import(names))
        return ast.unparse(ast.ImportFrom(node.module, names, node.level))
    first = min([node.lineno, *(one.lineno for one in getattr(node, "decorator_list", []))])
    # A text over several lines may be indented less than the function that it is in.
    block = "\n".join(one.removeprefix(" " * node.col_offset) for one in text.splitlines()[first - 1 : node.end_lineno])
    return block if isinstance(node, ast.Assign) else f"\n\n{block}"
