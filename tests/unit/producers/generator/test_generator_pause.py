"""What holds a generator back: its capacity, pauses with several reasons, and an engine that hangs."""

import asyncio
import subprocess
import sys
import threading
import time
from typing import cast

import psutil
import pytest

from broker.client import Broker
from broker.flow.run_control import ControlState
from producers.engines.base import Engine, KvCacheUsage
from producers.engines.vllm.arguments import check_machine
from producers.generator import orders
from producers.generator.hang_watchdog import CHECK_S, Stall
from producers.generator.orders import OrderFollower
from producers.generator.task_loop import MeanSampleSize, cache_need, groups_to_take
from schemas.errors import ConfigError
from schemas.system.lifecycle import StopFlag

HUNG = """
import multiprocessing, os, signal, time
from producers.generator.hang_watchdog import end_hung_process

if __name__ == "__main__":
    child = multiprocessing.get_context("spawn").Process(target=time.sleep, args=(300,))
    child.start()
    os.kill(child.pid, signal.SIGSTOP)  # so deep asleep that it can't notice anything
    print(child.pid, flush=True)
    end_hung_process("the engine hangs")
"""


@pytest.mark.parametrize(
    ("in_flight", "cache", "mean", "expected"),
    [
        (10, None, 50.0, 54),
        (70, None, 50.0, 0),
        (10, KvCacheUsage(100_000, 400, 0), 50.0, 54),
        (0, KvCacheUsage(100, 0, 0), 500.0, 1),
        (0, KvCacheUsage(1000, 0, 0), 100.0, 9),
        (10, KvCacheUsage(1000, 200, 0), 50.0, 9),
        (10, KvCacheUsage(1000, 800, 0), 50.0, 1),
        (10, KvCacheUsage(1000, 960, 0), 50.0, 0),
        (10, KvCacheUsage(10_000, 100, 6), 50.0, 0),
        (10, KvCacheUsage(12_800, 1280, 0, 128), 50.0, 54),
        (10, KvCacheUsage(2560, 1280, 0, 128), 50.0, 9),
        (10, KvCacheUsage(2560, 1280, 0, 128), 130.0, 0),
    ],
    ids=[
        "the limit, if memory is not a limit",
        "a group may exceed the limit, then nothing more is taken",
        "a large cache",
        "an idle generator takes work in any case",
        "but no more than fits",
        "those in flight will grow to the mean",
        "those in flight are longer than the mean",
        "full",
        "most samples wait for their first token",
        "a large cache in blocks",
        "a sample takes a whole block",
        "and a second one when it goes beyond",
    ],
)
def test_groups_to_take(in_flight: int, cache: KvCacheUsage | None, mean: float, expected: int) -> None:
    assert groups_to_take(64, in_flight, cache, mean, n=1) == expected


def test_groups_are_whole() -> None:
    assert groups_to_take(64, 0, None, 50.0, n=8) == 8
    assert groups_to_take(64, 60, None, 50.0, n=8) == 1, "the last one may go beyond the limit"
    assert groups_to_take(64, 0, KvCacheUsage(1000, 0, 0), 50.0, n=8) == 2
    assert groups_to_take(64, 16, KvCacheUsage(1000, 800, 0), 50.0, n=8) == 0, "but not beyond the memory"
    assert groups_to_take(64, 0, KvCacheUsage(100, 0, 0), 50.0, n=8) == 1, "unless there is nothing else to do"


def test_the_mean_is_that_of_the_longest_until_samples_tell() -> None:
    size = MeanSampleSize(1000)
    assert size.tokens == 1000
    for _ in range(20):
        size.add(100)
    assert 100 < size.tokens < 200
    for _ in range(300):
        size.add(300)
    assert 290 < size.tokens <= 300


def test_a_sample_needs_its_own_tokens_and_its_share_of_the_prompt() -> None:
    assert cache_need(bytes([0] * 80 + [1] * 5), n=8) == 15
    assert cache_need(bytes([0] * 80 + [1] * 5 + [0] * 3 + [1] * 2), n=8) == 20
    assert cache_need(bytes([0] * 80), n=8) == 10


def test_arguments_that_this_machine_cannot_follow_are_one_line() -> None:
    check_machine({"tensor_parallel_size": 4, "data_parallel_size": 2}, on_cpu=False, devices=8)
    check_machine({"tensor_parallel_size": 16, "distributed_executor_backend": "ray"}, on_cpu=False, devices=8)
    check_machine({"tensor_parallel_size": 1}, on_cpu=True, devices=1)
    with pytest.raises(ConfigError, match=r"tensor_parallel_size 4, pipeline_parallel_size 4 need 16 GPUs.* shows 8"):
        check_machine({"tensor_parallel_size": 4, "pipeline_parallel_size": 4}, on_cpu=False, devices=8)
    with pytest.raises(ConfigError, match="one process"):
        check_machine({"tensor_parallel_size": 2}, on_cpu=True, devices=1)
    with pytest.raises(ConfigError, match="enforce_eager False: vLLM does not compile on a CPU"):
        check_machine({"enforce_eager": False}, on_cpu=True, devices=1)


