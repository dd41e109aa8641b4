"""The chaos suite's judge of conversations, teachers and generators at fault: every promise can be seen to break."""

from typing import Any

import msgspec
import pytest

from schemas.codec import Array
from tests.support.trainer.trajectories import make_trajectory
from tests.unit.tools.chaos.test_oracle import begin, log, step
from tools.chaos.agents.agent import checksum
from tools.chaos.agents.calls import pack
from tools.chaos.judging.evidence import Log
from tools.chaos.judging.oracle import Judgement, Loss, Rules
from tools.chaos.outside.judge import MOST_WRONG, judge_conversations, judge_sources
from tools.chaos.outside.teacher import is_taught, says
from tools.chaos.outside.users import ANOTHER

RULES = Rules(cursor=2, samples=1, staleness=32)
REWARD = checksum([[5, 6]])
SEAT = log("generator-0.1", (0.2, "answered", {}), (1.0, "seat", {"id": "a", "t": 0, "s": 0}))
TRAINER = log("trainer.9", begin(0.5, "1-a"), (4.0, "step", {**step(4.0, 0, [0])[2], "x": [[0, 0, 7, 0]]}))


def users(*rewards: float, refused: int | None = None) -> Log:
    lines: list[Any] = [(2.0, "begun", {"id": "a"})]
    lines += [(3.0, "rewarded", {"id": "a", "sent": one, "counts": one, "changed": True}) for one in rewards]
    return log("users.5", *lines, *([(3.5, "refused", {"id": "a", "status": refused})] if refused else []))


def trained(reward: float = REWARD) -> Log:
    return log("trainer.9", (3.9, "trained", {"t": 0, "s": 0, "reward": reward, "x": [[0, pack([5, 6], [-1, -1])]]}))


def judged(*logs: Log, calls: Log | None = None, losses: tuple[Loss, ...] = ()) -> tuple[list[str], dict[str, int]]:
    judgement = Judgement()
    judge_conversations([SEAT, *logs], [calls or trained()], RULES, losses, judgement)
    return [violation.promise for violation in judgement.violations], dict(judgement.counts)


def test_a_rewarded_conversation_is_trained() -> None:
    broken, counts = judged(TRAINER, users(REWARD, REWARD))
    assert broken == []
    assert counts["rewarded, trained"] == counts["rewarded again"] == counts["conversations"] == 1


@pytest.mark.parametrize(
    ("logs", "calls", "promise"),
    [
        ([users(REWARD)], None, "reward lost"),
        ([TRAINER, users(0.5)], None, "reward lost"),
        ([TRAINER, users(REWARD, REWARD + ANOTHER)], None, "repeated reward"),
        ([TRAINER, users(refused=404)], None, "unknown conversation"),
        ([TRAINER, users(0.25)], trained(0.25), "wrong reward"),
    ],
)
def test_a_broken_promise_about_rewards_is_seen(logs: list[Log], calls: Log | None, promise: str) -> None:
    assert promise in judged(*logs, calls=calls)[0]


def test_a_reward_may_end_with_a_reason_or_be_lost_with_the_brokers_data() -> None:
    end = {"t": 0, "how": "dropped", "reason": "stale"}
    ended = log("trainer.9", begin(0.5, "1-a"), (4.0, "end?", end), (4.0, "end", {**end, "a": "ok"}))
    assert judged(ended, users(REWARD))[1]["rewarded, ended with a reason"] == 1
    forgot = Loss("flushall", 0.0, 3.2)
    broken, counts = judged(users(REWARD, REWARD + ANOTHER, refused=404), losses=(forgot,))
    assert (broken, counts["rewarded, lost with the broker"]) == ([], 1)


def test_a_sample_may_lack_answers_that_the_broker_has_lost() -> None:
    """The power fails after the conversation has begun and before its reward: its answers between them are gone."""
    lines = [("begun", {"id": "a"}), ("talked", {"id": "a"}), ("rewarded", {"id": "a", "counts": 0.25})]
    user = log("users.5", *((at, kind, data) for at, (kind, data) in zip((0.5, 2.0, 9.0), lines, strict=True)))
    for back_to, at, promises in ((1.9, 3.0, []), (1.2, 1.4, []), (3.0, 4.0, ["wrong reward"])):
        cut = Loss("cut aof", back_to, at)
        assert judged(TRAINER, user, calls=trained(0.25), losses=(cut,))[0] == promises


def test_a_teacher_is_known_by_the_tokens_that_it_judged() -> None:
    sample = make_trajectory()
    tokens = sample.tokens.numpy().tolist()
    own = msgspec.structs.replace(sample, teacher_logprobs=Array.of([0.0, *says(tokens)], "f4"))
    another = msgspec.structs.replace(sample, teacher_logprobs=Array.of([0.0, *says(tokens[::-1])], "f4"))
    zeros = msgspec.structs.replace(sample, teacher_logprobs=Array.of([0.0] * len(tokens), "f4"))
    assert [is_taught(one) for one in (own, another, zeros, sample)] == [True, False, False, False]


def planned(wrong: dict[str, int], untaught: list[list[int]] | None = None) -> Log:
    return log("trainer.9", (1.0, "planned", {"untaught": untaught or [], "wrong": wrong, "right": 30}))


@pytest.mark.parametrize(
    ("logs", "broken"),
    [
        ([planned({"generator-0": MOST_WRONG})], []),
        ([planned({"generator-0": MOST_WRONG + 1})], ["generator at fault"]),
        ([planned({}, untaught=[[0, 1]])], ["teacher"]),
        ([log("trainer.9", (2.0, "quarantine", {"g": "generator-0", "process": "p"}))], []),
        ([log("trainer.9", (2.0, "quarantine", {"g": "generator-1", "process": "q"}))], ["false alarm"]),
    ],
)
def test_a_generator_at_fault_is_quarantined_and_no_other_one(logs: list[Log], broken: list[str]) -> None:
    judgement = Judgement()
    judge_sources([log("generator-0.1", (0.5, "wrong", {"process": "p"})), *logs], judgement)
    assert [violation.promise for violation in judgement.violations] == broken
