"""Each recipe of docs/recipes in small: its file's data, workflow, rewards and training step, with a tiny model.

The policy's answers are scripted, so that some are right. The search agent and its retriever are in the unit tests.
"""

import contextlib
import itertools
import json
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from consumers.reward.scorer import Scorer
from consumers.trainer.data.groups import Group
from consumers.trainer.step.build import build_train_step
from deploy.offline.tiny_model import write_tiny_model
from deploy.offline.tiny_vision_model import write_tiny_vision_model
from producers.datasets.loading import build_dataset
from producers.engines.base import Completion
from producers.images.placeholders import ImagePlaceholders
from producers.tasks import TaskLimits, make_task
from producers.tokenizer import HfTokenizer
from producers.workflows.base import FailedSample
from schemas.config import TidemillConfig, load_config
from schemas.images import read_image_settings
from schemas.messages import Sampling
from tests.support.models.chat_templates import SOURCES, STOPS, write_tokenizer
from tests.support.models.pictures import PAD, picture
from tests.support.producers.played_episodes import SpeakingEngine, play
from tests.support.servers.teacher_server import serve
from tests.support.user_code.docs_code import ROOT, write_code
from tests.support.user_code.sandboxes import sandbox

SMALL = [
    *("model.dtype=float32", "model.max_length=1024", "sampling.n=2", "sampling.max_tokens=256"),
    *("generator.engine=scripted", "generator.args={}", "trainer.processes=1", "trainer.micro_batch_tokens=2048"),
    *("trainer.activation_checkpointing=false", "trainer.optimizer.warmup_steps=0", "trainer.optimizer.lr=1e-3"),
]
PROGRAM = "```python\nprint(sum(map(int, input().split())))\n```"
TRIED = f"<tool_call>\n{json.dumps({'name': 'python', 'arguments': {'code': 'print(2 + 3)'}})}\n</tool_call>"


@dataclass(frozen=True)
class Recipe:
    """A recipe in small. rows: of its data. train: overrides for data that would be downloaded.

    answers: of the policy, one after the other. rewards: of the two samples that these make, the lower one first.
    """

    page: str
    rows: dict[str, Any]
    answers: tuple[str, ...]
    rewards: tuple[float, float]
    train: tuple[str, ...] = ()


SUM = {"question": "What is 2 + 3?", "answer": "2 + 3 = 5\n#### 5"}
GSM8K = ("train.args.path=.",)
RECIPES = {
    "gsm8k.yaml": Recipe("gsm8k", SUM, ("It is 5.\n#### 5", "It is 6.\n#### 6"), (0.0, 1.0), GSM8K),
    "lora.yaml": Recipe("lora", SUM, ("It is 5.\n#### 5", "It is 6.\n#### 6"), (0.0, 1.0), GSM8K),
    "distil.yaml": Recipe("distillation", SUM, ("It is 5.", "It is 6."), (0.0, 0.0), GSM8K),
    "reasoning.yaml": Recipe(
        "reasoning",
        {"prompt": "What is 2 + 3?", "solution": "5"},
        ("It is \\boxed{5}.", "It is \\boxed{6}."),
        (0.0, 1.0),
        ("train.name=jsonl", "train.args={path: train.jsonl, answer: solution}"),
    ),
    "coding.yaml": Recipe(
        "coding",
        {"prompt": "Add two numbers.", "cases": [{"stdin": "2 3\n", "stdout": "5\n"}]},
        (TRIED, "I have nothing.", PROGRAM),
        (0.0, 1.0),
        ("train.args.path=train.jsonl",),
    ),
    "questions.yaml": Recipe(
        "vision",
        {"question": "Which colour?", "image": "photo.png", "answers": ["red", "red", "dark red", "red", "red"]},
        ("<answer>Red.</answer>", "<answer>blue</answer>"),
        (0.0, 1.0),
        ("train.args.path=train.jsonl", "model.max_pixels=12544"),
    ),
    "selfplay.yaml": Recipe(
        "self-play",
        {"prompt": "Play to win."},
        ("2", "none", "1", "2"),
        (-1.0, 0.0),
        ("train.args.path=train.jsonl",),
    ),
}


class AnsweringEngine(SpeakingEngine):
    """Says the next answer for each sample of a request."""

    async def generate(
        self, prompt_ids: Sequence[int], sampling: Sampling, n: int = 1, *more: Any, **named: Any
    ) -> list[Completion]:
        """See Engine."""
        return [(await SpeakingEngine.generate(self, prompt_ids, sampling, 1, *more, **named))[0] for _ in range(n)]


