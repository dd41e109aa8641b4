"""A run whose generator asks an inference server over HTTP: vLLM's own, launched with it."""

import os
import signal
from pathlib import Path

import psutil
import pytest

from tests.support.models.tiny_model import make_tiny_model
from tests.support.runs.up_runs import UpRun, trained_samples

pytestmark = pytest.mark.timeout(500)

SEVENS = '''
def sevens(prompt, completion, prompt_ids, completion_ids, **data):
    """Share of sevens: an untrained model learns it in a few steps."""
    return completion.count("7") / max(len(completion), 1)
'''


def servers(run: UpRun) -> list[psutil.Process]:
    """The processes of the generator's inference server, its guardian not among them."""
    generator = run.service("generator-0")
    found = [] if generator is None else generator.children(recursive=True)
    return [process for process in found if "api_server" in " ".join(process.cmdline()) and process.is_running()]


@pytest.mark.matrix("the second engine in a whole run; test_up trains with vLLM in the process")
def test_a_policy_is_trained_over_vllms_own_server_and_a_killed_server_costs_no_sample(tmp_path: Path) -> None:
    pytest.importorskip("vllm")
    (tmp_path / "rewards.py").write_text(SEVENS)
    run = UpRun(
        tmp_path,
        {
            "model": {"path": str(make_tiny_model(tmp_path / "model")), "dtype": "float32", "max_length": 64},
            "train": {"name": "arithmetic"},
            "sampling": {"n": 4, "max_tokens": 12},
            "reward": {"terms": [{"name": "rewards.py:sevens"}]},
            "generator": {"engine": "http", "http": {"dialect": "vllm"}, "max_samples": 32, "lease_s": 5},
            "trainer": {
                "steps": 8,
                "batch_groups": 4,
                "threads": 1,
                "optimizer": {"lr": 3e-3},
                "advantage": {"keep_zero_variance": True},
            },
            "supervisor": {"max_restarts": 20, "backoff_s": 0.2},
        },
    )
    run.wait_until(lambda: run.steps() >= 2, "two steps", 240)
    generator = run.service("generator-0")
    assert generator is not None
    (server,) = [process for process in servers(run) if process.parent() not in servers(run)]
    os.kill(server.pid, signal.SIGKILL)
    generator.wait(timeout=10)
    summary = run.finish_whole(360)
    assert "was killed by signal 9" in run.output.read_text()
    assert summary["logprob_gap_mean"] < 1e-5
    samples = trained_samples(run)
    assert len(samples) == len(set(samples)) == 8 * 4 * 4
    assert len(run.lines("metrics.jsonl")) >= 8
