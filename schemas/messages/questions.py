"""Prompts of users to the current policy, outside of training, and its completions; users' live conversations."""

import msgspec

from schemas.codec import Array, Message
from schemas.messages.tasks import ChatMessage, Sampling
from schemas.messages.trajectories import FinishReason


class Question(Message, kw_only=True, tag="question"):
    """A prompt to sample ``n`` completions of. Exactly one of ``text``, ``messages`` is given.

    until: Unix seconds by the broker's clock, after which the answer is not needed.
    """

    id: str
    until: float
    sampling: Sampling
    n: int = 1
    text: str | None = None
    messages: list[ChatMessage] | None = None


class Reply(msgspec.Struct, frozen=True, gc=False):
    """A completion of G tokens: ids int32 [G], logprobs float32 [G], versions int32 [G], which sampled each."""

    text: str
    tokens: Array
    logprobs: Array
    versions: Array
    finish: FinishReason


class QuestionAnswer(Message, kw_only=True, tag="question_answer"):
    """A generator's completions for a question. error: why there are none, else empty."""

    id: str
    generator: str
    replies: list[Reply] = []
    error: str = ""


class LiveEpisode(msgspec.Struct, frozen=True):
    """The record of a conversation.

    run: identity of the run. seat: the sample, as TASK-SAMPLE. url: base address of its session in ``generator``, "" if
    no generator holds it. begun: Unix seconds, 0 for one that waits for a user. reward: as text, None before it came.
    ended: whether it ended without one.
    """

    run: str
    seat: str
    url: str
    generator: str
    begun: float
    tenant: str = ""
    reward: str | None = None
    ended: bool = False
