"""Configuration mistakes are one line that names field, value and what is allowed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from schemas.config import load_config, parse_config, save_config
from schemas.errors import ConfigError

MINIMAL: dict[str, Any] = {
    "model": {"path": "m"},
    "train": {"name": "jsonl"},
    "reward": {"terms": [{"name": "exact"}]},
}


def merged(**sections: Any) -> dict[str, Any]:
    return {**MINIMAL, **sections}


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (merged(trainer={"stepz": 3}), "trainer.stepz: unknown key, did you mean 'steps'?"),
        (merged(tariner={}), "tariner: unknown key, did you mean 'trainer'?"),
        (merged(trainer={"steps": 0}), "trainer.steps: 0 is not allowed, must be greater than or equal to 1"),
        (merged(model={"path": "m", "dtype": "fp8"}), "model.dtype: 'fp8' is not allowed"),
        ({"model": {"path": "m"}}, "train: required and missing; reward: required and missing"),
        (merged(sampling={"n": 1}), "sampling.n is 1: set sampling.n to 2 or more"),
        (merged(sampling={"min_p": 0.1}), "sampling.min_p is not supported: it changes the distribution"),
        (merged(sampling={"repetition_penalty": 1.1}), "sampling.repetition_penalty is not supported"),
        (merged(sampling={"temperature": 0.0}), "sampling.temperature 0 makes every sample of a group equal"),
        (merged(sampling={"max_tokens": 4096}), "leaves no room for a prompt in model.max_length 2048"),
        (merged(flow={"staleness": 0, "window": 9}), "the window may be at most 1"),
    ],
)
def test_a_mistake_is_one_clear_line(data: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as error:
        parse_config(data)
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_later_sources_win(tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    file.write_text(yaml.safe_dump(merged(trainer={"steps": 1, "batch_groups": 1})))
    environment = {"TIDEMILL_TRAINER__STEPS": "2", "TIDEMILL_TRAINER__BATCH_GROUPS": "2", "TIDEMILL_HOME": "x"}
    config = load_config(file, ["trainer.batch_groups=3", "reward.terms.0.weight=0.5"], environment)
    assert (config.trainer.steps, config.trainer.batch_groups, config.reward.terms[0].weight) == (2, 3, 0.5)
    assert config.base == tmp_path


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["trainer.steps"], "must look like trainer.steps=100"),
        (["model.path.x=1"], "which is not a section"),
        (["reward.terms.7.weight=1"], "'7' is not an index below 1"),
        (["trainer.steps=[1"], "is not a YAML value"),
    ],
)
def test_wrong_overrides_are_named(tmp_path: Path, overrides: list[str], message: str) -> None:
    file = tmp_path / "c.yaml"
    file.write_text(yaml.safe_dump(MINIMAL))
    with pytest.raises(ConfigError, match=r"^[^\n]*$") as error:
        load_config(file, overrides, {})
    assert message in str(error.value)


def test_a_file_that_is_not_there_or_not_yaml_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot read the configuration"):
        load_config(tmp_path / "none.yaml", [], {})
    (tmp_path / "bad.yaml").write_text("a: [")
    with pytest.raises(ConfigError, match="is not YAML"):
        load_config(tmp_path / "bad.yaml", [], {})


def test_slots_follow_the_staleness_bound_and_the_window() -> None:
    config = parse_config(merged(flow={"staleness": 4, "window": 3}, trainer={"batch_groups": 8}))
    assert config.slots == 5 * 8 - 2


def test_zero_variance_groups_are_dropped_only_where_advantages_compare() -> None:
    centered = parse_config(merged()).trainer.advantage
    raw = parse_config(merged(trainer={"advantage": {"name": "raw"}})).trainer.advantage
    kept = parse_config(merged(trainer={"advantage": {"keep_zero_variance": True}})).trainer.advantage
    assert (centered.drops_zero_variance, raw.drops_zero_variance, kept.drops_zero_variance) == (True, False, False)


def test_what_is_in_effect_is_saved_and_means_the_same_elsewhere(tmp_path: Path) -> None:
    source = tmp_path / "source" / "mine.yaml"
    source.parent.mkdir()
    source.write_text(yaml.safe_dump(MINIMAL))
    config = load_config(source, ["trainer.steps=7"], {"TIDEMILL_FLOW__STALENESS": "3"})
    saved = tmp_path / "run" / "config.yaml"
    saved.parent.mkdir()
    save_config(config, saved)
    again = load_config(saved, environment={})
    assert again.base == config.base == source.parent
    assert (again.trainer.steps, again.flow.staleness) == (7, 3)
    assert again.model_copy(update={"run": config.run}) == config
    assert saved.stat().st_mode & 0o077 == 0


@pytest.mark.parametrize("word", ["on", "off", "auto"])
def test_a_switch_may_be_written_as_yaml_reads_it(tmp_path: Path, word: str) -> None:
    file = tmp_path / "c.yaml"
    file.write_text(yaml.safe_dump(MINIMAL))
    assert load_config(file, [f"trainer.publish.delta={word}"], {}).trainer.publish.delta == word
