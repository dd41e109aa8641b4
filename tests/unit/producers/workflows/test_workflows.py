"""Workflows: single-turn sampling, what a start leaves behind, and user code that can't be called."""

import asyncio
import gc
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from producers.engines.base import Completion, EngineSettings, ProgressCallback, PromptImage
from producers.engines.factory import find_engine
from producers.engines.scripted import ScriptedEngine
from producers.tokenizer import HfTokenizer
from producers.workflows.base import RolloutContext, find_workflow, running
from producers.workflows.single_turn import SingleTurn
from producers.workflows.trajectory_builder import SampledCompletion, TrajectoryBuilder
from schemas.codec import Array
from schemas.errors import ConfigError, DataError
from schemas.messages import ChatMessage, Partial, Sampling, Span, Task, Trajectory
from schemas.system import lifecycle
from schemas.system.lifecycle import importing
from tests.support.models.tiny_model import EOS, make_tiny_model
from tests.support.producers.played_episodes import keep_in

WORKFLOWS = """
class Older:
    def run(self, engine, tokenizer, task, samples): ...

class Coroutine:
    async def run(self, rollout): return rollout.each(None)

class Without: ...

class Fine:
    def __init__(self, hint=""): self.hint = hint
    async def run(self, rollout):
        yield self.hint
"""

ENGINE = """
from producers.engines.scripted import ScriptedEngine

class Fine(ScriptedEngine): ...

class Older(ScriptedEngine):
    async def load(self, path, version): ...

class Without:
    async def start(self): ...
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model"))


def test_a_prompt_that_ends_with_an_assistants_message_is_continued(folder: Path) -> None:
    """The completion continues the message, which the chat template neither closes nor follows."""
    tokenizer, asked = HfTokenizer(str(folder)), [ChatMessage("user", "1+2=?")]

    def text(*messages: ChatMessage) -> str:
        task = Task(task_id=0, kind="train", n=1, sampling=Sampling(), messages=list(messages))
        return tokenizer.decode_all(tokenizer.prompt_ids(task))

    begun = [*asked, ChatMessage("assistant", "The sum is")]
    assert text(*begun) == text(*asked) + "The sum is"
    assert text(*begun, ChatMessage("user", "Well?")).count("assistant") == 2
    assert tokenizer.closing_id(begun) == tokenizer.closing_id(asked)


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> HfTokenizer:
    return HfTokenizer(str(folder))


class Recording(ScriptedEngine):
    """Remembers what it was asked for and ends every completion with <eos>."""

    def __init__(self, version: int = 0, **args: Any) -> None:
        super().__init__(EngineSettings("none", "float32", 200, 8, version=version, args=args))
        self.calls: list[tuple[list[int], int, list[int]]] = []

    async def generate(
        self,
        prompt_ids: Sequence[int],
        sampling: Sampling,
        n: int = 1,
        prefix: Sequence[int] = (),
        progress: ProgressCallback | None = None,
        images: Sequence[PromptImage] = (),
    ) -> list[Completion]:
        self.calls.append((list(prompt_ids), n, list(prefix)))
        completions = await super().generate(prompt_ids, sampling, n, prefix)
        return [Completion([*c.tokens[:-1], EOS], c.logprobs, c.spans, c.finish) for c in completions]


def samples(
    engine: ScriptedEngine, tokenizer: HfTokenizer, task: Task, indices: Sequence[int]
) -> dict[int, SampledCompletion]:
    rollout = RolloutContext(engine, tokenizer, task, indices)

    async def collect() -> dict[int, SampledCompletion]:
        return {sample.index: sample async for sample in SingleTurn().run(rollout)}

    return asyncio.run(collect())


def task(**fields: Any) -> Task:
    return Task(task_id=1, kind="train", n=4, sampling=Sampling(max_tokens=20), **fields)


def as_trajectory(sample: SampledCompletion) -> Trajectory:
    """The message that is made of a sample; raises where the two don't agree."""
    return sample.to_trajectory(task(text="x"), run="r", generator="g")


class Seeds(Recording):
    """Remembers the seed of the first sample of each request, and how many there are."""

    seeds: list[tuple[int | None, int]]

    async def generate(
        self, prompt_ids: Sequence[int], sampling: Sampling, n: int = 1, **others: Any
    ) -> list[Completion]:
        self.seeds = [*getattr(self, "seeds", []), (sampling.seed, n)]
        return await super().generate(prompt_ids, sampling, n, **others)


def test_a_sample_has_the_seed_of_its_index_whichever_are_asked_for(tokenizer: HfTokenizer):
    seeded = msgspec.structs.replace(task(text="1+1="), n=6, sampling=Sampling(max_tokens=20, seed=7))
    engine = Seeds()
    assert samples(engine, tokenizer, seeded, [0, 2, 3, 5]).keys() == {0, 2, 3, 5}
    assert engine.seeds == [(7, 1), (9, 2), (12, 1)]
    rollout = RolloutContext(engine, tokenizer, seeded, range(6))
    asyncio.run(rollout.generate(TrajectoryBuilder(4, tokenizer).prompt(rollout.prompt_ids)))
    assert engine.seeds[-1] == (11, 1)


