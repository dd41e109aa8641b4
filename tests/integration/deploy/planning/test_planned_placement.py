"""``placement: auto`` and ``balance``: the layout and the number of generators follow what the run measured."""

import json
import time
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest

from deploy.launchers import local
from deploy.launchers.gpus import Gpu, plan_gpus
from deploy.launchers.local import Balance
from deploy.planning.cluster import ClusterRates, LengthMix, PoolPart
from deploy.planning.run_rates import figures, sampling_at
from deploy.planning.search import best, best_in_turns, in_turns, simulate, wanted_generators
from schemas.config import TidemillConfig, dump_config, parse_config, save_config
from schemas.control_api.status import ServiceStatus
from schemas.errors import ConfigError, InfraError
from schemas.run_folder import CONFIG, METRICS

EVERY_S = 600.0


def make(folder: Path, placement: Any = "auto", **trainer: Any) -> TidemillConfig:
    return parse_config(
        {
            "run": {"folder": str(folder)},
            "model": {"path": "none", "max_length": 4000},
            "train": {"name": "arithmetic"},
            "sampling": {"n": 4, "max_tokens": 1000},
            "reward": {"terms": [{"name": "exact"}]},
            "generator": {"engine": "vllm", "max_samples": 8},
            "trainer": {"batch_groups": 8, **trainer},
            "placement": placement,
        }
    )


def gpus(count: int) -> list[Gpu]:
    return [Gpu(str(index)) for index in range(count)]


def measure(folder: Path, training_s: float, sampled: float, first: int = 0, **more: float) -> None:
    """Write 20 steps of a run, of 10,000 tokens and with answers of some 300."""
    with (folder / METRICS).open("a") as file:
        for step in range(first, first + 20):
            line = {
                "step": step,
                "time/total_s": 10.0,
                "time/forward_s": training_s,
                "time/publish_s": 0.1,
                "train/tokens": 10_000,
                "train/length_mean": 310.0,
                "train/length_median": 300.0,
                "train/length_p95": 500.0,
                "perf/generated_tokens_per_s": sampled,
                **more,
            }
            file.write(json.dumps(line) + "\n")


def supervisor(name: str, role: str, room: int) -> ServiceStatus:
    return ServiceStatus(
        name=name,
        role=role,
        host="h",
        pid=1,
        state="running",
        version=None,
        silent_s=0.0,
        live=True,
        paused=False,
        tokens_per_s=0.0,
        load=None,
        acknowledged={},
        figures={"room:generator": room},
    )


def test_one_gpu_is_shared_and_on_several_the_best_layout_is_taken(tmp_path: Path) -> None:
    alone = plan_gpus(make(tmp_path), gpus(1))
    assert (alone.placed, list(alone.sharing)) == ({"trainer": [0], "generator-0": [0]}, ["generator-0"])
    plan = plan_gpus(make(tmp_path), gpus(8))
    assert plan.text.startswith("placement auto, rates stated")
    assert plan.placed is not None
    assert plan.placed["generator-0"] == [len(plan.placed["trainer"])], "those of their own come first"
    applied = plan.apply(make(tmp_path))
    assert applied.trainer.processes == len(plan.placed["trainer"])
    assert applied.placement is not None
    assert not applied.placement.is_auto


def test_the_last_run_decides_and_the_trainers_gpus_stay_if_they_are_set(tmp_path: Path) -> None:
    measure(tmp_path, training_s=9.0, sampled=9000.0)
    slow_trainer = plan_gpus(make(tmp_path), gpus(8))
    assert "measured, 15 steps" in slow_trainer.text
    assert slow_trainer.trainer > 4
    assert plan_gpus(make(tmp_path, processes=2), gpus(8)).trainer == 2
    ran = make(tmp_path, None)
    ran.generator.replicas = 32
    save_config(ran, tmp_path / CONFIG)
    assert plan_gpus(make(tmp_path), gpus(8)).trainer < slow_trainer.trainer, "each of 32 generators sampled little"


def test_a_generator_that_slept_while_the_trainer_worked_is_not_taken_for_a_slow_one(tmp_path: Path) -> None:
    measure(tmp_path, 9.0, 9_000.0, **{"perf/shared_gpu_share": 0.5})
    rates = []
    for generator in ("1-3", "0-2"):
        ran = make(tmp_path, {"trainer": "0", "generator": generator})
        ran.generator.replicas = 3
        save_config(ran, tmp_path / CONFIG)
        rates.append(figures(ran).rates.sampled_tokens_per_s())
    # One of three sampled for half of the time.
    assert rates == pytest.approx([3_000, 3_600])


