"""The reward service on a real server, scoring what a generator would publish."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from broker.client import Broker
from consumers.reward.scorer import Scorer
from consumers.reward.service import RewardService
from schemas.codec import Array
from schemas.config import RewardTerm
from schemas.lifecycle import StopFlag
from schemas.messages import Sampling, Span, Task, Trajectory
from tests.support.trainer_sessions import take_over

pytestmark = pytest.mark.integration

SLOW = """
import time
def moody(prompt, completion, prompt_ids, completion_ids, **data):
    if completion == "hang":
        time.sleep(600)
    if completion == "raise":
        raise RuntimeError("bad mood")
    return 1.0
"""


def test_a_hanging_and_a_raising_reward_cost_nobody_else_anything(broker: Broker, tmp_path: Path) -> None:
    training = take_over(broker)
    (tmp_path / "rewards.py").write_text(SLOW)
    completions = ["hang", "fine", "raise", "fine"]
    broker.ledger.admit(Task(task_id=0, kind="train", n=4, sampling=Sampling(), text="?"))
    trajectories = [
        Trajectory(
            run="r",
            task_id=0,
            sample=index,
            kind="train",
            tokens=Array.of([1, 2], "i4"),
            loss_mask=Array.of([0, 1], "u1"),
            logprobs=Array.of([0, -1], "f4"),
            spans=[Span(0, 1, 2)],
            turns=[],
            finish="stop",
            prompt="?",
            completion=text,
            generator="g",
        )
        for index, text in enumerate(completions)
    ]
    broker.task_queue("g").publish(0, trajectories)
    scorer = Scorer([RewardTerm(name="rewards.py:moody")], tmp_path, workers=2, timeout_s=2.0)
    stop = StopFlag()
    service = RewardService(broker.score_queue("r"), scorer, scorer, lease_s=30)
    thread = threading.Thread(target=service.run, args=(stop,))
    thread.start()
    outcomes = []
    for _ in range(30):
        outcomes += training.claim_scores(10)
        if len(outcomes) == 4:
            break
        training.wait_for_scores(1000)
    stop.set()
    thread.join(30)
    scorer.close()
    assert {item.sample: item.score.status for item in outcomes} == {0: "timeout", 1: "ok", 2: "error", 3: "ok"}
    assert outcomes[-1].sample == 0
    assert broker.connection.client.xlen(broker.connection.keys.dead) == 2
