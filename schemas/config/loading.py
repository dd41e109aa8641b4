"""Loading of the configuration: a YAML file, TIDEMILL_ variables and dotted arguments, checked together.

Later sources win: file, then environment (``TIDEMILL_TRAINER__STEPS=10``), then
arguments (``trainer.steps=10``). Values are YAML. Every mistake is one line, and so is a key that is given twice.
"""

import difflib
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, get_origin

import yaml
from pydantic import BaseModel, ValidationError

from schemas.config.root import TidemillConfig
from schemas.errors import ConfigError
from schemas.system.files import atomic_write
from schemas.urls import hide_password

ENV_PREFIX = "TIDEMILL_"
OTHER_VARIABLES = {
    *("TIDEMILL_CONTROL_READ_TOKEN", "TIDEMILL_CONTROL_READ_TOKEN_FILE", "TIDEMILL_CONTROL_TOKEN"),
    *("TIDEMILL_CONTROL_TOKEN_FILE", "TIDEMILL_CONTROL_URL", "TIDEMILL_POOL", "TIDEMILL_SUPERVISOR"),
    "TIDEMILL_VLLM_OWNER",
}
"""Variables that are no settings, and look like some."""
LONGEST_VALUE = 100
"""Characters of a wrong value that are shown."""
EXPONENT = re.compile(r"^[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)[eE][-+]?[0-9]+$")
"""Numbers such as 1e-6, which YAML 1.2 knows and the library, which reads YAML 1.1, takes for texts."""


class _Loader(yaml.SafeLoader):
    """A YAML loader that rejects a key given twice, whose first value would be lost silently."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode) and key.tag != "tag:yaml.org,2002:merge":
                if key.value in seen:
                    line = key.start_mark.line + 1
                    raise ConfigError(f"the key {key.value!r} is given twice, for the second time in line {line}")
                seen.add(key.value)
        return super().construct_mapping(node, deep)


class _Dumper(yaml.SafeDumper):
    """YAML in which a text that the loader would take for a number has quotes."""


for _class in (_Loader, _Dumper):
    _class.add_implicit_resolver("tag:yaml.org,2002:float", EXPONENT, list("-+.0123456789"))


def load_config(
    file: Path | str, overrides: Sequence[str] = (), environment: Mapping[str, str] | None = None
) -> TidemillConfig:
    """Read and check a configuration; ConfigError is one line that names field, value and what is allowed."""
    return parse_config(read_tree(file, overrides, environment), base=Path(file).resolve().parent)


def read_tree(
    file: Path | str, overrides: Sequence[str] = (), environment: Mapping[str, str] | None = None
) -> dict[str, Any]:
    """Read the settings of a configuration in their sections; they are not checked yet. ConfigError."""
    file = Path(file)
    try:
        text = file.read_text(encoding="utf-8")
    except OSError as error:
        inside = f", give the file in it, such as {file / 'config.yaml'}" if file.is_dir() else ""
        raise ConfigError(f"cannot read the configuration {file}: {error.strerror}{inside}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"the configuration {file} is not UTF-8: {error.reason} at byte {error.start}") from error
    try:
        data = _Loader(text).get_single_data()
    except ConfigError as error:
        raise ConfigError(f"{file}: {error}") from None
    except yaml.YAMLError as error:
        raise ConfigError(f"{file} is not YAML: {' '.join(str(error).split())}") from error
    if not isinstance(data, dict):
        raise ConfigError(f"{file} must hold sections such as model: and train:, it holds {type(data).__name__}")
    environment = os.environ if environment is None else environment
    for key, value in sorted(environment.items()):
        if not key.startswith(ENV_PREFIX):
            continue
        if is_setting(key):
            path = key.removeprefix(ENV_PREFIX).lower().split("__")
            _assign(data, path, _value(value, key), key)
        elif key not in OTHER_VARIABLES and not value.startswith("tcp://"):
            _refuse_single_underscores(key)
    for override in overrides:
        name, equals, value = override.partition("=")
        if not equals:
            raise ConfigError(f"override {hide_password(override)!r} must look like trainer.steps=100")
        _assign(data, name.split("."), _value(value, name), override)
    return data


def is_setting(variable: str) -> bool:
    """Return whether an environment variable of this name sets a setting."""
    return variable.startswith(ENV_PREFIX) and "__" in variable


def parse_config(data: Mapping[str, Any], base: Path | None = None) -> TidemillConfig:
    """Check a configuration that is already a mapping; ConfigError as above. base: folder of plugin files."""
    try:
        config = TidemillConfig.model_validate(data)
    except ValidationError as error:
        raise ConfigError("; ".join(_explain(item, data) for item in error.errors())) from error
    config._base = (config.run.base or base or Path.cwd()).resolve()
    by_pool(config)
    return config


def save_config(config: TidemillConfig, file: Path) -> None:
    """Write the configuration as it is in effect, so that later edits of its sources change nothing."""
    # It may hold the broker's password.
    atomic_write(file, dump_yaml(dump_config(config)), private=True)


def dump_yaml(tree: Mapping[str, Any]) -> str:
    """Write a tree of settings as YAML that loads as the same settings."""
    return yaml.dump(tree, Dumper=_Dumper, sort_keys=False, allow_unicode=True)


def dump_config(config: TidemillConfig) -> dict[str, Any]:
    """Return the configuration in effect as a mapping that ``parse_config`` reads, in any process."""
    data = config.model_dump(mode="json", exclude_unset=True)
    data.setdefault("run", {})["base"] = str(config.base)
    return data


def of_pool(config: TidemillConfig, name: str | None) -> TidemillConfig:
    """Return the configuration of the generators of a pool; the same one in a run without pools. ConfigError."""
    if not config.pools and not name:
        return config
    if name not in config.pools:
        known = ", ".join(config.pools) or "none"
        raise ConfigError(f"{name!r} is not one of pools, which are {known}" if name else f"name one of pools: {known}")
    pool, data = config.pools[name], dump_config(config)
    del data["pools"]
    common = data.get("generator", {})
    if pool.generator.get("engine", config.generator.engine) != config.generator.engine:
        common = {key: value for key, value in common.items() if key not in ("args", "http")}
    own = {"replicas": len(pool.units), **pool.generator} if pool.units else pool.generator
    data["generator"] = merge(common, own)
    try:
        found = parse_config(data)
    except ConfigError as error:
        raise ConfigError(f"pools.{name}: {error}") from error
    if pool.units and found.generator.replicas > len(pool.units):
        raise ConfigError(
            f"pools.{name}.generator.replicas {found.generator.replicas} must be at most {len(pool.units)}, one for"
            f" each of pools.{name}.units"
        )
    found._pool = name
    return found


def by_pool(config: TidemillConfig) -> dict[str, TidemillConfig]:
    """Return the configuration of each pool's generators, in order; without pools that of all of them, by ""."""
    return {name: of_pool(config, name) for name in config.pools or [""]}


