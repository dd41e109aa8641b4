"""Generation: sampling, the workflow and the generator service."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, model_validator

from schemas.config.agents import AgentsConfig
from schemas.config.base import Seconds, Section

REFUSED_SAMPLING = (
    "min_p",
    "typical_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "logit_bias",
    "bad_words",
    "allowed_token_ids",
    "min_tokens",
    "logits_processors",
)
"""Settings of other samplers under which log-probabilities are not the policy's."""

EPISODE_WORKFLOWS = ("agent", "environment", "tools")
"""Built-in workflows whose samples are conversations of several model calls."""
REWARDING_WORKFLOWS = ("agent", "environment")
"""Those of them whose samples bring a reward, so that no reward term has to be named."""


class SamplingConfig(Section):
    """Sampling of completions."""

    n: int = Field(8, ge=1, le=1024, description="Samples per prompt: the group size.")
    temperature: float = Field(1.0, ge=0, description="Sampling temperature; log-probabilities are taken after it.")
    top_p: float = Field(
        1.0,
        gt=0,
        le=1,
        description="Nucleus sampling; below 1 the log-probabilities are of the truncated distribution.",
    )
    top_k: int = Field(-1, ge=-1, description="Keep the k likeliest tokens; -1 keeps all.")
    max_tokens: int = Field(256, ge=1, description="Longest completion, generated tokens.")
    stop: list[str] = Field(default_factory=list, description="Strings that end a completion.")

    @model_validator(mode="before")
    @classmethod
    def _unbent(cls, data: Any) -> Any:
        for name in REFUSED_SAMPLING if isinstance(data, dict) else ():
            if name in data:
                raise ValueError(
                    f"sampling.{name} is not supported: it changes the distribution that is sampled from, so that"
                    " log-probabilities are not the policy's and training on them is biased"
                )
        return data


class WorkflowConfig(Section):
    """The workflow, which makes trajectories of a prompt."""

    name: str = Field(
        "single_turn", description="single_turn, tools, environment, agent, or your own as module:name or file.py:name."
    )
    args: dict[str, Any] = Field(default_factory=dict, description="Arguments of the workflow.")


class GeneratorConfig(Section):
    """The generator service."""

    engine: str = Field("auto", description="auto, vllm, transformers, scripted, or your own as module:name.")
    args: dict[str, Any] = Field(
        default_factory=dict, description="Passed through to the engine (vLLM: AsyncEngineArgs)."
    )
    replicas: int = Field(1, ge=0, description="Generator services that `tidemill up` starts.")
    max_samples: int = Field(64, ge=1, description="Samples in flight in one replica.")
    lease_s: Seconds = Field(30.0, description="Silence of a replica after which another claims its work.")
    stall_s: Seconds = Field(
        300.0, description="A replica ends, to be restarted, when no running request has gained a token for this long."
    )
    probe_tolerance: float | None = Field(
        None,
        gt=0,
        description="Largest accepted probe difference, nats; by default 1e-3 in float32, 0.1 in 16-bit types.",
    )
    update: Literal["keep", "recompute", "drain"] = Field(
        "keep",
        description="What happens to samples in flight when new weights come. keep: they go on with their keys"
        " and values. recompute: the new weights compute these again. drain: they are finished first, so that every"
        " sample is of one version; new ones wait meanwhile.",
    )
    flush_every: int | None = Field(
        None,
        ge=2,
        description="Save unfinished samples each time they gain this many tokens, the most of each that a"
        " killed replica loses. None: unfinished samples of a killed replica are lost. An agent's finished model calls"
        " are always saved.",
    )
    allow_truncated: bool = Field(
        False,
        description="Train on samples drawn with top_p, top_k or engine arguments that change what is sampled, whose"
        " log-probabilities are not the policy's.",
    )
    workflow: WorkflowConfig = Field(default_factory=WorkflowConfig)
    agents: AgentsConfig = Field(default_factory=AgentsConfig)
