"""Sections of the run as a whole: its name, the model, the bound on staleness, the broker and the log."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from schemas.config.base import ModelPath, Seconds, Section, UserPath, matching

RunName = Annotated[
    str,
    matching(
        r"[a-z0-9][a-z0-9_-]{0,62}",
        "run.name",
        "lower-case letters, digits, - and _, at most 63, and begin with a letter or digit",
    ),
]
Prefix = Annotated[str, matching(r"[A-Za-z0-9_.-]+", "broker.prefix", "letters, digits, - _ and .")]


class RunConfig(Section):
    """Name, folder and seed of the run."""

    name: RunName = Field(
        "run", description="Name of the run, its key prefix in the broker; lower-case letters, digits, - and _."
    )
    folder: UserPath | None = Field(None, description="Folder of the run's files; runs/NAME by default.")
    base: UserPath | None = Field(
        None, description="Folder in which plugin files are looked up; that of the configuration file by default."
    )
    seed: int = Field(0, ge=0, description="Seed of prompt order, sampling and training.")


class ModelConfig(Section):
    """The policy."""

    path: ModelPath = Field(
        description="Folder of a Hugging Face causal language model, or its hub id, also of a"
        " revision: org/name@revision."
    )
    dtype: Literal["float32", "bfloat16", "float16"] = Field(
        "bfloat16",
        description="Compute type of training and generation, and the wire type of weights; the trainer's own weights"
        " and optimizer are float32.",
    )
    kind: Literal["text", "vision"] = Field(
        "text",
        description="text, or vision: a model that reads images, of the families Qwen2.5-VL and Qwen3-VL, see"
        " docs/vision.md.",
    )
    max_pixels: int | None = Field(
        None,
        ge=784,
        description="Most pixels of an image, to which larger ones are scaled down; by default the model's own limit."
        " An image of Qwen2.5-VL takes a token for each 28 x 28 pixels.",
    )
    freeze_vision: bool = Field(
        True,
        description="Leave the vision tower of a vision model as it is: it is not trained, and does not travel to the"
        " generators.",
    )
    max_length: int = Field(2048, ge=8, description="Longest prompt and completion together, tokens.")
    trust_remote_code: bool = Field(False, description="Run Python code that comes with the model.")


def count_slots(staleness: int, batch: int, window: int) -> int:
    """Most prompt groups in the pipeline at once; also in broker/lua/prelude.lua."""
    return (staleness + 1) * batch - (window - 1)


def slots_problem(staleness: int, batch: int, window: int) -> str | None:
    """Say why no batch of this size can ever be complete, None if it can: it needs a slot for each of its groups."""
    slots = count_slots(staleness, batch, window)
    if slots >= batch:
        return None
    return (
        f"flow.window {window} leaves {slots} slots for a batch of {batch} at staleness {staleness}: the window may be"
        f" at most {staleness * batch + 1}, staleness times batch at least {window - 1}"
    )


class FlowConfig(Section):
    """The bound on staleness. Slots = (staleness + 1) * trainer.batch_groups - (window - 1)."""

    staleness: int = Field(4, ge=0, le=1000, description="Bound on the age of a trained token, weight versions.")
    window: int = Field(
        1,
        ge=1,
        description="How far a finished group may overtake the oldest unfinished one; 1 is strict admission order.",
    )


class BrokerConfig(Section):
    """The Redis or Valkey server, 7.0 or newer."""

    url: str | None = Field(
        None, description="redis://, rediss:// or unix:// URL; REDIS_URL, else an embedded server, when absent."
    )
    prefix: Prefix = Field("tidemill", description="First part of every key.")
    deadline_s: Seconds = Field(60.0, description="How long a service tries to reach a broker that does not answer.")
    max_message_bytes: int = Field(16 * 1024 * 1024, ge=1024, description="Largest accepted message.")
    max_deliveries: int = Field(5, ge=1, description="Deliveries after which a message goes to the dead letters.")
    fsync: Literal["everysec", "always", "no"] = Field("everysec", description="appendfsync of the embedded server.")


class LogConfig(Section):
    """Logging: human on a terminal, JSON otherwise."""

    level: Literal["debug", "info", "warning", "error"] = Field("info", description="The least that is logged.")
    format: Literal["auto", "human", "json"] = Field(
        "auto", description="human: lines for people. json: an object a line. auto: human on a terminal, else json."
    )
