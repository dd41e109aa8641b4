"""Workers with many calls in flight: what one call does costs no other, and functions of lists get lists."""

import asyncio
import time
from pathlib import Path

import pytest

from consumers.reward.scorer import Scorer, check_reward
from schemas.config import RewardConfig, RewardTerm
from schemas.errors import ConfigError, InfraError
from schemas.messages import Score
from tests.support.user_code.reward_samples import trajectory

FUNCTIONS = '''
import asyncio, os, time

together, most, loops = 0, 0, set()

async def judged(prompt, completion, prompt_ids, completion_ids, do="", wait=0.0, begun="", **data):
    """Says how many calls were in flight at most, as far as it knows."""
    if begun:
        open(begun, "w").close()
    global together, most
    loops.add(id(asyncio.get_running_loop()))
    together += 1
    most = max(most, together)
    try:
        await asyncio.sleep(wait)
        if do == "hang":
            await asyncio.sleep(3600)
        if do == "hang on":
            while True:
                try:
                    await asyncio.sleep(3600)
                except asyncio.CancelledError:
                    pass
        if do == "block":
            time.sleep(3600)
        if do == "exit":
            os._exit(7)
        if do == "raise":
            raise RuntimeError("no")
    finally:
        together -= 1
    return {"most": float(most), "loops": float(len(loops)), "pid": float(os.getpid())}.get(do, 0.5)

judged.concurrency = 16

async def unsaid(prompt, completion, prompt_ids, completion_ids, **data):
    loops.add(id(asyncio.get_running_loop()))
    return float(len(loops))

def lengths(prompts, completions, **columns):
    """As for TRL: the number of samples it was called with."""
    assert all(len(column) == len(prompts) for column in columns.values() if isinstance(column, list))
    for completion in completions:
        if completion == "raise":
            raise RuntimeError("no")
        if completion == "exit":
            os._exit(7)
        if completion == "hang":
            time.sleep(3600)
    return [None if completion == "none" else float(len(prompts)) for completion in completions]

def few(prompts, completions, answer, **columns):
    return [1.0]

def only_completions(completions, answer, scale=1.0):
    return [scale * (completion == wanted) for completion, wanted in zip(completions, answer)]

async def in_chat(prompts, completions, **columns):
    return [float(len(said[0]["content"]) + 100 * len(asked)) for asked, said in zip(prompts, completions)]

def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    found = float(solution_str == ground_truth)
    return {"score": found + (data_source == "sums") + extra_info.get("bonus", 0), "acc": found}

def plain(prompt, completion, prompt_ids, completion_ids, **data):
    return 1.0

def loaded(prompt, completion, prompt_ids, completion_ids, path, **data):
    return float(loads[path])

def load_slowly(path):
    if path == "missing":
        raise FileNotFoundError(path)
    time.sleep(1.5)
    loads[path] = 4

def loaded_lists(prompts, completions, path, **columns):
    return [float(loads[path])] * len(prompts)

loads, loaded.prepare, loaded_lists.prepare = {}, load_slowly, load_slowly

def mixed(prompt, completion, completions, **columns):
    return [1.0]
'''


@pytest.fixture
def base(tmp_path: Path) -> Path:
    (tmp_path / "mine.py").write_text(FUNCTIONS)
    return tmp_path


def scoring(base: Path, *terms: dict, workers: int = 1, timeout_s: float = 30.0) -> Scorer:
    return Scorer(RewardConfig(terms=[*terms], workers=workers, timeout_s=timeout_s), base)


def of(name: str, **settings) -> dict:
    return {"name": f"mine.py:{name}", **settings}


def found(score: Score) -> tuple[str, str]:
    return score.status, score.reason.partition(": ")[2]


async def test_an_async_function_with_a_concurrency_has_its_calls_in_flight_in_one_loop_for_life(base: Path):
    async with scoring(base, of("judged")) as scorer:
        assert scorer.capacity == 16
        rest = await scorer.score_all([trajectory(wait=0.2) for _ in range(32)])
        most, loops = await scorer.score_all([trajectory(do="most"), trajectory(do="loops")])
    assert {score.reward for score in rest} == {0.5}
    assert most.reward == 16.0
    assert loops.reward == 1.0


