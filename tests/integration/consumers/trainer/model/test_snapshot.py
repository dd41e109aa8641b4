"""What is published as a version is that version's weights to the bit, however soon the next step starts."""

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from consumers.trainer.model import snapshot as snapshot_module
from consumers.trainer.model.file_layout import SharedFile
from consumers.trainer.model.policy import Policy, load_model
from consumers.trainer.model.snapshot import Snapshot
from consumers.trainer.rank_group import RankGroup
from consumers.trainer.step.build import build_train_step
from schemas.errors import InfraError
from tests.support.configurations import minimal_config
from tests.support.trainer.trajectories import make_groups

PROBE = [5, 6, 7]
WAIT_S = 60.0
Weights = dict[str, torch.Tensor]


@pytest.fixture(params=["float32", "bfloat16"])
def wire(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def rank_group(model: Path, tmp_path: Path, wire: str) -> RankGroup:
    config = minimal_config(
        run={"folder": str(tmp_path)},
        model={"path": str(model), "dtype": "float32", "max_length": 64},
        sampling={"max_tokens": 8},
        trainer={"steps": 9, "optimizer": {"lr": 1e-2}},
    )
    step = build_train_step(config, policy=Policy(load_model(model, "float32")))
    # The weights travel in another type than they are computed in: that needs no sharding here.
    return RankGroup(config.model_copy(update={"model": config.model.model_copy(update={"dtype": wire})}), step)


def weights(rank_group: RankGroup, wire: str) -> Weights:
    named = rank_group.step.policy.causal_lm.named_parameters()
    return {name: tensor.detach().to(getattr(torch, wire), copy=True) for name, tensor in named}


def same(found: Weights, wanted: Weights) -> bool:
    return found.keys() == wanted.keys() and all(torch.equal(found[name], wanted[name]) for name in wanted)


def held_back(snapshot: Snapshot, monkeypatch: pytest.MonkeyPatch) -> tuple[threading.Event, threading.Event]:
    """Its copying waits for the first event; the second is set when the optimizer waits for it."""
    go, waiting = threading.Event(), threading.Event()
    fill, wait = snapshot.fill, snapshot.wait

    def late() -> None:
        assert go.wait(WAIT_S)
        fill()

    def told() -> None:
        waiting.set()
        wait()

    monkeypatch.setattr(snapshot, "fill", late)
    monkeypatch.setattr(snapshot, "wait", told)
    return go, waiting


def test_the_optimizer_waits_for_the_copy_and_for_nothing_more(
    rank_group: RankGroup, wire: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with ThreadPoolExecutor(2) as threads:
        for version in range(3):
            before = weights(rank_group, wire)
            snapshot, _ = rank_group.gather(PROBE, tmp_path / "v")
            go, waiting = held_back(snapshot, monkeypatch)
            filled = threads.submit(snapshot.fill)
            trained = threads.submit(rank_group.train, make_groups([4, 3], seed=version), version)
            assert waiting.wait(WAIT_S), "forward and backward needed no copy"
            assert same(weights(rank_group, wire), before), "not changed yet"
            go.set()
            filled.result(WAIT_S)
            trained.result(WAIT_S)
            assert not same(weights(rank_group, wire), before)
            assert same(load_file(tmp_path / "v"), before)


def test_a_checkpoint_is_not_loaded_over_weights_that_are_still_to_be_copied(
    rank_group: RankGroup, wire: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rank_group.save(step=0, version=0, leader_term=1, extra={})
    rank_group.wait_saved()
    saved = rank_group.checkpoint_store.at()
    rank_group.train(make_groups([4, 3], seed=1), 0)
    before = weights(rank_group, wire)
    snapshot, _ = rank_group.gather(PROBE, tmp_path / "v")
    go, waiting = held_back(snapshot, monkeypatch)
    with ThreadPoolExecutor(2) as threads:
        filled, loaded = threads.submit(snapshot.fill), threads.submit(rank_group.load, saved)
        assert waiting.wait(WAIT_S)
        go.set()
        filled.result(WAIT_S)
        loaded.result(WAIT_S)
    assert same(load_file(tmp_path / "v"), before)
    assert not same(weights(rank_group, wire), before)


def test_a_copy_that_fails_lets_the_step_go_on_and_is_reported_by_its_thread(
    rank_group: RankGroup, wire: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(self: SharedFile, pieces: object, head: bytes) -> None:
        raise RuntimeError("no memory")

    monkeypatch.setattr(SharedFile, "write", broken)
    snapshot, _ = rank_group.gather(PROBE, tmp_path / "v")
    with pytest.raises(RuntimeError, match="no memory"):
        snapshot.fill()
    assert not rank_group.train(make_groups([4, 3], seed=1), 0).skipped


def test_waiting_for_a_copy_that_never_comes_has_a_deadline(
    rank_group: RankGroup, wire: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(snapshot_module, "COPY_DEADLINE_S", 0.01)
    rank_group.gather(PROBE, tmp_path / "v")
    with pytest.raises(InfraError, match="were not written"):
        rank_group.train(make_groups([4, 3], seed=1), 0)


def test_a_file_that_finds_no_room_is_not_there(
    rank_group: RankGroup, wire: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "v"
    snapshot, _ = rank_group.gather(PROBE, file)
    file.unlink()
    file.symlink_to("/dev/full")
    with pytest.raises(OSError, match="No space"):
        snapshot.fill()
    assert not file.is_symlink()
    assert not rank_group.train(make_groups([4, 3], seed=1), 0).skipped
