"""Offline training: losses on preference pairs against their formulas, and when a warm-started model is up to date."""

import math
from pathlib import Path

import pytest
import torch

from consumers.offline.pairs import bradley_terry_loss, dpo_loss, ipo_loss, preference_margin
from consumers.offline.provenance import settings_digest
from schemas.config import WarmStartConfig

MARGINS = [-800.0, -3.0, -0.2, 0.0, 0.7, 5.0, 800.0]
SETTINGS = WarmStartConfig.model_validate(
    {"model": "model.py:build", "dataset": {"name": "data/turns.py:Turns"}, "eval": {"name": "arithmetic"}}
)


def softplus(x: float) -> float:
    return max(x, 0.0) + math.log1p(math.exp(-abs(x)))


def test_margin_is_relative_to_the_reference_and_to_the_rejected_answer() -> None:
    values = [torch.tensor([v]) for v in (-4.0, -9.0, -5.0, -7.0)]
    assert preference_margin(*values).tolist() == [1.0 - (-2.0)]


@pytest.mark.parametrize("beta", [0.1, 2.0])
def test_values(beta: float) -> None:
    margins = torch.tensor(MARGINS, dtype=torch.float64)
    assert dpo_loss(margins, beta).tolist() == pytest.approx([softplus(-beta * h) for h in MARGINS])
    assert ipo_loss(margins, beta).tolist() == pytest.approx([(h - 1 / (2 * beta)) ** 2 for h in MARGINS])
    assert bradley_terry_loss(margins).tolist() == pytest.approx([softplus(-h) for h in MARGINS])


def test_gradcheck() -> None:
    margins = torch.tensor([-3.0, -0.2, 0.7, 5.0], dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda h: dpo_loss(h, 0.3), (margins,))
    assert torch.autograd.gradcheck(lambda h: ipo_loss(h, 0.3), (margins,))
    assert torch.autograd.gradcheck(lambda h: bradley_terry_loss(0.5 * h), (margins,))


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
