"""A device's lock: held alone or together, free when its process is gone."""

import os
import time
from pathlib import Path

import pytest

from schemas.system.device_lock import VARIABLE, DeviceLock, SharedGpus, TurnClock


def test_one_holds_alone_or_several_together(tmp_path: Path) -> None:
    first, second, third = (DeviceLock(tmp_path / "devices" / "generator-0.lock") for _ in range(3))
    assert first.is_free()
    assert first.try_hold()
    assert first.try_hold(), "again"
    assert not second.try_hold()
    assert not second.try_hold(shared=True)
    assert not first.is_free()
    assert not second.is_free()
    first.release()
    first.release()
    assert second.try_hold(shared=True)
    assert third.try_hold(shared=True)
    assert not first.try_hold()
    second.release()
    assert not first.try_hold()
    third.release()
    assert first.try_hold()


def test_services_learn_from_a_variable_with_whom_they_share(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    assert SharedGpus.from_environment() is None
    monkeypatch.setenv(VARIABLE, '{"folder": "/run/devices", "generators": ["generator-0", "generator-2"]}')
    assert SharedGpus.from_environment() == SharedGpus("/run/devices", ["generator-0", "generator-2"])


def test_who_is_stopped_while_it_asks_holds_nobody_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asking, other = (DeviceLock(tmp_path / "trainer.lock") for _ in range(2))
    assert other.try_hold()
    other.release()
    real, taken = os.close, []

    def close(descriptor: int) -> None:
        monkeypatch.setattr(os, "close", real)
        taken.append(other.try_hold())
        real(descriptor)

    monkeypatch.setattr(os, "close", close)
    assert asking.is_free(shared=True)
    assert taken == [True]


def test_the_share_of_a_holder_is_of_all_its_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    clock = TurnClock()
    assert clock.figures() == {"device_lent_s": 0.0, "device_share": 0.0}
    for seconds, holds in ((10.0, True), (30.0, False), (20.0, True), (5.0, True)):
        now += seconds
        clock.turn(holds)
    now += 15.0
    assert clock.figures() == {"device_held_s": 15.0, "device_share": 50.0 / 80.0}
