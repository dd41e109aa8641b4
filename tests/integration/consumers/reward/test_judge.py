"""The judge: what it reads is what counts, what it can't read is excluded, and a slow judge costs no other sample."""

import asyncio
import time
from pathlib import Path
from typing import Any

import pytest

from benchmarks.rewards.judge import measure_limited
from benchmarks.rewards.server import ANSWERS, FlakyJudge
from consumers.reward.rewards.clock import CLOCK, CallClock
from consumers.reward.rewards.http import Pace
from consumers.reward.rewards.judge import fill_in, judge
from consumers.reward.rewards.terms import resolve
from consumers.reward.rewards.verdicts import combine, read_verdict
from consumers.reward.scorer import Scorer, check_reward
from schemas.config import RewardConfig, RewardTerm
from schemas.errors import ConfigError
from tests.support.user_code.reward_samples import trajectory
from tests.support.user_code.user_rewards import score

PARSE = {"regex": r"Score: (\d+)", "min": 1, "max": 10}
ARGS = {"base_url": "http://127.0.0.1:9/v1", "model": "m", "template": "Rate {completion}", "parse": PARSE}


def ask(
    server: FlakyJudge, *completions: str, timeout_s: float = 20.0, in_turn: bool = False, **settings: Any
) -> list[Any]:
    """What the judge says of each completion, asked side by side or in turn: a number or an exception."""

    async def one(completion: str) -> float:
        CLOCK.set(CallClock(timeout_s))
        args = {**ARGS, "base_url": server.url, **settings}
        data = args.pop("data", {})
        return await judge("12+34=", completion, **args, **data)

    async def all_of_them() -> list[Any]:
        if in_turn:
            return [await one(completion) for completion in completions]
        return await asyncio.gather(*(one(completion) for completion in completions), return_exceptions=True)

    return asyncio.run(all_of_them())


@pytest.mark.parametrize(
    ("text", "parse", "value"),
    [
        ("Score: 3, no, rather Score: 7", PARSE, 7.0),
        ("Score: 11", PARSE, None),
        ("Score: none", PARSE, None),
        ("", PARSE, None),
        ("Score: 10", {**PARSE, "scale": True}, 1.0),
        ("Score: 1", {**PARSE, "scale": True}, 0.0),
        ("I would say **CORRECT**.", {"regex": r"(CORRECT|WRONG)", "values": {"correct": 1, "wrong": 0}}, 1.0),
        ("WRONG", {"regex": r"\b(\w+)\b", "values": {"correct": 1, "wrong": 0}}, 0.0),
        ("perhaps", {"regex": r"\b(\w+)\b", "values": {"correct": 1, "wrong": 0}}, None),
        ('```json\n{"why": "{}", "score": 0.5}\n```', {"json": "score"}, 0.5),
        ('{"score": "4"} and {"score": 5}', {"json": "score"}, 5.0),
        ('{"score": true}', {"json": "score"}, None),
        ('{"good": true}', {"json": "good", "values": {"true": 1, "false": 0}}, 1.0),
        ('{"score": NaN}', {"json": "score"}, None),
        ('{"score": 1e999}', {"json": "score"}, None),
        ('{"other": 1}', {"json": "score"}, None),
        ("{" * 5000, {"json": "score"}, None),
    ],
)
def test_a_verdict_is_read_or_there_is_none(text: str, parse: dict, value: float | None):
    assert read_verdict(text, parse) == value


def test_a_majority_is_more_than_half():
    assert combine([1.0, 0.0, 1.0], "majority") == 1.0
    assert combine([1.0, 0.0], "mean") == 0.5
    with pytest.raises(ValueError, match="no value has a majority among 1, 0"):
        combine([1.0, 0.0], "majority")


