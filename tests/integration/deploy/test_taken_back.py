"""A spot machine with the trainer is taken back: a checkpoint is written, and the trainer resumes elsewhere."""

import time
from collections.abc import Callable
from pathlib import Path

import yaml

from broker.client import Broker
from consumers.trainer.checkpoint.store import CheckpointStore
from schemas.errors import OK_EXIT, UNFINISHED_EXIT
from schemas.run_folder import read_lines
from tests.support.models.tiny_model import make_tiny_model
from tests.support.runs.light_service import METADATA, start_service
from tests.support.servers.metadata_server import metadata_server
from tests.support.trainer.deterministic_run import Pipeline, generate_freshly, make_config

DEADLINE_S = 120.0


def test_the_trainer_of_a_machine_that_is_taken_back_saves_and_resumes(
    make_broker: Callable[..., Broker], tmp_path: Path
) -> None:
    broker = make_broker()
    model = make_tiny_model(tmp_path / "model", hidden=32, layers=1)
    settings = make_config(tmp_path / "run", model, broker, steps=100_000, checkpoint={"every": 1_000_000})
    settings["supervisor"] = {"spot_notices": "azure"}
    file = tmp_path / "config.yaml"
    file.write_text(yaml.safe_dump(settings))

    def steps() -> list[int]:
        return [line["step"] for line in read_lines(tmp_path / "run" / "trained.jsonl") if "step" in line]

    def train(metadata: str, until: Callable[[], object]) -> int:
        trainer = start_service("trainer", file, "trainer", broker.connection.url, output=None, **{METADATA: metadata})
        try:
            before, deadline = len(steps()), time.monotonic() + DEADLINE_S
            while len(steps()) < before + 2:
                assert trainer.poll() is None
                assert time.monotonic() < deadline
                time.sleep(0.1)
            until()
            return trainer.wait(DEADLINE_S)
        finally:
            trainer.kill()

    with Pipeline(broker, generate_freshly), metadata_server() as (first, _, ended):
        assert train(first, ended.set) == UNFINISHED_EXIT, "not 0, which a Slurm job or a pod takes for the run's end"
        saved = len(steps())
        assert CheckpointStore(tmp_path / "run" / "checkpoints").steps() == [saved]
    with Pipeline(broker, generate_freshly), metadata_server() as (second, _, _):
        assert train(second, lambda: broker.ledger.change_settings({"steps": saved + 20})) == OK_EXIT
    assert steps() == list(range(saved + 20)), "each step once"
