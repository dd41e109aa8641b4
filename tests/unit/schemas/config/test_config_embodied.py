"""Settings of policies that act in environments with numbers: what would do nothing is refused by name."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from schemas.config import TidemillConfig, parse_config
from schemas.config.loading import dump_config
from schemas.errors import ConfigError
from schemas.policy_shape import PolicyShape

EXAMPLES = Path(__file__).parents[4] / "examples"


def parse(example: str = "cartpole", **sections: dict[str, Any]) -> TidemillConfig:
    """The example with these changes; None removes a setting."""
    config = yaml.safe_load((EXAMPLES / example / "config.yaml").read_text())
    for section, changes in sections.items():
        config[section] |= changes
        config[section] = {name: value for name, value in config[section].items() if value is not None}
    return parse_config(config)


@pytest.mark.parametrize("example", ["cartpole", "pendulum"])
def test_the_examples_are_read_again_as_they_were(example: str) -> None:
    config = parse(example)
    assert dump_config(parse_config(dump_config(config))) == dump_config(config)


@pytest.mark.parametrize("file", sorted(file.name for file in (EXAMPLES / "simulators").glob("*.yaml")))
def test_the_runs_in_simulators_are_valid(file: str) -> None:
    config = parse_config(yaml.safe_load((EXAMPLES / "simulators" / file).read_text()))
    if config.model.kind == "mlp":
        PolicyShape.read(EXAMPLES.parent / config.model.path)


def test_a_policys_folder_that_is_missing_is_named_with_where_it_was_looked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError) as refused:
        PolicyShape.read("policy")
    assert str(refused.value) == (
        f"model.path policy: cannot read {tmp_path}/policy/config.json, which says the sizes of an mlp: No such file or"
        " directory"
    )


@pytest.mark.parametrize(
    ("section", "changes", "reason"),
    [
        ("trainer", {"mask_truncated": True}, "trainer.mask_truncated is not supported with model.kind mlp"),
        ("trainer", {"aggregation": "constant"}, "trainer.aggregation is not supported"),
        ("trainer", {"micro_batch_tokens": 64}, "trainer.micro_batch_tokens is not supported"),
        ("trainer", {"activation_checkpointing": True}, "trainer.activation_checkpointing is not supported"),
        ("trainer", {"lora": {}}, "trainer.lora is not supported"),
        ("trainer", {"processes": 2}, "trainer.processes is not supported"),
        ("trainer", {"minibatches": 257}, "trainer.minibatches 257 must be at most 256, the transitions of a step"),
        ("sampling", {"temperature": 0.5}, "sampling.temperature is not supported"),
        ("sampling", {"stop": ["x"]}, "sampling.stop is not supported"),
        ("model", {"kind": "text"}, "model.kind must be mlp to act in environments with numbers, is 'text'"),
        ("trainer", {"advantage": {"name": "raw"}, "critic": None}, "trainer.advantage.name must be gae"),
    ],
)
def test_a_setting_that_would_do_nothing_is_refused(section: str, changes: dict[str, Any], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        parse(**{section: changes})


@pytest.mark.parametrize(
    "changes",
    [
        {"loss": {"name": "ppo"}},
        {"advantage": {"name": "gae"}},
        {"critic": {}},
        {"epochs": 2},
        {"minibatches": 1},
        {"aggregation": "token_mean"},
    ],
)
def test_sac_takes_no_settings_of_ppo(changes: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=f"trainer.{next(iter(changes))} has no effect with trainer.sac: remove it"):
        parse("pendulum", trainer=changes)


def test_rewards_are_scaled_for_a_critic_or_sac_alone() -> None:
    assert parse(trainer={"scale_rewards": True}).reward_discount == 0.98
    assert parse("pendulum", trainer={"scale_rewards": True}).reward_discount == 0.99
    assert parse().reward_discount is None
    reason = r"trainer\.scale_rewards true needs model\.kind mlp, and trainer\.critic or trainer\.sac"
    changes = {"advantage": {"name": "grpo"}, "critic": None, "scale_rewards": True}
    with pytest.raises(ConfigError, match=reason):
        parse(trainer=changes, sampling={"n": 8})
    with pytest.raises(ConfigError, match=reason):
        parse("reach", trainer={"scale_rewards": True})


def test_sac_is_not_for_language_models() -> None:
    with pytest.raises(ConfigError, match=r"model\.kind must be mlp .* is 'text'"):
        parse("pendulum", model={"kind": "text"}, generator={"engine": "vllm", "workflow": {"name": "environment"}})


def test_episodes_of_a_state_may_be_compared_without_a_critic() -> None:
    assert parse(trainer={"advantage": {"name": "grpo"}, "critic": None}, sampling={"n": 8}).compares_episodes
    assert not parse().compares_episodes
    with pytest.raises(ConfigError, match="the advantage is 'grpo' and there is a critic"):
        parse(trainer={"advantage": {"name": "grpo"}})


def test_a_fragment_may_be_cut_into_minibatches() -> None:
    assert parse(trainer={"minibatches": 8}).trainer.minibatches == 8
