"""A random language model of a given size, and one real optimizer step of it: what the weights benchmark moves."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import Qwen2Config

from consumers.trainer.model.hf_weights import reference_logprobs
from consumers.trainer.model.policy import Policy
from consumers.trainer.model.snapshot import Snapshot, Snapshots
from consumers.trainer.step.optimizer import build_optimizer
from deploy.offline.tiny_model import byte_tokenizer, random_model
from schemas.config import OptimizerConfig
from schemas.errors import ConfigError

WIRE = "bfloat16"
PROBE = 32
"""Tokens, as trainer.publish.probe_tokens has them by default."""


@dataclass(frozen=True)
class Shape:
    """A decoder of this many layers; parameters come close to the name it has in SHAPES."""

    hidden: int
    intermediate: int
    layers: int
    vocabulary: int


SHAPES = {
    "1M": Shape(128, 384, 4, 512),
    "50M": Shape(512, 1408, 15, 4096),
    "500M": Shape(1280, 3456, 24, 8192),
}


class Subject:
    """A policy with float32 parameters, as a trainer holds them, and AdamW at a learning rate of 1e-6."""

    def __init__(self, name: str) -> None:
        shape = SHAPES.get(name)
        if shape is None:
            raise ConfigError(f"a model of {name} is not known here, give some of {', '.join(SHAPES)}")
        model = random_model(
            shape.vocabulary,
            0,
            hidden=shape.hidden,
            intermediate=shape.intermediate,
            layers=shape.layers,
            heads=shape.hidden // 64,
            max_length=1024,
        )
        self.policy = Policy(model)
        self.parameters = sum(parameter.numel() for parameter in self.policy.parameters())
        self._snapshots = Snapshots(self.policy, WIRE)
        self._tokens = torch.randint(shape.vocabulary, (4, 128), generator=torch.Generator().manual_seed(0))

    def step(self) -> None:
        """One optimizer step on the cross-entropy of 4 × 128 random tokens."""
        optimizer = build_optimizer(self.policy.parameters(), OptimizerConfig(lr=1e-6))
        self.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    def backward(self) -> None:
        """Forward and backward: the part of a step during which the weights are read."""
        targets = self._tokens[:, 1:]
        scores = self.policy(self._tokens, targets, torch.ones_like(targets, dtype=torch.bool))
        (-scores.logprobs.mean()).backward()

    def take(self) -> Snapshot:
        """The weights as they are about to travel."""
        return self._snapshots.take()

    def probe(self) -> None:
        """The forward that makes the probe's reference."""
        reference_logprobs(self.policy, self._tokens[0, :PROBE].tolist())

    def write(self, path: Path) -> None:
        """The weights as they travel."""
        snapshot = self.take()
        snapshot.fill()
        snapshot.write(path)

    def save(self, folder: Path) -> Path:
        """A model folder that an engine boots from."""
        lm: Any = self.policy.causal_lm
        folder.mkdir(parents=True)
        config = Qwen2Config.from_dict(lm.config.to_dict() | {"dtype": WIRE})
        config.architectures = ["Qwen2ForCausalLM"]
        config.save_pretrained(folder)
        self.write(folder / "model.safetensors")
        byte_tokenizer([]).save_pretrained(folder)
        return folder
