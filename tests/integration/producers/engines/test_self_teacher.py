"""The policy as its own teacher: what it says after another prompt, by the weights of the sample or not at all."""

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from consumers.reward.scorer import Scorer, check_reward
from consumers.trainer.model.policy import load_model
from producers.engines.base import EngineSettings
from producers.engines.transformers.engine import TransformersEngine
from producers.tokenizer import HfTokenizer
from producers.workflows.base import RolloutContext
from producers.workflows.self_teacher import ask_self, other_prompt
from producers.workflows.single_turn import SingleTurn
from producers.workflows.trajectory_builder import SampledCompletion
from schemas.config import RewardConfig, RewardTerm
from schemas.errors import ConfigError, DataError
from schemas.messages import ChatMessage, FileSource, Sampling, Task
from tests.support.configurations import minimal_config
from tests.support.models.tiny_model import make_tiny_model
from tests.support.trainer.trajectories import make_trajectory

pytestmark = pytest.mark.integration

WITH_ANSWER = {"template": "The answer is {answer}. {prompt}"}
CHAT = Task(
    task_id=1,
    kind="train",
    n=1,
    sampling=Sampling(max_tokens=6),
    messages=[ChatMessage("system", "Add."), ChatMessage("user", "1+2"), ChatMessage("assistant", "3")],
    data={"answer": "7"},
)
TEXT = Task(task_id=1, kind="train", n=2, sampling=Sampling(max_tokens=6), text="3+4=", data={"answer": "7"})


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("policy"), hidden=32, layers=1)


Use = Callable[[TransformersEngine, HfTokenizer, RolloutContext, list[SampledCompletion]], Awaitable[Any]]


def sampled(folder: Path, task: Task, use: Use) -> Any:
    """What ``use`` makes of the samples that an engine has just generated."""

    async def run() -> Any:
        tokenizer = HfTokenizer(str(folder))
        engine = TransformersEngine(EngineSettings(str(folder), "float32", 64, 8, version=3))
        await engine.start()
        try:
            rollout = RolloutContext(engine, tokenizer, task, range(task.n))
            samples = [sample async for sample in SingleTurn().run(rollout)]
            return await use(engine, tokenizer, rollout, samples)
        finally:
            await engine.close()

    return asyncio.run(run())


@pytest.mark.parametrize(
    ("task", "args"),
    [(TEXT, WITH_ANSWER), (msgspec.structs.replace(CHAT, messages=CHAT.messages[:2]), {"system": "The answer is 7."})],
)
def test_it_is_what_the_model_says_after_another_prompt(folder: Path, task: Task, args: dict[str, str]) -> None:
    async def ask(engine: Any, tokenizer: HfTokenizer, rollout: RolloutContext, samples: Any) -> Any:
        given = [await ask_self(engine, tokenizer, task, rollout.prompt_ids, sample, args, 60.0) for sample in samples]
        return tokenizer.prompt_ids(other_prompt(task, **args)), len(rollout.prompt_ids), samples, given

    other, begun, samples, given = sampled(folder, task, ask)
    model = load_model(folder, "float32")
    for sample, (logprobs, problem) in zip(samples, given, strict=True):
        own = sample.tokens[begun:]
        with torch.no_grad():
            scores = torch.log_softmax(model(torch.tensor([[*other, *own]])).logits[0, len(other) - 1 : -1].float(), -1)
        want = scores.gather(-1, torch.tensor(own)[:, None])[:, 0].numpy()
        assert problem == ""
        assert np.allclose(logprobs.numpy()[begun:], want, atol=1e-5)
        assert not logprobs.numpy()[:begun].any()
        assert not np.allclose(want, sample.logprobs[begun:], atol=1e-3), "the prompt makes a difference"


def test_a_version_that_is_gone_gives_no_log_probabilities(folder: Path, tmp_path: Path) -> None:
    weights = make_tiny_model(tmp_path / "other", seed=1, hidden=32, layers=1) / "model.safetensors"

    async def load_first(engine: Any, tokenizer: HfTokenizer, rollout: RolloutContext, samples: Any) -> Any:
        await engine.load(FileSource(weights), 4)
        return await ask_self(engine, tokenizer, TEXT, rollout.prompt_ids, samples[0], WITH_ANSWER, 60.0)

    async def load_meanwhile(engine: Any, tokenizer: HfTokenizer, rollout: RolloutContext, samples: Any) -> Any:
        asked = ask_self(engine, tokenizer, TEXT, rollout.prompt_ids, samples[0], WITH_ANSWER, 60.0)
        found, _ = await asyncio.gather(asked, engine.load(FileSource(weights), 4))
        return found

    assert sampled(folder, TEXT, load_first) == (
        None,
        "weight version 3 was replaced by 4 before it had judged the sample",
    )
    found, problem = sampled(folder, TEXT, load_meanwhile)
    assert (found is None) == bool(problem), "either of version 3 or nothing"


