"""The configuration's own words name every built-in algorithm part, and none that does not exist."""

import re

import pytest
from pydantic import BaseModel

from consumers.trainer.algorithms import ADVANTAGES, AGGREGATIONS, KL_ESTIMATORS, LOSSES
from schemas.config import AdvantageConfig, KlConfig, LossConfig, TrainerConfig
from schemas.config.algorithm import RECIPES
from schemas.config.trainer import AGGREGATION_NAMES
from schemas.errors import ConfigError
from schemas.plugins import Registry
from tests.support.configurations import minimal_config


@pytest.mark.parametrize(
    ("section", "field", "registry"),
    [
        (LossConfig, "name", LOSSES),
        (AdvantageConfig, "name", ADVANTAGES),
        (KlConfig, "estimator", KL_ESTIMATORS),
        (TrainerConfig, "aggregation", AGGREGATIONS),
    ],
)
def test_a_description_lists_its_registrys_names(section: type[BaseModel], field: str, registry: Registry) -> None:
    description = " ".join((section.model_fields[field].description or "").split())
    listed = re.sub(r"\(.*?\)", "", description.partition(", or your own")[0]).rpartition(":")[2]
    assert sorted(re.findall(r"\w+", listed)) == registry.names


def test_recipes_are_made_of_built_in_parts() -> None:
    for loss, (aggregation, advantage) in RECIPES.items():
        assert loss in LOSSES.names
        assert aggregation in AGGREGATIONS.names
        assert advantage in ADVANTAGES.names


def test_an_aggregation_that_does_not_exist_is_refused_with_those_that_do() -> None:
    assert sorted(AGGREGATION_NAMES) == AGGREGATIONS.names
    with pytest.raises(ConfigError, match=r"trainer\.aggregation: 'tokn_mean' is not known, must be one of constant"):
        minimal_config(model={"path": "m"}, trainer={"aggregation": "tokn_mean"})
