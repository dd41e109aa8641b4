"""The scorer: whatever a reward function does, only its own sample pays for it."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from functools import partial
from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from consumers.reward.rewards import REWARDS
from consumers.reward.rewards.signatures import RewardInput
from consumers.reward.rewards.terms import Term, TermResult
from consumers.reward.scorer import Scorer, check_reward, reward_input
from consumers.reward.workers.pool import WorkerPool
from consumers.reward.workers.worker import PREFIX, Answer
from schemas.codec import Array
from schemas.config import RewardTerm
from schemas.errors import ConfigError, InfraError
from schemas.messages import LARGEST_REWARD, Span, Trajectory, Turn

STALE = msgspec.msgpack.encode(Answer(0, TermResult(value=99.0)))
USERS_OWN = '''
import asyncio, os, subprocess, sys, time

def by_data(prompt, completion, prompt_ids, completion_ids, do, answer="", **data):
    if do == "hang":
        while True:
            time.sleep(3600)
    if do == "raise":
        raise RuntimeError("two\\nlines")
    if do == "exit":
        os._exit(7)
    if do == "print":
        print("noise on stdout", flush=True)
    return {"nan": float("nan"), "text": "1.0", "none": None, "true": True}.get(do, 0.5)

async def later(prompt, completion, prompt_ids, completion_ids, **data):
    await asyncio.sleep(0)
    return float(len(completion_ids))

DAEMON = """
import os, pathlib, sys, time
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        pathlib.Path(sys.argv[1]).with_suffix(".part").write_text(str(os.getpid()))
        os.rename(pathlib.Path(sys.argv[1]).with_suffix(".part"), sys.argv[1])
        time.sleep(3600)
    os._exit(0)
