"""The whole configuration. Its checks are of settings of different sections that exclude or need each other."""

from collections.abc import Sequence, Set
from typing import Self

from pydantic import model_validator

from schemas.config.algorithm import setting_of
from schemas.config.base import Section
from schemas.config.data import SELF, RewardTerm, check_labels
from schemas.config.deploy import PlacementConfig, count_gpus, parse_ranges
from schemas.config.generator import ENDPOINT_WORKFLOWS, LIVE
from schemas.config.run import slots_problem
from schemas.config.sections import Sections

DRAIN_S = 60.0
"""Longest deadline of episodes for which new weights may wait."""
HAND_OVER_S = 5.0
"""Time that a generator needs to hand over unfinished episodes after their grace period."""
TEXT_TRAINER = (
    "lora", "datasets", "router_replay", "compile", "mask_truncated", "micro_batch_tokens", "aggregation",
    "share_prefixes", "activation_checkpointing", "activation_offload", "processes", "parallel",
)  # fmt: skip
"""Settings of the trainer that concern tokens or several ranks: with other policies they would do nothing."""
GROUP_ADVANTAGES = ("centered", "grpo", "rloo", "lite_ppo", "max_rl")
"""Advantages that compare whole episodes from one state, where a policy acts in environments with numbers."""
TEXT_SAMPLING = ("temperature", "top_p", "top_k", "stop")
"""The same of sampling for training."""


def _check_lengths_and_rewards(config: Sections) -> None:
    for label, advantage in config.trainer.advantages.items():
        if config.sampling.n == 1 and advantage.compares_groups:
            where = setting_of("advantage", label)
            raise ValueError(
                f"{where}.name {advantage.name!r} compares the samples of a group, but sampling.n is 1: set sampling.n"
                f" to 2 or more, or {where}.name to raw"
            )
    if problem := slots_problem(config.flow.staleness, config.trainer.batch_groups, config.flow.window):
        raise ValueError(problem)
    samplings = [("sampling", config.sampling)]
    if config.eval is not None:
        for one in config.eval.dataset:
            where = "eval.sampling" if one.sampling is None else f"eval.dataset {one.label!r}: sampling"
            samplings.append((where, config.eval.sampling_of(one)))
    for name, sampling in samplings:
        if sampling.max_tokens >= config.model.max_length:
            raise ValueError(
                f"{name}.max_tokens {sampling.max_tokens} leaves no room for a prompt in"
                f" model.max_length {config.model.max_length}"
            )
    term, terms = config.trainer.advantage.filter_term, [term.label for term in config.reward.terms]
    if term is not None and term.partition("#")[0] not in terms:
        raise ValueError(
            f"trainer.advantage.filter_term {term!r} is not a term of reward.terms, must be one of {', '.join(terms)}"
        )
    best = config.trainer.checkpoint.keep_best
    if best and config.eval is None:
        raise ValueError(f"trainer.checkpoint.keep_best {best} needs evaluations: add an eval section")
    if config.placement is not None:
        _check_placement(config, config.placement)
    _check_pools(config)
    if config.generator.http is not None and config.trainer.lora is not None:
        raise ValueError(
            "trainer.lora: the engine http loads whole models only; set generator.engine to vllm or transformers"
        )
    if config.generator.workflow.name == "agent":
        _check_agents(config)
    if config.generator.workflow.name == LIVE:
        _check_live(config)
    elif config.trainer.advantage.compare == "tenant":
        raise ValueError("trainer.advantage.compare tenant needs generator.workflow live: set it to prompt")
    if (workflow := config.generator.workflow.name) in ("single_turn", "tools"):
        for where, named in (("reward", config.reward.terms), ("eval", config.eval_terms)):
            if any(term.name == "episode" for term in named):
                raise ValueError(
                    f"{where}.terms name episode, the reward of the workflow, but the workflow {workflow}"
                    " gives no reward: use another term, or another workflow"
                )
    if config.sampling.temperature == 0:
        raise ValueError("sampling.temperature is 0, which makes all samples of a group equal: must be above 0")


