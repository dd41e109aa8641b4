"""The built-in names of a configuration: checked in milliseconds, without importing what they name, and completed.

The JSON schema has them, by which an editor completes and checks a configuration while you write it.
"""

from collections.abc import Iterable
from typing import Any

from consumers.reward.rewards import REWARDS
from consumers.trainer.algorithms import ADVANTAGES, AGGREGATIONS, KL_ESTIMATORS, LOSSES
from producers.datasets import DATASETS
from producers.engines import ENGINES
from producers.workflows import WORKFLOWS
from schemas.config import REWARDING_WORKFLOWS, TidemillConfig, by_pool
from schemas.errors import ConfigError
from schemas.plugins import Registry

FILE = "tidemill.schema.json"

NAMES: dict[tuple[str, str], tuple[Registry, list[str]]] = {
    ("TrainDataset", "name"): (DATASETS, []),
    ("EvalDataset", "name"): (DATASETS, []),
    ("DatasetConfig", "name"): (DATASETS, []),
    ("RewardTerm", "name"): (REWARDS, []),
    ("WorkflowConfig", "name"): (WORKFLOWS, []),
    ("GeneratorConfig", "engine"): (ENGINES, ["auto"]),
    ("LossConfig", "name"): (LOSSES, []),
    ("AdvantageConfig", "name"): (ADVANTAGES, []),
    ("TrainerConfig", "aggregation"): (AGGREGATIONS, []),
    ("KlConfig", "estimator"): (KL_ESTIMATORS, []),
    ("RejectionConfig", "measure"): (KL_ESTIMATORS, ["ratio"]),
}
"""The choices of each setting that also takes an import path, by its section and key, and further words it takes."""


def check_names(config: TidemillConfig) -> str:
    """Check that every name is built in or an import path. Return the loss, advantage and engine names."""
    trainer, engines = config.trainer, sorted({one.generator.engine for one in by_pool(config).values()})
    held_out = config.eval.dataset if config.eval else []
    warm = [config.warm_start.dataset, config.warm_start.eval] if config.warm_start else []
    for dataset in (*config.train, *held_out, *warm):
        DATASETS.check(dataset.name)
    for term in (*config.reward.terms, *config.eval_terms):
        REWARDS.check(term.name)
    WORKFLOWS.check(config.generator.workflow.name)
    for engine in engines:
        if engine != "auto":
            ENGINES.check(engine)
    # Algorithms are named after both.
    for setting, name, ours, other, others in (
        ("trainer.loss.name", trainer.loss.name, LOSSES, "trainer.advantage.name", ADVANTAGES),
        ("trainer.advantage.name", trainer.advantage.name, ADVANTAGES, "trainer.loss.name", LOSSES),
    ):
        if name in others.names and name not in ours.names:
            raise ConfigError(
                f"{setting} {name!r} is a choice for {other}: set {other}={name}; {setting} is one of"
                f" {', '.join(ours.names)}"
            )
    for loss in trainer.losses.values():
        LOSSES.check(loss.name)
    for advantage in trainer.advantages.values():
        ADVANTAGES.check(advantage.name)
    AGGREGATIONS.check(trainer.aggregation)
    KL_ESTIMATORS.check(trainer.kl.estimator)
    for rule in trainer.rejection:
        if rule.measure != "ratio":
            KL_ESTIMATORS.check(rule.measure)
    return f"loss {trainer.loss.name}, advantage {trainer.advantage.name}, engine {', '.join(engines)}"


def editor_schema() -> dict[str, Any]:
    """Return the schema. It accepts what a file may hold: a single dataset for a list, and no terms for episodes."""
    schema = TidemillConfig.model_json_schema()
    sections = schema["$defs"]
    for (section, key), (registry, more) in NAMES.items():
        field = sections[section]["properties"][key]
        del field["type"]
        field["anyOf"] = [{"enum": [*more, *registry.names, *registry.installed()]}, {"type": "string", "pattern": ":"}]
    schema["required"].remove("reward")
    sections["RewardConfig"]["required"].remove("terms")
    del sections["RewardConfig"]["properties"]["terms"]["minItems"]
    rewarding = _at(("generator", "workflow", "name"), {"enum": sorted(REWARDING_WORKFLOWS)})
    return {**schema, "if": rewarding, "else": _at(("reward", "terms"), {"minItems": 1})}


def _at(path: Iterable[str], check: dict[str, Any]) -> dict[str, Any]:
    """Return a schema that demands the key at ``path``, and checks its value."""
    for key in reversed([*path]):
        check = {"required": [key], "properties": {key: check}}
    return check
