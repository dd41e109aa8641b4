"""What training without generators reads, and what a reward model judges: prompts as generators encode them."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from torch import nn
from transformers import PreTrainedTokenizerFast

from consumers.offline.encoding import Prompt
from consumers.offline.loop import MemoryLimits
from consumers.offline.pairs import Preference, encode
from consumers.offline.preference import train_on_pairs
from consumers.offline.sft import train_sft
from consumers.reward.rewards.reward_model import reward_model
from producers.engines.base import Completion
from producers.tokenizer import HfTokenizer
from producers.workflows.trajectory_builder import TrajectoryBuilder
from schemas.codec import Array
from schemas.config import DpoConfig, ModelConfig, RewardModelConfig, RewardTerm, WarmStartConfig
from schemas.errors import ConfigError, DataError
from schemas.messages import ChatMessage, Sampling, Segment, Span, Task, Trajectory, Turn
from tests.support.models.tiny_model import BOS, add_bos, make_tiny_model
from tests.support.user_code.user_rewards import score

PROMPTS: dict[str, list[Prompt]] = {
    "text": ["12+34=", "5>"],
    "chat": [[ChatMessage("user", "12+34=")], [ChatMessage("system", "Add."), ChatMessage("user", "5")]],
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> ModelConfig:
    folder = add_bos(make_tiny_model(tmp_path_factory.mktemp("bos"), hidden=32, layers=1))
    return ModelConfig(path=str(folder), dtype="float32", max_length=64)


def section(out: Path) -> dict[str, Any]:
    data = {"name": "jsonl"}
    return {"out": out, "dataset": data, "eval": data, "steps": 5, "batch_size": 2, "optimizer": {"lr": 1e-2}}


def warm_start() -> WarmStartConfig:
    data = {"name": "jsonl"}
    return WarmStartConfig.model_validate(
        {"model": "m:f", "dataset": data, "eval": data, "stop_accuracy": 1.0, "max_steps": 1}
    )


def preferences(prompts: list[Prompt]) -> list[Preference]:
    return [Preference(prompt, "yes", "no") for prompt in prompts]


def make_task(prompt: Prompt) -> Task:
    text, messages = (prompt, None) if isinstance(prompt, str) else (None, list(prompt))
    return Task(task_id=0, kind="train", n=1, sampling=Sampling(), text=text, messages=messages)


@contextmanager
def read_tokens() -> Iterator[list[list[int]]]:
    """Rows of token ids that models read meanwhile."""
    rows: list[list[int]] = []

    def note(module: nn.Module, arguments: tuple[Any, ...]) -> None:
        if isinstance(module, nn.Embedding):
            rows.extend(arguments[0].tolist())

    handle = nn.modules.module.register_module_forward_pre_hook(note)
    try:
        yield rows
    finally:
        handle.remove()


def holds(row: list[int], part: list[int]) -> bool:
    return any(row[start : start + len(part)] == part for start in range(len(row)))


@pytest.mark.parametrize("kind", ["text", "chat"])
@pytest.mark.parametrize("train", ["dpo", "reward model", "sft"])
def test_training_reads_what_generators_encode(model: ModelConfig, tmp_path: Path, kind: str, train: str) -> None:
    prompts = PROMPTS[kind]
    pairs = preferences(prompts)
    with read_tokens() as read:
        if train == "dpo":
            dpo = DpoConfig.model_validate(section(tmp_path / "out"))
            # A prompt that two answers share would be read once, apart from the second of them.
            train_on_pairs(
                model, pairs, pairs, dpo, load_tokenizer=HfTokenizer, limits=MemoryLimits(share_prefixes=False)
            )
        elif train == "reward model":
            scoring = RewardModelConfig.model_validate(section(tmp_path / "out"))
            train_on_pairs(model, pairs, pairs, scoring, load_tokenizer=HfTokenizer)
        else:
            examples = [(prompt, "yes") for prompt in prompts]
            with pytest.raises(ConfigError, match="reached accuracy"):
                train_sft(
                    model.model_copy(update={"path": str(tmp_path / "out")}),
                    model.path,
                    examples,
                    examples,
                    warm_start(),
                    load_tokenizer=HfTokenizer,
                )
    tokenizer = HfTokenizer(model.path)
    for prompt in prompts:
        wanted = [*tokenizer.prompt_ids(make_task(prompt)), *tokenizer.encode("yes")]
        assert wanted[0] == BOS
        assert any(holds(row, wanted) for row in read)


CLOSING = (
    "{% for m in messages %}<turn>{{ m.content }}<end>\n{% endfor %}{% if add_generation_prompt %}<turn>{% endif %}"
)


def test_answers_to_messages_end_as_the_chat_template_closes_them(tmp_path: Path) -> None:
    """Sampled answers of such a model, as Gemma and Phi are, never have the tokenizer's own end of sequence."""
    folder = make_tiny_model(tmp_path, hidden=32, layers=1)
    plain = PreTrainedTokenizerFast.from_pretrained(folder)
    plain.add_special_tokens({"additional_special_tokens": ["<turn>", "<end>"]})
    plain.chat_template = CLOSING
    plain.save_pretrained(folder)
    tokenizer = HfTokenizer(str(folder))
    (end,) = tokenizer.encode("<end>")
    chat, text = [ChatMessage("user", "12+34=")], "12+34="
    (chosen, rejected), (written, _) = (
        [row.answer for row in encode(tokenizer, Preference(prompt, "46", "7"), 64)] for prompt in (chat, text)
    )
    assert (chosen[-1], rejected[-1], written[-1]) == (end, end, tokenizer.eos_id)
    assert chosen[:-1] == written[:-1] == tokenizer.encode("46")


