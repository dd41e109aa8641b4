"""A spot machine with the trainer is taken back: a checkpoint is written, from which it resumes elsewhere.

That it does is in tests/e2e/consumers/trainer/test_asked_machines.py: the trainer ends as there.
"""

import time
from collections.abc import Callable
from pathlib import Path

import yaml

from broker.client import Broker
from consumers.trainer.checkpoint.store import CheckpointStore
from schemas.errors import UNFINISHED_EXIT
from schemas.run_folder import read_lines
from tests.support.models.tiny_model import make_tiny_model
from tests.support.runs.light_service import METADATA, start_service
from tests.support.servers.metadata_server import metadata_server
from tests.support.trainer.deterministic_run import Pipeline, generate_freshly, make_config

DEADLINE_S = 120.0


def test_the_trainer_of_a_machine_that_is_taken_back_saves_and_is_not_finished(
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

    with Pipeline(broker, generate_freshly), metadata_server() as (metadata, _, ended):
        trainer = start_service("trainer", file, "trainer", broker.connection.url, output=None, **{METADATA: metadata})
        try:
            deadline = time.monotonic() + DEADLINE_S
            while len(steps()) < 2:
                assert trainer.poll() is None
                assert time.monotonic() < deadline
                time.sleep(0.1)
            ended.set()
            code = trainer.wait(DEADLINE_S)
        finally:
            trainer.kill()
    assert code == UNFINISHED_EXIT, "not 0, which a Slurm job or a pod takes for the run's end"
    assert CheckpointStore(tmp_path / "run" / "checkpoints").steps() == [len(steps())]
    assert steps() == list(range(len(steps()))), "each step once"
