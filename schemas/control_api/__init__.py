"""The control plane's requests and answers as types that its routes, its OpenAPI document and its clients share.

Times are Unix seconds, durations seconds, rates per second; a metric that is not known yet is null.
"""

from schemas.control_api.base import Answer, Finish, Health, Level, Limit, PauseMode, Problem, RunState
from schemas.control_api.dead_letters import DeadLetters, LetterDetail, LetterHead
from schemas.control_api.history import (
    Evaluations,
    MetricsHistory,
    ThroughputHistory,
    Timeline,
    TimelineEvent,
    Weights,
    WeightVersion,
)
from schemas.control_api.orders import (
    Accepted,
    BegunEpisode,
    EpisodeReward,
    EvaluationRequest,
    PauseRequest,
    RewardedEpisode,
    ScaleRequest,
    Settings,
    SettingsChange,
    WaitRequest,
)
from schemas.control_api.status import (
    Bottleneck,
    EvaluationStatus,
    LedgerStatus,
    PauseStatus,
    PoolStatus,
    RunStatus,
    Scaling,
    Services,
    ServiceStatus,
    Staleness,
    StreamStatus,
    Throughput,
)
from schemas.control_api.trajectories import (
    Generated,
    GeneratedReply,
    GenerateRequest,
    ImageRange,
    SegmentRange,
    SpokenMessage,
    SpokenTurn,
    TokenTable,
    ToolUse,
    Trajectories,
    TrajectoryDetail,
    TrajectoryHead,
    TurnRange,
)