class RecordingEngine:
    def __init__(self) -> None:
        self.calls: list[str] = []

    async def pause(self) -> None:
        self.calls.append("pause")

    async def resume(self) -> None:
        self.calls.append("resume")


class SilentBroker:
    """Answers with ``control`` once ``answers`` is set."""

    def __init__(self) -> None:
        self.control = ControlState()
        self.answers = threading.Event()
        self.run_control = self

    def wait_order(self, position: bytes) -> None:
        """Nothing changes."""

    def order_position(self) -> bytes:
        return b"1"

    def read(self) -> ControlState:
        assert self.answers.wait(30)
        return self.control


def follower() -> tuple[OrderFollower, RecordingEngine]:
    engine = RecordingEngine()
    return OrderFollower(cast(Broker, None), cast(Engine, engine)), engine


async def test_a_generator_begins_paused_until_it_has_read_the_orders_once() -> None:
    pause, engine = follower()
    assert not pause.is_open
    assert pause.reasons == {"starting"}
    await pause.follow(None)
    assert pause.is_open
    assert not pause.reasons
    assert engine.calls == []


async def test_a_freeze_pauses_the_engine_and_the_next_order_resumes_it() -> None:
    pause, engine = follower()
    await pause.engine_started()
    await pause.follow(ControlState(pause="freeze", pause_id=3))
    assert not pause.is_open
    assert pause.reasons == {"ordered"}
    assert pause.acknowledged == {"pause": 3}
    await pause.follow(None)
    assert not pause.is_open, "a broker that knows no orders ends no pause"
    await pause.follow(ControlState(pause_id=4))
    assert pause.is_open
    assert engine.calls == ["pause", "resume"]
    assert pause.acknowledged == {"pause": 4}


async def test_a_silent_broker_pauses_and_its_answer_ends_that_reason_alone(monkeypatch) -> None:
    monkeypatch.setattr(orders, "FENCE_S", 0.01)

    broker, engine, stop = SilentBroker(), RecordingEngine(), StopFlag()
    pause = OrderFollower(cast(Broker, broker), cast(Engine, engine))
    await pause.engine_started()
    await pause.follow(ControlState(pause="freeze", pause_id=1))
    running = asyncio.create_task(pause.run(stop))
    async with asyncio.timeout(30):
        while "broker silent" not in pause.reasons:  # noqa: ASYNC110 - nothing tells of a pause that begins
            await asyncio.sleep(0.001)
        assert "ordered" in pause.reasons
        broker.control = ControlState(pause="freeze", pause_id=1)
        broker.answers.set()
        while "broker silent" in pause.reasons:  # noqa: ASYNC110 - the pause continues for another reason
            await asyncio.sleep(0.001)
        assert pause.reasons == {"ordered"}
        assert not pause.is_open
        broker.control = ControlState(pause_id=2)
        assert await pause.wait_open()
        stop.set()
        await running
    assert engine.calls == ["pause", "resume"]


async def test_the_clock_of_deadlines_stands_still_in_pauses(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = 100.0
    monkeypatch.setattr(orders.time, "monotonic", lambda: now)

    pause, _ = follower()
    at_start, now = pause.clock(), 107.0
    assert pause.clock() == at_start
    await pause.follow(None)
    now = 110.0
    assert pause.clock() == at_start + 3
    await pause.follow(ControlState(pause="freeze", pause_id=1))
    now = 150.0
    await pause.follow(ControlState(pause="freeze", pause_id=2))
    now = 160.0
    assert pause.clock() == at_start + 3
    await pause.follow(ControlState(pause_id=3))
    now = 161.0
    assert pause.clock() == at_start + 4


def silences(growths: list[int | None], step_s: float = CHECK_S) -> list[float]:
    stall = Stall()
    return [stall.observe(growth, at * step_s) for at, growth in enumerate(growths)]


def test_an_engine_whose_requests_do_not_grow_hangs_for_longer_and_longer():
    assert silences([5, 5, 5]) == [0, CHECK_S, 2 * CHECK_S]


def test_growth_ends_the_silence_also_when_the_number_falls_with_a_finished_request():
    assert silences([5, 5, 6, 6, 2]) == [0, CHECK_S, 0, CHECK_S, 0]


def test_an_idle_or_paused_engine_never_hangs():
    assert silences([5, None, None, 5, 5]) == [0, 0, 0, 0, CHECK_S]


def test_time_in_which_the_whole_process_was_frozen_does_not_count():
    assert max(silences([5, 5], step_s=10_000)) == 2 * CHECK_S


def test_no_child_outlives_a_process_that_ends_because_of_a_hung_engine():
    done = subprocess.run([sys.executable, "-c", HUNG], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1, done.stderr
    child = int(done.stdout.split()[0])
    end = time.monotonic() + 30
    while exists(child):
        assert time.monotonic() < end, "the child is still there"
        time.sleep(0.01)


def exists(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