async def test_the_configuration_decides_on_the_concurrency_and_on_batches(base: Path):
    async with scoring(base, of("judged", concurrency=3), of("lengths", batch=4), workers=2) as scorer:
        assert scorer.capacity == 7
        await scorer.score_all([trajectory(wait=0.05) for _ in range(8)])
        assert (await scorer.score(trajectory(do="most"))).components["mine.py:judged"] == 3.0


async def test_an_async_function_without_a_concurrency_shares_the_workers_and_keeps_its_loop(base: Path):
    async with scoring(base, of("unsaid")) as scorer:
        assert [score.reward for score in await scorer.score_all([trajectory()] * 3)] == [1.0, 1.0, 1.0]


@pytest.mark.parametrize("kind", ["hang", "hang on"])
async def test_a_call_that_hangs_among_others_is_alone_excluded_and_its_worker_stays(base: Path, kind: str):
    async with scoring(base, of("judged"), timeout_s=1.0) as scorer:
        (before,) = await scorer.score_all([trajectory(do="pid")])
        fine, hanging, raising, after = await scorer.score_all([trajectory(do=do) for do in ("", kind, "raise", "pid")])
    assert (fine.status, fine.reward) == ("ok", 0.5)
    assert found(hanging) == ("timeout", "no result within 1 s")
    assert found(raising) == ("error", "RuntimeError: no")
    assert after.reward == before.reward


@pytest.mark.parametrize(
    ("kind", "status", "reason"),
    [
        ("exit", "error", "the worker process died: exit code 7"),
        ("block", "timeout", "no result within 1 s, its worker was killed"),
    ],
)
async def test_a_call_that_kills_its_worker_is_excluded_alone(base: Path, kind: str, status: str, reason: str):
    async with scoring(base, of("judged"), timeout_s=1.0) as scorer:
        bad, *others = await scorer.score_all([trajectory(do=kind, wait=0.2), *[trajectory(wait=0.4)] * 5])
    assert found(bad) == (status, reason)
    assert {(score.status, score.reward) for score in others} == {("ok", 0.5)}


async def test_a_function_of_lists_gets_the_samples_that_wait(base: Path):
    async with scoring(base, of("lengths", batch=8, wait_ms=300)) as scorer:
        await scorer.score_all([trajectory()])
        scores = await scorer.score_all([trajectory(str(i), a=i) for i in range(12)])
    assert [score.reward for score in scores] == [8.0] * 8 + [4.0] * 4


@pytest.mark.parametrize(
    ("kind", "status", "reason"),
    [
        ("raise", "error", "RuntimeError: no"),
        ("exit", "error", "the worker process died: exit code 7"),
        ("hang", "timeout", "no result within 2 s, its worker was killed"),
    ],
)
async def test_one_sample_of_a_batch_that_fails_costs_no_other(base: Path, kind: str, status: str, reason: str):
    async with scoring(base, of("lengths", batch=4, wait_ms=200), timeout_s=2.0) as scorer:
        first, bad, last = await scorer.score_all([trajectory("a"), trajectory(kind), trajectory("b")])
    assert found(bad) == (status, reason)
    assert (first.reward, last.reward) == (1.0, 1.0)


async def test_none_from_a_function_of_lists_is_no_opinion_and_no_zero(base: Path):
    async with scoring(base, of("lengths"), {"name": "exact"}) as scorer:
        (both,) = await scorer.score_all([trajectory("none", answer="none")])
    assert both.components == {"exact": 1.0}
    async with scoring(base, of("lengths")) as scorer:
        (none,) = await scorer.score_all([trajectory("none")])
    assert (none.status, none.reason) == ("error", "no term applies to it")


