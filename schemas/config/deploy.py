"""Operation: launcher, which GPUs of a machine each side has, supervisor, control plane and probes."""

import re
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, BeforeValidator, Field, HttpUrl, IPvAnyNetwork, model_validator

from schemas.config.base import Seconds, Section, UserPath

RANGE = re.compile(r"(\d{1,4})(?:-(\d{1,4}))?")
"""One number, or the first and the last of a range."""


class LauncherConfig(Section):
    """The launcher with which `tidemill up` starts the services."""

    name: str = "local"
    """local (this machine), ray, slurm, kubernetes, or your own as module:name or file.py:name."""
    args: dict[str, Any] = {}
    """Arguments of the launcher."""


def count_gpus(count: int) -> str:
    """Return a number of GPUs in words, such as ``1 GPU``."""
    return f"{count} GPU{'' if count == 1 else 's'}"


def parse_ranges(text: str) -> list[int]:
    """Return the numbers that ranges such as ``0-3,6`` name, in order; ValueError says what is allowed."""
    numbers: list[int] = []
    for part in text.split(","):
        found = RANGE.fullmatch(part.strip())
        first, last = (int(found[1]), int(found[2] or found[1])) if found else (1, 0)
        if first > last:
            raise ValueError(f"placement: {text!r} names no GPUs, must be numbers and ranges such as 0-3,6")
        numbers.extend(range(first, last + 1))
    if len(set(numbers)) < len(numbers):
        raise ValueError(f"placement: {text!r} names a GPU twice")
    return numbers


AUTO = "auto"


def _check(text: str) -> str:
    if text != AUTO:
        parse_ranges(text)
    return text


Ranges = Annotated[str, AfterValidator(_check)]
"""GPUs of a machine, by their place in the order of CUDA_VISIBLE_DEVICES."""


class PlacementConfig(Section):
    """The GPUs of a machine for the trainer and the generators, with the launcher local.

    Instead of the section, auto stands for what `tidemill plan` finds best on this machine's GPUs.
    """

    trainer: Ranges
    """GPUs of the trainer, such as 0-3: as many as trainer.processes. Or auto."""
    generator: Ranges
    """GPUs of the generators, such as 4-7. They are dealt out in order, and there are as many generators as they are
    enough for. GPUs that the trainer has as well are used in turns: see docs/deploy/placement.md. Or auto."""
    balance: bool = False
    """Whether the number of generators follows the plan of the rates that this run measures. There are never more than
    placement.generator has GPUs for, and those that `tidemill node` started."""
    balance_s: Seconds = 600.0
    """Seconds between two plans of balance, so that both sides settle after a change."""

    @model_validator(mode="after")
    def _check_auto(self) -> Self:
        if (self.trainer == AUTO) != (self.generator == AUTO):
            raise ValueError("placement.trainer and placement.generator must both be auto, or both name GPUs")
        return self

    @property
    def is_auto(self) -> bool:
        """Whether the plan decides; the command that starts the run replaces it by GPUs."""
        return self.trainer == AUTO

    @property
    def shared(self) -> list[int]:
        """Return the GPUs that both ranges name."""
        return [] if self.is_auto else sorted(set(parse_ranges(self.trainer)) & set(parse_ranges(self.generator)))

    @property
    def least_gpus(self) -> int:
        """Return how many GPUs a machine must have: the last one that is named, counted from 1."""
        return 1 + max(parse_ranges(self.trainer) + parse_ranges(self.generator))

    def engines(self, width: int) -> list[list[int]]:
        """Return the GPUs of each generator whose engine takes ``width``; ValueError if some are left over."""
        numbers = parse_ranges(self.generator)
        if len(numbers) % width:
            raise ValueError(
                f"placement.generator {self.generator!r} has {count_gpus(len(numbers))}, must be a multiple of {width}"
                " (generator.args.tensor_parallel_size)"
            )
        return [numbers[at : at + width] for at in range(0, len(numbers), width)]


def _from_word(given: Any) -> Any:
    return {"trainer": AUTO, "generator": AUTO} if given == AUTO else given


Placement = Annotated[
    PlacementConfig, BeforeValidator(_from_word, json_schema_input_type=Literal["auto"] | PlacementConfig)
]


