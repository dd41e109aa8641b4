"""Pools in the status: which generators are whose, what they give to training, and which orders scale them."""

import io

import msgspec
import pytest
from rich.console import Console

from broker.flow.run_control import ControlState
from broker.telemetry.stream_lag import StreamLag
from deploy.cli.status import rows
from deploy.control_plane.alerts.alerts import AlertRules
from deploy.control_plane.status.collector import Collector, PlannedRun
from deploy.control_plane.status.prometheus import render
from deploy.terminal.page import History, page
from schemas.control_api.status import RunStatus
from schemas.messages import Heartbeat
from tests.support.broker.run_statuses import LEDGER

LAGS = [StreamLag(name, 3, 1, 2, 10, 95.0) for name in ("tasks", "eval_tasks", "trajectories", "scored")]


def beat(name: str, pool: str, at: float = 100.0, role: str = "generator") -> Heartbeat:
    figures = {"tokens_per_s": 50.0}
    return Heartbeat(service=name, role=role, host="h", pid=1, state="running", time=at, figures=figures, pool=pool)


def status(beats: list[Heartbeat], **planned: tuple[str, ...]) -> RunStatus:
    collector = Collector(None, PlannedRun("run", **planned))  # type: ignore[arg-type]
    for step, (gap, tokens) in enumerate(((0.5, 30.0), (0.1, 10.0))):
        collector.history.add(
            {
                "step": step,
                "pool/fast/gap": gap,
                "pool/fast/tokens": tokens,
                "pool/old/gap": 0.01,
                "pool/old/tokens": 20.0,
            }
        )
    return collector._status(LEDGER, LAGS, beats, 100.0)


BEATS = [
    beat("generator-fast-0", "fast"),
    beat("generator-fast-1", "fast"),
    beat("generator-fast-2", "fast", at=1.0),
    beat("generator-old-0", "old"),
    beat("reward-0", "", role="reward"),
    beat("up", "", role="supervisor"),
]


def test_each_pool_has_its_live_generators_and_its_part_of_training() -> None:
    found = status(BEATS, pools=("fast", "old", "idle"))
    fast, old, idle = found.pools
    assert (fast.name, fast.generators, fast.tokens_per_s) == ("fast", 2, 100.0)
    assert (fast.trained_share, fast.logprob_gap) == (pytest.approx(0.5), pytest.approx(0.4))
    assert (old.generators, old.logprob_gap) == (1, pytest.approx(0.01))
    assert (idle.generators, idle.trained_share, idle.logprob_gap) == (0, 0.0, None)
    assert {one.name: one.pool for one in found.services}["generator-old-0"] == "old"
    assert found.scaling.replicas == {"generator.fast": 2, "generator.old": 1, "generator.idle": 0, "reward": 1}


def test_an_order_names_the_pool_and_without_pools_all_is_as_it_was() -> None:
    found = status([beat("generator-0", ""), *BEATS[-2:]])
    assert found.pools == []
    assert found.scaling.replicas == {"generator": 1, "reward": 1}
    assert "pool" not in render(found, True, {}, {}).decode()
    collector = Collector(None, PlannedRun("run"))  # type: ignore[arg-type]
    orders = ControlState(replicas={"generator.old": 3, "generator": 7})
    ledger = LEDGER.__class__(**{**vars(LEDGER), "control": orders})
    assert collector._status(ledger, LAGS, BEATS, 100.0).scaling.replicas == {
        "generator.fast": 2,
        "generator.old": 3,
        "reward": 1,
    }


def test_what_is_ordered_from_machines_that_are_here_is_counted_and_not_from_others() -> None:
    collector = Collector(None, PlannedRun("run", pools=("fast", "old")))  # type: ignore[arg-type]
    orders = ControlState(replicas={"generator.fast@a": 4, "generator.fast@b": 1, "generator.fast@lost": 7})
    ledger = LEDGER.__class__(**{**vars(LEDGER), "control": orders})
    nodes = [beat(f"node-{name}", "", role="node", at=at) for name, at in (("a", 100.0), ("b", 100.0), ("lost", 1.0))]
    for node in nodes:
        node.figures["room:generator.fast"] = 9.0
    found = collector._status(ledger, LAGS, [*BEATS, *nodes], 100.0)
    assert found.scaling.replicas == {"generator.fast": 5, "generator.old": 1, "reward": 1}


