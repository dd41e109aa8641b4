"""``tidemill serve --live``: each version that a run publishes is loaded under requests, and a bad one is not."""

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from broker.client import Broker
from broker.connection.embedded import EmbeddedServer
from deploy.offline.serve import LiveWeights, find_served
from producers.engines.base import Engine
from schemas.config import save_config
from schemas.errors import ConfigError, DataError
from schemas.messages import FileSource, WeightSource
from tests.support.broker.trainer_sessions import take_over
from tests.support.configurations import minimal_config
from tests.support.producers.generator_service import publish_version

DEADLINE_S = 30


class LoadingEngine:
    """An engine that keeps the bytes of what it loads, and refuses those of ``refused``."""

    def __init__(self) -> None:
        self.loaded: dict[int, bytes] = {}
        self.refused = b"not weights"
        self.changed = asyncio.Event()

    async def load(self, source: WeightSource, version: int) -> None:
        """See Engine."""
        assert isinstance(source, FileSource)
        content = Path(source.path).read_bytes()
        self.changed.set()
        if content == self.refused:
            raise DataError("these are no weights")
        self.loaded[version] = content


async def test_versions_are_served_as_they_are_published(
    tmp_path: Path,
    server: EmbeddedServer,
    make_broker: Callable[..., Broker],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("REDIS_URL", server.url)
    config = minimal_config(run={"name": "live", "folder": str(tmp_path / "run")})
    config.folder.mkdir()
    save_config(config, config.folder / "config.yaml")
    broker, engine = make_broker("live"), LoadingEngine()
    training = take_over(broker)
    publish_version(broker, training, tmp_path, 1, b"first")
    weights = LiveWeights(config, as_engine(engine))
    await asyncio.wait_for(weights.start(), DEADLINE_S)
    assert engine.loaded == {1: b"first"}
    following = asyncio.create_task(weights.follow())
    for version, content in ((2, engine.refused), (3, b"third")):
        engine.changed.clear()
        publish_version(broker, training, tmp_path, version, content)
        await asyncio.wait_for(engine.changed.wait(), DEADLINE_S)
    following.cancel()
    assert engine.loaded == {1: b"first", 3: b"third"}
    told = capsys.readouterr().err
    assert told.count("version 1 stays in use: these are no weights") == 1
    weights.close()
    assert not list((config.folder / "cache").iterdir())


def as_engine(engine: Any) -> Engine:
    """The part of an engine that live weights need."""
    found: Engine = engine
    return found


def test_a_step_is_not_live(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="either --live or --step"):
        find_served(str(tmp_path), 3, None, None, live=True)
