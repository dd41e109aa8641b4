"""Two kinds of generators in one run of ``tidemill up``, each with its own settings, variables and interpreter."""

import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest

from deploy.control_plane.address import address_of
from tests.support.runs.up_runs import UpRun, trained_samples

EXAMPLE = Path(__file__).parents[3] / "examples" / "arithmetic" / "model.py"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The untrained model of the arithmetic example."""
    spec = importlib.util.spec_from_file_location("arithmetic_model", EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    folder = tmp_path_factory.mktemp("model") / "untrained"
    folder.mkdir()
    module.build(folder, 0)
    return folder


@pytest.mark.timeout(300)
def test_two_pools_train_one_policy_also_when_a_generator_of_one_is_killed(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nSTARTED_BY=own exec {sys.executable} "$@"\n')
    python.chmod(0o755)
    monkeypatch.setenv("OF_MACHINE", "/opt/lib")
    config = {
        "model": {"path": str(model), "dtype": "float32", "max_length": 32},
        "train": {"name": "arithmetic"},
        "sampling": {"n": 4, "max_tokens": 6},
        "reward": {"terms": [{"name": "exact"}]},
        "generator": {"engine": "transformers", "max_samples": 32, "lease_s": 5, "probe_tolerance": 1e3},
        "pools": {
            "real": {
                "generator": {"max_samples": 4},
                "env": {"SEARCH": "/own:${OF_MACHINE}:$NOWHERE"},
                "python": str(python),
            },
            "quick": {"generator": {"engine": "scripted", "replicas": 2, "args": {"token_s": 0.02}}},
        },
        "trainer": {
            "steps": 100_000,
            "batch_groups": 8,
            "threads": 1,
            "advantage": {"keep_zero_variance": True},
            "mismatch": {"action": "report"},
        },
        "control": {"port": 0},
        "supervisor": {"max_restarts": 20, "backoff_s": 0.2},
    }
    run = UpRun(tmp_path, config)
    run.wait_until(lambda: run.steps() >= 3 and address_of(run.folder) is not None, "three steps")
    service = run.service("generator-real-0")
    assert service is not None
    environment = service.environ()
    assert (environment["SEARCH"], environment["STARTED_BY"]) == ("/own:/opt/lib:", "own")
    killed = run.service("generator-quick-0")
    assert killed is not None
    assert "SEARCH" not in killed.environ()
    killed.kill()
    run.ask("/v1/scale", {"role": "generator", "pool": "quick", "replicas": 1})

    def of_pools(figure: str) -> list[Any]:
        return [pool[figure] for pool in run.ask("/v1/status")["pools"]]

    run.wait_until(lambda: of_pools("generators") == [1, 1], "one generator of each pool")
    run.wait_until(lambda: None not in of_pools("logprob_gap"), "samples of both pools")
    status = run.ask("/v1/status")
    assert status["scaling"]["replicas"] == {"generator.real": 1, "generator.quick": 1, "reward": 1}
    assert {one["name"]: one["pool"] for one in status["services"] if one["pool"]}["generator-real-0"] == "real"
    run.ask("/v1/settings", {"steps": run.steps() + 5}, method="PATCH")
    run.finish_whole()
    samples = trained_samples(run)
    assert len(samples) == len(set(samples)) == run.steps() * 8 * 4
    figures = {name for line in run.lines("metrics.jsonl") for name in line if name.startswith("pool/")}
    assert {"pool/real/gap", "pool/quick/gap", "pool/real/tokens", "pool/quick/tokens"} <= figures
    gap = {pool["name"]: pool["logprob_gap"] for pool in status["pools"]}
    # The scripted engine draws its log-probabilities; some samples that it began, the other pool has finished.
    assert gap["quick"] > 2 * gap["real"]


@pytest.mark.matrix("two equal engines of different speed; make test has two pools of different engines")
@pytest.mark.timeout(400)
def test_pools_make_samples_as_they_are_fast_and_one_may_be_scaled_to_zero_and_back(
    model: Path, tmp_path: Path
) -> None:
    """One pool samples three times as fast as the other, and the trainer waits for both."""
    args = {"min_length": 4, "max_length": 4}
    config = {
        "model": {"path": str(model), "dtype": "float32", "max_length": 32},
        "train": {"name": "arithmetic"},
        "sampling": {"n": 4, "max_tokens": 6},
        "reward": {"terms": [{"name": "exact"}]},
        "generator": {"engine": "scripted", "max_samples": 8, "probe_tolerance": 1e3},
        "pools": {
            name: {"generator": {"args": {**args, "token_s": token_s}}}
            for name, token_s in (("quick", 0.25), ("slow", 0.75))
        },
        "trainer": {
            "steps": 100_000,
            "batch_groups": 4,
            "threads": 1,
            "advantage": {"keep_zero_variance": True},
            "mismatch": {"action": "report"},
        },
        "control": {"port": 0},
    }
    run = UpRun(tmp_path, config)

    def generators() -> list[int]:
        return [pool["generators"] for pool in run.ask("/v1/status")["pools"]]

    def tokens(since: int) -> list[float]:
        lines = [line for line in run.lines("metrics.jsonl") if line.get("step", 0) >= since]
        return [sum(line.get(f"pool/{name}/tokens", 0.0) for line in lines) for name in ("quick", "slow")]

    run.wait_until(lambda: run.steps() >= 5 and address_of(run.folder) is not None, "five steps")
    run.wait_until(lambda: run.steps() >= 35, "thirty more", 200)
    quick, slow = tokens(since=5)
    assert quick / (quick + slow) == pytest.approx(0.75, rel=0.1)
    for count in (0, 1):
        run.ask("/v1/scale", {"role": "generator", "pool": "slow", "replicas": count})
        run.wait_until(lambda count=count: generators() == [1, count], f"{count} generators")  # type: ignore[misc]
    back = run.steps()
    run.wait_until(lambda: tokens(since=back + 5)[1] > 0, "samples of the pool that is back")
    run.ask("/v1/settings", {"steps": run.steps() + 5}, method="PATCH")
    run.finish_whole()
    samples = trained_samples(run)
    assert len(samples) == len(set(samples)) == run.steps() * 4 * 4
    print(f"share of the quick pool: {quick / (quick + slow):.3f}")
