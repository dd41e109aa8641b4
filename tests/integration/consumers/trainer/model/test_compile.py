"""Compiled layers train the same weights, for batches of any size; without a compiler they are left as they are."""

import copy
import shutil
from pathlib import Path

import pytest
import structlog
import torch
from torch._dynamo.utils import counters
from transformers import PreTrainedModel

from consumers.trainer.model.compile import what_lacks
from consumers.trainer.model.policy import Policy, load_model
from consumers.trainer.step.train_step import TrainStep
from tests.support.models.tiny_model import make_tiny_model
from tests.support.trainer.train_steps import make_train_step
from tests.support.trainer.trajectories import make_groups

pytestmark = pytest.mark.matrix("compiling takes half a minute, and changes speed alone")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> PreTrainedModel:
    return load_model(make_tiny_model(tmp_path_factory.mktemp("tiny"), hidden=32, layers=3), "float32")


def make_step(model: PreTrainedModel, **settings: object) -> TrainStep:
    return make_train_step(
        Policy(copy.deepcopy(model)), {"optimizer": {"lr": 1e-3}, "micro_batch_tokens": 60, **settings}
    )


@pytest.mark.skipif(what_lacks("cpu") is not None, reason="there is no C++ compiler")
@pytest.mark.timeout(900)
@pytest.mark.parametrize("checkpointing", [False, True])
def test_compiled_layers_train_the_same(
    model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch, checkpointing: bool
) -> None:
    monkeypatch.delenv("TORCHDYNAMO_DISABLE", raising=False)
    torch.compiler.reset()
    counters.clear()
    plain, compiled = (
        make_step(model, compile=wanted, activation_checkpointing=checkpointing) for wanted in (False, True)
    )
    graphs = []
    # Rows of the first batch share their prompts, those of the second do not.
    for version, sizes in enumerate([[4, 1], [1, 1], [2, 5, 3], [6, 2]]):
        groups = make_groups(sizes, seed=version)
        wanted = plain.run(plain.planner.plan(groups).batch(), version).metrics
        found = compiled.run(compiled.planner.plan(groups).batch(), version).metrics
        for name in ("loss", "entropy", "grad_norm", "kl"):
            assert found[name] == pytest.approx(wanted[name], rel=1e-3, abs=1e-5), name
        graphs.append(counters["stats"]["unique_graphs"])
    assert graphs[0] > 0, "something was compiled"
    assert graphs[2:] == graphs[1:2] * 2, "other sizes are not compiled again"
    assert plain.policy.state_dict().keys() == compiled.policy.state_dict().keys()


def test_without_a_compiler_one_line_says_so(model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: None)
    with structlog.testing.capture_logs() as logs:
        step = make_step(model, compile=True)
    assert [line["event"] for line in logs] == [
        "trainer.compile is left out: it needs a C++ compiler (Debian, Ubuntu: apt install g++)"
    ]
    step.run(step.planner.plan(make_groups([2, 1])).batch(), 0)


def test_what_a_gpu_needs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CC", raising=False)
    found = what_lacks("cuda")
    assert found is not None
    assert "Triton" in found