def _check_datasets(config: Sections) -> None:
    check_labels("train", config.train)
    train = [dataset.label for dataset in config.train]
    rewarded = {*train} - config.unrewarded
    for label in config.trainer.datasets:
        if label not in rewarded:
            raise ValueError(
                f"trainer.datasets.{label} must be a training dataset with a reward, one of"
                f" {', '.join(sorted(rewarded))}"
            )
    held_out = [] if config.eval is None else config.eval.dataset
    evaluated = {one.label for one in held_out if not (config.eval and config.eval.terms_of(one))}
    _check_terms("reward.terms", config.reward.terms, {*train}, evaluated)
    rewards = [term for term in config.reward.terms if term.is_reward]
    _check_terms("reward.terms", rewards, evaluated, {*train})
    for one in held_out:
        if config.eval is not None and (terms := config.eval.terms_of(one)):
            _check_terms("eval terms", terms, {one.label}, {other.label for other in held_out})
    term, terms = config.reward.correct_term, [*config.reward.terms, *config.eval_terms]
    if term is not None and term.partition("#")[0] not in {named.label for named in terms}:
        raise ValueError(f"reward.correct_term {term!r} is not the name of a reward term")


def _check_vision(config: Sections) -> None:
    model, trainer, parallel = config.model, config.trainer, config.trainer.parallel
    if model.max_pixels is not None and model.kind != "vision":
        raise ValueError("model.max_pixels applies to images only: set model.kind to vision")
    if model.kind != "vision":
        return
    refused = {
        f"generator.engine {config.generator.engine}": config.generator.engine in ("transformers", "http"),
        "trainer.lora with model.freeze_vision false": trainer.lora is not None and not model.freeze_vision,
        "trainer.router_replay": trainer.router_replay,
        f"trainer.parallel.tensor {parallel.tensor}": parallel.tensor > 1,
        f"trainer.parallel.context {parallel.context}": parallel.context > 1,
        "reward_model": config.reward_model is not None,
    }
    if names := [name for name, there in refused.items() if there]:
        raise ValueError(f"{names[0]} is not supported with model.kind vision: remove it (docs/vision.md)")


def _check_output_tokens(config: Sections) -> None:
    trainer = config.trainer
    refused = {
        f"trainer.parallel.tensor {trainer.parallel.tensor}": trainer.parallel.tensor > 1,
        "trainer.kl.reference teacher": trainer.kl.reference == "teacher",
        "warm_start with trainer.parallel.context": config.warm_start is not None and trainer.parallel.context > 1,
        f"generator.engine {config.generator.engine}": config.generator.engine == "http",
        "dpo": config.dpo is not None,
        "reward_model": config.reward_model is not None,
    }
    names = [name for name, there in refused.items() if there and config.model.output_tokens is not None]
    if names:
        raise ValueError(f"{names[0]} is not supported with model.output_tokens: remove it")


def _check_exact(config: Sections) -> None:
    model, generator, trainer, parallel = config.model, config.generator, config.trainer, config.trainer.parallel
    for name, pool in config.pools.items() if generator.exact else ():
        if pool.generator.get("engine", generator.engine) != generator.engine:
            raise ValueError(f"pools.{name}.generator.engine must be that of the section generator with exact")
    refused = {
        f"model.dtype {model.dtype}": model.dtype != "float32",
        "model.kind vision": model.kind == "vision",
        "model.output_tokens": model.output_tokens is not None,
        "trainer.lora": trainer.lora is not None,
        "trainer.compile": trainer.compile,
        "trainer.router_replay": trainer.router_replay,
        f"trainer.parallel.tensor {parallel.tensor}": parallel.tensor > 1,
        f"trainer.parallel.context {parallel.context}": parallel.context > 1,
    }
    if names := [name for name, there in refused.items() if there and config.exact]:
        raise ValueError(f"generator.exact does not support {names[0]} (docs/exact.md)")


def _check_teachers(config: Sections) -> None:
    terms, trainer = [term for term in config.reward.terms if term.is_teacher], config.trainer
    if useless := [term.name for term in config.eval_terms if not term.is_reward]:
        raise ValueError(f"eval terms name {useless[0]}, which gives no reward: remove it")
    if not terms and trainer.kl.reference != "teacher":
        return
    wrong = {
        "trainer.kl.reference teacher needs a term teacher or teacher_server in reward.terms": not terms,
        "reward.terms has a teacher: set trainer.kl.reference to teacher": trainer.kl.reference != "teacher",
        "reward.terms has a teacher: set trainer.kl.coef above 0": not trainer.kl.coef,
        "trainer.kl.place must be loss with a teacher": trainer.kl.place != "loss",
        "model.kind must be text with a teacher": config.model.kind != "text",
        "reward.terms: the weight of a teacher must be above 0": any(term.weight <= 0 for term in terms),
        f"sampling.temperature must be 1 with teacher_server and teacher_self, is {config.sampling.temperature:g}: they"
        " give log-probabilities at temperature 1": config.sampling.temperature != 1
        and any(term.name in ("teacher_server", SELF) for term in terms),
        f"generator.workflow {config.generator.workflow.name} is not supported with teacher_self, which needs samples"
        " of one row": config.generator.workflow.name in ENDPOINT_WORKFLOWS
        and any(term.name == SELF for term in terms),
        "generator.engine scripted is not supported with teacher_self: it has no model": config.generator.engine
        == "scripted"
        and any(term.name == SELF for term in terms),
        "reward.terms: a dataset can have one teacher_self": any(
            sum(term.name == SELF and term.applies_to(one.label) for term in terms) > 1 for one in config.train
        ),
    }
    if problems := [text for text, there in wrong.items() if there]:
        raise ValueError(problems[0])


