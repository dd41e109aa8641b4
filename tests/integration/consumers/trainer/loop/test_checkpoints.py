"""CheckpointStore: the next step is the same bit for bit, only whole folders count, damage is named."""

import copy
import hashlib
import io
import json
import pickle
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, MetadataIndex
from transformers import PreTrainedModel

from consumers.trainer.checkpoint import files, store
from consumers.trainer.checkpoint.files import damage
from consumers.trainer.checkpoint.state import model_tensors, tensors_of
from consumers.trainer.checkpoint.store import CheckpointStore, load_tensors
from consumers.trainer.model.policy import Policy, load_model
from consumers.trainer.records.evaluation_log import EvaluationLog
from consumers.trainer.step.train_step import TrainStep
from schemas.config import TrainerConfig
from schemas.errors import ConfigError, InfraError
from tests.support.models.tiny_model import make_tiny_model
from tests.support.trainer.train_steps import make_train_step
from tests.support.trainer.trajectories import make_groups


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> PreTrainedModel:
    return load_model(make_tiny_model(tmp_path_factory.mktemp("tiny"), hidden=32, layers=1), "float32")


def make_step(model: PreTrainedModel) -> TrainStep:
    settings = TrainerConfig.model_validate(
        {"steps": 10, "optimizer": {"lr": 1e-3, "schedule": "linear", "warmup_steps": 2}}
    )
    return make_train_step(Policy(copy.deepcopy(model)), settings)


def advance(step: TrainStep, version: int) -> None:
    step.run(step.planner.plan(make_groups([3, 4], seed=version)).batch(), version)


def same(a: TrainStep, b: TrainStep) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a.policy.parameters(), b.policy.parameters(), strict=True))