class SupervisorConfig(Section):
    """The supervisor, which restarts services that die under `tidemill up`."""

    max_restarts: int = Field(5, ge=0)
    """Restarts of one service within window_s before the run fails."""
    window_s: Seconds = 120.0
    """Only restarts within this time count."""
    backoff_s: Seconds = 0.5
    """Wait before the first restart; it doubles with each further restart, up to 15 s."""
    grace_s: Seconds = 20.0
    """How long a service may take to end after it is asked to; then it is killed."""
    max_devices: int | None = Field(None, ge=1)
    """Most devices of the run: those of the trainer's ranks and of all generators. A start that needs more is rejected,
    as is an order that would scale beyond. null: no bound."""
    spot_notices: Literal["aws", "gcp", "azure"] | None = None
    """Cloud of a spot machine: aws, gcp or azure. When it announces that it takes the machine back, `tidemill up` or
    the service that you started there ends in order, as after SIGTERM."""


class DeploymentsConfig(Section):
    """Names of the Kubernetes Deployments that the control plane scales."""

    generator: str = "generator"
    """Deployment of the generators."""
    reward: str = "reward"
    """Deployment of the reward services."""


class ControlConfig(Section):
    """The control plane: status, orders and the dashboard over HTTP."""

    enabled: bool = True
    """Whether `tidemill up` starts the control plane."""
    host: str = "127.0.0.1"
    """Address to listen on. An address that other machines can reach requires a token."""
    port: int = Field(8642, ge=0, le=65535)
    """Port; 0 picks a free one. If the port is taken on 127.0.0.1, a free one is used."""
    token_file: UserPath | None = None
    """File with the token; TIDEMILL_CONTROL_TOKEN_FILE or TIDEMILL_CONTROL_TOKEN by default."""
    trusted_proxies: list[IPvAnyNetwork] = []
    """Addresses or networks of proxies whose X-Forwarded-For is trusted: clients behind them have own rate limits."""
    user_header: str | None = Field(None, pattern=r"^[A-Za-z][A-Za-z0-9-]*$")
    """Header in which a trusted proxy names the user who is logged in, such as X-Forwarded-Email; the timeline then
    records who gave each order. Needs trusted_proxies."""
    playground: bool | None = None
    """Whether users may prompt the current policy, on spare capacity. By default only if host is this machine."""
    deployments: DeploymentsConfig = Field(default_factory=DeploymentsConfig)
    devices: dict[Annotated[str, Field(pattern=r"^(trainer|generator(\..+)?)$")], Annotated[int, Field(ge=1)]] = {}
    """Devices of the trainer, and of one generator (generator, or generator.POOL), for supervisor.max_devices;
    `tidemill kubernetes` and the chart write them. By default trainer.processes, and the width of the engine."""
    scale_hint: str | None = None
    """Command, with {role} and {replicas}, that changes the number of replicas in a deployment that takes no scaling
    orders. It is named when such an order is rejected."""

    @model_validator(mode="after")
    def _is_of_a_proxy(self) -> Self:
        if self.user_header and not self.trusted_proxies:
            raise ValueError(f"user_header {self.user_header} needs trusted_proxies: others could name any user")
        return self


Occasion = Literal["finished", "failed", "stopped", "stuck", "alert"]
"""Events that a notice reports. alert: any alert except stuck."""


class NotifyConfig(Section):
    """Notices that a run has ended, or makes no progress."""

    webhook: HttpUrl | None = None
    """Address that receives each notice as a POST with JSON. Chat systems show its `text`."""
    command: list[str] | None = None
    """Command with arguments that runs for each notice, with the JSON as its input."""
    events: list[Occasion] = ["finished", "failed", "stuck"]
    """Events to report: finished, failed, stopped, stuck (no step for stuck_s), alert (any other alert)."""
    stuck_s: Seconds = 900.0
    """How long a run that is not paused may go without a step before it counts as stuck."""


class ProbesConfig(Section):
    """Probes of every service except the control plane, for Kubernetes and Prometheus."""

    host: str = "0.0.0.0"
    """Address to listen on."""
    port: int | None = Field(None, ge=0, le=65535)
    """Port of /livez, /readyz, /startupz and /metrics; none by default."""