def test_all_samples_come_from_one_request_and_make_valid_trajectories(tokenizer: HfTokenizer):
    engine = Recording(version=4, min_length=3, max_length=3, tokens=90)
    got = samples(engine, tokenizer, task(text="1+2="), [0, 2, 3])
    prompt = tokenizer.encode("1+2=")
    assert engine.calls == [(prompt, 3, [])]
    assert sorted(got) == [0, 2, 3]
    for sample in got.values():
        assert as_trajectory(sample).oldest_version == 4
        assert sample.tokens[: len(prompt)] == prompt
        assert sample.loss_mask == [0] * len(prompt) + [1, 1, 1]
        assert sample.prompt == "1+2="
        assert sample.completion == tokenizer.decode(sample.tokens[len(prompt) : -1])
        assert "<eos>" not in sample.completion
        assert [(turn.start, turn.end) for turn in sample.turns] == [(0, 4), (4, 7)]


def test_a_partial_sample_goes_on_and_its_parts_are_joined(tokenizer: HfTokenizer):
    part = Partial(
        sample=2,
        tokens=Array.of([7, 8, 9], "i4"),
        logprobs=Array.of([-1.0, -2.0, -3.0], "f4"),
        spans=[Span(3, 0, 2), Span(4, 2, 3)],
    )
    engine = Recording(version=4, min_length=2, max_length=2)
    got = samples(engine, tokenizer, task(token_ids=[5, 6], partials=[part]), [1, 2])
    assert ([5, 6], 1, []) in engine.calls
    assert ([5, 6], 1, [7, 8, 9]) in engine.calls
    joined = got[2]
    as_trajectory(joined)
    assert joined.tokens[:5] == [5, 6, 7, 8, 9]
    assert joined.tokens[-1] == EOS
    assert joined.loss_mask == [0, 0, 1, 1, 1, 1, 1]
    assert joined.logprobs[:5] == [0.0, 0.0, -1.0, -2.0, -3.0]
    assert joined.spans == [Span(3, 2, 4), Span(4, 4, 7)]


def test_a_partial_of_another_version_keeps_its_own_span(tokenizer: HfTokenizer):
    part = Partial(sample=0, tokens=Array.of([7], "i4"), logprobs=Array.of([-1.0], "f4"), spans=[Span(3, 0, 1)])
    engine = Recording(version=9, min_length=2, max_length=2)
    joined = samples(engine, tokenizer, task(token_ids=[5], partials=[part]), [0])[0]
    assert joined.spans == [Span(3, 1, 2), Span(9, 2, 4)]


def test_messages_go_through_the_chat_template(tokenizer: HfTokenizer):
    ids = tokenizer.prompt_ids(task(messages=[ChatMessage("user", "a b\n")]))
    assert ids[0] == 1
    assert tokenizer.decode(ids) == "user:a b\nassistant:"


def test_a_tokenizer_without_chat_template_refuses_messages(folder: Path, tmp_path: Path):
    for name in ("tokenizer.json", "tokenizer_config.json", "config.json"):
        (tmp_path / name).write_bytes((folder / name).read_bytes())
    plain = HfTokenizer(str(tmp_path))
    assert plain.prompt_ids(task(text="1+1=")) == plain.encode("1+1=")
    with pytest.raises(DataError, match="no chat template"):
        plain.prompt_ids(task(messages=[ChatMessage("user", "hi")]))


def test_text_survives_the_round_trip_and_empty_prompts_are_refused(tokenizer: HfTokenizer):
    text = "  12 + 34 =\n\tü, don't "
    assert tokenizer.decode(tokenizer.encode(text)) == text
    with pytest.raises(DataError, match="empty"):
        tokenizer.prompt_ids(task(text=""))


def test_a_generic_tokenizer_is_used_as_its_file_says(tmp_path: Path):
    # AutoTokenizer would load this folder as Qwen2Tokenizer and lose the space.
    from tokenizers import Regex, Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({"a": 0, " ": 1, "b": 2}, unk_token="a"))
    words.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    make_tiny_model(tmp_path)
    PreTrainedTokenizerFast(tokenizer_object=words).save_pretrained(tmp_path)
    assert HfTokenizer(str(tmp_path)).encode("a b") == [0, 1, 2]


def test_a_generic_tokenizer_is_loaded_without_pytorch(folder: Path):
    code = (
        "import sys; from producers.tokenizer import HfTokenizer;"
        " print(HfTokenizer(sys.argv[1]).decode([5]) != '', 'torch' in sys.modules)"
    )
    command = [sys.executable, "-c", code, str(folder)]
    found = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    assert found.stdout.split() == ["True", "False"]


