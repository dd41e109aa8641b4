"""Datasets: examples by index, in an order that is the same on every machine and after every restart."""

from schemas.plugins import Registry

DATASETS = Registry(
    "dataset",
    {
        "arithmetic": "producers.datasets.arithmetic:Arithmetic",
        "gsm8k": "producers.datasets.gsm8k:Gsm8k",
        "gymnasium": "producers.embodied.gymnasium_tasks:GymnasiumTasks",
        "hf": "producers.datasets.hf:HuggingFace",
        "jsonl": "producers.datasets.jsonl:Jsonl",
        "lerobot": "producers.embodied.lerobot:LeRobot",
        "live": "producers.agents.places:LivePlaces",
        "reasoning_gym": "producers.datasets.reasoning_gym:ReasoningGym",
        "verifiers": "producers.episodes.environments.verifiers.dataset:VerifiersTasks",
    },
)
