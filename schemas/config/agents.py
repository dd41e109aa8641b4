"""Agents: programs that ask the policy over HTTP, and whose conversations are trained."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from schemas.config.base import Seconds, Section, UserPath, shown_variable


class AgentsConfig(Section):
    """Agents of one replica (workflow agent): their processes, their limits, and the endpoint that they talk to."""

    processes: int = Field(1, ge=1, le=256, description="Worker processes of one replica, in which its agents run.")
    python: UserPath | None = Field(
        None, description="Interpreter of the worker processes, of an environment of the agents' own; by default ours."
    )
    env: list[Annotated[str, shown_variable("generator.agents.env")]] = Field(
        default_factory=list, description="Names of further environment variables that agents see, such as API keys."
    )
    sandbox: Literal["none", "bwrap"] = Field(
        "none",
        description="Where agents that are programs (workflow.args.command) run. bwrap: in a sandbox, with the"
        " configuration's folder to read, and no network but the endpoint.",
    )
    memory_mb: int | None = Field(
        None, ge=64, description="Most data memory of one worker process, over which an agent's allocation fails."
    )
    episodes: int = Field(64, ge=1, description="Episodes in progress at once in one replica.")
    deadline_s: Seconds = Field(300.0, description="Longest time of an episode; what it has then is its sample.")
    max_calls: int = Field(50, ge=1, description="Most model calls of an episode.")
    attempts: int = Field(
        3, ge=1, description="How often an episode is started, if its worker process dies, before it is given up."
    )
    grace_s: float = Field(
        10.0, ge=0, description="Time that episodes get to end when a replica is asked to end; the rest is handed over."
    )
    history: Literal["held", "template"] = Field(
        "held",
        description="The tokens that a model call sees of earlier turns. held: those that were sampled, so that an"
        " episode is one row. template: what the chat template makes of the messages; where that rewrites them, a new"
        " row begins.",
    )
    tool_parser: str = Field(
        "hermes", description="How tool calls are read from the policy's text: hermes, or another parser of vLLM's."
    )
    reasoning_parser: str | None = Field(
        None, description="How reasoning is split from the policy's text: a parser of vLLM's, such as qwen3."
    )
    constrained: Literal["ignore", "refuse"] = Field(
        "ignore",
        description="A request that would change the distribution that is sampled from (tool_choice required,"
        " response_format). ignore: it is answered without that, and counted. refuse: with an error.",
    )
    train: list[str] | None = Field(
        None, description="Names of the agents whose tokens are trained, main among them; by default all."
    )
    late: Literal["score", "exclude"] = Field(
        "score", description="Whether an episode that reaches its deadline or its calls is scored, or excluded."
    )
    outcomes: dict[str, float] = Field(
        default_factory=dict,
        description="Exceptions of an agent that are no failure: full name to the reward of the episode.",
    )
    alarm: float = Field(
        0.2, gt=0, le=1, description="Share of failures among the last 100 episodes that is reported as an event."
    )
    address: str = Field(
        "127.0.0.1:0", description="Host and port at which a replica listens for its agents; port 0 takes a free one."
    )
    public_url: str | None = Field(
        None, description="Address at which agents elsewhere reach the endpoint, if that is another one."
    )
    max_images: int = Field(
        64,
        ge=0,
        le=64,
        description="Most images of a prompt, and most different ones of an episode, that agents, tools or environments"
        " show the policy (model.kind vision); those of the task are not counted.",
    )
    max_image_bytes: int = Field(
        20 * 2**20,
        ge=1024,
        description="Bytes of the largest image file that an agent, a tool or an environment gives.",
    )
    keep_messages: int = Field(
        65536, ge=0, description="Bytes of the conversation that travel with the sample, for rewards and for people."
    )
