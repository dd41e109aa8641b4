"""``tidemill replay --rollouts``: recorded samples, with turns of tools and several versions, come out again."""

import asyncio
import json
from pathlib import Path

import msgspec
import pytest

from consumers.trainer.checkpoint.batch_files import BatchFiles, step_record
from consumers.trainer.data.groups import Group
from consumers.trainer.rank_group import RankGroup
from consumers.trainer.step.build import build_train_step
from deploy.export.checkpoints import replay_steps
from producers.engines.transformers.engine import TransformersEngine
from producers.generator.service import engine_settings
from producers.tasks import make_sampling, task_seed
from producers.tokenizer import HfTokenizer
from producers.workflows.trajectory_builder import TrajectoryBuilder
from schemas.codec import Array
from schemas.config import TidemillConfig
from schemas.errors import ConfigError
from schemas.messages import FileSource, Task, Trajectory
from tests.support.configurations import minimal_config
from tests.support.models.tiny_model import make_tiny_model

STEPS, GROUPS, SAMPLES, FIRST = 3, 2, 2, 7
"""FIRST: tokens that a sample has when new weights come."""


def make_config(folder: Path) -> TidemillConfig:
    model = make_tiny_model(folder / "model", hidden=32, layers=1)
    return minimal_config(
        run={"name": "exact", "folder": str(folder / "run")},
        model={"path": str(model), "dtype": "float32", "max_length": 128},
        generator={"engine": "transformers", "exact": True, "update": "recompute"},
        sampling={"n": SAMPLES, "max_tokens": 20},
        trainer={"batch_groups": GROUPS, "threads": 1, "optimizer": {"lr": 1e-2}, "checkpoint": {"every": STEPS}},
    )


async def play(
    engine: TransformersEngine, config: TidemillConfig, task_id: int, index: int, new: FileSource | None
) -> Trajectory:
    """Sample two turns with a tool's answer between them; ``new`` weights come in the middle of the first."""
    sampling = make_sampling(config.sampling, task_seed(config.run.seed, task_id))
    sampling = msgspec.structs.replace(sampling, seed=sampling.seed + index)
    task = Task(task_id=task_id, kind="train", n=SAMPLES, sampling=sampling, text="?")
    builder = TrajectoryBuilder(index, HfTokenizer(config.model.path)).prompt([5 + task_id, 6, 7])
    for turn in range(2):
        parts = (FIRST, 9) if turn == 0 else (11,)
        for count in parts:
            if count == 9 and new is not None:
                await engine.load(new, engine.version + 1)
            (found,) = await engine.generate(builder.tokens, msgspec.structs.replace(sampling, max_tokens=count))
            builder.generated(found)
        if turn == 0:
            builder.observed([40, 41, 42], "tool")
    return builder.finish("stop").to_trajectory(task, config.run.name, "generator-0")


async def sample_steps(engine: TransformersEngine, config: TidemillConfig, ranks: RankGroup) -> None:
    """Train steps whose samples began one version earlier, and record them."""
    await engine.start()
    files = BatchFiles(config.folder)
    try:
        for step in range(STEPS):
            snapshot, _ = ranks.gather([1, 2], file := config.folder / "weights")
            snapshot.fill()
            new: FileSource | None = FileSource(file)
            groups = []
            for k in range(GROUPS):
                samples: list[tuple[Trajectory, float]] = []
                for index in range(SAMPLES):
                    played = await play(engine, config, step * GROUPS + k, index, new if step else None)
                    samples.append((played, float(index)))
                    new = None
                groups.append(Group(step * GROUPS + k, samples))
            record = step_record(
                groups, step=step, version=step, leader_term=1, world=1, parallel=ranks.ranks.layout.parallel
            )
            files.write(record)
            ranks.train(groups, step)
    finally:
        await engine.close()
    ranks.save(step=STEPS, version=STEPS, leader_term=1, extra={})
    ranks.wait_saved()


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> TidemillConfig:
    """A run that recorded three steps."""
    config = make_config(tmp_path_factory.mktemp("rollouts"))
    config.folder.mkdir()
    ranks = RankGroup(config, build_train_step(config))
    asyncio.run(sample_steps(TransformersEngine(engine_settings(config, "generator-0")), config, ranks))
    return config


def test_recorded_samples_come_out_to_the_bit(finished: TidemillConfig, capsys: pytest.CaptureFixture[str]) -> None:
    record = BatchFiles(finished.folder).read(1)
    spans = record.groups[0].samples[0].spans
    assert {span.version for span in spans} == {0, 1}
    assert replay_steps(finished, "", 0, None, rollouts=True) == 0
    trained, generated = capsys.readouterr().out.splitlines()
    assert trained.startswith("equal: steps 0 to 2 of run exact, ")
    count = STEPS * GROUPS * SAMPLES
    assert generated == f"equal: {count * (FIRST + 9 + 11)} tokens of {count} samples were generated again, to the bit"


def test_one_changed_bit_is_named(finished: TidemillConfig, capsys: pytest.CaptureFixture[str]) -> None:
    files = BatchFiles(finished.folder)
    record = files.read(2)
    sample = record.groups[1].samples[1]
    logprobs = sample.logprobs.numpy().copy()
    logprobs.view("i4")[-1] ^= 1
    record.groups[1].samples[1] = msgspec.structs.replace(sample, logprobs=Array.of(logprobs, "f4"))
    (file,) = files.folder.glob("step-00000002-*")
    before = file.read_bytes()
    try:
        files.write(record)
        assert replay_steps(finished, "", 0, None, as_json=True, rollouts=True) == 1
    finally:
        file.write_bytes(before)
    found = json.loads(capsys.readouterr().out)
    assert found["rollouts"]["differs"] == ["task 5, sample 1, token 22"]


def test_other_runs_are_refused_in_one_line(finished: TidemillConfig) -> None:
    plain = finished.generator.model_copy(update={"exact": False})
    with pytest.raises(ConfigError, match=r"^replay --rollouts needs a run with generator.exact: true"):
        replay_steps(finished.model_copy(update={"generator": plain}), "", 0, None, rollouts=True)
