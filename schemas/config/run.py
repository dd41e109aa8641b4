"""Sections for the whole run: name, model, bound on staleness, broker and log."""

from typing import Annotated, Literal

from pydantic import Field

from schemas.config.base import ModelPath, Seconds, Section, UserPath, matching

RunName = Annotated[
    str,
    matching(
        r"[a-z0-9][a-z0-9_-]{0,62}",
        "run.name",
        "at most 63 lower-case letters, digits, - and _, beginning with a letter or digit",
    ),
]
Prefix = Annotated[str, matching(r"[A-Za-z0-9_.-]+", "broker.prefix", "letters, digits, - _ and .")]


class RunConfig(Section):
    """Name, folder, seed and description of the run."""

    name: RunName = "run"
    """Name of the run, and part of its keys in the broker; lower-case letters, digits, - and _."""
    folder: UserPath | None = None
    """Folder for the run's files; runs/NAME by default."""
    base: UserPath | None = None
    """Folder for relative paths of your own code; by default the folder of the configuration file."""
    seed: int = Field(0, ge=0)
    """Seed of prompt order, sampling and training."""
    tags: list[str] = []
    """Tags, by which lists of runs and trackers find this run."""
    notes: str | None = None
    """What this run is for, in your own words; shown beside its name."""


class ModelConfig(Section):
    """The policy."""

    path: ModelPath
    """Folder or hub id of a Hugging Face causal language model; a hub id may name a revision: org/name@revision."""
    dtype: Literal["float32", "bfloat16", "float16"] = "bfloat16"
    """Type for training, generation and published weights. The trainer's weights and optimizer are in float32."""
    kind: Literal["text", "vision", "mlp"] = "text"
    """text, or vision: a model that reads images, of the families Qwen2.5-VL and Qwen3-VL (docs/vision.md). mlp: a
    small policy for environments with numbers (docs/embodied.md), whose sizes are in path/config.json."""
    max_pixels: int | None = Field(None, ge=784)
    """Most pixels of an image; larger images are scaled down. By default the model's own limit. Qwen2.5-VL uses one
    token for each 28 x 28 pixels."""
    freeze_vision: bool = True
    """Don't train the vision tower of a vision model, and don't publish it to the generators."""
    max_length: int = Field(2048, ge=8)
    """Most tokens of prompt and completion together."""
    output_tokens: str | None = None
    """Regular expression of the only tokens that the policy can produce, such as `<a\\d+>` for actions. Generation and
    training compute log-probabilities among these tokens alone."""
    trust_remote_code: bool = False
    """Run Python code that comes with the model."""


def count_slots(staleness: int, batch: int, window: int) -> int:
    """Return the most prompt groups in the pipeline at once; broker/lua/prelude.lua computes the same."""
    return (staleness + 1) * batch - (window - 1)


def slots_problem(staleness: int, batch: int, window: int) -> str | None:
    """Return why no batch of this size can ever be complete, or None if it can: each of its groups needs a slot."""
    slots = count_slots(staleness, batch, window)
    if slots >= batch:
        return None
    return (
        f"flow.window {window} leaves {slots} slots for a batch of {batch} at staleness {staleness}: the window may be"
        f" at most {staleness * batch + 1}, staleness times batch at least {window - 1}"
    )


class FlowConfig(Section):
    """The bound on staleness. Slots = (staleness + 1) * trainer.batch_groups - (window - 1)."""

    staleness: int = Field(4, ge=0, le=1000)
    """Largest age of a trained token, in weight versions."""
    window: int = Field(1, ge=1)
    """How far a finished group may overtake the oldest unfinished group; 1 keeps the order of admission."""


class BrokerConfig(Section):
    """The Redis or Valkey server, 7.0 or newer."""

    url: str | None = None
    """redis://, rediss:// or unix:// URL. By default REDIS_URL, or an embedded server if that is not set."""
    prefix: Prefix = "tidemill"
    """First part of every key."""
    deadline_s: Seconds = 60.0
    """How long a service retries while the broker does not answer."""
    max_message_bytes: int = Field(16 * 1024 * 1024, ge=1024)
    """Largest accepted message, in bytes."""
    max_deliveries: int = Field(5, ge=1)
    """Deliveries after which a message goes to the dead letters."""
    fsync: Literal["everysec", "always", "no"] = "everysec"
    """appendfsync of the embedded server."""


class TraceConfig(Section):
    """Traces of episodes: from admission over each call, tool and reward term to the step that trained it."""

    url: str | None = Field(None, pattern="^https?://")
    """Receiver of OpenTelemetry's spans by OTLP over HTTP, such as http://localhost:4318; else only the page has
    them."""
    share: float = Field(0.01, ge=0, le=1)
    """Share of the trained samples that are sent; those that failed all are."""


class LogConfig(Section):
    """Logging."""

    level: Literal["debug", "info", "warning", "error"] = "info"
    """Lowest level that is logged."""
    format: Literal["auto", "human", "json"] = "auto"
    """human: lines of text. json: one JSON object per line. auto: human on a terminal, otherwise json."""
