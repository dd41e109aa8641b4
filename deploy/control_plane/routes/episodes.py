"""Routes for users' conversations with the policy: begin one, hold it with any client, reward it later.

The address of a conversation leads to the generator that holds it now, by a redirection that keeps method and body.
Its id is unguessable and serves as its key; to begin and to reward one takes the key of a tenant.
"""

import asyncio
import hmac
import os
import time

from fastapi import APIRouter, Request
from fastapi.responses import RedirectResponse

from deploy.control_plane.routes.context import Context, InContext, poll
from deploy.control_plane.web.refusal import Refusal
from schemas.control_api.orders import BegunEpisode, EpisodeReward, RewardedEpisode
from schemas.messages import LiveEpisode

router = APIRouter(prefix="/v1/episodes", tags=["conversations"])
HELD_S = 60.0
"""Seconds for which a request waits until a generator holds its conversation again."""
FRESH_S = 5.0
"""A generator that has been silent for longer is not asked."""


@router.post("")
async def begin_episode(context: InContext, request: Request) -> BegunEpisode:
    """Begin a conversation. Use ``base_url`` in any client for OpenAI's or Anthropic's protocol."""
    tenant = _tenant(context, request)
    wait = context.conversations.take(tenant, time.monotonic())
    if wait > 0:
        raise Refusal(429, f"more than {context.plan.live.rate:g} conversations a minute: wait {wait:.1f} s")
    found = await asyncio.to_thread(context.broker.live_episodes().begin, tenant)
    if found is None:
        raise Refusal(429, "no generator has room for another conversation now: try again")
    id, episode = found
    url = f"{str(request.base_url).rstrip('/')}{router.prefix}/{id}/v1"
    return BegunEpisode(id=id, base_url=url, reward_until=episode.begun + context.plan.live.reward_s)


@router.post("/{id}/reward")
async def reward_episode(context: InContext, request: Request, id: str, body: EpisodeReward) -> RewardedEpisode:
    """Reward a conversation, once: a repeated reward changes nothing."""
    settle, live = context.broker.live_episodes().reward, context.plan.live
    answer, counts = await asyncio.to_thread(settle, id, _tenant(context, request), body.reward, live.reward_s)
    if answer == "unknown":
        raise Refusal(404, "there is no such conversation")
    if answer in ("ended", "late") or counts is None:
        raise Refusal(409, f"its time for a reward is over: {live.reward_s:g} s from its begin")
    return RewardedEpisode(id=id, reward=counts, changed=answer == "ok")


@router.api_route("/{id}/v1/{path:path}", methods=["GET", "POST"], include_in_schema=False)
async def converse(context: InContext, request: Request, id: str, path: str) -> RedirectResponse:
    """Lead a client's request to the generator that holds the conversation."""
    # Anthropic's library appends /v1/messages to an address, also to one that ends in /v1.
    path = path.removeprefix("v1/")
    url = await poll(lambda: _held_at(context, id), bool, HELD_S)
    if not url:
        raise Refusal(503, "no generator holds this conversation now: try again")
    return RedirectResponse(f"{url}/{path}", 307)


def _held_at(context: Context, id: str) -> str:
    """Return the address of a conversation in its generator, "" if none holds it."""
    record: LiveEpisode | None = context.broker.live_episodes().read([id])[1].get(id)
    if record is None or not record.begun:
        raise Refusal(404, "there is no such conversation")
    age = context.broker.heartbeats.read_age_s(record.generator)
    return str(record.url) if age is not None and age < FRESH_S else ""


def _tenant(context: Context, request: Request) -> str:
    """Return the tenant whose key a request has; "" if there are no tenants, where the guard has checked the token."""
    tenants = context.plan.live.tenants
    if not tenants:
        return ""
    _, _, given = request.headers.get("authorization", "").partition(" ")
    for name, variable in tenants.items():
        key = os.environ.get(variable, "")
        if key and hmac.compare_digest(given.strip().encode(), key.encode()):
            return name
    raise Refusal(401, "send the key of a tenant: Authorization: Bearer KEY")
