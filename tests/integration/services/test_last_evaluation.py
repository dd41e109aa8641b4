"""The last evaluation of a run, by its real services, is ended though the broker loses it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from broker.client import Broker
from deploy.run.summary import read_lines
from schemas.config import parse_config
from tests.support.models.tiny_model import make_tiny_model
from tests.support.runs.pausable_system import PausableSystem

pytestmark = pytest.mark.integration
SAMPLES = 400


@pytest.fixture
def system(
    tmp_path: Path, make_broker: Callable[..., Broker], monkeypatch: pytest.MonkeyPatch
) -> Iterator[PausableSystem]:
    monkeypatch.chdir(tmp_path)
    name = f"last-{tmp_path.name[-12:]}".lower().replace("_", "-")
    model = make_tiny_model(tmp_path / "tiny", hidden=32, layers=1)
    config = parse_config(
        {
            "run": {"name": name, "folder": str(tmp_path / "run")},
            "model": {"path": str(model), "dtype": "float32", "max_length": 64},
            "train": {"name": "arithmetic"},
            "sampling": {"n": 2, "max_tokens": 16},
            "reward": {"terms": [{"name": "exact"}]},
            "generator": {"engine": "scripted", "max_samples": 16, "lease_s": 5, "probe_tolerance": 1e9},
            "trainer": {"steps": 2, "batch_groups": 2, "advantage": {"name": "raw"}, "threads": 1},
            "eval": {
                "every": 1000,
                "sampling": {"n": 1, "max_tokens": 16},
                "dataset": {"name": "arithmetic", "limit": SAMPLES},
            },
        }
    )
    system = PausableSystem(config, lambda: make_broker(name))
    yield system
    system.end(*system.running)
    assert not system.errors


@pytest.mark.parametrize("lost", ["evals", "groups"])
def test_what_the_broker_loses_of_it_is_made_anew(system: PausableSystem, lost: str) -> None:
    system.start_all()
    system.wait("the last evaluation", lambda: bool(system.broker.evals.samples_left(2)))
    system.pause("freeze")
    assert system.broker.evals.samples_left(2), "it is under way"
    system.broker.connection.client.delete(getattr(system.broker.connection.keys, lost))
    system.broker.run_control.pause("none", "test")
    system.wait("the end", lambda: system.broker.ledger.read_state().state == "finished")
    lines = {line["version"]: line for line in read_lines(system.config.folder / "evaluations.jsonl")}
    assert (lines[2]["n"], lines[2]["scored"], lines[2]["failed"]) == (SAMPLES, SAMPLES, 0)
