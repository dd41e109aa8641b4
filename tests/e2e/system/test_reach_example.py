"""examples/reach as its user starts it, with few steps: only actions are sampled, and generator and trainer agree."""

import shutil
from pathlib import Path

import pytest
import yaml

from schemas.model_folder import find_tokens
from tests.support.runs.up_runs import UpRun

pytestmark = pytest.mark.matrix("an example of vLLM with pictures; its parts have unit tests")

EXAMPLE = Path(__file__).parents[3] / "examples" / "reach"


@pytest.mark.timeout(500)
def test_a_vision_language_action_model_is_taught_by_demonstrations_and_then_by_its_success(tmp_path: Path) -> None:
    shutil.copy(EXAMPLE / "reach.py", tmp_path)
    config = yaml.safe_load((EXAMPLE / "config.yaml").read_text())
    config["model"]["path"] = str(tmp_path / "model")
    config["warm_start"] |= {"stop_accuracy": 0.01, "eval_every": 5}
    for part in ("dataset", "eval"):
        config["warm_start"][part]["args"]["rows"] = 100
    config["trainer"] |= {"steps": 4, "batch_groups": 4}
    config["eval"] |= {"every": 4}
    config["eval"]["dataset"]["args"]["tasks"] = 10
    run = UpRun(tmp_path, config)
    run.finish_whole()
    metrics = run.lines("metrics.jsonl")
    assert {line["step"] for line in metrics} == {1, 2, 3, 4}
    assert max(line["train/logprob_gap_max"] for line in metrics if "train/logprob_gap_max" in line) < 1e-4
    allowed = find_tokens(tmp_path / "model", config["model"]["output_tokens"])
    assert allowed is not None
    assert len(allowed) == 8