def _check_supervised(config: Sections) -> None:
    terms = [term for term in config.reward.terms if term.is_supervised]
    if not terms:
        return
    if config.model.kind == "mlp":
        raise ValueError("model.kind must be text or vision with the term supervised, is 'mlp'")
    if config.model.output_tokens is not None:
        raise ValueError("model.output_tokens is not supported with the term supervised: remove it")
    if any(term.weight <= 0 for term in terms):
        raise ValueError("reward.terms: the weight of supervised must be above 0")
    for one in config.train:
        applied = [term for term in config.reward.terms if term.applies_to(one.label)]
        if not any(term.is_supervised for term in applied):
            continue
        if len(applied) > 1:
            other = next((term.name for term in applied if not term.is_supervised), "another supervised")
            raise ValueError(
                f"reward.terms: supervised and {other} both apply to the dataset {one.label!r}, whose samples are its"
                " answers: set datasets of one of them"
            )
        if one.curriculum.name != "uniform":
            raise ValueError(
                f"train.curriculum.name of {one.label!r} must be uniform, is {one.curriculum.name!r}: given answers are"
                " neither solved nor failed"
            )


def _check_live(config: Sections) -> None:
    if config.sampling.n != 1:
        raise ValueError(f"sampling.n {config.sampling.n} must be 1 with generator.workflow live")
    if config.generator.update == "drain":
        raise ValueError("generator.update drain would wait for every conversation: set it to keep or recompute")


def _check_minibatches(config: Sections) -> None:
    trainer = config.trainer
    most, of = trainer.batch_groups, "trainer.batch_groups, {}: a minibatch has whole prompt groups"
    if config.model.kind == "mlp":
        sizes = [(one.args.get("envs", 8), one.args.get("steps", 32)) for one in config.train]
        played = [envs * steps for envs, steps in sizes if isinstance(envs, int) and isinstance(steps, int)] or [1]
        most, of = most * config.sampling.n * min(played), "{}, the transitions of a step"
    if trainer.minibatches > most:
        raise ValueError(f"trainer.minibatches {trainer.minibatches} must be at most {of.format(most)}")


def _check_mlp(config: Sections) -> None:
    trainer, generator = config.trainer, config.generator
    if trainer.scale_rewards and (config.model.kind != "mlp" or config.compares_episodes):
        raise ValueError(
            "trainer.scale_rewards true needs model.kind mlp, and trainer.critic or trainer.sac: leave it out"
        )
    parts = {
        "model.kind": (config.model.kind, "mlp"),
        "generator.engine": (generator.engine, "mlp"),
        "generator.workflow.name": (generator.workflow.name, "fragments"),
    }
    if all(value != wanted for value, wanted in parts.values()) and trainer.sac is None:
        return
    name = trainer.advantage.name
    if trainer.sac is None and name not in ("gae", *GROUP_ADVANTAGES):
        known = ", ".join(GROUP_ADVANTAGES)
        raise ValueError(
            f"trainer.advantage.name must be gae or, without a trainer.critic, one of {known} to act in"
            f" environments with numbers, is {name!r}"
        )
    for name, (value, wanted) in parts.items():
        if value != wanted:
            raise ValueError(f"{name} must be {wanted} to act in environments with numbers, is {value!r}")
    refused = {
        f"model.dtype {config.model.dtype}": config.model.dtype != "float32",
        "model.output_tokens": config.model.output_tokens is not None,
        "trainer.kl.coef": trainer.kl.coef > 0,
        f"trainer.optimizer.name {trainer.optimizer.name}": trainer.optimizer.name != "adamw",
        "trainer.critic.model": trainer.critic is not None and trainer.critic.model is not None,
        "warm_start": config.warm_start is not None,
        "dpo": config.dpo is not None,
        "reward_model": config.reward_model is not None,
    }
    chosen: list[tuple[str, Section, Sequence[str]]] = [
        ("trainer", trainer, TEXT_TRAINER),
        ("sampling", config.sampling, TEXT_SAMPLING),
    ]
    for where, section, settings in chosen:
        for name in settings:
            default = type(section).model_fields[name].get_default(call_default_factory=True)
            refused[f"{where}.{name}"] = getattr(section, name) != default
    if names := [name for name, there in refused.items() if there]:
        raise ValueError(f"{names[0]} is not supported with model.kind mlp: remove it (docs/embodied.md)")


