"""The tree keeps its rules: no folder is too wide, and the contracts of `make lint` do find a circle."""

import subprocess
import sys
import tomllib
from pathlib import Path

import grimp
import pytest

ROOT = Path(__file__).resolve().parents[3]
PACKAGES = ("schemas", "broker", "producers", "consumers", "deploy")
WIDEST = 13
"""Modules in one folder, its ``__init__`` not counted."""

FILE_CIRCLE = {"room/first.py": "import planted.room.second", "room/second.py": "import planted.room.first"}
FOLDER_CIRCLE = {
    "left/one.py": "import planted.right.one",
    "left/two.py": "",
    "right/one.py": "",
    "right/two.py": "import planted.left.two",
}
TYPES_ONLY = "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    "


def test_no_folder_has_more_modules_than_a_reader_keeps_in_mind() -> None:
    for package in (*PACKAGES, "tests", "benchmarks", "examples"):
        for folder in (ROOT / package, *(ROOT / package).rglob("*/")):
            modules = [file for file in folder.glob("*.py") if file.name != "__init__.py"]
            assert len(modules) <= WIDEST, folder


def test_no_module_imports_the_folder_whose_init_imports_it() -> None:
    """The contract looks at siblings; a circle between a folder's ``__init__`` and a file in it is not among them."""
    graph = grimp.build_graph(*PACKAGES, cache_dir=None)
    for folder in sorted(graph.modules):
        for imported in graph.find_modules_directly_imported_by(folder) if graph.find_children(folder) else ():
            assert graph.find_shortest_chain(imported, folder) is None, (folder, imported)


@pytest.mark.parametrize("types_only", [False, True], ids=["run time", "type checking"])
@pytest.mark.parametrize("planted", [FILE_CIRCLE, FOLDER_CIRCLE], ids=["files", "folders"])
def test_the_contract_finds_a_circle(tmp_path: Path, planted: dict[str, str], types_only: bool) -> None:
    assert lint(tmp_path, {name: "" for name in planted}) == 0
    assert lint(tmp_path, {name: TYPES_ONLY + text if types_only and text else text for name, text in planted.items()})


def lint(folder: Path, files: dict[str, str]) -> int:
    """Exit status of the project's contract on circles over a package of these files."""
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["importlinter"][
        "contracts"
    ]
    assert [one["ancestors"] for one in contracts if one["type"] == "acyclic_siblings"] == [list(PACKAGES)]
    settings = '[tool.importlinter]\nroot_packages = ["planted"]\n[[tool.importlinter.contracts]]\n'
    settings += 'name = "circles"\ntype = "acyclic_siblings"\nancestors = ["planted"]\n'
    (folder / "pyproject.toml").write_text(settings, encoding="utf-8")
    for name, text in files.items():
        file = folder / "planted" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        for package in (file.parent, folder / "planted"):
            (package / "__init__.py").touch()
        file.write_text(text, encoding="utf-8")
    command = [Path(sys.executable).with_name("lint-imports"), "--no-cache", "--no-logo"]
    return subprocess.run(command, cwd=folder, capture_output=True, timeout=60).returncode
