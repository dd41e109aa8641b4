"""Rewards: the functions, the killable workers they run in, and the service around them."""

from schemas.plugins import Registry

REWARDS = Registry(
    "reward",
    {
        "exact": "consumers.reward.functions:exact",
        "format": "consumers.reward.functions:format",
        "gsm8k": "consumers.reward.functions:gsm8k",
        "length": "consumers.reward.functions:length",
        "math": "consumers.reward.functions:math",
        "model": "consumers.reward.functions:model",
        "reasoning_gym": "consumers.reward.functions:reasoning_gym",
    },
)
