"""Operation: launcher, supervisor, control plane and probes."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, HttpUrl, IPvAnyNetwork

from schemas.config.base import Seconds, Section, UserPath


class LauncherConfig(Section):
    """The launcher, with which `tidemill up` starts the services."""

    name: str = Field(
        "local", description="local (this machine), ray, slurm, or your own as module:name or file.py:name."
    )
    args: dict[str, Any] = Field(default_factory=dict, description="Arguments of the launcher.")


class SupervisorConfig(Section):
    """The supervisor: what `tidemill up` does when a service dies."""

    max_restarts: int = Field(
        5, ge=0, description="Restarts of one service within window_s before the run is given up."
    )
    window_s: Seconds = Field(120.0, description="Only restarts this recent count.")
    backoff_s: Seconds = Field(0.5, description="First wait before a restart; doubles each time up to 15 s.")
    grace_s: Seconds = Field(20.0, description="How long a service may take to end when asked; then it is killed.")


class DeploymentsConfig(Section):
    """Names of the Kubernetes Deployments that the control plane scales."""

    generator: str = Field("generator", description="Deployment of the generators.")
    reward: str = Field("reward", description="Deployment of the reward services.")


class ControlConfig(Section):
    """The control plane: status, orders and the dashboard over HTTP."""

    enabled: bool = Field(True, description="Whether `tidemill up` starts the control plane.")
    host: str = Field("127.0.0.1", description="Address to listen on; beyond this machine a token is required.")
    port: int = Field(
        8642, ge=0, le=65535, description="Port; 0: any free one. A port taken on 127.0.0.1 is replaced by a free one."
    )
    token_file: UserPath | None = Field(
        None, description="File with the token; TIDEMILL_CONTROL_TOKEN_FILE or TIDEMILL_CONTROL_TOKEN by default."
    )
    trusted_proxies: list[IPvAnyNetwork] = Field(
        default_factory=list,
        description="Addresses or networks of proxies that are believed about their clients (X-Forwarded-For), who then"
        " have a rate limit each.",
    )
    playground: bool | None = Field(
        None,
        description="Whether people may ask the present policy something, on room that generators have; by default only"
        " where host is this machine.",
    )
    deployments: DeploymentsConfig = Field(default_factory=DeploymentsConfig)
    scale_hint: str | None = Field(
        None,
        description="Command that changes the number of replicas where nobody takes orders, with {role} and {replicas};"
        " a refusal names it.",
    )


Occasion = Literal["finished", "failed", "stopped", "stuck", "alert"]
"""What people are told of. alert: any alert but stuck."""


class NotifyConfig(Section):
    """Notices to people: how a run ended, or that it stands still."""

    webhook: HttpUrl | None = Field(
        None, description="Address that gets each notice as a POST with JSON; its `text` is what chat systems show."
    )
    command: list[str] | None = Field(
        None, description="Command and its arguments that is run for each notice, with the JSON as its input."
    )
    events: list[Occasion] = Field(
        ["finished", "failed", "stuck"],
        description="Occasions: finished, failed, stopped, stuck (no step for stuck_s), alert (any other alert).",
    )
    stuck_s: Seconds = Field(900.0, description="Without a step for so long, and not paused, a run is stuck.")


class ProbesConfig(Section):
    """Probes of every service but the control plane, for Kubernetes and Prometheus."""

    host: str = Field("0.0.0.0", description="Address to listen on.")
    port: int | None = Field(
        None, ge=0, le=65535, description="Port of /livez, /readyz, /startupz and /metrics; none by default."
    )
