"""The trainer's pause: why it pauses, what it acknowledges, and what it remembers without the broker."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import cast

from broker.flow.progress import Progress
from broker.flow.run_control import ControlState
from consumers.trainer.context import TrainerContext
from consumers.trainer.pause import PauseFollower


class Follower(PauseFollower):
    """Of a trainer without a broker; ``saves`` counts the checkpoints that were wanted."""

    def __init__(self, folder: Path) -> None:
        store = SimpleNamespace(checkpoint_store=SimpleNamespace(folder=folder))
        self.progress = Progress()
        self.saves = 0
        context = SimpleNamespace(broker=None, progress=self.progress, rank_group=store)
        super().__init__(cast(TrainerContext, context), self.count_save)

    def count_save(self) -> None:
        self.saves += 1


def test_a_pause_lasts_until_no_reason_is_left(tmp_path: Path) -> None:
    pause = Follower(tmp_path)
    pause.reasons = pause.reasons.adding("device in use")
    assert pause.follow(ControlState("freeze", 1))
    assert str(pause.reasons) == "device in use, ordered"
    assert pause.follow(ControlState("none", 2)), "somebody else has the device"
    assert pause.acknowledged == {"pause": 2}
    pause.reasons = pause.reasons.without("device in use")
    assert not pause.follow(ControlState("none", 2))


def test_a_drain_is_acknowledged_with_a_checkpoint_and_when_nothing_is_left(tmp_path: Path) -> None:
    pause = Follower(tmp_path)
    assert not pause.follow(ControlState("drain", 1))
    assert (pause.acknowledged, pause.saves) == ({}, 0)
    assert pause.follow(ControlState("drain", 1), drained=True)
    assert (pause.acknowledged, pause.saves) == ({"pause": 1}, 1)
    assert pause.follow(ControlState("drain", 1)), "nothing is admitted, so it stays drained"
    assert pause.saves == 1


def test_a_pause_is_remembered_for_a_broker_that_forgot_it(tmp_path: Path) -> None:
    Follower(tmp_path).follow(ControlState("freeze", 7, "ada", 12.0))
    later = Follower(tmp_path)
    later.restore()
    progress = later.progress
    assert (progress.pause, progress.pause_id, progress.pause_by, progress.pause_since) == ("freeze", 7, "ada", 12)


def test_a_checkpoint_order_is_followed_once(tmp_path: Path) -> None:
    pause = Follower(tmp_path)
    for _ in range(2):
        pause.follow(ControlState(checkpoint=3))
    assert (pause.saves, pause.acknowledged["checkpoint"]) == (1, 3)
