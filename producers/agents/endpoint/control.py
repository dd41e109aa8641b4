"""Routes beside the model calls: the list of models, and reports of an agent about its episode."""

import math

import msgspec

from producers.agents.endpoint.errors import bad_request
from producers.agents.endpoint.protocols import JSON, Asker, convert, read_json

NAME = "policy"
MODEL: JSON = {
    "id": NAME,
    "object": "model",
    "type": "model",
    "display_name": NAME,
    "created": 0,
    "created_at": "2026-01-01T00:00:00Z",
    "owned_by": "tidemill",
}


class RewardBody(msgspec.Struct):
    """A reward of the episode, or of the completion with an id; metrics of the episode."""

    reward: float | None = None
    completion: str | None = None
    metrics: dict[str, float] = {}


async def models(body: bytes, asker: Asker) -> JSON:
    """Return the list of models, in a form that OpenAI's and Anthropic's clients both read."""
    return {"object": "list", "data": [MODEL], "has_more": False, "first_id": NAME, "last_id": NAME}


async def model(body: bytes, asker: Asker) -> JSON:
    """Return a model; requests may name it as they like."""
    return MODEL


async def reward(body: bytes, asker: Asker) -> JSON:
    """Record a reward, metrics or both."""
    report = convert(read_json(body), RewardBody)
    for name, value in {"reward": report.reward or 0.0, **report.metrics}.items():
        if not math.isfinite(value):
            raise bad_request(f"{name} {value}: must be a finite number")
    if report.reward is None and (report.completion is not None or not report.metrics):
        raise bad_request("reward is missing: must be a number")
    if report.reward is not None:
        asker.session.set_reward(report.reward, report.completion)
    asker.session.add_metrics(report.metrics)
    return {}


async def end(body: bytes, asker: Asker) -> JSON:
    """End the episode at the agent's request. SessionError 403 if a user asks."""
    asker.session.finish()
    return {}
