"""The config.json of a model that transformers does not take: one line that says what is wrong."""

import json
from pathlib import Path
from typing import Any

import pytest

from consumers.trainer.model.policy import load_model
from deploy.checks.thorough import measure_model
from schemas.errors import ConfigError
from schemas.model_folder import load_model_config
from tests.support.configurations import minimal_config

QWEN: dict[str, Any] = {
    "model_type": "qwen2",
    "architectures": ["Qwen2ForCausalLM"],
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "vocab_size": 64,
}
WRONG = [
    ({"layer_types": ["full_attention"] * 3}, r"`num_hidden_layers` \(2\) must be equal to"),
    ({"hidden_size": "wide"}, r"'hidden_size'.*'wide'"),
    ({"model_type": "qwen99"}, "qwen99"),
]


@pytest.mark.parametrize(("changes", "says"), WRONG)
def test_a_wrong_value_is_named_in_a_line(tmp_path: Path, changes: dict[str, Any], says: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps(QWEN | changes))
    config = minimal_config(model={"path": str(tmp_path), "max_length": 512})
    for read in (
        lambda: load_model_config(tmp_path),
        lambda: load_model(tmp_path, "float32"),
        lambda: measure_model(config),
    ):
        with pytest.raises(ConfigError, match=says) as error:
            read()
        assert str(tmp_path) in str(error.value)
        assert "\n" not in str(error.value)
