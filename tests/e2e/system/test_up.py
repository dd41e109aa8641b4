"""The whole system as its user starts it: it learns on real parts, and survives the death of any of them."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from broker.client import Broker
from broker.connection.embedded import EmbeddedServer
from broker.weights.peers.registry import PeerRegistry
from broker.weights.versions import count_deltas
from tests.support.runs.up_runs import UpRun, trained_samples
from tests.support.user_code.example_scripts import load_script

SEVENS = '''
def sevens(prompt, completion, prompt_ids, completion_ids, **data):
    """Share of sevens: an untrained model learns it in a few steps."""
    return completion.count("7") / max(len(completion), 1)
'''


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The untrained model of the arithmetic example."""
    folder = tmp_path_factory.mktemp("model") / "untrained"
    folder.mkdir()
    load_script("arithmetic/model.py").build(folder, 0)
    return folder


def configuration(model: Path, folder: Path, steps: int, **generator: Any) -> dict[str, Any]:
    (folder / "rewards.py").write_text(SEVENS)
    return {
        "model": {"path": str(model), "dtype": "float32", "max_length": 32},
        "train": {"name": "arithmetic"},
        "sampling": {"n": 8, "max_tokens": 6},
        "reward": {"terms": [{"name": "rewards.py:sevens"}]},
        "generator": {"max_samples": 128, "lease_s": 5, **generator},
        "trainer": {
            "steps": steps,
            "batch_groups": 16,
            "threads": 1,
            "optimizer": {"lr": 3e-3},
            "checkpoint": {"every": 5},
        },
        "supervisor": {"max_restarts": 20, "backoff_s": 0.2},
    }


@pytest.mark.timeout(400)
def test_a_policy_learns_with_real_vllm_and_nothing_is_lost(
    model: Path, tmp_path: Path, server: EmbeddedServer, make_broker: Callable[..., Broker]
) -> None:
    """Its weights go through the server, as deltas where they pay; each passes its probe.

    Only digits can be sampled. Were log-probabilities of one side among all tokens, the gap would be 0.3 at first.
    """
    pytest.importorskip("vllm")
    steps, chain = 16, 3
    config = configuration(model, tmp_path, steps, engine="vllm")
    config["broker"] = {"url": server.url}
    config["model"]["output_tokens"] = "[0-9]"
    config["model"]["dtype"] = "bfloat16"  # in float32 every element changes, and a delta does not pay
    config["trainer"]["publish"] = {"transport": "redis", "delta": "on", "max_chain": chain}
    config["trainer"]["optimizer"] = {"lr": 3e-4}
    # Once every completion is all sevens, groups have no variance any more, and the run must end all the same.
    config["trainer"]["advantage"] = {"keep_zero_variance": True}
    run = UpRun(tmp_path, config)
    summary = run.finish()
    rewards = [line["reward/mean"] for line in run.lines("metrics.jsonl")]
    assert len(rewards) == steps
    assert sum(rewards[-5:]) / 5 > sum(rewards[:5]) / 5 + 0.2
    assert summary["exit_reason"] == "finished"
    assert (summary["trajectories_lost"], summary["trajectories_trained_twice"]) == (0, 0)
    assert summary["max_staleness"] <= 4
    assert summary["logprob_gap_mean"] < 0.02
    shown = [group for file in (run.folder / "samples").glob("*.jsonl") for group in map(json.loads, file.open())]
    assert shown
    assert all(re.fullmatch("[0-9]{6}", one["completion"]) for group in shown for one in group["samples"])
    samples = trained_samples(run)
    assert len(samples) == len(set(samples))
    broker = make_broker("e2e")
    versions = broker.weights.published()
    assert versions[-1].version == steps
    assert all(manifest.delta for manifest in versions)
    assert not all(manifest.whole for manifest in versions)
    assert count_deltas(versions) <= chain
    assert not [event for event in [stored.event for stored in broker.events.newest(100)] if event.level == "error"]


