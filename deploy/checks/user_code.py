"""The checks that open data and run the user's code: ``python -P -m deploy.checks.user_code``.

Reads ``{"config": ..., "thorough": ..., "step_s": ...}`` from stdin and writes a JSON line when a check begins, for
each finding, and at the end. Output of the user's code goes to stderr. Data come first and PyTorch last: its import
takes seconds, and is needed only if a loss, an advantage or an estimator is the user's own or has arguments.
"""

import importlib.util
import json
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from consumers.reward.rewards.terms import resolve
from consumers.reward.scorer import check_reward
from consumers.trainer.algorithms import ADVANTAGES, AGGREGATIONS, KL_ESTIMATORS, LOSSES
from deploy.checks.finding import Finding, run_check
from deploy.checks.model_files import cached_folder, find_unmade
from deploy.checks.teachers import check_teachers
from producers.datasets.base import Example
from producers.datasets.loading import build_dataset
from producers.engines import ENGINES
from producers.engines.factory import engine_name, find_engine
from producers.workflows import WORKFLOWS
from producers.workflows.base import find_workflow
from schemas.codec import Array
from schemas.config import EPISODE_WORKFLOWS, REWARDING_WORKFLOWS, RewardTerm, TidemillConfig, by_pool, parse_config
from schemas.config.algorithm import setting_of
from schemas.errors import ConfigError
from schemas.messages import ChatMessage, Span, Trajectory, Turn
from schemas.model_folder import chat_template
from schemas.plugins import bind, check_call, load

QUICK_S = 5.0
"""Longest that the start of a run waits for a first reward, including the start of the worker."""
WRITTEN = ("#### {}", "\\boxed{{{}}}")
"""How rules that read a final answer expect it to be written."""
BUILT_IN = {*LOSSES.names, *ADVANTAGES.names, *AGGREGATIONS.names, *KL_ESTIMATORS.names, "ratio"}
"""Names of algorithms that need no check."""
END = "end"
"""Reported as the next check when all are done."""
Check = tuple[str, Callable[[], Finding | str | None]]


def checks(config: TidemillConfig, thorough: bool = False, step_s: float | None = None) -> Iterator[Check]:
    """Yield the checks in their order. step_s: known seconds of a training step."""
    first: list[Example] = []
    yield "dataset", partial(check_data, config, first)
    yield "reward", partial(check_rewards, config)
    if any(term.is_teacher for term in config.reward.terms):
        yield "teachers", partial(check_teachers, config)
    yield "workflow", partial(check_generator, config)
    yield "trackers", partial(check_own_trackers, config)
    yield "algorithm", partial(check_algorithm, config)
    yield "first reward", partial(score_example, config, first, thorough)
    if thorough:
        from deploy.checks import thorough as more

        def of_model(check: Callable[[TidemillConfig], Finding | str]) -> Callable[[], Finding | str]:
            return lambda: find_unmade(config) or check(config)

        yield "prompts", of_model(more.measure_prompts)
        if config.generator.workflow.name == "tools":
            yield "tools", partial(more.start_tools, config)
        if config.generator.workflow.name in EPISODE_WORKFLOWS:
            yield "joined turns", of_model(more.check_bridge)
        if config.generator.workflow.name == "agent":
            from deploy.checks.agent_episode import check_agent

            yield "agent episode", of_model(check_agent)
            yield "episode times", partial(more.compare_times, config, step_s)
        yield "model size", of_model(more.measure_model)


def check_data(config: TidemillConfig, first: list[Example]) -> Finding | str:
    """Open every dataset and read its first example. Warn if a batch needs more prompts than there are.

    first: receives the first examples of the training datasets.
    """
    count, texts = 0, []
    for dataset in config.train:
        levels = [build_dataset(level, config.base) for level in dataset.at_levels()]
        own = sum(map(len, levels))
        count += own
        texts.append(f"{dataset.label}: {own:,} prompts" + (f" at {len(levels)} levels" if dataset.levels else ""))
        for examples in levels:
            first.append(examples[0])
            check_chat(config, first[-1])
    text = ", ".join(texts)
    if config.eval is not None:
        held_out = [build_dataset(dataset, config.base) for dataset in config.eval.dataset]
        text += f", {sum(map(len, held_out)):,} held-out"
        for examples in held_out:
            check_chat(config, examples[0])
    if config.warm_start is not None and find_unmade(config):
        for supervised in (config.warm_start.dataset, config.warm_start.eval):
            build_dataset(supervised, config.base)
    batch = config.trainer.batch_groups
    if batch > count:
        names = ", ".join(dataset.label for dataset in config.train)
        text = f"trainer.batch_groups {batch} exceeds the {count:,} prompts of {names}: prompts repeat within a batch"
        return Finding("dataset", "warn", text, "use smaller batches, or more prompts")
    return text


