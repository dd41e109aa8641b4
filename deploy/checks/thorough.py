"""The checks that only ``tidemill doctor`` makes, since they take seconds or need a metric of the run."""

import asyncio
from collections import deque
from pathlib import Path
from statistics import median
from typing import Any

from deploy.checks.finding import Finding
from producers.datasets.loading import ShortPrompts, build_dataset
from schemas.config import TidemillConfig
from schemas.errors import ConfigError, DataError
from schemas.model_folder import load_model_config
from schemas.run_folder import METRICS, StoredLines

GB = 1024**3
MEASURED = 256
"""Number of prompts of each dataset that are measured."""
STEPS = 50
"""Number of a run's last steps whose time is measured."""
STATE_BYTES = 16
"""Bytes of a trained parameter, its gradient and its two moments, all float32."""


def measure_model(config: TidemillConfig) -> Finding | str:
    """Build the model from its configuration on the meta device, where tensors take no memory."""
    path, trust = config.model.path, config.model.trust_remote_code
    if config.model.kind == "mlp":
        return "a small policy, of the sizes in its config.json"
    import torch
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    from consumers.trainer.model.lora import targets
    from producers.images.placeholders import ImagePlaceholders
    from producers.tokenizer import HfTokenizer

    try:
        settings = load_model_config(path, trust)
        with torch.device("meta"):
            kind: Any = AutoModelForImageTextToText if config.model.kind == "vision" else AutoModelForCausalLM
            model = kind.from_config(settings, trust_remote_code=trust)
    except (OSError, ValueError) as error:
        raise ConfigError(f"model.path {path}: {error}") from error
    if Path(path).expanduser().is_dir():
        HfTokenizer(path, trust)
        ImagePlaceholders.of(config)
    count = sum(parameter.numel() for parameter in model.parameters())
    text = f"{count / 1e6:,.1f}M parameters{', reads images' if config.model.kind == 'vision' else ''}"
    if config.trainer.lora is not None:
        return f"{text}, adapter on {', '.join(targets(model, config.trainer.lora.targets))}"
    state = count * STATE_BYTES / GB
    return f"{text}; the trainer's weights, gradients and optimizer take {state:,.1f} GB over all ranks"


def measure_prompts(config: TidemillConfig) -> Finding | str:
    """Check that the first prompts fit into model.max_length, in tokens as generators encode them."""
    from producers.prompt_meter import PromptMeter

    measure, room = PromptMeter(config), config.model.max_length
    lengths: list[int] = []
    wrong: list[str] = []
    count = left_out = 0
    for dataset in (level for train in config.train for level in train.at_levels()):
        examples = build_dataset(dataset, config.base, measure)
        left_out += examples.left_out if isinstance(examples, ShortPrompts) else 0
        for index in range(min(len(examples), MEASURED)):
            count += 1
            try:
                length = measure(examples, dataset.label, index)
                if length >= room:
                    raise DataError(f"example {index} of dataset {dataset.label!r} has {length} tokens")
            except DataError as error:
                wrong.append(str(error))
            else:
                lengths.append(length)
    if wrong:
        text = f"{len(wrong)} of the first {count} prompts cannot be used with model.max_length {room}: {wrong[0]}"
        advice = "increase model.max_length or set max_prompt_tokens of the dataset: each becomes a failed prompt group"
        return Finding("prompts", "warn" if lengths else "fail", text, advice)
    text = f"up to {max(lengths)} tokens in the first {count}; model.max_length is {room}"
    text += f"; max_prompt_tokens leaves out {left_out:,} examples" if left_out else ""
    cut = sum(length + config.sampling.max_tokens > room for length in lengths)
    if cut:
        problem = f"{text}; {cut} leave less than sampling.max_tokens {config.sampling.max_tokens}"
        return Finding("prompts", "warn", problem, "increase model.max_length, or their answers are cut off early")
    return text


def check_bridge(config: TidemillConfig) -> Finding | str:
    """Join turns with the model's own chat template, as generators do when they start."""
    from producers.conversation import template_check
    from producers.conversation.chat_template import ChatTemplate
    from producers.tokenizer import HfTokenizer

    template = ChatTemplate(HfTokenizer(config.model.path, config.model.trust_remote_code))
    if problem := template_check.check_bridge(template):
        advice = (
            "training stays exact but takes more tokens; turns are joined if the chat template ends each with a token"
            " that ends generation"
        )
        return Finding("joined turns", "warn", f"each model call becomes a separate row: {problem}", advice)
    return "the model's chat template joins the calls of an episode into one row"


def compare_times(config: TidemillConfig, step_s: float | None) -> Finding | str:
    """Compare an episode's longest time with what waits for it. step_s: seconds of a step, by default as measured."""
    deadline_s, held = config.generator.agents.deadline_s, config.flow.staleness + 1
    text = f"episodes take up to {deadline_s:g} s, the trainer gives up after {config.trainer.batch_timeout_s:g} s"
    problems, advice = [], []
    if config.eval is not None and config.eval.hold_s < deadline_s:
        problems.append(
            f"an evaluation holds new weights back for {config.eval.hold_s:g} s only: longer episodes mix versions"
        )
        advice.append(f"eval.hold_s {deadline_s:g}")
    measured = step_s is None
    step_s = step_s or _measured_step_s(config.folder / METRICS)
    if step_s is None:
        text += f"; pass --step-s to check whether {held} steps are enough for them"
    elif deadline_s > held * step_s:
        source = "measured" if measured else "given"
        problems.append(
            f"the trainer waits for episodes that take over {held * step_s:g} s: flow.staleness {config.flow.staleness}"
            f" allows {held} steps of {step_s:g} s ({source}) meanwhile"
        )
        enough = -int(-deadline_s // step_s) - 1
        advice.append(f"flow.staleness {enough}, or a flow.window, or generator.agents.deadline_s {held * step_s:g}")
    else:
        text += f", and {held} steps of {step_s:g} s are enough for all"
    if not problems:
        return text
    fit = "; ignore this if few episodes take so long" if len(advice) == len(problems) else ""
    return Finding("episode times", "warn", "; ".join([text, *problems]), "set " + ", and ".join(advice) + fit)


def _measured_step_s(file: Path) -> float | None:
    """Return the median time of the run's last steps without waiting, or None."""
    steps = (line for line in StoredLines(file) if "time/total_s" in line)
    seconds = deque((line["time/total_s"] - line.get("time/wait_s", 0.0) for line in steps), STEPS)
    return round(median(seconds), 3) if seconds else None


def start_tools(config: TidemillConfig) -> str:
    """Start the servers of the workflow's tools, as a generator does, and name the tools. ConfigError if one fails."""
    from producers.episodes.tools.sources import ToolBox

    async def list_tools() -> list[str]:
        tools = ToolBox(config.generator.workflow.args.get("tools"), config.base)
        try:
            await tools.start()
            return sorted(tools.schemas)
        finally:
            await tools.close()

    return ", ".join(asyncio.run(list_tools()))