@pytest.mark.matrix("a second transport in a whole run; test_weight_peers holds its promises")
@pytest.mark.timeout(400)
def test_a_policy_learns_from_weights_that_go_from_peer_to_peer(
    model: Path, tmp_path: Path, server: EmbeddedServer, make_broker: Callable[..., Broker]
) -> None:
    steps = 16
    config = configuration(model, tmp_path, steps, engine="transformers", replicas=2)
    make_broker("e2e").purge()
    config["broker"] = {"url": server.url}
    config["trainer"]["publish"] = {"transport": "peer"}
    config["trainer"]["advantage"] = {"keep_zero_variance": True}
    run = UpRun(tmp_path, config)
    run.wait_until(lambda: run.steps() >= steps // 2, "half of the steps")
    peers = PeerRegistry(make_broker("e2e").connection).find()[1]
    assert sorted(peer.id.rpartition("-")[0] for peer in peers) == ["generator-0", "generator-1", "trainer"]
    summary = run.finish()
    rewards = [line["reward/mean"] for line in run.lines("metrics.jsonl")]
    assert sum(rewards[-5:]) / 5 > sum(rewards[:5]) / 5 + 0.2
    assert (summary["exit_reason"], summary["trajectories_lost"], summary["trajectories_trained_twice"]) == (
        "finished",
        0,
        0,
    )
    assert summary["max_staleness"] <= 4
    broker = make_broker("e2e")
    assert {item.state.uri.partition(":")[0] for item in broker.weights.published()} == {"peer"}
    assert not [event for event in [stored.event for stored in broker.events.newest(100)] if event.level == "error"]


@pytest.mark.matrix("a third transport in a whole run; test_weight_broadcast holds its promises")
@pytest.mark.timeout(400)
def test_versions_are_broadcast_to_the_generators_of_a_run_and_no_process_stays(model: Path, tmp_path: Path) -> None:
    config = configuration(
        model, tmp_path, 1_000_000, engine="scripted", args={"token_s": 0.02}, probe_tolerance=1e3, replicas=2
    )
    config["trainer"]["publish"] = {"transport": "nccl", "nccl": {"backend": "gloo"}}
    config["trainer"]["advantage"] = {"keep_zero_variance": True}
    run = UpRun(tmp_path, config)
    logs = [run.folder / "logs" / f"{name}.log" for name in ("trainer", "generator-0", "generator-1")]

    def both() -> bool:
        text = logs[0].read_text(encoding="utf-8") if logs[0].exists() else ""
        return any("weights were broadcast" in line and '"generators": 2' in line for line in text.splitlines())

    run.wait_until(both, "broadcast to both generators")
    steps = run.steps()
    run.wait_until(lambda: run.steps() >= steps + 3, "steps after it")
    family = psutil.Process(run.process.pid).children(recursive=True)
    assert sum("broadcast" in process.cmdline()[-1:] for process in family) == 3, "guardians of their processes"
    run.process.terminate()
    run.process.wait(60)
    assert not [process for process in family if process.is_running()]
    assert not any("weights come from peers" in log.read_text(encoding="utf-8") for log in logs)


@pytest.mark.timeout(400)
def test_any_service_may_be_killed_and_nothing_is_lost_or_trained_twice(model: Path, tmp_path: Path) -> None:
    steps = 22
    config = configuration(
        model, tmp_path, steps, engine="scripted", args={"token_s": 0.01}, probe_tolerance=1e3, replicas=2
    )
    config["trainer"]["advantage"] = {"keep_zero_variance": True}
    # A publisher that is killed and one of its readers are the hardest case of weights, too.
    config["trainer"]["publish"] = {"transport": "peer"}
    run = UpRun(tmp_path, config)
    for at, victim in ((4, "generator-0"), (8, "trainer"), (12, "reward-0"), (16, "feeder")):
        run.wait_until(lambda at=at: run.steps() >= at, f"step {at}")
        run.wait_until(lambda victim=victim: run.service(victim) is not None, f"process of {victim}")
        process = run.service(victim)
        assert process is not None
        process.kill()
    summary = run.finish()
    assert run.steps() == steps
    samples = trained_samples(run)
    assert len(samples) == len(set(samples))
    assert {task_id for task_id, _ in samples} == set(range(steps * 16)), "a prompt was skipped"
    assert (summary["trajectories_lost"], summary["trajectories_trained_twice"]) == (0, 0)
    assert summary["max_staleness"] <= 4
    replayed: dict[int, list[Any]] = {}
    for line in run.lines("trained.jsonl"):
        if "step" in line:
            replayed.setdefault(line["step"], []).append(line["samples"])
    assert all(times[0] == again for times in replayed.values() for again in times[1:])


@pytest.mark.matrix("kills of another kind of dataset; test_up kills each service of the demo")
@pytest.mark.timeout(400)
def test_a_mixture_with_a_curriculum_goes_on_after_kills_and_says_what_it_skipped(model: Path, tmp_path: Path) -> None:
    rows = [json.dumps({"prompt": f"{number}+0=", "answer": str(number)}) for number in range(10, 40)]
    (tmp_path / "facts.jsonl").write_text("\n".join(rows))
    config = configuration(model, tmp_path, 14, engine="scripted", args={"token_s": 0.01}, probe_tolerance=1e3)
    # Few prompts, hardly ever solved, so that they come back and most are left out.
    curriculum = {"name": "band", "between": [0.9, 1.0], "floor": 0.4}
    config["train"] = [
        {"name": "arithmetic", "weight": 3, "limit": 24, "curriculum": curriculum},
        {"name": "jsonl", "label": "facts", "weight": 1, "args": {"path": "facts.jsonl"}},
    ]
    config["trainer"]["advantage"] = {"keep_zero_variance": True}
    run = UpRun(tmp_path, config)
    for at, victim in ((4, "feeder"), (8, "trainer")):
        run.wait_until(lambda at=at: run.steps() >= at, f"step {at}")
        run.wait_until(lambda victim=victim: run.service(victim) is not None, f"process of {victim}")
        process = run.service(victim)
        assert process is not None
        process.kill()
    summary = run.finish()
    samples = trained_samples(run)
    assert len(samples) == len(set(samples))
    assert (summary["trajectories_lost"], summary["trajectories_trained_twice"]) == (0, 0)
    named: set[str] = set().union(*run.lines("metrics.jsonl"))
    skipped = [line["data/skipped_fraction"] for line in run.lines("metrics.jsonl") if "data/skipped_fraction" in line]
    assert 0 < skipped[-1] < 0.6
    assert {"data/arithmetic/solve_rate", "data/facts/solve_rate"} <= named
