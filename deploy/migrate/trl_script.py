"""Settings in a script for one of TRL's trainers, read from its source: the script is not run.

They are in the call of a config, in the command that the script's text shows if it takes them from the command line
(``TrlParser``), in the defaults of argparse, and in the call of the trainer.
"""

import ast
import re
import shlex
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import yaml

from deploy.migrate.conversion import Unread
from deploy.migrate.hydra import number
from deploy.migrate.shell import UNKNOWN

CONFIGS = ("GRPOConfig", "RLOOConfig", "AsyncGRPOConfig", "DPOConfig")
TRAINERS = tuple(name.replace("Config", "Trainer") for name in CONFIGS)
POSITIONS = ("model", "reward_funcs", "args", "train_dataset", "eval_dataset")
"""Arguments of a trainer that may come without a name."""
LORA = {"r": "lora_r", "lora_alpha": "lora_alpha", "target_modules": "lora_target_modules"}


class ScriptSource:
    """What a script's source tells: calls by the function's name, what names stand for, and options by default."""

    def __init__(self, file: Path, text: str) -> None:
        self.file, self.text = file, text
        self.tree = ast.parse(text, file.name)
        nodes = list(ast.walk(self.tree))
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

    def value(self, node: ast.expr, depth: int = 8) -> Any:
        """Return the value of an expression, or its source where only a run tells it."""
        try:
            return ast.literal_eval(node)
        except ValueError:
            pass
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
            if word.arg is not None:
                yield word.arg, word.value
                continue
            made = self.assigned.get(ast.unparse(word.value), [])
            if len(made) == 1 and isinstance(made[0], ast.Dict | ast.Call):
                yield from self.entries(made[0])
            else:
                yield f"**{ast.unparse(word.value)}", word.value

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


def _name(call: ast.Call) -> str:
    return ast.unparse(call.func).rpartition(".")[2]


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
    return {key: _parsed(values) for key, values in found.items()}


def _parsed(values: list[str]) -> Any:
    if not values:
        return True
    if any(UNKNOWN in one for one in values):
        return Unread(" ".join(values).replace(UNKNOWN, ""))
    parsed = [number(yaml.safe_load(one)) for one in values]
    return parsed if len(parsed) > 1 else parsed[0]


def shown_flags(file: Path, text: str) -> dict[str, Any]:
    """Return the flags of the longest command in a script's text that starts it."""
    shown: dict[str, Any] = {}
    for line in re.sub(r"\s*\\\n[\s#]*", " ", text).splitlines():
        if f"{file.name} --" in line:
            try:
                flags = read_flags(shlex.split(line.partition(file.name)[2]))
            except (ValueError, yaml.YAMLError):
                continue
            shown = max(shown, flags, key=len)
    return shown


def read_script(file: Path, text: str, flags: dict[str, Any] | None = None) -> dict[str, Any] | None:
    """Return the settings in a Python file that makes a config of TRL, None if it makes none; SyntaxError.

    flags: those of the command line that starts it, by default those that its text shows.
    """
    source = ScriptSource(file, text)
    made = next((name for name in CONFIGS if name in source.calls), None)
    parsed = next((call for name, call in source.calls.items() if name in ("TrlParser", "HfArgumentParser")), None)
    taken = [name for name in CONFIGS if parsed is not None and re.search(rf"\b{name}\b", ast.unparse(parsed))]
    if made is None and not taken:
        return None
    found: dict[str, Any] = {"trainer": (made or taken[0]).removesuffix("Config")}
    if made is None:
        shown = shown_flags(file, text) if flags is None else flags
        source.options |= shown
        found |= shown | {"shown_flags": len(shown)} if flags is None else shown
    given = dict(source.keywords(source.calls[made])) if made is not None else {}
    given |= source.fields
    init = given.pop("model_init_kwargs", None)
    found |= {key: source.value(value) for key, value in given.items()}
    for key, value in source.entries(init) if init is not None else ():
        found.setdefault({"torch_dtype": "dtype", "revision": "model_revision"}.get(key, key), source.value(value))
    found.pop("model_init_kwargs", None)
    trainer = next((source.calls[name] for name in TRAINERS if name in source.calls), None)
    if trainer is not None:
        found |= _trainer_arguments(source, trainer)
    # What the command line does not set has TRL's default there.
    unset = {key for key, value in found.items() if isinstance(value, Unread) and re.fullmatch(r"\w+_args\.\w+", value)}
    return {key: value for key, value in found.items() if parsed is None or key not in unset}


def _trainer_arguments(source: ScriptSource, call: ast.Call) -> dict[str, Any]:
    given = dict(zip(POSITIONS, call.args, strict=False)) | dict(source.keywords(call))
    found: dict[str, Any] = {key: ast.unparse(value) for key, value in given.items()}
    if "model" in given:
        model = source.value(given["model"])
        traced = source.assigned.get(ast.unparse(given["model"]), [])
        loaded = traced[0] if traced else given["model"]
        if isinstance(model, Unread) and isinstance(loaded, ast.Call) and _name(loaded) == "from_pretrained":
            model = source.value(loaded.args[0]) if loaded.args else model
        found["model"] = model
    for key in ("reward_funcs", "tools"):
        if key in given:
            listed = given[key]
            if isinstance(listed, ast.Name) and isinstance(source.assigned.get(listed.id, [None])[0], ast.List):
                listed = source.assigned[listed.id][0]
            items = listed.elts if isinstance(listed, ast.List | ast.Tuple) else [listed]
            found[key] = [_function(item, source, key.removesuffix("_funcs").removesuffix("s")) for item in items]
    config = given.get("args")
    if config is None:
        found["args"] = "missing"
    elif _is_config(source, config):
        del found["args"]
    for key in ("eval_dataset", "peft_config", "quantization_config"):
        if found.get(key) in ("None", None):
            found.pop(key, None)
    rows = given.get("train_dataset")
    loads = source.loads(rows) if rows is not None else None
    loads = loads or source.calls.get("load_dataset")
    if loads is not None:
        found |= _dataset(source, loads)
    if rows is not None and isinstance(rows, ast.Name) and len(source.assigned.get(rows.id, [])) == 1:
        rows = source.assigned[rows.id][0]
    if loads is not None and rows is loads:
        del found["train_dataset"]
    return found | _adapter(source, found.pop("peft_config", None))


def _is_config(source: ScriptSource, node: ast.expr) -> bool:
    """Whether an expression is a config that the script makes, or gets from its command line."""
    made = source.assigned.get(node.id, []) if isinstance(node, ast.Name) else [node]
    names = (*CONFIGS, "parse_args_and_config", "parse_args_into_dataclasses")
    return any(isinstance(one, ast.Call) and _name(one) in names for one in made)


def _dataset(source: ScriptSource, call: ast.Call) -> dict[str, Any]:
    arguments = [source.value(argument) for argument in call.args]
    named = {word.arg: source.value(word.value) for word in call.keywords}
    found: dict[str, Any] = {"dataset_name": named.get("path", arguments[0] if arguments else None)}
    found["dataset_config"] = named.get("name", arguments[1] if len(arguments) > 1 else None)
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
    return {"use_peft": True} | {LORA.get(key, key): value for key, value in given.items()}


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
