"""Orders and settings of a running run, and the answers to them."""

from typing import Literal

from pydantic import Field

from schemas.control_api.base import Answer, RequestBody, RunState
from schemas.limits import LARGEST_REWARD


class Settings(Answer):
    """Settings that can be changed while the run is active; null: the configured value, or no bound."""

    staleness: int
    batch: int
    concurrency: int | None = Field(description="Most samples in flight in one generator; null: generator.max_samples.")
    lr: float | None = Field(description="Peak learning rate; null: trainer.optimizer.lr.")
    steps: int = Field(description="Steps of the whole run.")
    temperature: float | None = Field(description="Sampling temperature of new tasks; null: sampling.temperature.")
    eval_every: int | None = Field(description="Versions between two evaluations; null: eval.every.")
    checkpoint_every: int | None = Field(description="Steps between checkpoints; null: trainer.checkpoint.every.")
    changed: list[str] = Field(description="Names of the settings that an order has changed.")


class SettingsChange(RequestBody):
    """Body of PATCH /v1/settings: an absent setting stays, null restores the configured value.

    This is the table of what can be changed in a running run. A new setting needs a line here, one in Settings, one in
    the form of the dashboard (js/live/orders.js), and its reader, which asks the orders for it by name.
    """

    staleness: int | None = Field(None, ge=0, le=1000)
    batch: int | None = Field(None, ge=1, le=1_000_000)
    concurrency: int | None = Field(None, ge=1, le=1_000_000)
    lr: float | None = Field(None, gt=0, le=1, allow_inf_nan=False, description="Peak learning rate.")
    steps: int | None = Field(
        None, ge=1, le=1_000_000_000, description="Steps of the whole run; must exceed the steps so far."
    )
    temperature: float | None = Field(
        None, gt=0, le=10, allow_inf_nan=False, description="Sampling temperature of tasks admitted from now on."
    )
    eval_every: int | None = Field(None, ge=1, le=1_000_000)
    checkpoint_every: int | None = Field(None, ge=1, le=1_000_000)


CONFIGURED = {
    "staleness": "flow.staleness",
    "batch": "trainer.batch_groups",
    "concurrency": "generator.max_samples",
    "lr": "trainer.optimizer.lr",
    "steps": "trainer.steps",
    "temperature": "sampling.temperature",
    "eval_every": "eval.every",
    "checkpoint_every": "trainer.checkpoint.every",
}
"""The setting of the configuration in whose place each of them is."""


class WaitRequest(RequestBody):
    """Body of POST /v1/resume, drain and checkpoint. wait_s: longest wait for the order, seconds."""

    wait_s: float = Field(0.0, ge=0, le=300)


class PauseRequest(WaitRequest):
    """Body of POST /v1/pause. wait_s: longest wait for the pause, seconds; the answer says whether it is done."""

    mode: Literal["freeze", "drain"] = "freeze"


class EvaluationRequest(WaitRequest):
    """Body of POST /v1/evaluations. version: the current one or a later one; the current one by default."""

    version: int | None = Field(None, ge=0, le=2**53)


def scaled_role(role: str, pool: str = "") -> str:
    """Return what orders and ``Scaling.replicas`` call a kind of services: ``generator``, or ``generator.POOL``."""
    return f"{role}.{pool}" if pool else role


def on_node(kind: str, node: str) -> str:
    """Return what the order of a kind of services is called to one machine: its node, or "" for `tidemill up`."""
    return f"{kind}@{node}" if node else kind


ROOM = "room:"
"""Begins the figure in a supervisor's heartbeat that says how many services of a kind its machine has room for."""


class ScaleRequest(RequestBody):
    """Body of POST /v1/scale."""

    role: Literal["generator", "reward"]
    pool: str = Field("", description="Pool of generators, in a run with pools.")
    replicas: int = Field(ge=0, le=1000)


class Accepted(Answer):
    """Answer to an order."""

    order: Literal["pause", "resume", "drain", "stop", "checkpoint", "evaluate", "scale", "requeue", "drop"]
    changed: bool = Field(description="False if the order changed nothing.")
    done: bool = Field(
        description="Whether all services have followed the order; if not, ``/v1/status`` shows when they have."
    )
    waiting_for: list[str]
    state: RunState
    text: str


class BegunEpisode(Answer):
    """A conversation that has begun."""

    id: str
    base_url: str = Field(description="Its address for clients of OpenAI's protocol; Anthropic's take it without /v1.")
    reward_until: float = Field(description="Unix time, seconds, until which its reward may come.")


class EpisodeReward(RequestBody):
    """Body of POST /v1/episodes/{id}/reward."""

    reward: float = Field(ge=-LARGEST_REWARD, le=LARGEST_REWARD, allow_inf_nan=False)


class RewardedEpisode(Answer):
    """The reward of a conversation that counts. changed: false if an earlier reward stays."""

    id: str
    reward: float
    changed: bool
