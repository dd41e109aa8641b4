"""Reward functions: the built-in ones by name, and the terms that call built-in and users' functions."""

from schemas.plugins import Registry

REWARDS = Registry(
    "reward",
    {
        "clevr": "consumers.reward.rewards.vision:clevr",
        "code": "consumers.reward.rewards.programs.score:code",
        "episode": "consumers.reward.rewards.functions:episode",
        "exact": "consumers.reward.rewards.functions:exact",
        "format": "consumers.reward.rewards.functions:format",
        "geometry3k": "consumers.reward.rewards.vision:geometry3k",
        "gsm8k": "consumers.reward.rewards.functions:gsm8k",
        "judge": "consumers.reward.rewards.judge:judge",
        "length": "consumers.reward.rewards.functions:length",
        "math": "consumers.reward.rewards.functions:math",
        "reasoning_gym": "consumers.reward.rewards.reasoning_gym:reasoning_gym",
        "remote": "consumers.reward.rewards.remote:remote",
        "reward_model": "consumers.reward.rewards.reward_model:reward_model",
        "reward_model_server": "consumers.reward.rewards.remote:reward_model_server",
        "searchr1": "consumers.reward.rewards.grading:searchr1",
        "supervised": "consumers.reward.rewards.functions:supervised",
        "teacher": "consumers.reward.rewards.teacher:teacher",
        "teacher_self": "consumers.reward.rewards.teacher:teacher_self",
        "teacher_server": "consumers.reward.rewards.teacher:teacher_server",
        "vqa": "consumers.reward.rewards.vision:vqa",
    },
)
