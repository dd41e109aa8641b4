"""Reward functions: the built-in ones by name, and the terms that call built-in and users' functions."""

from schemas.plugins import Registry

REWARDS = Registry(
    "reward",
    {
        "code": "consumers.reward.rewards.functions:code",
        "episode": "consumers.reward.rewards.functions:episode",
        "exact": "consumers.reward.rewards.functions:exact",
        "format": "consumers.reward.rewards.functions:format",
        "gsm8k": "consumers.reward.rewards.functions:gsm8k",
        "length": "consumers.reward.rewards.functions:length",
        "math": "consumers.reward.rewards.functions:math",
        "model": "consumers.reward.rewards.functions:model",
        "reasoning_gym": "consumers.reward.rewards.functions:reasoning_gym",
    },
)
