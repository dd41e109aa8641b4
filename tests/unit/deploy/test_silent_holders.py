"""Which services are found to be silent with GPUs that others wait for."""

import os
import time
from pathlib import Path

import pytest

from deploy.supervisor.silent_holders import LOOK_S, SILENT_S, SilentHolders
from schemas.system.device_lock import DeviceLock, SharedGpus, generator_lock, trainer_lock


def hold(lock: DeviceLock, silent: bool = True, shared: bool = False) -> DeviceLock:
    assert lock.try_hold(shared)
    if silent:
        old = time.time() - SILENT_S - 1
        os.utime(lock.file, (old, old))
    return lock


@pytest.fixture
def silent(tmp_path: Path) -> SilentHolders:
    return SilentHolders(SharedGpus(str(tmp_path), ["generator-0", "generator-1"]))


def looks(silent: SilentHolders, times: int = 2) -> list[set[str]]:
    return [silent.look(time.time() + number * LOOK_S) for number in range(times)]


def test_a_holder_is_killed_at_the_second_look(silent: SilentHolders, tmp_path: Path) -> None:
    lock = hold(generator_lock(tmp_path, "generator-1"))
    assert looks(silent, 3) == [set(), {"generator-1"}, {"generator-1"}]
    lock.release()
    assert silent.look(time.time() + 4 * LOOK_S) == set()


def test_who_touches_its_file_again_is_spared(silent: SilentHolders, tmp_path: Path) -> None:
    lock, now = hold(trainer_lock(tmp_path)), time.time()
    assert silent.look(now) == set()
    assert silent.look(now + LOOK_S / 2) == set(), "too soon for a second look"
    lock.touch()
    assert silent.look(now + LOOK_S) == set()


def test_a_trainer_that_wants_gpus_and_one_that_has_them_are_both_found(silent: SilentHolders, tmp_path: Path) -> None:
    hold(trainer_lock(tmp_path))
    hold(generator_lock(tmp_path, "generator-0"), shared=True)
    assert looks(silent)[1] == {"trainer"}


def test_old_files_that_nobody_holds_and_no_files_are_nothing(silent: SilentHolders, tmp_path: Path) -> None:
    assert looks(silent)[1] == set()
    hold(generator_lock(tmp_path, "generator-0")).release()
    hold(generator_lock(tmp_path, "generator-1"), silent=False)
    assert looks(silent)[1] == set()
