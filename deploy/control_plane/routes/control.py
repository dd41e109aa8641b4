"""Routes for orders: all are idempotent, and the timeline records who asked."""

import asyncio
from collections.abc import Callable
from typing import Any, TypeVar

from fastapi import APIRouter

from deploy.control_plane.routes.context import By, Context, InContext, accepted, poll
from deploy.control_plane.status.scaling import NO_SUPERVISOR, order_replicas, scale_command
from deploy.control_plane.web.refusal import Refusal
from schemas.control_api.base import OVER, PauseMode
from schemas.control_api.orders import (
    Accepted,
    EvaluationRequest,
    PauseRequest,
    ScaleRequest,
    Settings,
    SettingsChange,
    WaitRequest,
    scaled_role,
)
from schemas.control_api.status import RunStatus

router = APIRouter(prefix="/v1", tags=["orders"])
Order = TypeVar("Order", bool, int)
STOP_ELSEWHERE = {
    "kubernetes": "Kubernetes keeps these services running: drain the run, then `kubectl delete -k` what started it",
    "nobody": "no supervisor of this run is running (`tidemill up` did not start it): drain the run, then stop its"
    " services where they were started",
}
"""How to stop a run without a supervisor."""


@router.post("/pause")
async def pause(context: InContext, by: By, body: PauseRequest | None = None) -> Accepted:
    """Pause. freeze: once ``done``, nothing is generated or trained; drain: finish work in flight."""
    body = body or PauseRequest()
    return await _pause(context, by, body.mode, body.wait_s, "drain" if body.mode == "drain" else "pause")


@router.post("/drain")
async def drain(context: InContext, by: By, body: WaitRequest | None = None) -> Accepted:
    """Stop admitting prompts, finish work in flight and save a checkpoint, so that services can be shut down."""
    return await _pause(context, by, "drain", (body or WaitRequest()).wait_s, "drain")


async def _give(context: Context, by: str, name: str, text: str, order: Callable[..., Order], *wanted: Any) -> Order:
    """Give an order, and record it in the timeline if it changes anything. by: who gives it. wanted: its arguments."""

    def give() -> Order:
        if changed := order(*wanted, by):
            context.record_event(name, text, by)
        return changed

    return await asyncio.to_thread(give)


async def _pause(context: Context, by: str, mode: PauseMode, wait_s: float, order: str) -> Accepted:
    pause = context.broker.run_control.pause
    changed = await _give(context, by, "paused", f"pause ({mode}) ordered", pause, mode)
    status = await poll(context.poller.refresh, lambda status: status.pause.done or status.pause.mode != mode, wait_s)
    missing = status.pause.waiting_for
    text = "paused" if status.pause.done else f"waiting for {', '.join(missing)}"
    return accepted(status.state, order, changed, text, status.pause.done, missing)


@router.post("/resume")
async def resume(context: InContext, by: By, body: WaitRequest | None = None) -> Accepted:
    """Resume a paused run."""
    changed = await _give(context, by, "resumed", "resume ordered", context.broker.run_control.pause, "none")

    def paused(status: RunStatus) -> list[str]:
        return [service.name for service in status.services if service.live and service.state == "paused"]

    def resumed(status: RunStatus) -> bool:
        return status.pause.mode == "none" and not paused(status)

    status = await poll(context.poller.refresh, resumed, (body or WaitRequest()).wait_s)
    waiting = paused(status)
    text = "the run has resumed" if not waiting else f"waiting for {', '.join(waiting)}"
    return accepted(status.state, "resume", changed, text, resumed(status), waiting)


@router.post("/checkpoint")
async def checkpoint(context: InContext, by: By, body: WaitRequest | None = None) -> Accepted:
    """Save a checkpoint after the current step."""
    number = await _give(context, by, "checkpoint", "checkpoint ordered", context.broker.run_control.checkpoint)

    def written(status: RunStatus) -> bool:
        return any(
            service.role == "trainer" and service.live and service.acknowledged.get("checkpoint", 0) >= number
            for service in status.services
        )

    status = await poll(context.poller.refresh, written, (body or WaitRequest()).wait_s)
    done = written(status)
    text = "the checkpoint is saved" if done else "the trainer saves it after the current step"
    return accepted(status.state, "checkpoint", True, text, done, ["trainer"])


