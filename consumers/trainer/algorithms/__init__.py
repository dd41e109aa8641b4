"""The RL maths by the names in a configuration, known without PyTorch, so that a wrong name is reported at once."""

from schemas.plugins import Registry

_HERE = "consumers.trainer.algorithms"

LOSSES = Registry(
    "trainer.loss.name",
    {
        **{
            name: f"{_HERE}.losses:{name}"
            for name in ("reinforce", "ppo", "dapo", "dr_grpo", "gspo", "cispo", "dppo", "sapo")
        },
        "decoupled_ppo": f"{_HERE}.losses:DecoupledPpo",
        "m2po": f"{_HERE}.losses:M2po",
    },
)
ADVANTAGES = Registry(
    "trainer.advantage.name",
    {
        **{name: f"{_HERE}.advantages:{name}" for name in ("centered", "grpo", "rloo", "lite_ppo", "max_rl", "raw")},
        "turns": f"{_HERE}.advantages:Turns",
        "reinforce_pp": f"{_HERE}.advantages:ReinforcePp",
        "gae": f"{_HERE}.advantages:Gae",
    },
)
AGGREGATIONS = Registry(
    "trainer.aggregation",
    {name: f"{_HERE}.advantages:{name}" for name in ("token_mean", "sequence_mean", "prompt_mean", "constant")},
)
KL_ESTIMATORS = Registry("trainer.kl.estimator", {name: f"{_HERE}.kl:{name}" for name in ("k1", "k2", "k3")})
