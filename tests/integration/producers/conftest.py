"""What generator services in this process have in common."""

from pathlib import Path

import pytest

from tests.support.models.tiny_model import make_tiny_model


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model and its tokenizer, which no test changes."""
    return make_tiny_model(tmp_path_factory.mktemp("model"))
