"""Names that an installed package adds by its entry points: found like built-in ones, which they never replace."""

from pathlib import Path
from typing import Any

import jsonschema
import pytest

from consumers.reward.rewards import REWARDS
from consumers.reward.rewards.terms import resolve
from consumers.trainer.algorithms.losses import BoundLoss, ppo
from deploy.checks.names import check_names, editor_schema
from deploy.launchers import LAUNCHERS
from producers.datasets import DATASETS
from producers.datasets.loading import build_dataset
from schemas.config import DatasetConfig, RewardTerm, parse_config
from schemas.errors import ConfigError

ENTRY_POINTS = """
[tidemill.reward]
brevity = planted_plugin:brevity
exact = planted_plugin:brevity

[tidemill.dataset]
planted = planted_plugin.data:Planted

[tidemill.trainer.loss.name]
planted_loss = planted_plugin:loss
ppo = planted_plugin:loss

[tidemill.launcher]
planted_queue = planted_plugin:missing
"""
CODE = """
def brevity(completion, limit=1.0):
    return min(limit, 1.0 / len(completion))

def loss(inputs):
    return None
"""
DATA = """
from tidemill import Example

class Planted:
    def __init__(self, size):
        self.size = size

    def __len__(self):
        return self.size

    def __getitem__(self, index):
        return Example(text=str(index), data={})
"""
CONFIG: dict[str, Any] = {
    "model": {"path": "m"},
    "train": {"name": "planted", "args": {"size": 3}},
    "reward": {"terms": [{"name": "brevity"}]},
    "trainer": {"loss": {"name": "planted_loss"}},
}


@pytest.fixture(autouse=True)
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A package as pip leaves it."""
    package, info = tmp_path / "planted_plugin", tmp_path / "planted_plugin-1.0.dist-info"
    for folder in (package, info):
        folder.mkdir()
    (package / "__init__.py").write_text(CODE)
    (package / "data.py").write_text(DATA)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: planted-plugin\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(ENTRY_POINTS)
    monkeypatch.syspath_prepend(tmp_path)


def test_a_configuration_names_what_a_package_adds() -> None:
    check_names(parse_config(CONFIG))
    jsonschema.validate(CONFIG, editor_schema())
    (term,) = resolve([RewardTerm(name="brevity", args={"limit": 0.5})], Path())
    assert term.label == "brevity"
    assert len(build_dataset(DatasetConfig(name="planted", args={"size": 3}), Path())) == 3
    assert BoundLoss.load("planted_loss", {}).function is not None


def test_a_built_in_name_stays_what_it_is() -> None:
    assert REWARDS.get("exact").__module__ == "consumers.reward.rewards.functions"
    assert BoundLoss.load("ppo", {}).function.func is ppo  # type: ignore[attr-defined]
    assert "exact" not in REWARDS.installed()


def test_a_name_that_nobody_has_is_told_with_the_names_of_packages() -> None:
    with pytest.raises(ConfigError, match=r"unknown dataset 'plantd' \(did you mean 'planted'\?\): one of .*planted,"):
        DATASETS.check("plantd")


def test_a_package_that_lacks_what_it_names_is_a_wrong_configuration() -> None:
    assert LAUNCHERS.check("planted_queue") == "planted_plugin:missing"
    with pytest.raises(ConfigError, match="launcher 'planted_plugin:missing': planted_plugin has no 'missing'"):
        LAUNCHERS.get("planted_queue")