def check_chat(config: TidemillConfig, example: Example) -> None:
    """Raise ConfigError if an example has messages but the tokenizer has no valid chat template."""
    if example.messages is None or (config.warm_start is not None and not Path(config.model.path).is_dir()):
        return
    folder = Path(config.model.path).expanduser()
    if not folder.is_dir():
        cached = cached_folder(config.model.path)
        if cached is None or not (cached / "tokenizer_config.json").is_file():
            # The tokenizer is not downloaded yet.
            return
        folder = cached
    template = chat_template(folder)
    if template is None:
        raise ConfigError(
            f"the dataset has chat messages, but the tokenizer in {folder} has no chat template: use a chat model or"
            " a dataset of plain text"
        )
    from jinja2 import TemplateSyntaxError
    from jinja2.ext import loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class GenerationBlock(loopcontrols):
        """The block that marks the model's own words, as transformers defines it."""

        tags = loopcontrols.tags | {"generation"}

        def parse(self, parser: Any) -> Any:
            if parser.stream.current.value != "generation":
                return super().parse(parser)
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    try:
        ImmutableSandboxedEnvironment(extensions=[GenerationBlock]).parse(template)
    except TemplateSyntaxError as error:
        raise ConfigError(f"the chat template in {folder} is broken, line {error.lineno}: {error.message}") from error


def check_rewards(config: TidemillConfig) -> str:
    """Import every term and check its arguments."""
    check_reward(config.reward.terms, config.base)
    if config.eval_terms:
        check_reward(config.eval_terms, config.base)
    return ", ".join(term.name for term in config.reward.terms)


def score_example(config: TidemillConfig, first: Sequence[Example], thorough: bool) -> Finding | str:
    """Score the first example, with its reference answer as the completion if it has one.

    first: first examples of the training datasets. Unless ``thorough``, terms that need a server, a model or data of
    the workflow are skipped, slow terms are left to the run, and a failure is a warning: a function that rejects a
    bare answer may accept what the policy writes.
    """
    terms = [term for term in config.reward.terms if term.is_reward] if thorough else _local_terms(config)
    if not terms:
        return "skipped: it needs a server, a model or the workflow"
    if not first:
        return "skipped: the dataset has no example"
    example = first[0]
    prompt = example.text if example.text is not None else "\n".join(m.text for m in example.messages or [])
    answer, data, reward = str(example.data.get("answer", "")), example.data, None
    if config.generator.workflow.name in EPISODE_WORKFLOWS:
        asked = [{"role": m.role, "content": m.plain} for m in example.messages or [ChatMessage("user", prompt)]]
        data = data | {"messages": [*asked, {"role": "assistant", "content": answer}]}
    if config.generator.workflow.name in REWARDING_WORKFLOWS:
        reward = 1.0
    trajectory = Trajectory(
        run=config.run.name,
        task_id=0,
        sample=0,
        kind="train",
        tokens=Array.of(np.zeros(2), "i4"),
        loss_mask=Array.of([0, 1], "u1"),
        logprobs=Array.of(np.zeros(2), "f4"),
        spans=[Span(0, 1, 2)],
        turns=[Turn("assistant", 1, 2)],
        finish="stop",
        prompt=prompt,
        dataset=config.train[0].label,
        completion=answer,
        generator="doctor",
        data=data,
        reward=reward,
    )
    settings, within_s = config.reward, None if thorough else QUICK_S
    score = check_reward(terms, config.base, trajectory, settings.timeout_s, settings.env, within_s)
    if score is None:
        return f"skipped: it takes longer than {QUICK_S:g} s"
    what = "the reference answer" if answer else "an empty answer"
    if score.status != "ok":
        text = f"no reward for {what} of the first prompt: {score.reason}; samples that fail are excluded from training"
        fields = ", ".join(example.data) or "none"
        advice = f"fix the reward function; the row gives it the fields {fields}"
        return Finding("first reward", "fail" if thorough else "warn", text, advice)
    given = "" if reward is None else f", if the workflow's reward is {reward:g}"
    text = f"{score.reward:g} for {what} of the first prompt{given}"
    for written in (form.format(answer) for form in WRITTEN if thorough and answer and score.reward == 0):
        other = msgspec.structs.replace(trajectory, completion=written)
        formatted = check_reward(terms, config.base, other, settings.timeout_s, settings.env)
        if formatted is not None and formatted.reward:
            return f"{text}, {formatted.reward:g} for {written!r}"
    return text