@pytest.mark.parametrize(
    ("task", "args", "reason"),
    [
        (msgspec.structs.replace(TEXT, sampling=Sampling(max_tokens=6, temperature=0.5)), WITH_ANSWER, "temperature"),
        (TEXT, {"system": "Add."}, "a system message needs a dataset of chat messages"),
        (TEXT, {"template": "{solution} {prompt}"}, "does not fit the row: KeyError"),
        (TEXT, {"template": "{prompt}" * 40}, "must be 2 to max_length 64"),
    ],
)
def test_what_cannot_be_asked_has_a_reason(folder: Path, task: Task, args: dict[str, str], reason: str) -> None:
    async def ask(engine: Any, tokenizer: HfTokenizer, rollout: RolloutContext, samples: Any) -> Any:
        return await ask_self(engine, tokenizer, task, rollout.prompt_ids, samples[0], args, 60.0)

    found, problem = sampled(folder, task, ask)
    assert found is None
    assert reason in problem


def test_an_engine_that_does_not_answer_holds_up_no_sample(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def use(
        engine: TransformersEngine, tokenizer: HfTokenizer, rollout: RolloutContext, samples: list[SampledCompletion]
    ) -> Any:
        async def hang(*_: Any) -> None:
            await asyncio.Event().wait()

        monkeypatch.setattr(engine, "logprobs", hang)
        return await ask_self(engine, tokenizer, TEXT, rollout.prompt_ids, samples[0], WITH_ANSWER, 0.05)

    assert sampled(folder, TEXT, use) == (None, "the engine gave no log-probabilities within 0.05 s")


def test_prompts_of_chats_keep_their_other_messages() -> None:
    changed = other_prompt(CHAT, "Be brief.", "{answer}? {prompt}")
    assert changed.messages == [
        ChatMessage("system", "Be brief."),
        ChatMessage("user", "7? 1+2"),
        ChatMessage("assistant", "3"),
    ]
    with pytest.raises(DataError, match="does not fit the row"):
        other_prompt(CHAT, template="{prompt.missing}")


def test_a_sample_without_log_probabilities_is_excluded_and_never_scored_0(tmp_path: Path) -> None:
    term = RewardTerm(name="teacher_self", args=WITH_ANSWER)
    made = make_trajectory()
    says = msgspec.structs.replace(made.logprobs)
    there = msgspec.structs.replace(made, teacher_logprobs=says)
    gone = msgspec.structs.replace(made, teacher_problem="weight version 3 was replaced by 4")

    async def score() -> Any:
        async with Scorer(RewardConfig(terms=[term], workers=1), tmp_path) as scorer:
            return await scorer.score_all([there, gone, made])

    good, excluded, foreign = asyncio.run(score())
    assert (good.status, good.components) == ("ok", {"teacher_self": 0.0})
    assert good.teacher_logprobs.numpy().tolist() == made.logprobs.numpy().tolist()
    assert (excluded.status, foreign.status) == ("error", "error")
    assert "weight version 3 was replaced by 4" in excluded.reason
    assert excluded.teacher_logprobs is None
    assert "the generator gave no log-probabilities" in foreign.reason


@pytest.mark.parametrize(
    ("sections", "reason"),
    [
        ({"sampling": {"temperature": 0.7}}, "sampling.temperature must be 1 with teacher_server and teacher_self"),
        ({"generator": {"workflow": {"name": "live"}}, "sampling": {"n": 1}}, "generator.workflow live is not"),
        (
            {"generator": {"engine": "scripted"}},
            "generator.engine scripted is not supported with teacher_self: it has no",
        ),
        ({"reward": {"terms": [{"name": "teacher_self"}] * 2}}, "a dataset can have one teacher_self"),
    ],
)
def test_settings_that_do_not_fit_are_refused(sections: dict[str, Any], reason: str) -> None:
    given: dict[str, Any] = {
        "reward": {"terms": [{"name": "teacher_self", "args": WITH_ANSWER}]},
        "trainer": {"kl": {"coef": 1.0, "reference": "teacher"}, "advantage": {"name": "raw"}},
    }
    assert minimal_config(**given).teacher_weights == {"arithmetic": 1.0}
    with pytest.raises(ConfigError, match=reason):
        minimal_config(**{**given, **sections})


def test_the_other_prompt_must_be_another(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="it needs system or template"):
        check_reward([RewardTerm(name="teacher_self")], tmp_path)