def tiny_chat_model(folder: Path, seed: int = 0) -> Path:
    """A random model whose tokenizer has a chat template with tools."""
    from transformers import PreTrainedTokenizerFast

    write_tokenizer(folder, stops=STOPS["append only"])
    stops = (folder / "generation_config.json").read_text()
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
    write_tiny_model(folder, tokenizer, seed, hidden=32, intermediate=64, layers=1, heads=2, max_length=1024)
    (folder / "generation_config.json").write_text(stops)
    (folder / "chat_template.jinja").write_text(SOURCES["append only"], encoding="utf-8")
    return folder


@contextlib.contextmanager
def teacher(model: Path) -> Iterator[str]:
    """The address of a server of the teacher."""
    server = serve(model)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/v1"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def read(title: str, recipe: Recipe, folder: Path, overrides: list[str]) -> TidemillConfig:
    """The configuration of a recipe, as its page or its example has it, with its data beside it."""
    page = (ROOT / f"docs/recipes/{recipe.page}.md").read_text(encoding="utf-8")
    _, found, text = page.partition(f'```yaml title="{title}"\n')
    text = text.partition("```")[0] if found else (ROOT / "examples/gsm8k/config.yaml").read_text(encoding="utf-8")
    (folder / title).write_text(text, encoding="utf-8")
    (folder / "train.jsonl").write_text(json.dumps(recipe.rows) + "\n", encoding="utf-8")
    (folder / "photo.png").write_bytes(picture("red"))
    write_code(ROOT / "docs/bring-your-own/environments.md", folder)
    return load_config(folder / title, [*SMALL, *recipe.train, *overrides], {})


@pytest.mark.parametrize("title", RECIPES)
async def test_a_recipe_samples_rewards_and_trains(title: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe, model = RECIPES[title], tmp_path / "model"
    if recipe.page == "vision":
        write_tiny_vision_model(model)
    else:
        tiny_chat_model(model)
    monkeypatch.chdir(tmp_path)
    with contextlib.ExitStack() as stack:
        overrides = [f"model.path={model}"]
        if title == "coding.yaml":
            sandbox("bwrap")
        if title == "distil.yaml":
            address = stack.enter_context(teacher(tiny_chat_model(tmp_path / "teacher", seed=1)))
            overrides.append(f"reward.terms=[{{name: teacher_server, args: {{base_url: {address}, model: m}}}}]")
        config = read(title, recipe, tmp_path, overrides)
        group = await sampled(config, recipe)
    assert sorted(reward for _, reward in group.samples) == pytest.approx(recipe.rewards)
    step = build_train_step(config)
    before = [parameter.detach().clone() for parameter in step.policy.parameters() if parameter.requires_grad]
    result = step.run(step.planner.plan([group]).batch(), 0)
    after = [parameter for parameter in step.policy.parameters() if parameter.requires_grad]
    assert not result.skipped
    assert any(not torch.equal(one, two) for one, two in zip(before, after, strict=True))


async def sampled(config: TidemillConfig, recipe: Recipe) -> Group:
    """Two samples of the first row, with their rewards."""
    tokenizer, answers = HfTokenizer(config.model.path), itertools.cycle(recipe.answers)
    engine = AnsweringEngine(tokenizer, lambda _: next(answers), length=1024)
    example = build_dataset(config.train[0].at_levels()[0], config.base)[0]
    settings = read_image_settings(Path(config.model.path), config.model.max_pixels) if example.images else None
    limits = TaskLimits(config.broker.max_message_bytes, settings)
    task = make_task(0, "train", example, config.sampling, config.train[0].label, limits=limits)
    places = None if settings is None else ImagePlaceholders(PAD, settings)
    played = await play(config, engine, tokenizer, task, placeholders=places, files=limits.images)
    samples = [one.to_trajectory(task, "recipe", "g") for one in played if not isinstance(one, FailedSample)]
    assert len(samples) == 2, played
    async with Scorer(config.reward.model_copy(update={"workers": 1, "timeout_s": 60.0}), config.base) as scorer:
        scores = await scorer.score_all(samples)
    assert [score.status for score in scores] == ["ok", "ok"], scores
    both = list(zip(samples, scores, strict=True))
    if any(score.teacher_logprobs is not None for score in scores):
        both = [(msgspec.structs.replace(one, teacher_logprobs=score.teacher_logprobs), score) for one, score in both]
    return Group(0, [(sample, score.reward) for sample, score in both], limits.images)
