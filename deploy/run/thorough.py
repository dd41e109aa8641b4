"""What only ``tidemill doctor`` looks at, since it takes seconds: the model without its weights, and a first reward."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from consumers.reward.scorer import check_reward
from deploy.run.findings import Finding
from producers.datasets.loading import build_dataset
from schemas.codec import Array
from schemas.config import EPISODE_WORKFLOWS, REWARDING_WORKFLOWS, TidemillConfig
from schemas.errors import ConfigError
from schemas.messages import ChatMessage, Span, Trajectory, Turn

GB = 1024**3
STATE_BYTES = 16
"""Of one trained parameter: itself, its gradient and two moments, float32."""


def measure_model(config: TidemillConfig) -> Finding | str:
    """Build the model from its configuration alone, on the meta device, where tensors have shapes and no memory."""
    path, trust = config.model.path, config.model.trust_remote_code
    if config.warm_start is not None and not (Path(path) / "config.json").is_file():
        return f"{path} is not there yet, warm_start makes it"
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from consumers.trainer.model.lora import targets
    from producers.rendering.tokenizer import HfTokenizer

    try:
        settings = AutoConfig.from_pretrained(path, trust_remote_code=trust)
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(settings, trust_remote_code=trust)
    except (OSError, ValueError) as error:
        raise ConfigError(f"model.path {path}: {error}") from error
    if Path(path).expanduser().is_dir():
        HfTokenizer(path, trust)
    count = sum(parameter.numel() for parameter in model.parameters())
    text = f"{count / 1e6:,.1f}M parameters"
    if config.trainer.lora is not None:
        return f"{text}, an adapter of {', '.join(targets(model, config.trainer.lora.targets))}"
    state = count * STATE_BYTES / GB
    return f"{text}; weights, gradients and optimizer of the trainer take {state:,.1f} GB over all ranks"


def score_first_example(config: TidemillConfig) -> Finding | str:
    """The reward of a first example, answered with its own reference answer where it has one."""
    example = build_dataset(config.train[0].at_levels()[0], config.base)[0]
    prompt = example.text if example.text is not None else "\n".join(m.content for m in example.messages or [])
    answer, data, reward = str(example.data.get("answer", "")), example.data, None
    if config.generator.workflow.name in EPISODE_WORKFLOWS:
        asked = [{"role": m.role, "content": m.content} for m in example.messages or [ChatMessage("user", prompt)]]
        data = data | {"messages": [*asked, {"role": "assistant", "content": answer}]}
    if config.generator.workflow.name in REWARDING_WORKFLOWS:
        reward = 1.0
    trajectory = Trajectory(
        run=config.run.name,
        task_id=0,
        sample=0,
        kind="train",
        tokens=Array.of(np.zeros(2), "i4"),
        loss_mask=Array.of([0, 1], "u1"),
        logprobs=Array.of(np.zeros(2), "f4"),
        spans=[Span(0, 1, 2)],
        turns=[Turn("assistant", 1, 2)],
        finish="stop",
        prompt=prompt,
        dataset=config.train[0].label,
        completion=answer,
        generator="doctor",
        data=data,
        reward=reward,
    )
    score = check_reward(config.reward.terms, config.base, trajectory, config.reward.timeout_s, config.reward.env)
    if score is None or score.status != "ok":
        reason = score.reason if score else "no score"
        advice = "mend the reward function: failed samples are excluded from training"
        return Finding("reward trial", "fail", reason, advice)
    given = "" if reward is None else f", if the workflow gives it {reward:g}"
    return f"{score.reward:g} for the reference answer of the first prompt{given}"
