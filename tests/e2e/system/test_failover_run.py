"""A whole run behind Redis Sentinel: its primary dies, and it trains to its last step with the replica."""

from pathlib import Path

import pytest

from broker.connection.connection import open_client
from tests.support.broker.sentinels import Sentinels
from tests.support.models.tiny_model import make_tiny_model
from tests.support.runs.up_runs import UpRun, trained_samples

STEPS = 60


@pytest.mark.matrix("a whole run; test_sentinel.py follows a failover with single services")
@pytest.mark.timeout(400)
def test_a_run_goes_on_with_the_primary_that_sentinel_chose(tmp_path: Path) -> None:
    sentinels = Sentinels(tmp_path)
    try:
        sentinels.wait_replica()
        make_tiny_model(tmp_path / "model")
        config = {
            "broker": {"url": sentinels.url, "deadline_s": 120},
            "model": {"path": str(tmp_path / "model"), "dtype": "float32", "max_length": 64},
            "train": {"name": "arithmetic"},
            "sampling": {"n": 4, "max_tokens": 6},
            "reward": {"terms": [{"name": "exact"}]},
            "generator": {"engine": "transformers"},
            "trainer": {
                "steps": STEPS,
                "batch_groups": 4,
                "threads": 1,
                "advantage": {"keep_zero_variance": True},
                "checkpoint": {"every": 10},
            },
        }
        run = UpRun(tmp_path, config)
        run.wait_until(lambda: run.steps() >= 5, "the first steps")
        primary = sentinels.servers[0].process
        assert primary is not None
        primary.kill()
        before = run.steps()
        summary = run.finish()
        assert before < STEPS - 10, "it resumed without the primary"
        assert open_client(sentinels.servers[1].url).info("replication")["role"] == "master"
        assert (summary["exit_reason"], summary["steps"]) == ("finished", STEPS)
        assert summary["trajectories_trained_twice"] == 0
        samples = trained_samples(run)
        assert len(samples) == len(set(samples))
    finally:
        sentinels.stop()
