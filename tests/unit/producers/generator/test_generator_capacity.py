"""How many samples a generator takes."""

from __future__ import annotations

import pytest

from producers.engines.base import KvCacheUsage
from producers.engines.vllm.boot import check_parallel
from producers.generator.task_loop import MeanSampleSize, cache_need, groups_to_take
from schemas.errors import ConfigError


@pytest.mark.parametrize(
    ("in_flight", "cache", "mean", "expected"),
    [
        (10, None, 50.0, 54),
        (70, None, 50.0, 0),
        (10, KvCacheUsage(100_000, 400, 0), 50.0, 54),
        (0, KvCacheUsage(100, 0, 0), 500.0, 1),
        (0, KvCacheUsage(1000, 0, 0), 100.0, 9),
        (10, KvCacheUsage(1000, 200, 0), 50.0, 9),
        (10, KvCacheUsage(1000, 800, 0), 50.0, 1),
        (10, KvCacheUsage(1000, 960, 0), 50.0, 0),
        (10, KvCacheUsage(10_000, 100, 6), 50.0, 0),
        (10, KvCacheUsage(12_800, 1280, 0, 128), 50.0, 54),
        (10, KvCacheUsage(2560, 1280, 0, 128), 50.0, 9),
        (10, KvCacheUsage(2560, 1280, 0, 128), 130.0, 0),
    ],
    ids=[
        "the limit, if memory is not a limit",
        "a group may exceed the limit, then nothing more is taken",
        "a large cache",
        "an idle generator takes work in any case",
        "but no more than fits",
        "those in flight will grow to the mean",
        "those in flight are longer than the mean",
        "full",
        "most samples wait for their first token",
        "a large cache in blocks",
        "a sample takes a whole block",
        "and a second one when it goes beyond",
    ],
)
def test_groups_to_take(in_flight: int, cache: KvCacheUsage | None, mean: float, expected: int) -> None:
    assert groups_to_take(64, in_flight, cache, mean, n=1) == expected


def test_groups_are_whole() -> None:
    assert groups_to_take(64, 0, None, 50.0, n=8) == 8
    assert groups_to_take(64, 60, None, 50.0, n=8) == 1, "the last one may go beyond the limit"
    assert groups_to_take(64, 0, KvCacheUsage(1000, 0, 0), 50.0, n=8) == 2
    assert groups_to_take(64, 16, KvCacheUsage(1000, 800, 0), 50.0, n=8) == 0, "but not beyond the memory"
    assert groups_to_take(64, 0, KvCacheUsage(100, 0, 0), 50.0, n=8) == 1, "unless there is nothing else to do"


def test_the_mean_is_that_of_the_longest_until_samples_tell() -> None:
    size = MeanSampleSize(1000)
    assert size.tokens == 1000
    for _ in range(20):
        size.add(100)
    assert 100 < size.tokens < 200
    for _ in range(300):
        size.add(300)
    assert 290 < size.tokens <= 300


def test_a_sample_needs_its_own_tokens_and_its_share_of_the_prompt() -> None:
    assert cache_need(bytes([0] * 80 + [1] * 5), n=8) == 15
    assert cache_need(bytes([0] * 80 + [1] * 5 + [0] * 3 + [1] * 2), n=8) == 20
    assert cache_need(bytes([0] * 80), n=8) == 10


def test_parallel_settings_that_this_machine_cannot_have_are_one_line() -> None:
    check_parallel({"tensor_parallel_size": 4, "data_parallel_size": 2}, on_cpu=False, devices=8)
    check_parallel({"tensor_parallel_size": 16, "distributed_executor_backend": "ray"}, on_cpu=False, devices=8)
    check_parallel({"tensor_parallel_size": 1}, on_cpu=True, devices=1)
    with pytest.raises(ConfigError, match=r"tensor_parallel_size 4, pipeline_parallel_size 4 need 16 GPUs.* shows 8"):
        check_parallel({"tensor_parallel_size": 4, "pipeline_parallel_size": 4}, on_cpu=False, devices=8)
    with pytest.raises(ConfigError, match="one process"):
        check_parallel({"tensor_parallel_size": 2}, on_cpu=True, devices=1)
