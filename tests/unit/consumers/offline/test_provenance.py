"""A warm-started model is up to date as long as its settings and the user's own files are the same."""

from __future__ import annotations

from pathlib import Path

from consumers.offline.provenance import settings_digest
from schemas.config import WarmStartConfig

SETTINGS = WarmStartConfig.model_validate(
    {"model": "model.py:build", "dataset": {"name": "data/turns.py:Turns"}, "eval": {"name": "arithmetic"}}
)


def test_other_demonstrations_are_another_model(tmp_path: Path) -> None:
    """Also when they are in a file that the named one imports; a note beside them changes nothing."""
    (tmp_path / "data").mkdir()
    (tmp_path / "model.py").write_text("def build(folder, seed): ...\n")
    (tmp_path / "data/turns.py").write_text("from products import Turns\n")
    (tmp_path / "data/products.py").write_text("class Turns: ...\n")

    def digest() -> str:
        return settings_digest(SETTINGS, 0, "float32", tmp_path)

    first = digest()
    (tmp_path / "data/notes.txt").write_text("x")
    assert digest() == first
    (tmp_path / "data/products.py").write_text("class Turns: more = 1\n")
    second = digest()
    assert second != first
    (tmp_path / "model.py").write_text("def build(folder, seed): return None\n")
    assert digest() not in (first, second)


def test_built_in_names_and_installed_modules_have_no_files(tmp_path: Path) -> None:
    (tmp_path / "model.py").write_text("a = 1\n")
    settings = SETTINGS.model_copy(update={"model": "package.model:build", "dataset": SETTINGS.eval})
    before = settings_digest(settings, 0, "float32", tmp_path)
    (tmp_path / "model.py").write_text("a = 2\n")
    assert settings_digest(settings, 0, "float32", tmp_path) == before