def test_a_checkpoint_that_was_found_whole_is_not_read_again_before_it_is_loaded(
    model: PreTrainedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At 70B parameters each reading takes a quarter of an hour, in which all ranks wait."""
    step, checkpoints = make_step(model), CheckpointStore(tmp_path)
    path = checkpoints.save(step, step=1, version=1, leader_term=1, extra={})
    read: list[Path] = []
    monkeypatch.setattr(store, "damage", lambda found: read.append(found) or damage(found))
    assert checkpoints.newest()[0] == path
    checkpoints.load(path, step)
    assert read == [path]
    (path / "rng-0.json").write_text("{}")
    with pytest.raises(InfraError, match="bytes instead of"):
        checkpoints.load(path, step)


def test_rank_0_does_not_read_what_other_ranks_have_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their files are in the memory of their own machines."""
    aside = tmp_path / ".step.writing"
    aside.mkdir()
    theirs, ours = aside / "__1_0.distcp", aside / "state.json"
    for file in (theirs, ours):
        file.write_text(file.name)
    files.note_digests(aside, 1, [theirs])
    read: list[Path] = []
    digests = files._digests
    monkeypatch.setattr(files, "_digests", lambda paths, *by: read.extend(paths) or digests(paths, *by))
    files.complete(aside, tmp_path / "step")
    assert read == [ours]
    assert sorted(file.name for file in (tmp_path / "step").iterdir()) == ["COMPLETE", theirs.name, ours.name]
    assert damage(tmp_path / "step") is None
    (tmp_path / "step" / theirs.name).write_text("__2_0.distcp")
    assert damage(tmp_path / "step") == f"{theirs.name} has changed since it was written"


def test_a_marker_that_names_no_digest_holds_those_of_blake2b(tmp_path: Path) -> None:
    (tmp_path / "model").write_bytes(b"weights")
    digest = hashlib.blake2b(b"weights", digest_size=16).hexdigest()
    (tmp_path / "COMPLETE").write_text(json.dumps({"files": {"model": [7, digest]}}))
    assert damage(tmp_path) is None
    (tmp_path / "model").write_bytes(b"Weights")
    assert damage(tmp_path) == "model has changed since it was written"


def test_the_step_after_loading_is_bit_identical(model: PreTrainedModel, tmp_path: Path) -> None:
    original = make_step(model)
    for version in range(3):
        advance(original, version)
    checkpoints = CheckpointStore(tmp_path)
    torch.manual_seed(11)
    np.random.seed(12)
    random.seed(13)
    extra = {"journal": "17-0", "cursor": {"next": 99, "skipped": [3, 5]}}
    path = checkpoints.save(original, step=3, version=3, leader_term=1, extra=extra)
    drawn = torch.rand(3).tolist(), np.random.rand(3).tolist(), [random.random() for _ in range(3)]
    advance(original, 3)
    advance(original, 4)

    resumed = make_step(model)
    restored = checkpoints.load(path, resumed)
    assert (restored.step, restored.version, restored.extra) == (3, 3, extra)
    assert (torch.rand(3).tolist(), np.random.rand(3).tolist(), [random.random() for _ in range(3)]) == drawn
    advance(resumed, 3)
    advance(resumed, 4)
    assert same(original, resumed)
    assert original.update.optimizer.param_groups[0]["lr"] == resumed.update.optimizer.param_groups[0]["lr"]


def test_the_state_before_the_first_step_can_be_kept(model: PreTrainedModel, tmp_path: Path) -> None:
    checkpoints = CheckpointStore(tmp_path)
    path = checkpoints.save(make_step(model), step=0, version=0, leader_term=1, extra={})
    straight, resumed = make_step(model), make_step(model)
    checkpoints.load(path, resumed)
    advance(straight, 0)
    advance(resumed, 0)
    assert same(straight, resumed)


def test_saving_changes_nothing(model: PreTrainedModel, tmp_path: Path) -> None:
    saved, other = make_step(model), make_step(model)
    for version in range(3):
        advance(saved, version)
        advance(other, version)
        CheckpointStore(tmp_path).save(saved, step=version, version=version, leader_term=1, extra={})
    assert same(saved, other)


def test_the_last_k_are_kept(model: PreTrainedModel, tmp_path: Path) -> None:
    step, checkpoints = make_step(model), CheckpointStore(tmp_path, keep=2)
    for number in (1, 2, 10, 100):
        checkpoints.save(step, step=number, version=number, leader_term=1, extra={})
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step-00000010-t0001", "step-00000100-t0001"]
    assert checkpoints.newest()[0] == tmp_path / "step-00000100-t0001"


def test_a_checkpoint_waits_for_its_evaluation(model: PreTrainedModel, tmp_path: Path) -> None:
    """The version may turn out to be the best one."""
    step, checkpoints = make_step(model), CheckpointStore(tmp_path / "checkpoints", keep=1, keep_best=1)
    evaluations = EvaluationLog(tmp_path)

    def save(version: int) -> list[int]:
        checkpoints.save(step, step=version, version=version, leader_term=1, extra={}, evaluated=version % 2 == 0)
        return checkpoints.steps()

    with pytest.raises(ConfigError, match="keep_best"):
        checkpoints.at("best")
    assert save(2) == [2]
    assert save(3) == [2, 3]
    assert save(4) == [2, 4]
    assert save(6) == [2, 4, 6]
    evaluations.add({"version": 2, "mean": 0.5})
    evaluations.add({"version": 4, "mean": 0.1})
    assert save(7) == [2, 6, 7]
    evaluations.add({"version": 6, "mean": 0.6})
    assert save(9) == [6, 9]


def test_an_interrupted_write_does_not_count(model: PreTrainedModel, tmp_path: Path) -> None:
    step, checkpoints = make_step(model), CheckpointStore(tmp_path)
    kept = checkpoints.save(step, step=5, version=5, leader_term=1, extra={})
    half = tmp_path / ".step-00000006-t0001.writing"
    half.mkdir()
    (half / "state.json").write_text("{}")
    assert checkpoints.newest() == (kept, [])
    assert checkpoints.save(step, step=6, version=6, leader_term=1, extra={}).name == "step-00000006-t0001"


@pytest.mark.parametrize("kind", ["no marker", "short file", "flipped byte", "missing file", "broken marker"])
def test_damage_is_named_and_the_one_before_is_taken(model: PreTrainedModel, tmp_path: Path, kind: str) -> None:
    step, checkpoints = make_step(model), CheckpointStore(tmp_path)
    older = checkpoints.save(step, step=1, version=1, leader_term=1, extra={})
    path = checkpoints.save(step, step=2, version=2, leader_term=1, extra={})
    victim = next(p for p in (path / "tensors").iterdir() if p.suffix == ".distcp")
    if kind == "no marker":
        (path / "COMPLETE").unlink()
    elif kind == "broken marker":
        (path / "COMPLETE").write_text("{")
    elif kind == "short file":
        victim.write_bytes(victim.read_bytes()[:-1])
    elif kind == "missing file":
        victim.unlink()
    else:
        content = bytearray(victim.read_bytes())
        content[len(content) // 2] ^= 1
        victim.write_bytes(content)
    newest, refused = checkpoints.newest()
    assert newest == older
    assert len(refused) == 1
    assert refused[0].startswith("step-00000002-t0001: ")
    with pytest.raises(InfraError, match="damaged"):
        checkpoints.load(path, make_step(model))


def test_saving_a_step_again_replaces_it(model: PreTrainedModel, tmp_path: Path) -> None:
    step, checkpoints = make_step(model), CheckpointStore(tmp_path)
    checkpoints.save(step, step=1, version=1, leader_term=1, extra={"try": 1})
    path = checkpoints.save(step, step=1, version=1, leader_term=1, extra={"try": 2})
    assert checkpoints.load(path, step).extra == {"try": 2}
    assert damage(path) is None
    assert [p.name for p in tmp_path.iterdir()] == ["step-00000001-t0001"]


def test_an_empty_folder_has_no_checkpoint(tmp_path: Path) -> None:
    assert CheckpointStore(tmp_path / "none").newest()[0] is None


def test_the_marker_lists_every_file(model: PreTrainedModel, tmp_path: Path) -> None:
    path = CheckpointStore(tmp_path).save(make_step(model), step=1, version=1, leader_term=1, extra={})
    listed = set(json.loads((path / "COMPLETE").read_text())["files"])
    there = {str(p.relative_to(path)) for p in path.rglob("*") if p.is_file()}
    assert there == listed | {"COMPLETE"}


def test_a_checkpoint_of_another_shape_is_a_wrong_configuration(model: PreTrainedModel, tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    path = store.save(make_step(model), step=1, version=1, leader_term=1, extra={})
    for hidden, layers, reason in ((64, 1, "Size mismatch"), (32, 2, "Missing key")):
        folder = make_tiny_model(tmp_path / f"{hidden}-{layers}", hidden=hidden, layers=layers)
        with pytest.raises(ConfigError, match=f"step-00000001-t0001 is not one of model.path.*{reason}") as refused:
            store.load(path, make_step(load_model(folder, "float32")))
        assert "Traceback" not in str(refused.value)


def test_an_unwritable_folder_is_one_clear_error(model: PreTrainedModel, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(InfraError, match="cannot write the checkpoint"):
        CheckpointStore(tmp_path / "file").save(make_step(model), step=1, version=1, leader_term=1, extra={})


class Planted:
    """An object whose pickle writes a file when it is read."""

    def __init__(self, trace: Path) -> None:
        self.trace = trace

    def __reduce__(self) -> Any:
        return Path.touch, (self.trace,)


@pytest.mark.parametrize("place", [".metadata", "value"])
@pytest.mark.parametrize("reading", ["load", "export"])
def test_a_checkpoint_with_code_is_refused(model: PreTrainedModel, tmp_path: Path, place: str, reading: str) -> None:
    """A process that can write the run's folder can write a marker with the right digests, too."""
    step, trace = make_step(model), tmp_path / "trace"
    path = CheckpointStore(tmp_path / "checkpoints").save(step, step=1, version=1, leader_term=1, extra={})
    file = path / "tensors" / ".metadata"
    described = FileSystemReader(path / "tensors").read_metadata()
    if place == ".metadata":
        described.planner_data = Planted(trace)
    else:
        index = next(i for i in described.storage_data if isinstance(i.fqn, str) and i.fqn.startswith("model."))
        described.state_dict_metadata[index.fqn] = BytesStorageMetadata()
        info = described.storage_data.pop(index)
        body = io.BytesIO()
        torch.save(Planted(trace), body)
        (path / "tensors" / "planted").write_bytes(body.getvalue())
        described.storage_data[MetadataIndex(index.fqn)] = replace(
            info, relative_path="planted", offset=0, length=len(body.getvalue())
        )
    file.write_bytes(pickle.dumps(described))
    tensors = tensors_of(step) if reading == "load" else {"model": model_tensors(step.policy)}
    with pytest.raises(ConfigError, match=f"checkpoint {path.name} is not loaded: "):
        load_tensors(path, tensors)
    assert not trace.exists(), "the code has run"
