"""The check before a run that opens data and runs the user's code: ``python -P -m deploy.checks.user_code``.

Reads ``{"config": ..., "thorough": ..., "step_s": ...}`` from stdin and writes a JSON line for each check that begins,
for each finding, and for the end. What the code prints goes to stderr. Data come first and PyTorch last, which takes
seconds to import, and only where a loss, an advantage or an estimator is the user's own or has arguments.
"""

from __future__ import annotations

import importlib.util
import json
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from consumers.reward.rewards.terms import resolve
from consumers.reward.scorer import check_reward
from consumers.trainer.algorithms import ADVANTAGES, AGGREGATIONS
from deploy.checks.finding import Finding, examine
from deploy.checks.model_files import cached_folder, chat_template, find_unmade
from producers.datasets.base import Example
from producers.datasets.loading import build_dataset
from producers.engines import ENGINES
from producers.engines.factory import engine_name, find_engine
from producers.workflows import WORKFLOWS
from producers.workflows.base import find_workflow
from schemas.codec import Array
from schemas.config import EPISODE_WORKFLOWS, REWARDING_WORKFLOWS, RewardTerm, TidemillConfig, parse_config
from schemas.errors import ConfigError
from schemas.messages import ChatMessage, Span, Trajectory, Turn
from schemas.plugins import bind, check_call, load

QUICK_S = 5.0
"""Most that a run's start waits for a first reward, with the worker's start."""
END = "end"
"""The name of a check that begins when all have been made."""
Check = tuple[str, Callable[[], Finding | str | None]]


def checks(config: TidemillConfig, thorough: bool = False, step_s: float | None = None) -> Iterator[Check]:
    """The checks, in the order in which they are made. step_s: what somebody knows a step to take."""
    first: list[Example] = []
    yield "dataset", partial(check_data, config, first)
    yield "reward", partial(check_rewards, config)
    yield "workflow", partial(check_generator, config)
    yield "trackers", partial(check_own_trackers, config)
    yield "algorithm", partial(check_algorithm, config)
    yield "reward trial", partial(score_example, config, first, thorough)
    if thorough:
        from deploy.checks import thorough as more

        yield "prompts", partial(more.measure_prompts, config)
        if config.generator.workflow.name in EPISODE_WORKFLOWS:
            yield "joined turns", partial(more.try_bridge, config)
        if config.generator.workflow.name == "agent":
            from deploy.checks.agent_episode import try_agent

            yield "agent trial", partial(try_agent, config)
            yield "episode times", partial(more.compare_times, config, step_s)
        yield "model size", partial(more.measure_model, config)


def check_data(config: TidemillConfig, first: list[Example]) -> Finding | str:
    """Open every dataset, which reads a first example; a warning when a batch needs more prompts than there are.

    first: gets the first examples of the training datasets.
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
        return Finding(
            "dataset",
            "warn",
            f"trainer.batch_groups {batch} is more than the {count:,} prompts of"
            f" {', '.join(dataset.label for dataset in config.train)}: prompts repeat within a batch",
            "use smaller batches, or more prompts",
        )
    return text


def check_chat(config: TidemillConfig, example: Example) -> None:
    """ConfigError when an example has messages and the model's tokenizer no chat template, or a broken one."""
    if example.messages is None or (config.warm_start is not None and not Path(config.model.path).is_dir()):
        return
    folder = Path(config.model.path).expanduser()
    if not folder.is_dir():
        cached = cached_folder(config.model.path)
        if cached is None or not (cached / "tokenizer_config.json").is_file():
            # Of a tokenizer that is not here yet nothing can be told.
            return
        folder = cached
    template = chat_template(folder)
    if template is None:
        raise ConfigError(
            f"the dataset gives chat messages, but the tokenizer in {folder} has no chat template: use a chat model, or"
            " a dataset of plain text"
        )
    from jinja2 import TemplateSyntaxError
    from jinja2.ext import loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(loopcontrols):
        """Templates mark what the model says with this block, which transformers knows."""

        tags = loopcontrols.tags | {"generation"}

        def parse(self, parser: Any) -> Any:
            if parser.stream.current.value != "generation":
                return super().parse(parser)
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    try:
        ImmutableSandboxedEnvironment(extensions=[Generation]).parse(template)
    except TemplateSyntaxError as error:
        raise ConfigError(f"the chat template in {folder} is broken, line {error.lineno}: {error.message}") from error


def check_rewards(config: TidemillConfig) -> str:
    """Import every term and look at its arguments."""
    check_reward(config.reward.terms, config.base)
    if config.eval_terms:
        check_reward(config.eval_terms, config.base)
    return ", ".join(term.name for term in config.reward.terms)


