"""``tidemill eval`` before its engine starts: what has to come first, and of which folder the model is."""

from pathlib import Path
from typing import NoReturn

import pytest

from deploy.offline import evaluate
from schemas.config import EvalConfig, TidemillConfig


class Reached(Exception):
    """The datasets are about to be read."""


@pytest.mark.parametrize(("given", "expected"), [(None, "trained"), (Path("other"), "other")])
def test_the_engine_is_prepared_before_a_tokenizer_or_the_datasets_are_read(
    monkeypatch: pytest.MonkeyPatch, given: Path | None, expected: str
) -> None:
    """What stands in for torchvision has to be there before transformers; nothing is read of a model that isn't asked.

    Without it vLLM on a CPU did not start for a vision model.
    """
    config = TidemillConfig.model_validate(
        {
            "model": {"path": "trained", "kind": "vision"},
            "train": {"name": "arithmetic"},
            "eval": {"dataset": {"name": "arithmetic"}},
            "generator": {"engine": "vllm"},
            "reward": {"terms": [{"name": "exact"}]},
        }
    )
    prepared: list[tuple[str, bool]] = []
    opened: list[str] = []

    def prepare(name: str, vision: bool) -> None:
        assert not opened
        prepared.append((name, vision))

    def open_datasets(config: TidemillConfig, evaluation: EvalConfig) -> NoReturn:
        opened.append(config.model.path)
        raise Reached

    monkeypatch.setattr(evaluate, "prepare_engine", prepare, raising=False)
    monkeypatch.setattr(evaluate, "open_datasets", open_datasets)
    monkeypatch.setattr(evaluate, "configure_logging", lambda *_: None)
    assert config.eval is not None
    with pytest.raises(Reached):
        evaluate.evaluate_model(config, config.eval, given)
    assert prepared == [("vllm", True)]
    assert opened == [expected]