def test_pools_are_shown_on_the_page_in_the_status_and_to_prometheus() -> None:
    found = status(BEATS)
    console = Console(file=io.StringIO(), width=80, force_terminal=True, color_system=None)
    console.print(page(found, History()))
    assert isinstance(console.file, io.StringIO)
    assert "generators 2   tokens/s 100   trained 50%   gap 4.0e-01" in console.file.getvalue()
    assert (
        dict(rows(found))["pool old"]
        == "1 generators, 50 tokens/s, 50% of the trained tokens, log-probability gap 1.0e-02"
    )
    assert 'tidemill_pool_logprob_gap{pool="fast"} 0.4' in render(found, True, {}, {}).decode()


def test_each_generator_has_its_newest_distance_from_the_trainer_and_prometheus_the_largest() -> None:
    collector = Collector(None, PlannedRun("run", pools=("fast", "old")))  # type: ignore[arg-type]
    for step, far in ((1, 0.9), (2, 0.2)):
        near = {f"mismatch/generator-old-0/{name}": 0.01 for name in ("gap", "kl")}
        collector.history.add({"step": step, "mismatch/generator-fast-0/gap": far, **near})
    found = collector._status(LEDGER, LAGS, BEATS, 100.0)
    shown = {one.name: one.figures for one in found.services}
    assert shown["generator-fast-0"]["mismatch_gap"] == 0.2
    assert (shown["generator-old-0"]["mismatch_gap"], shown["generator-old-0"]["mismatch_kl"]) == (0.01, 0.01)
    assert not [name for name in shown["reward-0"] if name.startswith("mismatch")]
    text = render(found, True, {}, {}).decode()
    assert "tidemill_generators_mismatch_gap_max 0.2" in text
    assert "tidemill_generators_mismatch_kl_max 0.01" in text
    assert "mismatch" not in render(status(BEATS), True, {}, {}).decode()


def test_prometheus_has_the_share_of_time_of_those_that_share_gpus() -> None:
    found = status(BEATS)
    assert "shared_gpu" not in render(found, True, {}, {}).decode()
    for service, share in zip([one for one in found.services if one.role == "generator"], (0.2, 0.4), strict=False):
        service.figures["device_share"] = share
    assert 'tidemill_shared_gpu_time_share{role="generator"} 0.3' in render(found, True, {}, {}).decode()


def test_generators_of_a_pool_with_different_drivers_are_reported() -> None:
    """Until a generator has said what it runs with, nothing is known of it; between pools anything may differ."""
    software = {
        "generator-fast-0": {"driver": "570.10", "torch": "2.13.0"},
        "generator-fast-1": {"driver": "580.95", "torch": "2.13.0"},
        "generator-fast-2": {"driver": "550.01", "torch": "2.12.0"},
        "generator-old-0": {"driver": "535.01", "torch": "2.12.0"},
    }
    beats = [msgspec.structs.replace(one, software=software.get(one.service, {})) for one in BEATS]
    beats += [msgspec.structs.replace(beats[1], service=f"generator-fast-{index}") for index in (3, 4)]
    found = status([*beats, beat("generator-fast-5", "fast")])
    # generator-fast-2 has been silent for long.
    text = "generators of pool fast differ: driver 570.10 (generator-fast-0), 580.95 (generator-fast-1"
    (alert,) = (one for one, _ in AlertRules(900.0).observe(found, 100.0) if one.name == "unequal_generators")
    assert (alert.level, alert.text) == ("warning", f"{text} and 2 more)")
    assert dict(rows(found))["unequal"] == f"{text} and 2 more)"
    same = [msgspec.structs.replace(one, software=software["generator-fast-0"]) for one in BEATS]
    assert "unequal" not in dict(rows(status(same)))
