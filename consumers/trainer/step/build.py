"""A run's training step, put together from its configuration: models, loss, advantages, optimizer."""

from collections.abc import Mapping

import torch

from consumers.trainer.algorithms import AGGREGATIONS
from consumers.trainer.algorithms.objective import Objective, load_advantages
from consumers.trainer.data.credit import AnyAdvantage
from consumers.trainer.data.load_balancing import Cost
from consumers.trainer.data.plan import StepPlanner
from consumers.trainer.distributed.layout import check_model
from consumers.trainer.distributed.ranks import Ranks
from consumers.trainer.metrics.expert_load import watch_experts
from consumers.trainer.model.activations import save_activations
from consumers.trainer.model.compile import compile_layers
from consumers.trainer.model.lora import load_policy, make_policy
from consumers.trainer.model.packing import try_kernel
from consumers.trainer.model.policy import DTYPES, Policy, load_model
from consumers.trainer.model.vision import VisionTower, image_settings_of
from consumers.trainer.step.critic import Critic, CriticStep
from consumers.trainer.step.fragment_step import build_fragment_step
from consumers.trainer.step.gradient_update import GradientUpdate, Schedule
from consumers.trainer.step.learner import Learner
from consumers.trainer.step.optimizers import build_optimizer
from consumers.trainer.step.prepare import Preparation
from consumers.trainer.step.train_step import TrainStep
from schemas.config import TidemillConfig
from schemas.errors import ConfigError
from schemas.model_folder import check_quantised


def build_learner(config: TidemillConfig, ranks: Ranks) -> Learner:
    """Build the training step that a configuration describes, of tokens or of fragments; see build_train_step."""
    build = build_fragment_step if config.model.kind == "mlp" else build_train_step
    return build(config, ranks)


def build_train_step(
    config: TidemillConfig,
    ranks: Ranks | None = None,
    *,
    policy: Policy | None = None,
    reference: Policy | None = None,
    critic: Critic | None = None,
) -> TrainStep:
    """Build the training step of a language model; every rank calls this.

    ranks: by default this process alone. policy, reference, critic: loaded models, by default those of ``model``,
    ``trainer.kl`` and ``trainer.critic``; the reference on its device. Parameters and optimizer keep the type of
    ``policy``, which is float32 in a run; the model computes in ``model.dtype``. ConfigError says what is wrong with
    the configuration.
    """
    ranks = ranks or Ranks(parallel=config.trainer.parallel)
    trainer = config.trainer
    if policy is None:
        _check_models(config, ranks)
    # Rank 0 reads each model and sends it to the others, one model after the other.
    policy = policy or make_policy(config, empty=not ranks.is_main, stored=ranks.world > 1)
    dtype = DTYPES[config.model.dtype]
    advantages = load_advantages(config)
    advantage = advantages[""]
    # Counted before the policy is sharded: afterwards parameters are parts.
    cost = policy.cost
    policy = _shard_policy(policy, config, ranks)
    reference = reference or reference_policy(config, ranks)
    critic = critic or build_critic(config, empty=not ranks.is_main)
    critic_step = None if critic is None else _build_critic_step(critic, config, ranks)
    # Each model of the step computes the same micro-batches: one that pads needs them cut for padding.
    packed = all(model.packed for model in (policy, reference, critic) if model is not None)
    if policy.packed:
        try_kernel(policy.causal_lm.config.get_text_config(), ranks.accelerator.device, dtype)
    planner = _build_planner(config, ranks, policy, advantages, cost, packed)
    objective = Objective.from_config(trainer, config.base)
    preparation = Preparation(
        objective,
        reference=reference,
        lora_off=trainer.lora_off,
        kl_in_reward=trainer.kl.coef if trainer.kl.place == "reward" else 0.0,
        token_advantage=advantage if getattr(advantage, "per_token", False) else None,
        critic=critic_step,
        normalise=trainer.advantage.normalise,
        score_proximal=trainer.epochs * trainer.minibatches > 1 and objective.loss.needs_proximal,
    )
    optimizer = build_optimizer(policy, trainer.optimizer)
    return TrainStep(
        policy,
        planner,
        GradientUpdate(policy, optimizer, ranks, trainer.optimizer.max_grad_norm, dtype),
        Schedule(trainer.optimizer, trainer.optimizer.lr, trainer.steps),
        ranks,
        objective,
        preparation if preparation.needed else None,
        critic_step,
        [each for each in (watch_experts(policy), policy.router_replay) if each is not None],
        trainer.epochs,
    )


def _build_critic_step(critic: Critic, config: TidemillConfig, ranks: Ranks) -> CriticStep | None:
    if (settings := config.trainer.critic) is None:
        return None
    _run_tower(critic, ranks)
    _before_sharding(critic, config, ranks)
    return CriticStep(critic, settings, config.trainer.steps, ranks, DTYPES[config.model.dtype])