def test_the_template_shows_fields_and_leaves_other_braces():
    messages = [{"role": "user", "content": "1+1?"}, {"role": "assistant", "content": "2"}]
    fields = {"completion": "{answer}", "answer": 46, "messages": messages}
    assert fill_in('{completion} {answer} {"score": 1} {}', fields) == '{answer} 46 {"score": 1} {}'
    assert fill_in("{messages}", fields) == "user: 1+1?\n\nassistant: 2"
    with pytest.raises(ValueError, match=r"names {gold}, the sample has answer, completion, messages"):
        fill_in("{gold}", fields)


def test_the_judge_is_asked_in_openais_words_with_the_key_of_its_variable(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("JUDGE_KEY", "secret")
    with FlakyJudge() as server:
        settings = {"system": "Be strict.", "api_key_env": "JUDGE_KEY", "request": {"temperature": 0}, "data": {"x": 1}}
        assert ask(server, "46", template="{prompt}{completion} {x}", **settings) == [4.0]
    messages = [{"role": "system", "content": "Be strict."}, {"role": "user", "content": "12+34=46 1"}]
    assert server.requests == [{"model": "m", "temperature": 0, "messages": messages}]
    assert server.headers[0]["authorization"] == "Bearer secret"


def test_an_answer_that_cannot_be_read_is_an_error_and_no_zero():
    with FlakyJudge(garble=1.0) as server:
        (error,) = ask(server, "46")
    assert "the judge's answer cannot be read: 'As a model, I cannot say.'" in str(error)


def test_a_refusal_waits_as_asked_and_counts_against_that_sample_only():
    with FlakyJudge(refuse=0.5, retry_after="0.3") as server:
        found = ask(server, "a", "b", "c", "d", timeout_s=20.0, cache=0)
    assert all(isinstance(value, float) for value in found)
    assert server.refused > 0
    with FlakyJudge(refuse=1.0, retry_after="7200") as server:
        # Far longer than a test may take: waiting is of no use and takes no place.
        (error,) = ask(server, "46", timeout_s=3600.0)
    assert isinstance(error, TimeoutError)
    assert "429" in str(error)
    assert "would be too late" in str(error)
    assert server.seen == 1


def test_the_wait_for_its_turn_is_no_part_of_a_samples_deadline():
    with FlakyJudge() as server:
        found = ask(server, *map(str, range(5)), timeout_s=2.0, requests_per_minute=60 / 0.8)
    assert all(isinstance(value, float) for value in found)


def test_the_clock_stands_still_while_anybody_waits():
    clock = CallClock(10.0)
    with clock.stopped(), clock.stopped():
        left = clock.left()
        time.sleep(0.02)
        assert clock.left() == left
    time.sleep(0.02)
    assert clock.left() < left


async def test_the_pace_is_even():
    async def times() -> list[float]:
        pace = Pace(60 / 0.02)
        started = time.monotonic()

        async def turn() -> float:
            await pace.turn()
            return time.monotonic() - started

        return await asyncio.gather(*(turn() for _ in range(10)))

    assert all(at >= 0.02 * number for number, at in enumerate(await times()))


def test_the_same_question_is_asked_once_also_side_by_side():
    with FlakyJudge(seconds=0.1) as server:
        assert len(set(ask(server, "46", "46", "46"))) == 1
        assert server.seen == 1
        ask(server, "46", "46", cache=0)
        assert server.seen == 3
        ask(server, "a", "b", "a", cache=1, in_turn=True)
        assert server.seen == 6, "a loop of its own remembers nothing of another, and one place is one place"


def test_several_samples_are_combined_and_more_than_half_must_be_readable():
    with FlakyJudge() as server:
        assert ask(server, "46", samples=3) == [6.0]
        (error,) = ask(server, "47", samples=3, combine="majority")
        assert "no value has a majority among" in str(error)
    assert len(ANSWERS) == 3
    with FlakyJudge(garble=0.4) as server:
        (value,) = ask(server, "46", samples=4)
        assert isinstance(value, float)
    with FlakyJudge(garble=0.75) as server:
        (error,) = ask(server, "46", samples=4)
        assert "1 of 4 answers are readable: the judge's answer cannot be read" in str(error)


def test_one_of_several_answers_that_hangs_is_done_without():
    with FlakyJudge(hang=frozenset({1})) as server:
        (value,) = ask(server, "46", samples=3, timeout_s=1.5)
    assert value == 5.0


def test_a_judge_that_is_down_and_one_that_refuses_the_key_are_errors():
    (down,) = ask(FlakyJudge(url="http://127.0.0.1:9"), "46", timeout_s=1.0)
    assert "cannot be reached" in str(down)
    with FlakyJudge() as server:
        server.url += "/nowhere"
        (value,) = ask(server, "46")
    assert value == 4.0


def test_a_judge_that_fails_at_times_makes_no_zero_up_and_keeps_its_pace():
    """10 % refusals, 5 % nonsense and one that hangs, through a worker with 64 places."""
    row = measure_limited(samples=60, requests_per_minute=1200, refuse=0.1, garble=0.05, timeout_s=4.0)
    assert row["made_up_zeros"] == 0
    assert row["timeout"] == 1
    assert row["error"] == row["garbled"] > 0
    assert row["ok"] == 60 - 1 - row["garbled"]
    assert row["refused"] > 0


def test_only_the_judges_worker_sees_its_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "mine.py").write_text(
        "import os\n\ndef sees(prompt, completion, prompt_ids, completion_ids, **data):\n"
        "    return float('JUDGE_KEY' in os.environ)\n"
    )
    monkeypatch.setenv("JUDGE_KEY", "secret")
    with FlakyJudge() as server:
        args = {**ARGS, "base_url": server.url, "api_key_env": "JUDGE_KEY"}
        terms = [RewardTerm(name="judge", args=args), RewardTerm(name="mine.py:sees")]
        (scored,) = score(terms, tmp_path, trajectory("46", model="a field of the data is not a setting"))
        assert scored.components == {"judge": 4.0, "mine.py:sees": 0.0}
        monkeypatch.delenv("JUDGE_KEY")
        check_reward(terms, tmp_path)
        with pytest.raises(ConfigError, match="the environment variable JUDGE_KEY that it names is not set"):
            Scorer(RewardConfig(terms=terms), tmp_path)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"base_url": "localhost"}, "base_url 'localhost' must begin with http:// or https://"),
        ({"template": "Rate it"}, "template must show the judge {completion} or {messages}"),
        ({"parse": {}}, "must have one of regex (with a group around the verdict) and json (a key)"),
        ({"parse": {"regex": "Score"}}, "needs a group around the verdict"),
        ({"parse": {"regex": "("}}, "parse.regex '(' is wrong"),
        ({"parse": {"json": "s", "scale": True}}, "scale is true or false, and needs min and max"),
        ({"parse": {"json": "s", "min": 2, "max": 1}}, "parse.min 2 must be less than parse.max 1"),
        ({"parse": {"json": "s", "words": {}}}, "parse: unknown key 'words'"),
        ({"parse": {"json": "s", "values": {"a": "b"}}}, "must give a number for each word"),
        ({"samples": 0}, "'samples': 0 is not allowed, must be greater than or equal to 1"),
        ({"combine": "max"}, "'combine': 'max' is not allowed, must be 'mean' or 'majority'"),
        ({"samples": 5, "requests_per_minute": 3}, "requests_per_minute 3 must be a number of 5 (samples) or more"),
        ({"request": {"model": "x"}}, "request must be settings such as {temperature: 0}"),
        ({"temperatre": 1}, "unknown argument 'temperatre'"),
    ],
)
def test_a_wrong_judge_is_one_line(change: dict, reason: str):
    with pytest.raises(ConfigError) as caught:
        resolve([RewardTerm(name="judge", args={**ARGS, **change})], Path.cwd())
    assert reason in str(caught.value)
    assert "\n" not in str(caught.value)
