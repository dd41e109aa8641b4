"""The configuration: one YAML file, checked completely before any model is loaded.

Every setting has its type, unit, default and limits in the file of its section;
``docs/configuration.md`` is made from these.
"""

from schemas.config.agents import AgentsConfig
from schemas.config.algorithm import AdvantageConfig, KlConfig, LossConfig, RejectionConfig, SacConfig
from schemas.config.data import (
    CurriculumConfig,
    DatasetConfig,
    EvalConfig,
    EvalDataset,
    LabelledDataset,
    RewardConfig,
    RewardTerm,
    TrainDataset,
)
from schemas.config.deploy import (
    ControlConfig,
    DeploymentsConfig,
    LauncherConfig,
    PlacementConfig,
    ProbesConfig,
    SupervisorConfig,
)
from schemas.config.generator import (
    EPISODE_WORKFLOWS,
    REWARDING_WORKFLOWS,
    GeneratorConfig,
    HttpEngineConfig,
    PoolConfig,
    SamplingConfig,
    WorkflowConfig,
)
from schemas.config.loading import (
    by_pool,
    dump_config,
    dump_yaml,
    load_config,
    of_node,
    of_pool,
    parse_config,
    save_config,
)
from schemas.config.offline import DpoConfig, PreferenceConfig, RewardModelConfig, WarmStartConfig
from schemas.config.publish import PublishConfig
from schemas.config.root import TidemillConfig
from schemas.config.run import BrokerConfig, FlowConfig, LogConfig, ModelConfig, RunConfig, TraceConfig
from schemas.config.trainer import (
    CheckpointConfig,
    CriticConfig,
    LoraConfig,
    OptimizerConfig,
    ParallelConfig,
    TrainerConfig,
)