def test_where_engines_cannot_sleep_nothing_is_shared(tmp_path: Path) -> None:
    config = make(tmp_path).model_copy(
        update={"generator": make(tmp_path).generator.model_copy(update={"engine": "mlp"})}
    )
    assert not plan_gpus(config, gpus(8)).sharing
    with pytest.raises(ConfigError, match="placement auto: 1 GPU is too few for a trainer of 1 and a generator of 1"):
        plan_gpus(config, gpus(1))


def test_without_gpus_everything_runs_on_the_cpu(tmp_path: Path) -> None:
    assert plan_gpus(make(tmp_path), []).placed is None


def test_both_sides_are_planned_or_none(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"placement.trainer and placement.generator must both be auto"):
        make(tmp_path, {"trainer": "auto", "generator": "0-3"})


@pytest.mark.parametrize("trained", [500.0, 4000.0, 20_000.0])
def test_a_planned_split_is_within_5_percent_of_the_best_of_all(trained: float) -> None:
    rates, mix = replace(ClusterRates(), trained_tokens_per_s=trained), LengthMix(2000, 0.8, 8000)
    found = best(8, 16, 4, 2, rates, mix, steps=6)
    layouts = [replace(found.layout, generators=8 - n, trainers=n, window=w) for n in range(1, 8) for w in (1, 8, 16)]
    fastest = max(simulate(layout, rates, mix, 6).outcome.tokens_per_s for layout in layouts)
    assert found.outcome.tokens_per_s >= 0.95 * fastest


@pytest.mark.parametrize(
    ("trained", "slow"),
    [
        (4000.0, 0.5),
        *(
            pytest.param(trained, slow, marks=pytest.mark.matrix("one more pair of rates"))
            for trained, slow in product((500.0, 4000.0, 20_000.0), (0.1, 0.5, 1.5))
            if (trained, slow) != (4000.0, 0.5)
        ),
    ],
)
def test_a_split_planned_with_pools_is_within_5_percent_of_the_best_of_all(trained: float, slow: float) -> None:
    """One pool has three generators at most, the other's are spread over two GPUs and slower by a factor, each."""
    rates, mix = replace(ClusterRates(), trained_tokens_per_s=trained), LengthMix(2000, 0.8, 8000)
    quick, other = PoolPart("quick", 3, rates), PoolPart("other", 4, sampling_at(rates, 5000 * slow), 2)
    found = best(8, 16, 4, 2, rates, mix, steps=6, pools=[quick, other])
    layouts = [
        replace(found.layout, generators=few + many, trainers=trainers, window=window, pools=pools)
        for few, many, trainers, window in product(range(4), range(4), range(1, 8), (1, 8, 16))
        if few + many and few + 2 * many + trainers <= 8
        for pools in [(replace(quick, generators=few), replace(other, generators=many))]
    ]
    fastest = max(simulate(layout, rates, mix, 6).outcome.tokens_per_s for layout in layouts)
    assert len(layouts) > 100
    assert found.outcome.tokens_per_s >= 0.95 * fastest


@pytest.mark.parametrize("trained", [500.0, 4000.0, 20_000.0])
def test_planned_turns_are_within_5_percent_of_the_best_of_all(trained: float) -> None:
    rates, mix = replace(ClusterRates(), trained_tokens_per_s=trained), LengthMix(2000, 0.8, 8000)
    split = best(8, 16, 4, 2, rates, mix, steps=6)
    fastest = max(in_turns(split, count, rates, mix, 6).outcome.tokens_per_s for count in range(1, 9))
    assert best_in_turns(split, rates, mix, steps=6).outcome.tokens_per_s >= 0.95 * fastest


def test_generators_follow_the_measured_rates_once_in_ten_minutes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = [{"generator": 7}]
    monkeypatch.setattr(local, "order_replicas", lambda control, services, kind, total, by: asked.append({kind: total}))
    monkeypatch.setattr(local, "Broker", MagicMock())
    config = make(tmp_path, {"trainer": "0", "generator": "1-7", "balance": True})
    assert wanted_generators(config, {"": 7}, 0) is None, "nothing is measured"
    measure(tmp_path, training_s=9.0, sampled=14_000.0)
    balance = Balance(config, EVERY_S, now=0.0)

    def tick_until_planned(now: float) -> None:
        balance.tick(now, asked[-1], 19, [])
        end = time.monotonic() + 30
        while balance._planning is not None:
            assert time.monotonic() < end
            balance.tick(now, asked[-1], 19, [])
            time.sleep(0.01)

    balance.tick(EVERY_S - 1, asked[-1], 19, [])
    assert balance._planning is None, "too soon"
    tick_until_planned(EVERY_S)
    assert len(asked) == 2
    assert asked[-1]["generator"] < 3, "one generator samples as fast as the trainer trains"
    tick_until_planned(2 * EVERY_S)
    assert len(asked) == 2, "nothing is measured since the change"
    measure(tmp_path, training_s=0.5, sampled=2000.0, first=20)
    tick_until_planned(2 * EVERY_S + 1)
    assert len(asked) == 2, "too soon after the last plan"
    tick_until_planned(3 * EVERY_S)
    assert len(asked) == 3
    assert asked[-1]["generator"] > 4, "the trainer trains much faster now"