def of_node(config: TidemillConfig, node: str) -> dict[str, TidemillConfig]:
    """Return those of ``by_pool`` whose generators a machine starts. node: its name; empty for `tidemill up`."""
    return {name: one for name, one in by_pool(config).items() if not name or config.pools[name].is_on(node)}


def merge(common: Mapping[str, Any], own: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``common`` with the values of ``own`` in their place; mappings in both are merged in the same way."""
    both = {
        key: merge(common[key], value) if isinstance(value, dict) and isinstance(common.get(key), dict) else value
        for key, value in own.items()
    }
    return {**common, **both}


def _refuse_single_underscores(variable: str) -> None:
    """Reject a variable that looks like a setting but sets nothing.

    Variables of Kubernetes are allowed, which names the address of a service tidemill-control TIDEMILL_CONTROL_PORT.
    """
    settings = {"_".join(path).upper(): "__".join(path).upper() for path in _paths(TidemillConfig)}
    close = difflib.get_close_matches(variable.removeprefix(ENV_PREFIX), settings, n=1, cutoff=0.9)
    if close:
        raise ConfigError(
            f"the variable {variable} sets nothing: sections are separated by two underscores, did you mean"
            f" {ENV_PREFIX}{settings[close[0]]}?"
        )


def _paths(section: type[BaseModel]) -> Iterator[tuple[str, ...]]:
    """Return the paths of all settings in a section and in those below it."""
    for name, field in section.model_fields.items():
        yield (name,)
        below = _section(field.annotation)
        if below is not None and get_origin(field.annotation) is not dict:
            yield from ((name, *path) for path in _paths(below))


def _value(text: str, name: str) -> Any:
    try:
        return _Loader(text).get_single_data()
    except ConfigError as error:
        raise ConfigError(f"{name}: {error}") from None
    except yaml.YAMLError as error:
        raise ConfigError(f"{name}: {text!r} is not a YAML value") from error


def _assign(data: dict[str, Any], path: list[str], value: Any, source: str) -> None:
    node: Any = data
    for key in path[:-1]:
        if isinstance(node, dict) and node.get(key) is None:
            node[key] = {}
        node = node[_place(node, key, source)]
        if not isinstance(node, dict | list):
            raise ConfigError(f"{source}: {'.'.join(path)} goes through {key}, which is not a section")
    node[_place(node, path[-1], source)] = value


def _place(node: dict[str, Any] | list[Any], key: str, source: str) -> Any:
    """Return ``key`` as it is for a section, or as an index for a list; ConfigError if the list has no such index."""
    if isinstance(node, dict):
        return key
    if not key.isdigit() or int(key) >= len(node):
        raise ConfigError(f"{source}: {key!r} is not an index below {len(node)}")
    return int(key)


def _explain(item: Any, data: Any) -> str:
    path = _written(item["loc"], data)
    name = ".".join(path) or "configuration"
    if item["type"] == "extra_forbidden":
        return f"{name}: unknown key{_instead(path)}"
    if item["type"] == "missing":
        return f"{name}: required and missing"
    if item["type"] == "value_error":
        return str(item["ctx"]["error"])
    given = hide_password(repr(item["input"]))
    if len(given) > LONGEST_VALUE:
        given = f"{given[:LONGEST_VALUE]}…"
    return f"{name}: {given} is not allowed, must be {_allowed(item, path)}"


def _instead(path: Sequence[str]) -> str:
    """Suggest a key for an unknown one: the same name in a section below, or a similar spelling."""
    *above, key = path
    section = _section_at(above)
    further = [".".join([*above, *below]) for below in _paths(section) if below[-1] == key] if section else []
    if (above and further) or len(further) == 1:
        return f", did you mean {min(further, key=len)!r}?"
    close = difflib.get_close_matches(key, _fields(above), n=1)
    return f", did you mean {close[0]!r}?" if close else f": one of {', '.join(_fields(above))}"


def _allowed(item: Any, path: Sequence[str]) -> str:
    """Describe an allowed value in the words of a YAML file."""
    kind, context = item["type"], item.get("ctx", {})
    keys = f"with keys such as {', '.join(_fields(path)[:4])}"
    sections = "a section, or a list of them," if path in (["train"], ["eval", "dataset"]) else "a list of sections"
    words = {
        "model_type": f"a section {keys}",
        "list_type": f"{sections} {keys}" if _fields(path) else "a list, as in [a, b]",
        "dict_type": "a mapping, as in {a: 1}",
        "string_type": "a text, in quotes where it looks like a number",
        "path_type": "a path",
        "string_pattern_mismatch": f"a text of the form {context.get('pattern')}",
        "too_short": f"a list of {context.get('min_length')} or more",
        "too_long": f"a list of {context.get('max_length')} at most",
    }
    return words.get(kind) or item["msg"].removeprefix("Input should be ").removeprefix("value is not ")


def _written(loc: Sequence[int | str], data: Any) -> list[str]:
    """Return the path of a mistake as the file has it: a single dataset is not a list of one."""
    path = []
    for part in loc:
        # pydantic also names the kinds of value of which one is wanted.
        if isinstance(data, Mapping) if isinstance(part, int) else isinstance(data, str | int | float | list):
            continue
        path.append(str(part))
        try:
            data = data[part]
        except (KeyError, IndexError, TypeError):
            data = None
    return path


def _fields(path: Sequence[str]) -> list[str]:
    """Names allowed in the section at ``path``; none where there is no section."""
    section = _section_at(path)
    return list(section.model_fields) if section else []


def _section_at(path: Sequence[str]) -> type[BaseModel] | None:
    model: type[BaseModel] = TidemillConfig
    keys = iter(path)
    for key in keys:
        if key.isdigit():
            continue
        annotation = model.model_fields[key].annotation
        found = _section(annotation)
        if found is None:
            return None
        if get_origin(annotation) is dict:
            next(keys, None)  # the name of a section, which users choose
        model = found
    return model


def _section(annotation: Any) -> type[BaseModel] | None:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    for part in getattr(annotation, "__args__", ()):
        found = _section(part)
        if found is not None:
            return found
    return None
