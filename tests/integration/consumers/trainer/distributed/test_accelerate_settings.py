"""What accelerate reads from the environment, as ``accelerate launch`` leaves it there, changes no training."""

import copy
from collections.abc import Iterator

import pytest
from accelerate.state import AcceleratorState, GradientState
from structlog.testing import capture_logs
from transformers import PreTrainedModel

from consumers.trainer.model.policy import Policy, load_model
from tests.support.models.tiny_model import make_tiny_model
from tests.support.trainer.train_steps import make_train_step
from tests.support.trainer.trajectories import make_groups


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> PreTrainedModel:
    return load_model(make_tiny_model(tmp_path_factory.mktemp("tiny"), hidden=32, layers=1), "float32")


@pytest.fixture(autouse=True)
def new_process() -> Iterator[None]:
    """accelerate reads its settings once in a process."""
    forget_settings()
    yield
    forget_settings()


def forget_settings() -> None:
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


def figures(model: PreTrainedModel) -> tuple[float, float, str]:
    step = make_train_step(Policy(copy.deepcopy(model)), {})
    metrics = step.run(step.planner.plan(make_groups([4, 4], 1)).batch(), version=5).metrics
    return metrics["loss"], metrics["grad_norm"], type(step.policy).__name__


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "4"),
        ("ACCELERATE_MIXED_PRECISION", "bf16"),
        ("ACCELERATE_DYNAMO_BACKEND", "EAGER"),
        ("ACCELERATE_USE_DEEPSPEED", "true"),
        ("ACCELERATE_USE_FSDP", "true"),
    ],
)
def test_a_setting_for_accelerate_is_ignored_and_named(
    model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch, name: str, value: str
) -> None:
    expected = figures(model)
    forget_settings()
    monkeypatch.setenv(name, value)
    with capture_logs() as logs:
        assert figures(model) == expected
    assert any(name in str(entry) for entry in logs)