def score_example(config: TidemillConfig, first: Sequence[Example], thorough: bool) -> Finding | str:
    """The reward of a first example, answered with its own reference answer where it has one.

    first: of the training datasets. Unless ``thorough``, no term is called that needs a server, a model or what the
    workflow finds out, and one that takes long is left to the run. A failure is a warning then: a function that a bare
    answer does not suit may well suit what the policy writes.
    """
    terms = config.reward.terms if thorough else _local_terms(config)
    if not terms:
        return "not tried: it needs a server, a model or the workflow"
    if not first:
        return "not tried: the dataset gives no example"
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
        return f"not tried: it takes longer than {QUICK_S:g} s"
    what = "the reference answer" if answer else "an empty answer"
    if score.status != "ok":
        text = f"no reward for {what} of the first prompt: {score.reason}; samples that fail are excluded from training"
        return Finding("reward trial", "fail" if thorough else "warn", text, "mend the reward function")
    given = "" if reward is None else f", if the workflow gives it {reward:g}"
    return f"{score.reward:g} for {what} of the first prompt{given}"


def _local_terms(config: TidemillConfig) -> list[RewardTerm]:
    """The terms for samples of the first dataset that can be called at once, on what the dataset alone gives."""
    name, label, terms = config.generator.workflow.name, config.train[0].label, config.reward.terms
    if name not in WORKFLOWS.names or name in REWARDING_WORKFLOWS:
        return []
    resolved = zip(terms, resolve(terms, config.base), strict=True)
    return [one for one, term in resolved if term.is_local and (term.datasets is None or label in term.datasets)]


def check_generator(config: TidemillConfig) -> str:
    """Import workflow and engine where they are the user's own, and look at their arguments."""
    generator = config.generator
    find_workflow(generator.workflow.name, generator.workflow.args, config.base)
    if generator.workflow.name == "agent":
        from producers.agents.workflow import AgentWorkflow

        AgentWorkflow(**generator.workflow.args).check_agent(config.base, generator.agents)
    engine = engine_name(generator.engine)
    if engine not in ENGINES.names:
        find_engine(generator.engine, config.base)
    if engine == "scripted":
        from producers.engines.scripted import Script

        bind("generator", Script, generator.args)
    return f"{generator.workflow.name} on {engine}"


def check_own_trackers(config: TidemillConfig) -> str:
    """Import trackers that are the user's own."""
    names = config.trainer.trackers
    for name in names:
        if ":" in name:
            load(name, "trainer.trackers", config.base)
    return ", ".join(names) or "none"


def check_algorithm(config: TidemillConfig) -> str:
    """Build loss, advantage, aggregation and KL as the trainer does, where there is anything that could be wrong."""
    trainer = config.trainer
    names = [trainer.loss.name, trainer.advantage.name, trainer.aggregation, trainer.kl.estimator]
    names += [rule.measure for rule in trainer.rejection]
    text = ", ".join(names[:3])
    if not (trainer.loss.args or trainer.advantage.args or any(":" in name for name in names)):
        return text
    if importlib.util.find_spec("torch") is None:
        return f"{text}, not looked at without PyTorch"
    from consumers.trainer.algorithms.objective import Objective

    objective = Objective.from_config(trainer, config.base)
    advantage = bind("trainer.advantage", ADVANTAGES.get(trainer.advantage.name, config.base), trainer.advantage.args)
    takes: tuple[str, ...] = ("rewards", "groups")
    if getattr(advantage, "per_token", False):
        takes = ("batch", "all_reduce_sum")
    elif getattr(advantage, "per_turn", False):
        takes = ("rewards", "samples", "peers")
    check_call("trainer.loss", getattr(objective.loss, "function", objective.loss), ("inputs",))
    check_call("trainer.advantage", advantage, takes)
    aggregation = AGGREGATIONS.get(trainer.aggregation, config.base)
    check_call("trainer.aggregation", aggregation, ("lengths", "groups", "totals"))
    for estimator in (objective.estimator, *(rule.estimator for rule in objective.rules)):
        if estimator is not None:
            check_call("trainer.kl.estimator", estimator, ("difference",))
    return text


def main() -> None:
    """Answer on what was stdout, and give the user's code stderr to print to."""
    request = json.loads(sys.stdin.read())
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    config = parse_config(request["config"])

    def answer(line: dict[str, Any]) -> None:
        answers.write(json.dumps(line) + "\n")
        answers.flush()

    for name, look in checks(config, request["thorough"], request["step_s"]):
        answer({"begins": name})
        answer(asdict(examine(name, look)))
    answer({"begins": END})


if __name__ == "__main__":
    main()
