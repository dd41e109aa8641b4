"""The JSON schema of the configuration, by which an editor completes and checks one while you write it."""

from collections.abc import Iterable
from typing import Any

from consumers.reward.rewards import REWARDS
from consumers.trainer.algorithms import ADVANTAGES, AGGREGATIONS, KL_ESTIMATORS, LOSSES
from producers.datasets import DATASETS
from producers.engines import ENGINES
from producers.workflows import WORKFLOWS
from schemas.config import TidemillConfig
from schemas.config.generator import REWARDING_WORKFLOWS

FILE = "tidemill.schema.json"

NAMES: dict[tuple[str, str], list[str]] = {
    ("TrainDataset", "name"): DATASETS.names,
    ("EvalDataset", "name"): DATASETS.names,
    ("DatasetConfig", "name"): DATASETS.names,
    ("RewardTerm", "name"): REWARDS.names,
    ("WorkflowConfig", "name"): WORKFLOWS.names,
    ("GeneratorConfig", "engine"): ["auto", *ENGINES.names],
    ("LossConfig", "name"): LOSSES.names,
    ("AdvantageConfig", "name"): ADVANTAGES.names,
    ("TrainerConfig", "aggregation"): AGGREGATIONS.names,
    ("KlConfig", "estimator"): KL_ESTIMATORS.names,
    ("RejectionConfig", "measure"): ["ratio", *KL_ESTIMATORS.names],
}
"""The built-in names of each setting that also takes an import path, by its section and its key."""


def editor_schema() -> dict[str, Any]:
    """Return the schema. It accepts what a file may hold: a single dataset for a list, and no terms for episodes."""
    schema = TidemillConfig.model_json_schema()
    sections = schema["$defs"]
    for (section, key), names in NAMES.items():
        field = sections[section]["properties"][key]
        del field["type"]
        field["anyOf"] = [{"enum": names}, {"type": "string", "pattern": ":"}]
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