def test_the_reward_service_gives_the_trained_scores(model: ModelConfig, tmp_path: Path) -> None:
    pairs = preferences([PROMPTS["text"][0], PROMPTS["chat"][1]])
    settings = RewardModelConfig.model_validate(section(tmp_path / "out"))
    result = train_on_pairs(model, pairs, pairs, settings, load_tokenizer=HfTokenizer)
    tokenizer = HfTokenizer(model.path)
    sampled = [as_sampled(tokenizer, pair.prompt, text) for pair in pairs for text in (pair.chosen, pair.rejected)]
    terms = [RewardTerm(name="reward_model", args={"path": str(settings.out)})]
    scores = score(terms, tmp_path, *sampled, timeout_s=120.0)
    assert all(score.status == "ok" for score in scores), [score.reason for score in scores]
    rewards = [score.reward for score in scores]
    assert result.margin == pytest.approx((rewards[0] - rewards[1] + rewards[2] - rewards[3]) / 2, rel=1e-3)


def test_of_several_rows_a_reward_model_reads_the_one_with_the_last_answer(model: ModelConfig, tmp_path: Path) -> None:
    """One row after the other is nothing that the policy saw; prompt and completion are those of the last answer."""
    pairs = preferences(PROMPTS["text"])
    settings = RewardModelConfig.model_validate(section(tmp_path / "out"))
    train_on_pairs(model, pairs, pairs, settings, load_tokenizer=HfTokenizer)
    tokenizer = HfTokenizer(model.path)
    alone = as_sampled(tokenizer, "12+34=", "46")
    # The same answer as the second row, which begins with the first row's prompt; then a sub-agent's.
    prompt, answer = alone.loss_mask.data.count(0), alone.loss_mask.data.count(1)
    first, last = alone.tokens.numpy()[:prompt].tolist(), alone.tokens.numpy()[prompt:].tolist()
    tokens = [*first, *tokenizer.encode("99"), *last, *tokenizer.encode("7")]
    ends = [prompt + 2, prompt + 2 + answer, len(tokens)]
    mask = [0] * prompt + [1] * (len(tokens) - prompt)
    episode = msgspec.structs.replace(
        alone,
        tokens=Array.of(tokens, "i4"),
        loss_mask=Array.of(mask, "u1"),
        logprobs=Array.of([0.0] * len(tokens), "f4"),
        spans=[Span(0, prompt, len(tokens))],
        segments=[Segment(0, ends[0]), Segment(ends[0], ends[1], 0, prompt), Segment(ends[1], ends[2], name="helper")],
        turns=[Turn("assistant", prompt, ends[0], 0), Turn("assistant", ends[0], ends[1], 2)],
        prompt="what was said before",
    )
    terms = [RewardTerm(name="reward_model", args={"path": str(settings.out)})]
    of_row, of_episode = score(terms, tmp_path, alone, episode, timeout_s=120.0)
    assert (of_row.status, of_episode.reason) == ("ok", "")
    assert of_episode.reward == pytest.approx(of_row.reward)


def as_sampled(tokenizer: HfTokenizer, prompt: Prompt, text: str) -> Trajectory:
    """What a generator publishes whose model answers with this text and ends."""
    task, completion = make_task(prompt), [*tokenizer.encode(text), tokenizer.eos_id]
    sampled = Completion(completion, np.zeros(len(completion), np.float32), [Span(0, 0, len(completion))], "stop")
    builder = TrajectoryBuilder(0, tokenizer).prompt(tokenizer.prompt_ids(task)).generated(sampled)
    return builder.finish().to_trajectory(task, "r", "g")


def test_a_reward_model_with_another_tokenizer_is_an_error_and_no_reward(model: ModelConfig, tmp_path: Path) -> None:
    settings = RewardModelConfig.model_validate(section(tmp_path / "out") | {"steps": 1})
    pairs = preferences(PROMPTS["text"])
    train_on_pairs(model, pairs, pairs, settings, load_tokenizer=HfTokenizer)
    with pytest.raises(ValueError, match="another tokenizer than the policy"):
        reward_model(["12+34="], ["46"], [[4, 5, 6]], [[7, 8]], path=str(settings.out), row_ids=[[4, 5, 6, 7, 8]])


def test_an_example_that_is_longer_than_the_model_reads_is_named(model: ModelConfig, tmp_path: Path) -> None:
    for example in (("long " * 20, "yes"), ("5>", "yes" * 30)):
        with pytest.raises(DataError, match=r"example of prompt .* has \d+ tokens, more than model\.max_length 64"):
            train_sft(
                model.model_copy(update={"path": str(tmp_path / "out")}),
                model.path,
                [example],
                [("5>", "yes")],
                warm_start(),
                load_tokenizer=HfTokenizer,
            )
    assert not (tmp_path / "out").exists()
