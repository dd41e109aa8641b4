"""When a run asks for another generator, and when it gives one up."""

from __future__ import annotations

import pytest

from deploy.launchers.ray import GROW_S, SHRINK_S, Autoscaler, RayCluster
from schemas.control_api import ServiceStatus
from tests.support.broker.run_statuses import make_status


def test_one_more_when_tasks_have_waited_long_enough_and_then_the_count_starts_anew() -> None:
    scaler = Autoscaler(1, 3)
    assert scaler.wanted(0.0, replicas=1, loading=0, waiting=5) == 1
    assert scaler.wanted(GROW_S, replicas=1, loading=0, waiting=5) == 2
    assert scaler.wanted(GROW_S + 1, replicas=2, loading=0, waiting=5) == 2


def test_nothing_is_concluded_while_a_generator_is_still_loading() -> None:
    scaler = Autoscaler(1, 3)
    scaler.wanted(0.0, replicas=2, loading=0, waiting=5)
    assert scaler.wanted(GROW_S, replicas=2, loading=1, waiting=5) == 2
    assert scaler.wanted(GROW_S + 1, replicas=2, loading=0, waiting=5) == 2


def test_one_less_only_after_a_long_time_without_anything_waiting() -> None:
    scaler = Autoscaler(1, 3)
    assert scaler.wanted(0.0, replicas=3, loading=0, waiting=0) == 3
    assert scaler.wanted(SHRINK_S / 2, replicas=3, loading=0, waiting=1) == 3
    assert scaler.wanted(SHRINK_S, replicas=3, loading=0, waiting=0) == 3
    assert scaler.wanted(2 * SHRINK_S, replicas=3, loading=0, waiting=0) == 2


def test_the_bounds_hold() -> None:
    scaler = Autoscaler(2, 3)
    assert scaler.wanted(0.0, replicas=1, loading=0, waiting=0) == 2
    assert scaler.wanted(0.0, replicas=9, loading=9, waiting=9) == 3
    scaler.wanted(1.0, replicas=3, loading=0, waiting=9)
    assert scaler.wanted(1.0 + GROW_S, replicas=3, loading=0, waiting=9) == 3
    scaler.wanted(100.0, replicas=2, loading=0, waiting=0)
    assert scaler.wanted(100.0 + SHRINK_S, replicas=2, loading=0, waiting=0) == 2


@pytest.mark.parametrize(("waiting", "pending", "wanted"), [(0, 4, 1), (4, 4, 2)])
def test_tasks_in_progress_do_not_ask_for_another_generator_tasks_that_wait_do(
    waiting: int, pending: int, wanted: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Replicas:
        count = 1

        def replicas(self, role: str) -> int:
            return self.count

        def scale(self, role: str, count: int) -> None:
            self.count = count

    status = make_status()
    tasks = status.streams[0].model_copy(update={"waiting": waiting, "pending": pending})
    generator = ServiceStatus.model_construct(role="generator", state="running")
    status = status.model_copy(update={"streams": [tasks], "services": [generator]})
    # Without a cluster: only what it concludes from the status.
    cluster, scaler = object.__new__(RayCluster), Replicas()
    cluster._autoscaler = Autoscaler(1, 8)
    for now in (0.0, GROW_S):
        monkeypatch.setattr("deploy.launchers.ray.time.monotonic", lambda now=now: now)
        cluster.tick(scaler, status)
    assert scaler.count == wanted