def _shard_policy(policy: Policy, config: TidemillConfig, ranks: Ranks) -> Policy:
    _run_tower(policy, ranks)
    if config.trainer.router_replay:
        policy.replay_routers()
    _before_sharding(policy, config, ranks)
    kept = None if config.trainer.lora is not None else torch.float32
    return ranks.prepare(policy, DTYPES[config.model.dtype], kept, config.trainer.parallel.reshard)


def _build_planner(
    config: TidemillConfig,
    ranks: Ranks,
    policy: Policy,
    advantages: Mapping[str, AnyAdvantage],
    cost: Cost,
    packed: bool,
) -> StepPlanner:
    """Build the planner. advantages: by label, "" for the run's. packed: whether all models take packed rows."""
    trainer = config.trainer
    return StepPlanner(
        advantage=advantages[""],
        aggregation=AGGREGATIONS.get(trainer.aggregation, config.base),
        # Of a data part, whose ranks share the tokens.
        micro_batch_tokens=trainer.micro_batch_tokens * ranks.layout.context,
        max_tokens=config.sampling.max_tokens,
        dp_size=ranks.dp_size,
        cost=cost,
        packed=packed,
        by_name=trainer.advantage.by_name,
        mask_truncated=trainer.mask_truncated,
        share_prefixes=packed
        and policy.share_prefixes
        and policy.vision is None
        and ranks.layout.context == 1
        and not trainer.router_replay,
        images=None if policy.vision is None else policy.vision.settings,
        minibatches=trainer.minibatches,
        teacher_weights=config.teacher_weights,
        supervised_weights=config.supervised_weights,
        unrewarded=config.unrewarded,
        advantages=advantages,
        losses={label: number for number, label in enumerate(trainer.losses)},
        weights={label: own.weight for label, own in trainer.datasets.items()},
        by_tenant=trainer.advantage.compare == "tenant",
    )


def _run_tower(model: Policy | Critic, ranks: Ranks) -> None:
    """Have a vision tower run also where there are no images, if it must."""
    if model.vision is not None:
        # A tower that is trained moves on by its momentum in a step of text alone, on however many ranks.
        model.vision.always = ranks.world > 1 or not model.vision.frozen


def _before_sharding(model: Policy | Critic, config: TidemillConfig, ranks: Ranks) -> None:
    """Have a model share prefixes, keep fewer activations and be compiled, as configured."""
    trainer = config.trainer
    model.share_prefixes = trainer.share_prefixes
    save_activations(model.causal_lm, trainer.activation_checkpointing, trainer.activation_offload)
    if trainer.compile:
        compile_layers(model, ranks.accelerator.device.type)


def _check_models(config: TidemillConfig, ranks: Ranks) -> None:
    """Refuse, before anything is loaded, models that the ranks cannot share as trainer.parallel says."""
    trainer, model = config.trainer, config.model
    if check_quantised(model.path, adapted=trainer.lora is not None) and ranks.world > 1:
        raise ConfigError(
            f"model.path {model.path}: its weights are quantised, and {ranks.world} ranks can't share such a model: set"
            " their number to 1, or give a model with weights of 16 or 32 bits"
        )
    paths = {model.path: None}
    if trainer.critic is not None:
        check_quantised(trainer.critic.model or model.path, "trainer.critic.model")
        paths[trainer.critic.model or model.path] = None
    if trainer.has_second_model and trainer.kl.device != "cpu":
        paths[trainer.kl.model or model.path] = None
    for path in paths:
        check_model(path, ranks.layout, model.trust_remote_code)


def build_critic(config: TidemillConfig, empty: bool = False) -> Critic | None:
    """Load the critic of ``trainer.critic`` before its first step; None without one. empty: as in make_policy."""
    settings, model = config.trainer.critic, config.model
    if settings is None:
        return None
    path, max_length = settings.model or model.path, model.max_length
    vision = model.kind == "vision"
    causal_lm = load_model(path, "float32", model.trust_remote_code, vision, empty, max_length)
    if not vision:
        return Critic(causal_lm)
    named = model.model_copy(update={"path": path})
    return Critic(causal_lm, VisionTower(causal_lm, image_settings_of(named), model.freeze_vision))


def reference_policy(config: TidemillConfig, ranks: Ranks) -> Policy | None:
    """Load the frozen second model of ``trainer.kl``, None without one: sharded like the policy, or whole on a CPU."""
    settings, model = config.trainer.kl, config.model
    if not config.trainer.has_second_model:
        return None
    beside = settings.device != "cpu"
    policy = load_policy(config, settings.model or model.path, model.dtype, empty=beside and not ranks.is_main)
    policy.requires_grad_(False)
    policy.share_prefixes = config.trainer.share_prefixes
    if policy.vision is not None:
        policy.vision.always = ranks.world > 1 and beside
    if not beside:
        return policy
    return ranks.prepare(policy, DTYPES[model.dtype]) if ranks.world > 1 else policy.to(ranks.accelerator.device)
