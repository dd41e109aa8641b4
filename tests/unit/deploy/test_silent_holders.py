"""Which services are found to be silent with GPUs that others wait for."""

import os
import time
from pathlib import Path

import numpy as np
import pytest

from deploy.supervisor.silent_holders import LOOK_S, SILENT_S, SilentHolders
from schemas.system.device_lock import DeviceLock, SharedGpus, generator_lock, trainer_lock


def hold(lock: DeviceLock, shared: bool = False) -> DeviceLock:
    assert lock.try_hold(shared)
    return lock


@pytest.fixture
def silent(tmp_path: Path) -> SilentHolders:
    return SilentHolders(SharedGpus(str(tmp_path), ["generator-0", "generator-1"]))


def looks(silent: SilentHolders) -> list[set[str]]:
    """A first look, and three more, which begin when a holder that is silent from the first on is overdue."""
    return [silent.look(now) for now in (0.0, *(SILENT_S + 1 + number * LOOK_S for number in range(3)))]


def test_a_holder_is_killed_at_the_second_look(silent: SilentHolders, tmp_path: Path) -> None:
    lock = hold(generator_lock(tmp_path, "generator-1"))
    assert looks(silent) == [set(), set(), {"generator-1"}, {"generator-1"}]
    lock.release()
    assert silent.look(SILENT_S + 4 * LOOK_S) == set()


def test_who_touches_its_file_again_is_spared(silent: SilentHolders, tmp_path: Path) -> None:
    lock, late = hold(trainer_lock(tmp_path)), SILENT_S + 1
    assert silent.look(0.0) == silent.look(late) == set()
    assert silent.look(late + LOOK_S / 2) == set(), "too soon for another look"
    lock.touch()
    assert silent.look(late + LOOK_S) == set()


@pytest.mark.parametrize("skew_s", [-1000.0, 1000.0])
def test_the_clock_of_a_file_server_may_differ(silent: SilentHolders, tmp_path: Path, skew_s: float) -> None:
    lock, there = hold(trainer_lock(tmp_path)), time.time() + skew_s
    for now in np.arange(0.0, 3 * SILENT_S, LOOK_S):
        os.utime(lock.file, (there + now, there + now))
        assert silent.look(now) == set()
    assert {"trainer"} in [silent.look(now) for now in np.arange(3 * SILENT_S, 5 * SILENT_S, LOOK_S)]


def test_a_trainer_that_wants_gpus_and_one_that_has_them_are_both_found(silent: SilentHolders, tmp_path: Path) -> None:
    hold(trainer_lock(tmp_path))
    hold(generator_lock(tmp_path, "generator-0"), shared=True)
    assert looks(silent)[-1] == {"trainer"}


def test_old_files_that_nobody_holds_and_no_files_are_nothing(silent: SilentHolders, tmp_path: Path) -> None:
    assert looks(silent)[-1] == set()
    hold(generator_lock(tmp_path, "generator-0")).release()
    assert looks(silent)[-1] == set()
