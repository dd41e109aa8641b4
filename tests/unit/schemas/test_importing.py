"""The cycle collector is left aside while a process imports, and works again afterwards."""

from __future__ import annotations

import gc

import pytest

from schemas.system.lifecycle import importing


def test_imports_are_left_out_of_later_rounds_and_the_collector_goes_on() -> None:
    before = gc.get_freeze_count()
    try:
        with importing():
            assert not gc.isenabled()
            made = [[] for _ in range(1000)]
        assert gc.isenabled()
        assert gc.get_freeze_count() >= before + len(made)
    finally:
        gc.unfreeze()


def test_the_collector_works_again_when_an_import_fails() -> None:
    try:
        with pytest.raises(ImportError), importing():
            raise ImportError
        assert gc.isenabled()
    finally:
        gc.unfreeze()


def test_a_collector_that_the_user_turned_off_stays_off() -> None:
    gc.disable()
    try:
        with importing():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()
        gc.unfreeze()