def test_a_folder_without_tokenizer_is_named(tmp_path: Path):
    with pytest.raises(ConfigError, match="no usable tokenizer"):
        HfTokenizer(str(tmp_path))


async def test_growing_samples_come_as_partials_that_another_goes_on_from(tokenizer: HfTokenizer):
    async def collect(engine: ScriptedEngine, job: Task) -> tuple[list[SampledCompletion], list[Partial]]:
        growing: list[Partial] = []
        rollout = RolloutContext(engine, tokenizer, job, [0, 1], save=keep_in(growing))
        return [sample async for sample in SingleTurn().run(rollout)], growing

    settings = EngineSettings("none", "float32", 200, 8, report_every=3, args={"min_length": 9, "max_length": 9})
    finished, growing = await collect(ScriptedEngine(settings), task(text="1+2="))
    assert [(part.sample, len(part.tokens)) for part in growing] == [(0, 3), (1, 3), (0, 6), (1, 6)]
    ends = {sample.index: sample for sample in finished}
    start = len(ends[0].tokens) - 9
    for part in growing:
        assert part.tokens.numpy().tolist() == ends[part.sample].tokens[start : start + len(part.tokens)]
        assert part.spans == [Span(0, 0, len(part.tokens))]
    finished, grown = await collect(ScriptedEngine(settings), task(text="1+2=", partials=growing[2:]))
    assert len(finished) == 2
    pieces = [(part.sample, part.tokens.numpy().tolist()) for part in grown]
    for index, tokens in [*pieces, *((sample.index, sample.tokens[start:]) for sample in finished)]:
        assert tokens[:6] == growing[2 + index].tokens.numpy().tolist()
        assert len(tokens) > 6


class Starting:
    """A workflow that makes objects at its start, as those of a model library are."""

    async def start(self, services: Any) -> None:
        self.made = [[k] for k in range(1000)]


def watched(made: list[Any]) -> bool:
    """Whether the collector would look at it."""
    return any(found is made for found in gc.get_objects())


def run(workflow: Any) -> None:
    async def scene() -> None:
        async with running(workflow, SimpleNamespace()):  # type: ignore[arg-type]
            assert not watched(workflow.made)

    asyncio.run(scene())


def test_the_collector_sees_objects_of_the_start_again_after_the_workflow(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(lifecycle, "_imports_aside", False)
    run(workflow := Starting())
    assert watched(workflow.made)


def test_it_does_not_look_at_the_imports_of_a_service_again() -> None:
    with importing():
        imported = [[k] for k in range(1000)]
    run(Starting())
    assert not watched(imported)


@pytest.fixture
def base(tmp_path: Path) -> Path:
    (tmp_path / "mine.py").write_text(WORKFLOWS)
    (tmp_path / "engines.py").write_text(ENGINE)
    return tmp_path


@pytest.mark.parametrize(
    ("name", "args", "says"),
    [
        (
            "Older",
            {},
            r"generator.workflow Older: run\(self, engine, tokenizer, task, samples\) must be run\(rollout\)",
        ),
        ("Coroutine", {}, "run must yield or return an async iterator"),
        ("Without", {}, r"generator.workflow Without has no method run\(rollout\)"),
        (
            "Fine",
            {"hnit": "?"},
            r"args \{'hnit': '\?'\}: got an unexpected keyword argument 'hnit' \(did you mean 'hint'\?\)",
        ),
    ],
)
def test_a_workflow_that_cannot_be_called_is_refused(base: Path, name: str, args: dict[str, str], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        find_workflow(f"mine.py:{name}", args, base)


def test_a_workflow_gets_its_arguments(base: Path) -> None:
    assert find_workflow("mine.py:Fine", {"hint": "!"}, base)().hint == "!"  # type: ignore[attr-defined]


def test_an_argument_of_a_users_workflow_has_the_type_that_its_hint_says(base: Path) -> None:
    (base / "hinted.py").write_text(WORKFLOWS.replace('hint=""', "hint: float = 0.0"))
    assert find_workflow("hinted.py:Fine", {"hint": 3}, base)().hint == 3.0  # type: ignore[attr-defined]
    with pytest.raises(ConfigError, match="argument 'hint': 'much' is not allowed, must be a valid number"):
        find_workflow("hinted.py:Fine", {"hint": "much"}, base)


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("Older", r"generator.engine Older: load\(self, path, version\) must be load\(source, version\)"),
        ("Without", r"generator.engine Without has no method generate\(prompt_ids, sampling, n, prefix, progress\)"),
    ],
)
def test_an_engine_without_the_methods_of_one_is_refused(base: Path, name: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        find_engine(f"engines.py:{name}", base)


def test_an_engine_of_ones_own_and_the_built_in_ones_pass(base: Path) -> None:
    assert find_engine("engines.py:Fine", base).__name__ == "Fine"  # type: ignore[attr-defined]
    for name in ("scripted", "transformers"):
        find_engine(name, base)
