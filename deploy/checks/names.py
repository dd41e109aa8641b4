"""Checks of the built-in names in a configuration, without importing what they name: in milliseconds."""

from consumers.reward.rewards import REWARDS
from consumers.trainer.algorithms import ADVANTAGES, AGGREGATIONS, KL_ESTIMATORS, LOSSES
from producers.datasets import DATASETS
from producers.engines import ENGINES
from producers.workflows import WORKFLOWS
from schemas.config import TidemillConfig, by_pool
from schemas.errors import ConfigError


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
    _check_not_swapped(trainer.loss.name, trainer.advantage.name)
    LOSSES.check(trainer.loss.name)
    ADVANTAGES.check(trainer.advantage.name)
    AGGREGATIONS.check(trainer.aggregation)
    KL_ESTIMATORS.check(trainer.kl.estimator)
    for rule in trainer.rejection:
        if rule.measure != "ratio":
            KL_ESTIMATORS.check(rule.measure)
    return f"loss {trainer.loss.name}, advantage {trainer.advantage.name}, engine {', '.join(engines)}"


def _check_not_swapped(loss: str, advantage: str) -> None:
    """Raise ConfigError for an advantage that is given as the loss, or the reverse: algorithms are named after both."""
    for setting, name, ours, other, others in (
        ("trainer.loss.name", loss, LOSSES, "trainer.advantage.name", ADVANTAGES),
        ("trainer.advantage.name", advantage, ADVANTAGES, "trainer.loss.name", LOSSES),
    ):
        if name in others.names and name not in ours.names:
            raise ConfigError(
                f"{setting} {name!r} is a choice for {other}: set {other}={name}; {setting} is one of"
                f" {', '.join(ours.names)}"
            )
