"""Operation: launcher, supervisor, control plane and probes."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, HttpUrl, IPvAnyNetwork, model_validator

from schemas.config.base import Seconds, Section, UserPath


class LauncherConfig(Section):
    """The launcher with which `tidemill up` starts the services."""

    name: str = Field(
        "local", description="local (this machine), ray, slurm, kubernetes, or your own as module:name or file.py:name."
    )
    args: dict[str, Any] = Field(default_factory=dict, description="Arguments of the launcher.")


class SupervisorConfig(Section):
    """The supervisor, which restarts services that die under `tidemill up`."""

    max_restarts: int = Field(5, ge=0, description="Restarts of one service within window_s before the run fails.")
    window_s: Seconds = Field(120.0, description="Only restarts within this time count.")
    backoff_s: Seconds = Field(
        0.5, description="Wait before the first restart; it doubles with each further restart, up to 15 s."
    )
    grace_s: Seconds = Field(
        20.0, description="How long a service may take to end after it is asked to; then it is killed."
    )
    spot_notices: Literal["aws", "gcp", "azure"] | None = Field(
        None,
        description="Cloud of a spot machine: aws, gcp or azure. When it announces that it takes the machine back,"
        " `tidemill up` or the service that you started there ends in order, as after SIGTERM.",
    )


class DeploymentsConfig(Section):
    """Names of the Kubernetes Deployments that the control plane scales."""

    generator: str = Field("generator", description="Deployment of the generators.")
    reward: str = Field("reward", description="Deployment of the reward services.")


class ControlConfig(Section):
    """The control plane: status, orders and the dashboard over HTTP."""

    enabled: bool = Field(True, description="Whether `tidemill up` starts the control plane.")
    host: str = Field(
        "127.0.0.1", description="Address to listen on. An address that other machines can reach requires a token."
    )
    port: int = Field(
        8642,
        ge=0,
        le=65535,
        description="Port; 0 picks a free one. If the port is taken on 127.0.0.1, a free one is used.",
    )
    token_file: UserPath | None = Field(
        None, description="File with the token; TIDEMILL_CONTROL_TOKEN_FILE or TIDEMILL_CONTROL_TOKEN by default."
    )
    trusted_proxies: list[IPvAnyNetwork] = Field(
        default_factory=list,
        description="Addresses or networks of proxies whose X-Forwarded-For header is trusted, so that each client"
        " behind them has its own rate limit.",
    )
    user_header: str | None = Field(
        None,
        pattern=r"^[A-Za-z][A-Za-z0-9-]*$",
        description="Header in which a trusted proxy names the user who is logged in, such as X-Forwarded-Email; the"
        " timeline then records who gave each order. Needs trusted_proxies.",
    )
    playground: bool | None = Field(
        None,
        description="Whether users may send prompts to the current policy, on spare capacity of the generators. By"
        " default only if host is this machine.",
    )
    deployments: DeploymentsConfig = Field(default_factory=DeploymentsConfig)
    scale_hint: str | None = Field(
        None,
        description="Command, with {role} and {replicas}, that changes the number of replicas in a deployment that"
        " takes no scaling orders. It is named when such an order is rejected.",
    )

    @model_validator(mode="after")
    def _is_of_a_proxy(self) -> ControlConfig:
        if self.user_header and not self.trusted_proxies:
            raise ValueError(f"user_header {self.user_header} needs trusted_proxies: others could name any user")
        return self


Occasion = Literal["finished", "failed", "stopped", "stuck", "alert"]
"""Events that a notice reports. alert: any alert except stuck."""


class NotifyConfig(Section):
    """Notices that a run has ended, or makes no progress."""

    webhook: HttpUrl | None = Field(
        None, description="Address that receives each notice as a POST with JSON. Chat systems show its `text`."
    )
    command: list[str] | None = Field(
        None, description="Command with arguments that runs for each notice, with the JSON as its input."
    )
    events: list[Occasion] = Field(
        ["finished", "failed", "stuck"],
        description="Events to report: finished, failed, stopped, stuck (no step for stuck_s), alert (any other"
        " alert).",
    )
    stuck_s: Seconds = Field(
        900.0, description="How long a run that is not paused may go without a step before it counts as stuck."
    )


class ProbesConfig(Section):
    """Probes of every service except the control plane, for Kubernetes and Prometheus."""

    host: str = Field("0.0.0.0", description="Address to listen on.")
    port: int | None = Field(
        None, ge=0, le=65535, description="Port of /livez, /readyz, /startupz and /metrics; none by default."
    )