"""

def daemonizing(prompt, completion, prompt_ids, completion_ids, do, **data):
    subprocess.run([sys.executable, "-S", "-c", DAEMON, "daemon"], check=True)
    while not os.path.exists("daemon"):
        time.sleep(0.01)
    if do == "exit":
        os._exit(7)
    while True:
        time.sleep(3600)

def returning_twice(prompt, completion, prompt_ids, completion_ids, **data):
    return 99.0 if completion == "1" and os.fork() == 0 else float(completion)

def forging(prompt, completion, prompt_ids, completion_ids, forged, **data):
    if completion == "forge":
        for fd in range(3, 64):
            if os.path.exists(f"/proc/self/fd/{fd}") and os.readlink(f"/proc/self/fd/{fd}").startswith("socket:"):
                os.write(fd, forged)
    return float(os.getpid())

def secrets(prompt, completion, prompt_ids, completion_ids, names, **data):
    return float(sum(name in os.environ for name in names))

def pid(prompt, completion, prompt_ids, completion_ids):
    return float(os.getpid())

def strict(prompt, completion, prompt_ids, completion_ids, answer, scale=1):
    return scale * float(answer)

def seen(prompt, completion, prompt_ids, completion_ids, *, messages, reward, metrics, turns, calls, finish="none"):
    earned = sum(turn.reward or 0.0 for turn in turns)
    return reward + metrics.get("tools", 0.0) + calls + earned + len(messages[0]["content"])

def everything(prompt, completion, prompt_ids, completion_ids, **data):
    return float(len(data))

def as_in_trl(prompt, completions, prompt_ids, completion_ids, **data):
    return 0.0

def few(prompt, completion):
    return 0.0

def pooled_bonus(prompt, completion, prompt_ids, completion_ids, **data):
    return 0.25


def third(prompt, completion, prompt_ids, completion_ids, **data):
    return 1 / 3


number = 3
'''


@pytest.fixture
def base(tmp_path: Path) -> Path:
    (tmp_path / "mine.py").write_text(USERS_OWN)
    return tmp_path


def trajectory(completion: str = "46", /, mask: tuple[int, ...] = (0, 0, 1, 1), **data) -> Trajectory:
    spans = [Span(0, 0, len(mask))] if mask else []
    return Trajectory(
        run="r", task_id=0, sample=0, kind="train", tokens=Array.of(range(len(mask)), "i4"),
        loss_mask=Array.of(mask, "u1"), logprobs=Array.of([0.0] * len(mask), "f4"), spans=spans, turns=[],
        finish="stop", prompt="12+34=", completion=completion, generator="g", data=data,
    )  # fmt: skip


def terms(*names: str | dict) -> list[RewardTerm]:
    return [RewardTerm(name=n) if isinstance(n, str) else RewardTerm(**n) for n in names]


def score(terms_, base: Path, *trajectories: Trajectory, workers: int = 1, timeout_s: float = 30.0):
    scorer = Scorer(terms_, base, workers, timeout_s)
    try:
        return scorer.score(trajectories)
    finally:
        scorer.close()


# inline


def test_the_reward_is_the_weighted_sum_and_components_have_names(base: Path):
    sum_ = terms(
        {"name": "exact", "weight": 2.0},
        {"name": "length", "weight": 0.5, "args": {"max_tokens": 2, "overlong_buffer": 1}},
        "exact",
    )
    right, wrong = score(sum_, base, trajectory("46", answer="46"), trajectory("47", answer="46"))
    assert right.reward == 2.0 - 0.5 + 1.0
    assert right.components == {"exact": 1.0, "length": -1.0, "exact#2": 1.0}
    assert (right.status, wrong.reward) == ("ok", -0.5)


def test_a_missing_reference_is_an_error_and_not_a_zero(base: Path):
    (result,) = score(terms("exact"), base, trajectory())
    assert (result.status, result.components) == ("error", {})
    assert result.reason == ("exact: TypeError: exact() missing 1 required keyword-only argument: 'answer'")


def test_what_a_function_sees_of_a_trajectory():
    sample = reward_input(trajectory("46", mask=(0, 1, 0, 1), answer="46"))
    assert sample == RewardInput("12+34=", "46", [0], [1, 2, 3], {"answer": "46"}, trajectory_id=sample.trajectory_id)
    assert sample.trajectory_id.startswith("r-0-0-")
    again = reward_input(trajectory("46", mask=(0, 1, 0, 1, 1), answer="46"))
    assert again.trajectory_id != sample.trajectory_id, "a task that is done again has other tokens"
    assert reward_input(trajectory("", mask=(0, 0))).completion_ids == []


def test_the_term_episode_hands_on_what_the_workflow_gave(base: Path):
    given, none = trajectory(reward=7.0), trajectory("46", answer="46", reward=7.0)
    given.reward = 0.25
    both = terms("episode", {"name": "exact", "weight": 0.5})
    (result,) = score(terms("episode"), base, given)
    assert (result.reward, result.components) == (0.25, {"episode": 0.25})
    (result,) = score(both, base, none)
    assert result.status == "error"
    assert "the workflow gave the sample no reward" in result.reason
    none.reward = -1.0
    assert score(both, base, none)[0].components == {"episode": -1.0, "exact": 1.0}
    with pytest.raises(ConfigError, match="unknown argument 'reward'"):
        check_reward(terms({"name": "episode", "args": {"reward": 1.0}}), base)


def test_a_function_gets_the_fields_of_a_sample_that_it_names(base: Path):
    whole = trajectory("46", messages=[{"role": "user", "content": "hello"}])
    whole.reward, whole.metrics, whole.calls, whole.finish = 2.0, {"tools": 0.5}, 3, "deadline"
    whole.turns = [Turn("prompt", 0, 2), Turn("assistant", 2, 4, 0, 10.0)]
    assert score(terms("mine.py:seen"), base, whole)[0].reward == 2.0 + 0.5 + 3 + 10.0 + len("hello")
    assert score(terms("mine.py:everything"), base, whole)[0].reward == 1.0, "data is the task's and nothing else"
    own = trajectory("46", messages=[{"role": "user", "content": ""}], calls=100)
    own.reward, own.turns = 0.0, whole.turns
    assert score(terms("mine.py:seen"), base, own)[0].reward == 110.0, "a field of the data comes before"


JSON_LIKE = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**63) | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
)


@settings(deadline=None)
@given(
    st.text(),
    st.dictionaries(
        st.sampled_from(["answer", "prompt", "completion", "last_number", "regex", "tags", "x"]), JSON_LIKE
    ),
)
def test_the_scorer_never_raises_for_any_data(completion: str, data: dict):
    for name in ("exact", "gsm8k", "format"):
        (result,) = score(terms(name), Path.cwd(), trajectory(completion, **data))
        assert result.status == "ok" or result.reason


@settings(deadline=None)
@given(JSON_LIKE | st.integers() | st.fractions() | st.just(10**400))
def test_whatever_a_function_returns_becomes_a_finite_value_or_an_error(returned: object):
    term = Term("t", 1.0, lambda *_, **__: returned, {}, None, True)
    outcome = term.call(RewardInput("", "", [], [], {}))
    if outcome.status == "ok":
        assert outcome.value == float(returned)
    else:
        assert outcome.reason.startswith("returned")


def returning(value: float, name: str, weight: float = 1.0) -> Term:
    return Term(name, weight, lambda *_, **__: value, {}, None, True)


@pytest.mark.parametrize(
    ("found", "reason"),
    [
        ([returning(1.0, "right"), returning(1e308, "long")], "long: returned 1e+308, must be from -1e+30 to 1e+30"),
        ([returning(-1e31, "long")], "long: returned -1e+31, must be from -1e+30 to 1e+30"),
        (
            [returning(9e29, "right"), returning(5e29, "long")],
            "right: 9e+29 by its weight 1 makes a sum of 1.4e+30, must be from -1e+30 to 1e+30",
        ),
        (
            [returning(1e30, "right", 1e300), returning(1e30, "long", -1e300)],
            "right: 1e+30 by its weight 1e+300 makes a sum of nan, must be from -1e+30 to 1e+30",
        ),
    ],
)
def test_a_reward_that_training_could_not_add_up_is_an_error_that_names_the_term(
    base: Path, monkeypatch: pytest.MonkeyPatch, found: list[Term], reason: str
):
    monkeypatch.setattr("consumers.reward.scorer.resolve", lambda *_: found)
    (result,) = score(terms("exact"), base, trajectory("1"))
    assert (result.status, result.reason, result.reward) == ("error", reason, 0.0)


def test_the_largest_reward_is_one(base: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("consumers.reward.scorer.resolve", lambda *_: [returning(LARGEST_REWARD, "right")])
    (result,) = score(terms("exact"), base, trajectory("1"))
    assert (result.status, result.reward) == ("ok", LARGEST_REWARD)


# workers


def test_a_hanging_call_costs_nobody_else_anything(base: Path):
    actions = ["fine", "hang", "fine", "print", "exit", "fine", "raise", "nan", "text", "none", "true", "fine"]
    results = score(terms("mine.py:by_data"), base, *(trajectory(do=do) for do in actions), workers=1, timeout_s=2.0)
    found = {do: (r.status, r.reason.partition(": ")[2]) for do, r in zip(actions, results, strict=True)}
    assert found == {
        "fine": ("ok", ""),
        "print": ("ok", ""),
        "true": ("ok", ""),
        "hang": ("timeout", "no result within 2 s, its worker was killed"),
        "exit": ("error", "the worker process died: exit code 7"),
        "raise": ("error", "RuntimeError: two lines"),
        "nan": ("error", "returned nan, must be from -1e+30 to 1e+30"),
        "text": ("error", "returned str, must be a float"),
        "none": ("error", "returned NoneType, must be a float"),
    }
    assert all(r.reward == 0.5 for do, r in zip(actions, results, strict=True) if do == "fine")


def test_a_slow_sample_holds_up_no_other(base: Path):
    scorer = Scorer(terms("mine.py:by_data"), base, workers=2, timeout_s=20.0)
    try:
        hanging = scorer.submit(trajectory(do="hang"))
        results = [scorer.submit(trajectory(do="fine")).result(timeout=60) for _ in range(20)]
        assert {r.reward for r in results} == {0.5}
        assert not hanging.done()
    finally:
        scorer.close()
    with pytest.raises(InfraError, match="closed"):
        hanging.result(timeout=10)
    with pytest.raises(InfraError, match="closed"):
        scorer.score([trajectory(do="fine")])


def test_inline_and_worker_terms_are_summed_and_async_functions_work(base: Path):
    both = terms("mine.py:later", "exact", {"name": "mine.py:strict", "weight": 10, "args": {"scale": 2}})
    (result,) = score(both, base, trajectory("46", answer="46", extra="a strict function is not handed this"))
    assert result.components == {"mine.py:later": 2.0, "exact": 1.0, "mine.py:strict": 92.0}
    assert result.reward == 2.0 + 1.0 + 920.0


def test_the_first_error_ends_a_sample(base: Path):
    (result,) = score(terms("exact", "mine.py:by_data"), base, trajectory(do="hang"))
    assert result.status == "error"
    assert result.reason.startswith("exact: ")


def test_the_input_of_a_sample_that_waits_is_not_made_yet(base: Path):
    pool = WorkerPool(terms("mine.py:by_data"), base, size=1, timeout_s=60.0)
    made: list[int] = []
    begun = threading.Event()

    def make(number: int) -> RewardInput:
        made.append(number)
        begun.set()
        return RewardInput("", "", [], [], {"do": "hang"})

    try:
        futures = [pool.submit([0], partial(make, number), list) for number in range(3)]
        assert begun.wait(60)
        assert made == [0]
        assert [future.cancel() for future in futures] == [False, True, True]
    finally:
        pool.close()


def test_a_worker_that_cannot_start_is_an_infrastructure_error(base: Path):
    pool = WorkerPool(terms("mine.py:gone"), base, size=1, timeout_s=5.0)
    try:
        future = pool.submit([0], lambda: RewardInput("", "", [], [], {}), list)
        with pytest.raises(InfraError, match=r"a reward worker cannot start: .*has no 'gone'"):
            future.result(timeout=60)
    finally:
        pool.close()


def test_a_system_without_room_for_another_process_is_an_infrastructure_error_and_no_hang(
    base: Path, monkeypatch: pytest.MonkeyPatch
):
    real, refused = subprocess.Popen, threading.Event()

    def popen(*args, **options):
        if refused.is_set():
            return real(*args, **options)
        raise BlockingIOError(11, "Resource temporarily unavailable")

    monkeypatch.setattr(subprocess, "Popen", popen)
    pool = WorkerPool(terms("mine.py:later"), base, size=1, timeout_s=30.0)
    try:
        with pytest.raises(InfraError, match=r"could not be started: .*Resource temporarily unavailable"):
            pool.submit([0], lambda: reward_input(trajectory()), list).result(10)
        refused.set()
        assert pool.submit([0], lambda: reward_input(trajectory()), list).result(30)[0].status == "ok"
    finally:
        pool.close()


def test_start_has_a_deadline(base: Path):
    (base / "slow.py").write_text("import time\ntime.sleep(3600)\n")
    pool = WorkerPool(terms("slow.py:f"), base, size=1, timeout_s=5.0, start_timeout_s=0.5)
    try:
        with pytest.raises(InfraError, match=r"did not start within 0\.5 s"):
            pool.submit([0], lambda: RewardInput("", "", [], [], {}), list).result(timeout=60)
    finally:
        pool.close()


PARENT = """
import sys, pathlib
from consumers.reward.workers.pool import WorkerPool
from consumers.reward.rewards.signatures import RewardInput
from schemas.config import RewardTerm
pool = WorkerPool([RewardTerm(name=n) for n in ("mine.py:pid", "mine.py:by_data")], pathlib.Path("."), 1, 600.0)
print(int(pool.submit([0], lambda: RewardInput("", "", [], [], {}), list).result(60)[0].value), flush=True)
pool.submit([1], lambda: RewardInput("", "", [], [], {"do": "hang"}), list)
sys.stdin.read()
"""


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux can tie a hanging process to its parent")
def test_workers_die_with_their_parent_even_while_a_function_hangs(base: Path):
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT], cwd=base, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert parent.stdout is not None
    worker = int(parent.stdout.readline())
    parent.kill()
    parent.communicate(timeout=30)
    deadline = time.monotonic() + 30
    while _runs(worker):
        assert time.monotonic() < deadline, "the worker outlives its parent"
        time.sleep(0.02)


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux shows what a process started")
@pytest.mark.parametrize(("do", "status"), [("hang", "timeout"), ("exit", "error")])
def test_a_daemon_that_a_call_started_ends_with_its_worker(
    base: Path, monkeypatch: pytest.MonkeyPatch, do: str, status: str
):
    monkeypatch.chdir(base)
    (result,) = score(terms("mine.py:daemonizing"), base, trajectory(do=do), timeout_s=2.0)
    assert result.status == status
    assert not _runs(int((base / "daemon").read_text()))


@pytest.mark.skipif(not hasattr(os, "fork"), reason="the system has no fork")
def test_a_reward_that_forks_and_returns_twice_gives_no_other_sample_its_reward(base: Path):
    results = score(terms("mine.py:returning_twice"), base, *(trajectory(str(number)) for number in range(5)))
    assert [result.reward for result in results] == [0.0, 1.0, 2.0, 3.0, 4.0]


@pytest.mark.skipif(sys.platform != "linux", reason="finds the worker's connection in /proc")
@pytest.mark.parametrize(
    "forged",
    [b"\x05\0\0\0chaff", b"\xff\xff\xff\x7fchaff", PREFIX.pack(len(STALE)) + STALE],
    ids=["noise", "huge", "stale"],
)
def test_an_answer_that_is_not_of_its_call_ends_the_worker_and_is_nobodys(base: Path, forged: bytes):
    samples = [trajectory(text, forged=forged) for text in ("a", "forge", "b")]
    before, forging, after = score(terms("mine.py:forging"), base, *samples)
    assert forging.status == "error"
    assert forging.reason == "mine.py:forging: its worker wrote what is no answer to this call, and was killed"
    assert (before.status, after.status) == ("ok", "ok")
    assert before.reward != after.reward


def test_reward_functions_see_no_secret_of_the_service(base: Path, monkeypatch: pytest.MonkeyPatch):
    hidden = ["REDIS_URL", "REDIS_URL_FILE", "TIDEMILL_CONTROL_TOKEN", "TIDEMILL_BROKER__URL", "HF_TOKEN", "OTHER_KEY"]
    shown = ["PATH", "HOME", "JUDGE_KEY"]
    for name in [*hidden, *shown]:
        monkeypatch.setenv(name, os.environ.get(name, "x"))
    scorer = Scorer(terms("mine.py:secrets"), base, workers=1, timeout_s=30.0, env=["JUDGE_KEY"])
    try:
        results = scorer.score([trajectory(names=hidden), trajectory(names=shown)])
    finally:
        scorer.close()
    assert [result.reward for result in results] == [0.0, 3.0]


def _runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def test_close_leaves_no_process_behind(base: Path):
    scorer = Scorer(terms("mine.py:pid"), base, workers=2, timeout_s=30.0)
    pids = {int(s.reward) for s in scorer.score([trajectory()] * 8)}
    assert os.getpid() not in pids
    scorer.close()
    scorer.close()
    assert not any(_runs(pid) for pid in pids)


# configuration


@pytest.mark.parametrize(
    ("term", "reason"),
    [
        ({"name": "exat"}, "did you mean 'exact'"),
        ({"name": "length"}, "reward 'length': missing a required argument: 'max_tokens'"),
        (
            {"name": "length", "args": {"max_token": 5}},
            "reward 'length': unknown argument 'max_token', did you mean 'max_tokens'?",
        ),
        (
            {"name": "length", "args": {"max_tokens": 5, "overlong_buffer": 6}},
            "overlong_buffer 6 is larger than max_tokens 5",
        ),
        ({"name": "length", "args": {"max_tokens": "5", "overlong_buffer": 1}}, "max_tokens '5' must be a number"),
        ({"name": "exact", "args": {"answer": 1}}, "unknown argument 'answer': one of none"),
        ({"name": "format", "args": {"regex": "("}}, "reward 'format': regex '(' is wrong"),
        ({"name": "format", "args": {"regex": "a", "tags": ["b"]}}, "regex or tags, not both"),
        ({"name": "mine.py:as_in_trl"}, "rename its parameters to prompt and completion for one sample"),
        ({"name": "mine.py:few"}, "must take (prompt, completion, prompt_ids, completion_ids, **data)"),
        ({"name": "mine.py:number"}, "must be a function, is int"),
        ({"name": "mine.py:strict", "args": {"scal": 1}}, "did you mean 'scale'"),
        ({"name": "mine.py:nothing"}, "has no 'nothing'"),
        ({"name": "nofile.py:f"}, "no file"),
    ],
)
def test_a_wrong_term_is_one_line_before_anything_starts(base: Path, term: dict, reason: str):
    with pytest.raises(ConfigError) as caught:
        check_reward(terms(term), base)
    assert reason in str(caught.value)
    assert "\n" not in str(caught.value)


def test_every_built_in_is_there_and_only_bounded_ones_run_inline(base: Path):
    from consumers.reward.rewards.terms import resolve

    args: dict[str, dict[str, object]] = {
        "length": {"max_tokens": 8, "overlong_buffer": 4},
        "judge": {
            "base_url": "http://127.0.0.1:9/v1",
            "model": "m",
            "template": "{completion}",
            "parse": {"regex": "(\\d)"},
        },
        "remote": {"url": "http://127.0.0.1:9/score"},
        "reward_model": {"path": "m"},
        "reward_model_server": {"base_url": "http://127.0.0.1:9", "model": "m"},
    }
    resolved = resolve(terms(*({"name": n, "args": args.get(n, {})} for n in REWARDS.names)), base)
    assert {t.label for t in resolved if t.inline} == {"clevr", "episode", "exact", "format", "gsm8k", "length"}
    (backtracking,) = resolve(terms({"name": "format", "args": {"regex": "(a+)+$"}}), base)
    assert not backtracking.inline


def test_check_reward_can_score_one_example(base: Path):
    assert check_reward(terms("exact"), base) is None
    result = check_reward(terms("mine.py:by_data"), base, trajectory(do="fine"))
    assert result is not None
    assert result.reward == 0.5


def test_math_and_reasoning_gym_run_in_workers(base: Path):
    pytest.importorskip("math_verify")
    (result,) = score(terms("math"), base, trajectory("\\boxed{0.5}", answer="\\frac12"))
    assert result.reward == 1.0
    assert TermResult() == TermResult(0.0, "ok")


def test_a_term_counts_only_for_the_datasets_that_it_names(base: Path):
    both = terms("exact", {"name": "mine.py:pooled_bonus", "datasets": ["code"]}, {"name": "format", "datasets": ["x"]})
    sums, code = trajectory("46", answer="46"), trajectory("47", answer="46")
    sums.dataset, code.dataset = "sums", "code"
    first, second = score(both, base, sums, code)
    assert (first.components, first.dataset) == ({"exact": 1.0}, "sums")
    assert (second.components, second.dataset) == ({"exact": 0.0, "mine.py:pooled_bonus": 0.25}, "code")


def test_a_sample_is_correct_by_its_reward_or_by_the_term_that_decides(base: Path):
    sum_ = terms({"name": "exact", "weight": 0.7}, {"name": "mine.py:third", "weight": 0.9})
    right, wrong = trajectory("46", answer="46"), trajectory("47", answer="46")
    for least, expected in ((1.0, [True, False]), (0.3, [True, True])):
        scorer = Scorer(sum_, base, 1, 30.0, correct_from=least)
        assert [one.correct for one in scorer.score([right, wrong])] == expected
        scorer.close()
    scorer = Scorer(sum_, base, 1, 30.0, correct_from=0.5, correct_term="exact")
    assert [one.correct for one in scorer.score([right, wrong])] == [True, False]
    scorer.close()
