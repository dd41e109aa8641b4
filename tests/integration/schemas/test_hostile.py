"""Hostile programs of all kinds in the sandbox; ``python -m tools.hostile --count 10000`` runs more."""

from pathlib import Path
from typing import Any

import pytest

from schemas.errors import InfraError
from schemas.system.sandbox.jail import Sandbox
from schemas.system.sandbox.limits import Outcome
from tests.support.user_code.sandboxes import sandbox
from tools.hostile.programs import KINDS
from tools.hostile.run import TRIES, run_programs, targeted_mounts


def test_hostile_programs_reach_nothing_and_leave_nothing() -> None:
    report = run_programs(sandbox(), range(len(KINDS)), workers=4)
    assert set(report.kinds) == set(KINDS)
    assert (report.escapes, report.left, report.late) == ([], [], [])


def test_the_bait_is_found_where_there_is_no_sandbox() -> None:
    """Of the kinds that only look, since nothing holds the others back."""
    for number, name in enumerate(sorted(KINDS)):
        if name in ("network", "reading files"):
            assert run_programs(sandbox("none"), range(number, number + 1)).escapes


@pytest.mark.parametrize(
    ("place", "counts"),
    [("/tmp", True), ("/usr", True), ("/bait/secret", True), ("/var/lib/docker/overlay2/1/merged", False)],
)
def test_what_others_mount_meanwhile_is_no_escape(place: str, counts: bool) -> None:
    before = "overlay / overlay rw 0 0\nproc /proc proc rw 0 0\n"
    after = targeted_mounts(f"{before}tmpfs {place} tmpfs rw 0 0\n", Path("/bait"))
    assert (after != targeted_mounts(before, Path("/bait"))) == counts


class BusySandbox(Sandbox):
    """Starts nothing the first ``refused`` times, as on a machine that is too busy, and every program after that."""

    def __init__(self, refused: int) -> None:
        super().__init__(sandbox("none").name)
        self.refused = refused

    def run(self, *arguments: Any, **named: Any) -> Outcome:
        if self.refused > 0:
            self.refused -= 1
            raise InfraError("the machine is too busy")
        return Outcome("exit", 0, b"", b"", 0.0)


def test_a_program_that_did_not_come_to_run_is_started_again_until_it_has() -> None:
    report = run_programs(BusySandbox(refused=4), range(3))
    assert (report.programs, report.ends, report.again, report.not_started) == (3, {"exit": 3}, 4, [])


def test_a_program_that_never_comes_to_run_is_not_counted_as_one_that_ran() -> None:
    report = run_programs(BusySandbox(refused=10 * TRIES), range(1))
    assert (report.programs, report.again) == (0, TRIES - 1)
    assert report.not_started == ["0: the machine is too busy"]