def _local_terms(config: TidemillConfig) -> list[RewardTerm]:
    """Return the terms of the first dataset that need nothing but the data."""
    name, label, terms = config.generator.workflow.name, config.train[0].label, config.reward.terms
    if name not in WORKFLOWS.names or name in REWARDING_WORKFLOWS:
        return []
    resolved = zip(terms, resolve(terms, config.base), strict=True)
    return [setting for setting, term in resolved if setting.is_reward and term.is_local and setting.applies_to(label)]


def check_generator(config: TidemillConfig) -> str:
    """Import workflow and engine if they are the user's own, and check their arguments."""
    generator = config.generator
    find_workflow(generator.workflow.name, generator.workflow.args, config.base)
    if generator.workflow.name == "agent":
        from producers.agents.workers.start import check_agent
        from producers.agents.workflow import AgentWorkflow

        check_agent(AgentWorkflow(**generator.workflow.args).program(config.base, generator.agents))
    engines = []
    for name, one in by_pool(config).items():
        if name and config.pools[name].python is not None:
            # Another interpreter has packages of its own.
            continue
        engines.append(engine := engine_name(one.generator.engine))
        if engine not in ENGINES.names:
            find_engine(one.generator.engine, config.base)
        if engine == "scripted":
            from producers.engines.scripted import SampleScript

            bind(f"pools.{name}.generator" if name else "generator", SampleScript, one.generator.args)
    return f"{generator.workflow.name} on {', '.join(engines)}"


def check_own_trackers(config: TidemillConfig) -> str:
    """Import the user's own trackers, whose names have a colon. ConfigError if one can't be imported."""
    names = config.trainer.trackers
    for name in names:
        if ":" in name:
            load(name, "trainer.trackers", config.base)
    return ", ".join(names) or "none"


def check_algorithm(config: TidemillConfig) -> str:
    """Build loss, advantage, aggregation and KL as the trainer does, if they can be wrong at all."""
    trainer = config.trainer
    chosen = [*trainer.losses.values(), *trainer.advantages.values()]
    names = [trainer.aggregation, trainer.kl.estimator, *(one.name for one in chosen)]
    names += [rule.measure for rule in trainer.rejection]
    text = f"{trainer.loss.name}, {trainer.advantage.name}, {trainer.aggregation}"
    if not (any(one.args for one in chosen) or any(name not in BUILT_IN for name in names)):
        return text
    if importlib.util.find_spec("torch") is None:
        return f"{text}, not checked, since PyTorch is not installed"
    from consumers.trainer.algorithms.objective import Objective, load_advantages

    objective = Objective.from_config(trainer, config.base)
    for label, advantage in load_advantages(config).items():
        takes: tuple[str, ...] = ("rewards", "groups")
        if getattr(advantage, "per_token", False):
            takes = ("batch", "all_reduce_sum")
        elif getattr(advantage, "per_turn", False):
            takes = ("rewards", "samples", "peers")
        check_call(setting_of("advantage", label), advantage, takes)
    for label, loss in zip(trainer.losses, (objective.loss, *objective.others), strict=True):
        check_call(setting_of("loss", label), getattr(loss, "function", loss), ("inputs",))
    aggregation = AGGREGATIONS.get(trainer.aggregation, config.base)
    check_call("trainer.aggregation", aggregation, ("lengths", "groups", "totals"))
    for estimator in (objective.estimator, *(rule.estimator for rule in objective.rules)):
        if estimator is not None:
            check_call("trainer.kl.estimator", estimator, ("difference",))
    return text


def main() -> None:
    """Write findings to the original stdout, and redirect the output of user code to stderr."""
    request = json.loads(sys.stdin.read())
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    config = parse_config(request["config"])

    def answer(line: dict[str, Any]) -> None:
        answers.write(json.dumps(line) + "\n")
        answers.flush()

    for name, check in checks(config, request["thorough"], request["step_s"]):
        answer({"begins": name})
        answer(asdict(run_check(name, check)))
    answer({"begins": END})


if __name__ == "__main__":
    main()
