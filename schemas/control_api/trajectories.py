"""Trajectories token by token, and completions in the playground."""

from typing import Any, Literal

from pydantic import Field

from schemas.control_api.base import Answer, Finish, RequestBody


class TrajectoryHead(Answer):
    """A trajectory as a list shows it."""

    task_id: int
    sample: int
    kind: Literal["train", "eval"]
    state: Literal["generated", "scored", "trained"] = Field(
        description="trained: a copy for reading; the sample itself has left the pipeline."
    )
    step: int | None = Field(description="The step that trained it; null until then.")
    reward: float | None
    score_status: Literal["ok", "error", "timeout"] | None
    oldest_version: int | None
    newest_version: int | None
    finish: Finish
    tokens: int = Field(description="Tokens that the policy generated.")
    calls: int = Field(description="Model calls of the sample; 0 if they are not counted.")
    rows: int = Field(description="Number of rows in training.")
    generator: str
    time: float = Field(description="When the sample was published, or trained.")
    prompt: str = Field(description="First 200 characters of the prompt.")
    completion: str = Field(description="First 200 characters of the completion.")


class Trajectories(Answer):
    """Answer to GET /v1/trajectories: kept copies of trained samples, then samples in the pipeline."""

    trajectories: list[TrajectoryHead]
    examined: int = Field(description="Number of trajectories that the search read, which is limited.")
    complete: bool = Field(description="Whether the search read all trajectories.")
    next: str | None = Field(None, description="`cursor` that continues the search; null if it has read all.")


class TurnRange(Answer):
    """A turn of a conversation: tokens [start, end)."""

    role: str
    start: int
    end: int
    call: int = Field(description="Number of the model call that sampled it; -1 if they are not counted.")
    reward: float | None = Field(description="The part of the sample's reward that it earned; null if unknown.")


class SegmentRange(Answer):
    """Tokens [start, end) that are new in one row of training."""

    start: int
    end: int
    parent: int = Field(description="Index of the segment whose row this row begins with; -1 if it begins with none.")
    shared: int = Field(description="Number of first tokens that it shares with that row, which are not trained again.")
    name: str = Field(description="Name of the agent: main, or a sub-agent's.")


class ToolUse(Answer):
    """A call of a tool, and its result."""

    name: str
    arguments: str
    result: str | None = Field(description="null if no message answers this call.")
    images: list[str] = Field(default_factory=list, description="Digests of the images in its result.")


class SpokenMessage(Answer):
    """A message of an episode's conversation."""

    role: str
    text: str
    reasoning: str | None
    tools: list[ToolUse]
    images: list[str] = Field(default_factory=list, description="Digests of its images, in their order.")


class TokenTable(Answer):
    """Columns with an entry for each token, prompt and completion together, one segment after the other."""

    id: list[int]
    text: list[str] | None = Field(
        description="Text that each token adds; a character of several tokens is in the last of them."
        " null if the tokenizer is not available."
    )
    logprob: list[float | None] = Field(description="Natural logarithm, with temperature; null where the mask is 0.")
    version: list[int | None] = Field(description="Weight version that sampled the token; null where the mask is 0.")
    mask: list[int] = Field(description="1 for tokens that the policy generated and is trained on.")


class ImageRange(Answer):
    """An image that tokens [start, end) stand for; GET /v1/images/{digest} returns it."""

    digest: str
    start: int
    end: int


class TraceMoment(Answer):
    """A part of an episode's time, Unix seconds."""

    kind: Literal["admitted", "attempt", "chat", "tool", "term", "step"] = Field(
        description="An attempt is a generator's; chat and tool are its calls; term is of the reward; step trained it."
    )
    name: str = Field(description="Of the generator, the tool, the term, or the number of the step.")
    start: float
    end: float
    tokens: int = Field(description="Tokens that were sampled in it.")
    failed: bool


class TrajectoryDetail(TrajectoryHead):
    """Answer to GET /v1/trajectories/{task_id}/{sample}: a trajectory in full."""

    full_prompt: str
    full_completion: str
    seconds: float
    temperature: float = Field(description="Sampling temperature; log-probabilities include it.")
    components: dict[str, float] = Field(description="Terms of the reward by name.")
    score_reason: str
    turns: list[TurnRange]
    segments: list[SegmentRange] = Field(description="Rows of an agent's episode; empty: the tokens are one row.")
    images: list[ImageRange] = Field(default_factory=list, description="Images that the policy saw, in order.")
    messages: list[SpokenMessage] = Field(description="The conversation of an agent's episode, if it was kept.")
    workflow_reward: float | None = Field(description="Reward that the workflow gives.")
    trace: list[TraceMoment] = Field(default_factory=list, description="In order of time; empty without `trace`.")
    metrics: dict[str, float] = Field(description="Metrics that the workflow gives.")
    token_table: TokenTable
    data: dict[str, Any]


class SpokenTurn(Answer):
    """A message of a conversation to continue."""

    role: str = Field(max_length=64)
    content: str


class GenerateRequest(RequestBody):
    """Body of POST /v1/generate: ``prompt``, a plain text, or ``messages``, to which the chat template is applied."""

    prompt: str | None = None
    messages: list[SpokenTurn] | None = Field(None, min_length=1, max_length=200)
    n: int = Field(1, ge=1, le=8)
    max_tokens: int = Field(256, ge=1, le=8192)
    temperature: float = Field(1.0, ge=0, le=10, allow_inf_nan=False, description="0 is greedy.")
    top_p: float = Field(1.0, gt=0, le=1, allow_inf_nan=False)
    wait_s: float = Field(60.0, ge=1, le=300, description="Longest wait for a generator, seconds.")


class GeneratedReply(Answer):
    """A completion of the current policy."""

    text: str
    finish: Finish
    tokens: TokenTable


class Generated(Answer):
    """Answer to POST /v1/generate."""

    generator: str
    replies: list[GeneratedReply]