def _check_pools(config: Sections) -> None:
    for name, pool in config.pools.items():
        for setting in pool.common:
            raise ValueError(
                f"pools.{name}.{setting} must be the same for all generators, whose samples are trained together:"
                " remove it there"
            )
        if problem := pool.units_problem:
            raise ValueError(f"pools.{name}.units {problem}")


def _check_placement(config: Sections, placement: PlacementConfig) -> None:
    if placement.shared and (names := config.cannot_share):
        raise ValueError(
            f"{names[0]} can't use its GPUs in turns with the trainer: name other GPUs than"
            f" {placement.shared[0]} in placement.trainer or placement.generator"
        )
    if placement.is_auto and (names := [f"pools.{name}.nodes" for name, pool in config.pools.items() if pool.nodes]):
        raise ValueError(f"placement auto plans the machine of `tidemill up`: remove it, or {names[0]}")
    if not placement.is_auto and (given := len(parse_ranges(placement.trainer))) != config.trainer.processes:
        raise ValueError(
            f"placement.trainer {placement.trainer!r} has {count_gpus(given)}, must be as many as trainer.processes"
            f" {config.trainer.processes}"
        )
    if config.launcher.name != "local":
        raise ValueError(f"placement needs launcher.name local, not {config.launcher.name!r}: remove it")
    if names := sorted({"trainer_gpus", "generator_gpus"} & config.launcher.args.keys()):
        raise ValueError(f"launcher.args.{names[0]} and placement exclude each other: remove one of them")


def _check_agents(config: Sections) -> None:
    deadline_s = config.generator.agents.deadline_s
    if deadline_s >= config.trainer.batch_timeout_s:
        raise ValueError(
            f"generator.agents.deadline_s {deadline_s:g} must be below trainer.batch_timeout_s"
            f" {config.trainer.batch_timeout_s:g}: otherwise the trainer can fail during an episode"
        )
    grace_s, most_s = config.generator.agents.grace_s, config.supervisor.grace_s
    if grace_s + HAND_OVER_S > most_s:
        raise ValueError(
            f"generator.agents.grace_s {grace_s:g} and {HAND_OVER_S:g} s to hand episodes over exceed"
            f" supervisor.grace_s {most_s:g}, after which a generator is killed: lower the first or raise the last"
        )
    if config.generator.update == "drain" and deadline_s > DRAIN_S:
        raise ValueError(
            f"generator.update drain waits for every episode before new weights are loaded: set"
            f" generator.agents.deadline_s {deadline_s:g} to {DRAIN_S:g} or less, or generator.update to keep"
        )


def _check_terms(setting: str, terms: list[RewardTerm], labels: set[str], others: Set[str] = frozenset()) -> None:
    """Raise ValueError if a term names an unknown dataset, or a dataset has no term."""
    for term in terms:
        for label in term.datasets or []:
            if label not in labels | others:
                raise ValueError(
                    f"{setting}: the term {term.name!r} names an unknown dataset {label!r}, must be one of"
                    f" {', '.join(sorted(labels | others))}"
                )
    for label in sorted(labels):
        if not any(term.applies_to(label) for term in terms):
            raise ValueError(
                f"{setting}: no term applies to the dataset {label!r}, so its samples would have no reward"
            )


class TidemillConfig(Sections):
    """The whole configuration."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        for check in (
            _check_lengths_and_rewards,
            _check_datasets,
            _check_vision,
            _check_output_tokens,
            _check_exact,
            _check_teachers,
            _check_supervised,
            _check_minibatches,
            _check_mlp,
        ):
            check(self)
        return self