async def test_functions_written_for_trl_are_taken_as_they_are(base: Path):
    async with scoring(base, of("only_completions", args={"scale": 2.0}), of("in_chat", chat=True)) as scorer:
        asked = [{"role": "user", "content": "?"}]
        talk = [*asked, {"role": "assistant", "content": "46!"}]
        right, wrong = await scorer.score_all(
            [trajectory("46", answer="46", other=1), trajectory("4", answer="46", messages=talk)]
        )
        assert right.components == {"mine.py:only_completions": 2.0, "mine.py:in_chat": 102.0}
        assert wrong.components == {"mine.py:only_completions": 0.0, "mine.py:in_chat": 103.0}
    async with scoring(base, of("few")) as scorer:
        first, _ = await scorer.score_all([trajectory(answer="46"), trajectory(answer="46")])
        assert first.status == "ok", "called on each alone it returns as many as it was asked for"


async def test_functions_written_for_verl_are_taken_as_they_are(base: Path):
    rows = [
        {"data_source": "sums", "reward_model": {"style": "rule", "ground_truth": "46"}, "extra_info": {"bonus": 0.25}},
        {"ground_truth": "47", "answer": "46"},
        {"answer": "46", "bonus": 3},
        {},
    ]
    async with scoring(base, of("compute_score")) as scorer:
        one, two, three, none = await scorer.score_all([trajectory("46", **row) for row in rows])
    assert [one.reward, two.reward, three.reward] == [2.25, 0.0, 4.0]
    assert found(none) == ("error", "ValueError: the data has no ground_truth, reward_model.ground_truth or answer")


async def test_what_waits_can_be_given_back_and_what_has_begun_ends_with_the_pool(base: Path):
    async with scoring(base, of("judged", concurrency=1)) as scorer:
        hanging, waiting = (
            asyncio.create_task(scorer.score(trajectory(do="hang", begun=str(base / name)))) for name in ("one", "two")
        )
        deadline = time.monotonic() + 30
        while not (base / "one").exists():
            assert time.monotonic() < deadline
            await asyncio.sleep(0.01)
        scorer.cancel_waiting()
        await asyncio.wait([waiting], timeout=10)
        assert (hanging.done(), waiting.cancelled()) == (False, True)
    with pytest.raises(InfraError, match="closed"):
        await hanging
    with pytest.raises(InfraError, match="closed"):
        await scorer.score_all([trajectory()])
    assert not (base / "two").exists()


@pytest.mark.parametrize(
    ("term", "reason"),
    [
        (of("plain", concurrency=2), "concurrency needs an async function"),
        (of("plain", batch=2), "batch is for functions of lists, (prompts, completions, **columns)"),
        (of("judged", wait_ms=2), "wait_ms is for functions of lists"),
        (of("judged", chat=True), "chat is for functions of lists"),
        (of("lengths", concurrency=2), "one of lists has batch"),
        (of("mixed"), "completion is of one sample and completions of lists"),
        (of("only_completions", args={"answer": "1", "scal": 1}), "did you mean 'scale'"),
        (of("compute_score", args={"solution_str": "1"}), "unknown argument 'solution_str'"),
    ],
)
def test_a_setting_that_does_not_fit_the_function_is_one_line(base: Path, term: dict, reason: str):
    with pytest.raises(ConfigError) as caught:
        check_reward([RewardTerm(**term)], base)
    assert reason in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("settings", [{}, {"batch": 4}])
async def test_what_a_function_loads_before_its_first_call_is_charged_to_no_sample(base: Path, settings: dict):
    name = "loaded_lists" if settings else "loaded"
    async with scoring(base, of(name, args={"path": "model"}, **settings), timeout_s=1.0) as scorer:
        assert [score.reward for score in await scorer.score_all([trajectory(), trajectory()])] == [4.0, 4.0]


async def test_a_worker_that_cannot_load_what_it_needs_says_so(base: Path):
    async with scoring(base, of("loaded", args={"path": "missing"})) as scorer:
        with pytest.raises(InfraError, match=r"reward 'mine.py:loaded': FileNotFoundError: missing"):
            await scorer.score_all([trajectory()])
