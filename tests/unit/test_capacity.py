"""How many samples a generator takes."""

from __future__ import annotations

import pytest

from producers.engines.base import Load
from producers.engines.vllm_boot import check_parallel
from producers.generator.capacity import Lengths, room
from schemas.errors import ConfigError


@pytest.mark.parametrize(
    ("in_flight", "load", "mean", "expected"),
    [
        (10, None, 50.0, 54),
        (70, None, 50.0, 0),
        (10, Load(100_000, 400, 0), 50.0, 54),
        (0, Load(100, 0, 0), 500.0, 64),
        (10, Load(1000, 200, 0), 50.0, 9),
        (10, Load(1000, 800, 0), 50.0, 1),
        (10, Load(1000, 960, 0), 50.0, 0),
        (10, Load(1000, 960, 3), 0.0, 0),
        (10, Load(1000, 0, 10), 0.0, 54),
    ],
    ids=[
        "the limit, where memory is none",
        "a group may exceed the limit, then nothing more is taken",
        "a large cache",
        "an idle generator takes work in any case",
        "those in flight will grow to the mean",
        "those in flight are longer than the mean",
        "full",
        "full, and samples wait for room",
        "nothing is known yet",
    ],
)
def test_room(in_flight: int, load: Load | None, mean: float, expected: int) -> None:
    assert room(64, in_flight, load, mean) == expected


def test_the_mean_follows_the_samples() -> None:
    lengths = Lengths()
    lengths.add(100)
    assert lengths.mean == 100
    for _ in range(500):
        lengths.add(300)
    assert 290 < lengths.mean < 300


def test_parallel_settings_that_this_machine_cannot_have_are_one_line() -> None:
    check_parallel({"tensor_parallel_size": 4, "data_parallel_size": 2}, on_cpu=False, devices=8)
    check_parallel({"tensor_parallel_size": 16, "distributed_executor_backend": "ray"}, on_cpu=False, devices=8)
    check_parallel({"tensor_parallel_size": 1}, on_cpu=True, devices=1)
    with pytest.raises(ConfigError, match=r"tensor_parallel_size 4, pipeline_parallel_size 4 need 16 GPUs.* shows 8"):
        check_parallel({"tensor_parallel_size": 4, "pipeline_parallel_size": 4}, on_cpu=False, devices=8)
    with pytest.raises(ConfigError, match="one process"):
        check_parallel({"tensor_parallel_size": 2}, on_cpu=True, devices=1)