def test_generators_that_wait_for_the_trainer_are_given_up(tmp_path: Path) -> None:
    """Together they sample as much as is trained, and each has little in flight."""
    config = make(tmp_path, {"trainer": "0", "generator": "1-7", "balance": True})
    measure(tmp_path, training_s=9.0, sampled=1100.0)
    found = wanted_generators(config, {"": 7}, 0)
    assert found is not None
    assert found[""] > 3, "each is taken for a slow one"
    assert wanted_generators(config, {"": 7}, 0, load={"": 0.1}) in ({"": 1}, {"": 2})


def make_pools(folder: Path, **quick: Any) -> TidemillConfig:
    config = make(folder, {"trainer": "0", "generator": "1-7", "balance": True})
    pools = {"slow": {"generator": {"replicas": 4}}, "quick": {"generator": {"replicas": 3}, **quick}}
    return parse_config({**dump_config(config), "pools": pools})


def test_of_pools_the_slowest_is_given_up_first_and_keeps_one(tmp_path: Path) -> None:
    config, running = make_pools(tmp_path), {"slow": 4, "quick": 3}
    measure(tmp_path, training_s=4.0, sampled=8000.0, **{"pool/slow/tokens": 1000.0, "pool/quick/tokens": 9000.0})
    found = wanted_generators(config, running, 0)
    assert found is not None
    assert found["slow"] == 1
    assert found["quick"] in (1, 2)
    measure(tmp_path, training_s=0.1, sampled=8000.0, first=20, **{"pool/slow/tokens": 5e3, "pool/quick/tokens": 5e3})
    assert wanted_generators(config, running, 20) == running, "all are too few"
    assert wanted_generators(config, {"slow": 0, "quick": 3}, 20) == {"quick": 3}, "what was scaled to 0 stays so"


def test_pools_are_left_as_they_are_while_one_has_trained_nothing(tmp_path: Path) -> None:
    config = make_pools(tmp_path)
    measure(tmp_path, training_s=9.0, sampled=8000.0, **{"pool/quick/tokens": 9000.0})
    assert wanted_generators(config, {"slow": 4, "quick": 3}, 0) is None


def test_a_pool_of_other_machines_has_as_many_as_they_have_room_for(tmp_path: Path) -> None:
    config, running = make_pools(tmp_path, nodes=["m"]), {"slow": 4, "quick": 3}
    measure(tmp_path, training_s=0.1, sampled=8000.0, **{"pool/slow/tokens": 5e3, "pool/quick/tokens": 5e3})
    assert wanted_generators(config, running, 0, {"quick": 2}) == {"slow": 4, "quick": 2}


def test_the_order_of_each_pool_that_changes_is_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ordered: dict[str, int] = {}
    monkeypatch.setattr(local, "order_replicas", lambda _, services, kind, total, by: ordered.update({kind: total}))
    monkeypatch.setattr(local, "Broker", MagicMock())
    monkeypatch.setattr(local, "wanted_generators", MagicMock(return_value={"slow": 1, "quick": 3}))
    Balance(make_pools(tmp_path), EVERY_S, 0.0)._plan({"slow": 4, "quick": 3}, 0, [], {})
    assert ordered == {"generator.slow": 1}


def test_generators_of_other_machines_are_planned_too_and_a_lost_broker_ends_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = make(tmp_path, {"trainer": "0", "generator": "1", "balance": True})
    measure(tmp_path, training_s=0.5, sampled=2000.0)
    assert wanted_generators(config, {"": 7}, 0) == {"": 1}, "all that this machine has"
    assert wanted_generators(config, {"": 7}, 0, {"": 6}) in ({"": 5}, {"": 6}, {"": 7})
    planner, connect = MagicMock(return_value={"": 3}), MagicMock(side_effect=InfraError("no answer"))
    monkeypatch.setattr(local, "wanted_generators", planner)
    monkeypatch.setattr("deploy.launchers.local.Broker.connect", connect)
    services = [supervisor("up", "supervisor", 1), supervisor("node-b", "node", 6)]
    Balance(config, EVERY_S, 0.0)._plan({"": 7}, 0, services, {"": 0.5})
    planner.assert_called_once_with(config, {"": 7}, 0, {"": 6}, {"": 0.5})
    connect.assert_called_once()
