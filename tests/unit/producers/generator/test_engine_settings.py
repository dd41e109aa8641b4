"""The settings that a generator gives its engine."""

import pytest

from producers.generator.service import count_devices, engine_settings
from tests.support.configurations import minimal_config


def test_generators_of_any_launcher_sample_with_seeds_of_their_own() -> None:
    """Names as ``tidemill up`` gives them, with a pool, by ``tidemill node``, and from the host name of a container."""
    names = ("generator-1", "generator-2", "generator-small-1", "generator-small-2", "generator-a100-0-1")
    names += ("generator-a100-1-1", "generator-53c2750b7f67", "generator-run-generator-7d9f8-x2x4k")
    settings = {name: engine_settings(minimal_config(), name) for name in names}
    assert settings["generator-2"].seed == minimal_config().run.seed + 2
    assert len({each.seed for each in settings.values()}) == len(names)


@pytest.mark.parametrize(
    ("args", "devices"),
    [
        ({}, 1),
        ({"tensor_parallel_size": 2, "pipeline_parallel_size": 3}, 6),
        ({"tensor_parallel_size": 2, "data_parallel_size": 4}, 8),
        ({"data_parallel_size": "auto"}, 1),
    ],
)
def test_each_gpu_of_an_engine_is_a_device(args: dict[str, object], devices: int) -> None:
    assert count_devices(args) == devices