@router.post("/evaluations")
async def evaluate(context: InContext, by: By, body: EvaluationRequest | None = None) -> Accepted:
    """Evaluate the current weights, or a later version, on the held-out prompts."""
    body = body or EvaluationRequest()
    if not context.plan.held_out:
        raise Refusal(409, "the configuration has no eval section: there are no held-out prompts")
    latest = await asyncio.to_thread(context.poller.refresh)
    if latest.state in OVER:
        raise Refusal(409, f"the run is {latest.state}: `tidemill eval CONFIG --model FOLDER` needs no run")
    version = latest.version if body.version is None else body.version
    known = {one.version for one in context.poller.evaluations}
    if version < latest.version and version not in known:
        text = f"version {version} is behind version {latest.version}, and no generator goes back: export a checkpoint"
        raise Refusal(409, f"{text} of it, and `tidemill eval CONFIG --model FOLDER`")
    order, text = context.broker.run_control.evaluate, f"evaluation of version {version} ordered"
    changed = version not in known and await _give(context, by, "evaluation", text, order, version)

    def complete(status: RunStatus) -> bool:
        return any(one.version == version and one.complete for one in context.poller.evaluations)

    status = await poll(context.poller.refresh, complete, body.wait_s)
    done = complete(status)
    text = f"version {version} is evaluated" if done else f"the evaluation of version {version} is under way"
    by_whom = "feeder" if version > status.version else "generator"
    return accepted(status.state, "evaluate", changed, text, done, [by_whom])


@router.post("/stop")
async def stop(context: InContext, by: By) -> Accepted:
    """Stop the run cleanly, with a checkpoint. Start it again under the same name to resume."""
    by_whom = context.poller.latest.scaling.by
    if by_whom != "supervisor":
        raise Refusal(409, STOP_ELSEWHERE[by_whom])
    await _give(context, by, "stop", "stop ordered", context.broker.run_control.stop)
    text = "the services are being stopped, the control plane too"
    return accepted("stopping", "stop", True, text, False, ["supervisor"])


@router.post("/scale")
async def scale(context: InContext, by: By, body: ScaleRequest) -> Accepted:
    """Set the number of replicas of a role, through supervisors or a Deployment on Kubernetes."""
    if body.role == "reward" and body.replicas == 0:
        raise Refusal(409, "a run needs one reward service at least: pause it instead")
    kind = scaled_role(body.role, body.pool)
    changed = await _give(context, by, "scale", f"{body.replicas} {kind} services ordered", _scale, context, body)
    status = await asyncio.to_thread(context.poller.refresh)
    alive = sum(scaled_role(service.role, service.pool) == kind and service.live for service in status.services)
    text = f"{alive} of {body.replicas} {kind} services are alive"
    return accepted(status.state, "scale", changed, text, alive == body.replicas, [status.scaling.by])


def _scale(context: Context, body: ScaleRequest, by: str) -> bool:
    """Give the order to Kubernetes or to the supervisors; Refusal without either."""
    status, kind = context.poller.latest, scaled_role(body.role, body.pool)
    scaling = status.scaling
    by_whom, kinds = scaling.by, scaling.replicas
    of_pools = body.pool or (body.role == "generator" and context.plan.pools)
    if kind not in kinds and (by_whom == "supervisor" or (of_pools and kinds)):
        raise Refusal(409, f"{kind} cannot be scaled in this run, these can: {', '.join(kinds)}")
    if body.replicas > kinds.get(kind, 0) and (problem := context.plan.quota.problem({**kinds, kind: body.replicas})):
        raise Refusal(409, problem)
    if by_whom == "kubernetes" and context.poller.deployments is not None:
        return context.poller.deployments.scale(kind, body.replicas)
    if by_whom != "supervisor":
        raise Refusal(409, NO_SUPERVISOR + scale_command(context.plan.scale_hint, body.role, str(body.replicas)))
    return order_replicas(context.broker.run_control, status.services, kind, body.replicas, by)


@router.patch("/settings")
async def settings(context: InContext, by: By, body: SettingsChange) -> Settings:
    """Change settings of a running run, all or none: a missing one stays, null restores the configured value."""
    await asyncio.to_thread(_change, context, body, by)
    return (await asyncio.to_thread(context.poller.refresh)).settings


def _change(context: Context, wanted: SettingsChange, by: str) -> None:
    """Change the given settings, and record each. Refusal if they do not fit together."""
    ledger, given = context.broker.ledger, wanted.model_fields_set
    if not given:
        raise Refusal(422, f"nothing to change: give one of {', '.join(SettingsChange.model_fields)}")
    if wanted.steps is not None and wanted.steps <= (step := ledger.read_state().step):
        raise Refusal(409, f"the run has taken {step} steps: give it more than these, or stop it")
    values = wanted.model_dump(exclude_unset=True)
    if not ledger.change_settings(values):
        raise Refusal(409, "the run has no trainer yet that could follow; try again when it has started")
    for name, value in values.items():
        text = f"{name} set to {value}" if value is not None else f"{name} set back to the configuration's"
        context.record_event("settings", text, by)
