"""Agents: programs that call the policy over HTTP, and whose conversations are trained."""

from typing import Annotated, Literal

from pydantic import Field

from schemas.config.base import Seconds, Section, UserPath, shown_variable


class LiveConfig(Section):
    """Conversations that users hold with the policy (workflow live), and their rewards."""

    reward_s: Seconds = 3600.0
    """Seconds from the begin of a conversation in which its reward must come; else it is excluded, counted as
    unrewarded."""
    tenants: dict[Annotated[str, Field(pattern=r"^[A-Za-z0-9_-]+$")], str] = {}
    """Who may begin and reward conversations: names, and for each the environment variable of the control plane that
    has its key. None sees another's. Without any, the control plane's token is required."""
    rate: float = Field(600.0, gt=0)
    """Conversations a minute that a tenant may begin."""


class AgentsConfig(Section):
    """Agents of one replica (workflow agent): their processes, their limits, and the endpoint that they call."""

    processes: int = Field(1, ge=1, le=256)
    """Worker processes of one replica, in which its agents run."""
    python: UserPath | None = None
    """Interpreter of the worker processes, if agents need their own environment; by default that of Tidemill."""
    env: list[Annotated[str, shown_variable("generator.agents.env")]] = []
    """Names of further environment variables that agents see, such as API keys."""
    sandbox: Literal["none", "bwrap"] = "none"
    """Where agents that are programs (workflow.args.command) run. bwrap: in a sandbox that can read the configuration's
    folder and reach only the endpoint over the network."""
    memory_mb: int | None = Field(None, ge=64)
    """Most data memory of one worker process, or of each process of a program in a sandbox. Beyond it, an allocation
    fails. Programs outside a sandbox have no limit."""
    episodes: int = Field(64, ge=1)
    """Episodes in progress at once in one replica."""
    deadline_s: Seconds = 300.0
    """Longest time of an episode. The turns it has by then are its sample."""
    max_calls: int = Field(50, ge=1)
    """Most model calls of an episode."""
    attempts: int = Field(3, ge=1)
    """How often an episode is started before it fails, if its worker process dies."""
    grace_s: float = Field(10.0, ge=0)
    """How long episodes may take to finish when a replica is asked to end. Unfinished episodes are handed over."""
    history: Literal["held", "template"] = "held"
    """The tokens of earlier turns that a model call sees. held: the sampled tokens, so that an episode is one row.
    template: the tokens that the chat template makes of the messages; if that rewrites turns, a new row begins."""
    tool_parser: str = "hermes"
    """Parser of tool calls in the policy's text: hermes, or another parser of vLLM."""
    reasoning_parser: str | None = None
    """Parser that splits reasoning from the policy's text: a parser of vLLM, such as qwen3."""
    constrained: Literal["ignore", "refuse"] = "ignore"
    """How to treat a request that would change the sampled distribution (tool_choice required, response_format).
    ignore: answer it without the constraint, and count it. refuse: answer with an error."""
    train: list[str] | None = None
    """Names of the agents whose tokens are trained; the main agent is main. By default all."""
    late: Literal["score", "exclude"] = "score"
    """Whether an episode that reaches its deadline or its limit of calls is scored or excluded."""
    outcomes: dict[str, float] = {}
    """Exceptions of an agent that are results rather than failures: the full name, and the reward of the episode."""
    alarm: float = Field(0.2, gt=0, le=1)
    """Share of failures among the last 100 episodes at which an event is reported."""
    address: str = "127.0.0.1:0"
    """Host and port at which a replica listens for its agents; port 0 picks a free one."""
    public_url: str | None = None
    """Address at which agents on other machines reach the endpoint, if it differs from address."""
    max_images: int = Field(64, ge=0, le=64)
    """Most images in a prompt, and most different images in an episode, that agents, tools or environments show the
    policy (model.kind vision). Images of the task don't count."""
    max_image_bytes: int = Field(20 * 2**20, ge=1024)
    """Size of the largest image file that an agent, a tool or an environment may give, in bytes."""
    live: LiveConfig = Field(default_factory=LiveConfig)
    keep_messages: int = Field(65536, ge=0)
    """Bytes of the conversation that travel with the sample, for rewards and for the dashboard."""
