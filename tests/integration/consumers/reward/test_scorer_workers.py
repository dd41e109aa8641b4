"""Workers of the scorer: whatever a reward function does, only its own sample pays for it."""

import asyncio
import os
import subprocess
import sys
import threading
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from consumers.reward.rewards.signatures import RewardInput
from consumers.reward.rewards.terms import TermResult
from consumers.reward.scorer import Scorer, reward_input
from consumers.reward.workers.pool import WorkerPool
from consumers.reward.workers.worker import WorkerReply, WorkerSetup
from schemas.config import RewardConfig
from schemas.errors import InfraError
from schemas.system.worker_process import frame
from tests.support.user_code.user_rewards import USERS_OWN, score, terms, trajectory


@pytest.fixture
def base(tmp_path: Path) -> Path:
    (tmp_path / "mine.py").write_text(USERS_OWN)
    return tmp_path


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


async def test_a_slow_sample_holds_up_no_other(base: Path):
    async with Scorer(RewardConfig(terms=terms("mine.py:by_data"), timeout_s=20.0), base) as scorer:
        hanging = asyncio.create_task(scorer.score(trajectory(do="hang")))
        results = [await scorer.score(trajectory(do="fine")) for _ in range(20)]
        assert {r.reward for r in results} == {0.5}
        assert not hanging.done()
    with pytest.raises(InfraError, match="closed"):
        await hanging
    with pytest.raises(InfraError, match="closed"):
        await scorer.score_all([trajectory(do="fine")])


def test_inline_and_worker_terms_are_summed_and_async_functions_work(base: Path):
    both = terms("mine.py:later", "exact", {"name": "mine.py:strict", "weight": 10, "args": {"scale": 2}})
    (result,) = score(both, base, trajectory("46", answer="46", extra="a strict function is not handed this"))
    assert result.components == {"mine.py:later": 2.0, "exact": 1.0, "mine.py:strict": 92.0}
    assert result.reward == 2.0 + 1.0 + 920.0


def test_the_first_error_ends_a_sample(base: Path):
    (result,) = score(terms("exact", "mine.py:by_data"), base, trajectory(do="hang"))
    assert result.status == "error"
    assert result.reason.startswith("exact: ")


def workers(base: Path, name: str, timeout_s: float = 30.0, **options: Any) -> WorkerPool:
    """A pool with one worker of this function."""
    return WorkerPool(WorkerSetup.of(terms(name), base, [0], timeout_s), 1, **options)


def empty() -> RewardInput:
    return RewardInput("", "", [], [], {})


async def test_the_input_of_a_sample_that_waits_is_not_made_yet(base: Path):
    made: list[int] = []
    begun = asyncio.Event()

    def make(number: int) -> RewardInput:
        made.append(number)
        begun.set()
        return RewardInput("", "", [], [], {"do": "hang"})

    async with workers(base, "mine.py:by_data", timeout_s=60.0) as pool:
        calls = [asyncio.create_task(pool.call(0, partial(make, number))) for number in range(3)]
        await asyncio.wait_for(begun.wait(), 60)
        pool.cancel_waiting()
        await asyncio.wait(calls[1:], timeout=10)
        assert made == [0]
        assert [call.cancelled() for call in calls] == [False, True, True]
    with pytest.raises(InfraError, match="closed"):
        await calls[0]


async def test_a_worker_that_cannot_start_is_an_infrastructure_error(base: Path):
    async with workers(base, "mine.py:gone") as pool:
        with pytest.raises(InfraError, match=r"a reward worker cannot start: .*has no 'gone'"):
            await pool.call(0, empty)


async def test_no_room_for_another_process_is_an_infrastructure_error(base: Path, monkeypatch: pytest.MonkeyPatch):
    real, refused = subprocess.Popen, threading.Event()

    def popen(*args, **options):
        if refused.is_set():
            return real(*args, **options)
        raise BlockingIOError(11, "Resource temporarily unavailable")

    monkeypatch.setattr(subprocess, "Popen", popen)
    async with workers(base, "mine.py:later") as pool:
        with pytest.raises(InfraError, match=r"could not be started: .*Resource temporarily unavailable"):
            await pool.call(0, lambda: reward_input(trajectory()))
        refused.set()
        assert (await pool.call(0, lambda: reward_input(trajectory()))).status == "ok"


async def test_start_has_a_deadline(base: Path):
    (base / "slow.py").write_text("import time\ntime.sleep(3600)\n")
    async with workers(base, "slow.py:f", start_timeout_s=0.5) as pool:
        with pytest.raises(InfraError, match=r"did not start within 0\.5 s"):
            await pool.call(0, empty)


PARENT = """
import asyncio, pathlib
from consumers.reward.workers.pool import WorkerPool
from consumers.reward.workers.worker import WorkerSetup
from consumers.reward.rewards.signatures import RewardInput
from schemas.config import RewardTerm
terms = [RewardTerm(name=n) for n in ("mine.py:pid", "mine.py:by_data")]
async def main():
    async with WorkerPool(WorkerSetup.of(terms, pathlib.Path("."), [0, 1], 600.0), 1) as pool:
        print(int((await pool.call(0, lambda: RewardInput("", "", [], [], {}))).value), flush=True)
        await pool.call(1, lambda: RewardInput("", "", [], [], {"do": "hang"}))
asyncio.run(main())
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
def test_a_daemon_of_a_call_ends_with_its_worker(base: Path, monkeypatch: pytest.MonkeyPatch, do: str, status: str):
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
    [b"\x05\0\0\0chaff", b"\xff\xff\xff\x7fchaff", frame(WorkerReply(0, TermResult(value=99.0)))],
    ids=["noise", "huge", "stale"],
)
def test_an_answer_that_is_not_of_its_call_ends_the_worker_and_is_nobodys(base: Path, forged: bytes):
    samples = [trajectory(text, forged=forged) for text in ("a", "forge", "b")]
    before, forging, after = score(terms("mine.py:forging"), base, *samples)
    assert forging.status == "error"
    assert forging.reason == "mine.py:forging: its worker sent something that is not a reply, and was killed"
    assert (before.status, after.status) == ("ok", "ok")
    assert before.reward != after.reward


def test_reward_functions_see_no_secret_of_the_service(base: Path, monkeypatch: pytest.MonkeyPatch):
    hidden = ["REDIS_URL", "REDIS_URL_FILE", "TIDEMILL_CONTROL_TOKEN", "TIDEMILL_BROKER__URL", "HF_TOKEN", "OTHER_KEY"]
    shown = ["PATH", "HOME", "JUDGE_KEY"]
    for name in [*hidden, *shown]:
        monkeypatch.setenv(name, os.environ.get(name, "x"))
    asked = trajectory(names=hidden), trajectory(names=shown)
    results = score(terms("mine.py:secrets"), base, *asked, env=["JUDGE_KEY"])
    assert [result.reward for result in results] == [0.0, 3.0]


def _runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def test_close_leaves_no_process_behind(base: Path):
    pids = {int(s.reward) for s in score(terms("mine.py:pid"), base, *[trajectory()] * 8, workers=2)}
    assert os.getpid() not in pids
    assert not any(_runs(pid) for pid in pids)
