"""``tidemill replay``: the recorded steps of a real run come out equal to the bit, and anything else is noticed."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from broker.client import Broker
from broker.connection.connection import Connection
from broker.connection.embedded import EmbeddedServer
from broker.connection.keys import Keys
from consumers.offline.replay import plan_replay
from consumers.trainer.checkpoint.batch_files import FOLDER, BatchFiles
from consumers.trainer.loop import Trainer
from consumers.trainer.model.policy import Policy, load_model
from consumers.trainer.step.build import build_train_step
from deploy.export.checkpoints import replay_steps
from schemas.codec import Array
from schemas.config import BrokerConfig, TidemillConfig, parse_config, save_config
from schemas.errors import ConfigError
from schemas.system.lifecycle import StopFlag
from tests.support.models.tiny_model import make_tiny_model
from tests.support.runs.command_line import run_tidemill
from tests.support.trainer.deterministic_run import EVERY, STEPS, Pipeline, make_config


@pytest.fixture(scope="module")
def finished(server: EmbeddedServer, tmp_path_factory: pytest.TempPathFactory) -> TidemillConfig:
    """A run that recorded its batches and kept all checkpoints: of steps 2, 4 and 5."""
    folder, threads = tmp_path_factory.mktemp("replay"), torch.get_num_threads()
    broker = Broker(Connection(server.url, Keys("tidemill", "replayed"), 30), BrokerConfig())
    model = make_tiny_model(folder / "model", hidden=32, layers=1)
    settings = {"record": True, "checkpoint": {"every": EVERY, "keep": 9}}
    config = parse_config(make_config(folder / "run", model, broker, **settings))
    torch.manual_seed(config.run.seed)
    policy = Policy(load_model(config.model.path, "float32"))
    with Pipeline(broker):
        Trainer(config, "trainer", broker, build_train_step(config, policy=policy)).run(StopFlag())
    save_config(config, config.folder / "config.yaml")
    torch.set_num_threads(threads)
    return config


@pytest.fixture
def batches(finished: TidemillConfig) -> Iterator[BatchFiles]:
    """The batches of the run, which are as they were when the test is over."""
    files = {file: file.read_bytes() for file in (finished.folder / FOLDER).iterdir()}
    yield BatchFiles(finished.folder)
    for file, content in files.items():
        file.write_bytes(content)


@pytest.mark.parametrize(("first", "last"), [(0, None), (0, EVERY), (EVERY, STEPS), (2 * EVERY, STEPS)])
def test_recorded_steps_come_out_equal(
    finished: TidemillConfig, capsys: pytest.CaptureFixture[str], first: int, last: int | None
) -> None:
    assert replay_steps(finished, "", first, last) == 0
    told = capsys.readouterr().out
    assert told.startswith(f"equal: steps {first} to {(last or STEPS) - 1} of run replayed, trained again from ")
    assert f"give step-{last or STEPS:08d}-t0001 to the bit" in told


@pytest.mark.parametrize("what", ["token", "reward"])
def test_one_changed_sample_does_not(
    finished: TidemillConfig, batches: BatchFiles, capsys: pytest.CaptureFixture[str], what: str
) -> None:
    record = batches.read(3)
    group = record.groups[1]
    if what == "token":
        # The first one, which every other is predicted from, of the sample that is better than the other.
        tokens = group.samples[1].tokens.numpy().copy()
        tokens[0] += 1
        group.samples[1] = msgspec.structs.replace(group.samples[1], tokens=Array.of(tokens, "i4"))
    else:
        group.rewards[0] += 0.5
    batches.write(record)
    assert replay_steps(finished, "", EVERY, 2 * EVERY) == 1
    assert capsys.readouterr().out.startswith("NOT EQUAL: steps 2 to 3 ")
    # What was trained before it is as it was.
    assert replay_steps(finished, "", 0, EVERY) == 0


def without(step: int) -> Callable[[BatchFiles], None]:
    return lambda batches: next(batches.folder.glob(f"step-{step:08d}-*")).unlink()


def broken(batches: BatchFiles) -> None:
    file = next(batches.folder.glob("step-00000003-*"))
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


def by_others(batches: BatchFiles) -> None:
    batches.write(msgspec.structs.replace(batches.read(3), world=2))


def later(batches: BatchFiles) -> None:
    batches.write(msgspec.structs.replace(batches.read(3), leader_term=2))


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (without(3), r"batches of 1 of the steps 2 to 4 are not in .*, the first is 3: .* trainer.record: true"),
        (broken, r"batch of step 3 in .* is damaged"),
        (by_others, r"trained from step 3 on"),
        (later, r"step-00000005-t0001 is of weights that were given up: a later trainer trained step 3 again"),
    ],
    ids=["missing", "damaged", "ranks", "given up"],
)
def test_what_cannot_be_replayed_is_refused(
    finished: TidemillConfig, batches: BatchFiles, spoil: Callable[[BatchFiles], None], message: str
) -> None:
    try:
        spoil(batches)
        with pytest.raises(ConfigError, match=message):
            plan_replay(finished, EVERY, None)
    finally:
        for file in batches.folder.glob("*-t0002.*"):
            file.unlink()


@pytest.mark.parametrize(
    ("first", "last", "message"),
    [
        (3, None, r"no checkpoint of step 3 in .*; there is 2, 4, 5"),
        (5, None, r"--from 5 must be 0 or more and before step 5, which step-00000005-t0001 is of"),
        (2, 3, r"no checkpoint of step 3"),
    ],
)
def test_steps_without_checkpoints_are_refused(
    finished: TidemillConfig, first: int, last: int | None, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        plan_replay(finished, first, last)


def test_batches_are_kept_as_long_as_the_checkpoint_before_them(
    make_broker: Callable[..., Broker], finished: TidemillConfig, tmp_path: Path
) -> None:
    broker = make_broker()
    settings = {"record": True, "checkpoint": {"every": EVERY, "keep": 2}}
    config = parse_config(make_config(tmp_path / "run", Path(finished.model.path), broker, **settings))
    with Pipeline(broker):
        policy = Policy(load_model(config.model.path, "float32"))
        Trainer(config, "trainer", broker, build_train_step(config, policy=policy)).run(StopFlag())
    assert BatchFiles(config.folder).steps() == {4}
    assert plan_replay(config, 4, None).last == STEPS


def test_the_command_says_so_in_one_line_and_in_its_exit_code(finished: TidemillConfig, tmp_path: Path) -> None:
    done = run_tidemill("replay", str(finished.folder), "--from", "4", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("equal: steps 4 to 4 of run replayed, trained again from step-00000004-t0001,")
    assert "replay: step 4, up to 4" in done.stderr
    answer = json.loads(run_tidemill("replay", str(finished.folder), "--from", "4", "--json", cwd=tmp_path).stdout)
    assert (answer["equal"], answer["from"], answer["differs"]) == (True, 4, {})
    done = run_tidemill("replay", str(finished.folder), "--from", "4", "--to", "4")
    assert (done.returncode, len(done.stderr.splitlines())) == (2, 1)


def test_recorded_steps_of_an_adapter_come_out_equal(
    make_broker: Callable[..., Broker], finished: TidemillConfig, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    broker = make_broker()
    settings = {"record": True, "checkpoint": {"every": EVERY, "keep": 9}, "lora": {"rank": 4}}
    config = parse_config(make_config(tmp_path / "run", Path(finished.model.path), broker, **settings))
    with Pipeline(broker):
        Trainer(config, "trainer", broker, build_train_step(config)).run(StopFlag())
    for first in (0, EVERY):
        assert replay_steps(config, "", first, None) == 0
        assert "to the bit" in capsys.readouterr().out


def test_recorded_batches_are_listed_and_read_by_any_messagepack_library(finished: TidemillConfig) -> None:
    listed = run_tidemill("batches", str(finished.folder), "--json")
    assert listed.returncode == 0, listed.stderr
    steps = [json.loads(line) for line in listed.stdout.splitlines()]
    assert [(one["step"], one["groups"], one["samples"]) for one in steps] == [(step, 2, 4) for step in range(STEPS)]
    samples = [
        json.loads(line)
        for line in run_tidemill("batches", str(finished.folder), "--step", "1", "--json").stdout.splitlines()
    ]
    page = (Path(__file__).parents[4] / "docs" / "operations.md").read_text(encoding="utf-8")
    space: dict[str, Any] = {}
    exec(page.partition('```python title="read_batch.py"\n')[2].partition("```")[0], space)
    (file,) = (finished.folder / "batches").glob("step-00000001-*")
    plain = list(space["read_batch"](file))
    assert [(task, tokens.tolist(), reward) for task, tokens, _, _, reward in plain] == [
        (one["task"], one["tokens"], one["reward"]) for one in samples
    ]
    assert [logprobs.tolist() for _, _, logprobs, _, _ in plain] == [one["logprobs"] for one in samples]
    assert "reward" in run_tidemill("batches", str(finished.folder)).stdout
    assert run_tidemill("batches", str(finished.folder), "--step", "99").returncode == 2
