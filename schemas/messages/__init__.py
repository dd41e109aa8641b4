"""Messages that cross the broker, validated when they are made and when they are read.

Shapes: a trajectory has T tokens, prompt and completion together. Everything that is per token (mask,
log-probabilities) has length T and refers to the same position.
"""

from schemas.messages.batches import BatchRecord, GroupRef, Member, RecordedGroup, StepRecord
from schemas.messages.fragments import Fragment
from schemas.messages.partials import Call, Partial, Piece
from schemas.messages.questions import LiveEpisode, Question, QuestionAnswer, Reply
from schemas.messages.tasks import ChatMessage, ContentPart, Image, Sampling, Task
from schemas.messages.telemetry import DeadLetter, Event, Heartbeat
from schemas.messages.trajectories import (
    REWARD_RANGE,
    TENANT,
    UNREWARDED,
    FinishReason,
    Kind,
    PlacedImage,
    RoutedExperts,
    Row,
    Score,
    ScoreStatus,
    Segment,
    Span,
    Trajectory,
    Turn,
    UncheckedTrajectory,
    add_spans,
    check_logprobs,
    is_reward,
    rows_of,
    versions_of,
)
from schemas.messages.weights import Adapter, Delta, FileSource, Manifest, Payload, Probe, TensorSpec, WeightSource
