"""Ranks: how they are laid out, which models a layout refuses, and which rank ends when and why."""

import json
import os
import queue
import signal
import threading
from pathlib import Path
from types import FrameType, SimpleNamespace
from typing import Any

import pytest

from consumers.trainer.distributed.layout import Layout, check_model, has_plain_attention, has_windows
from consumers.trainer.distributed.watchdog import LEAVE_S, SILENT_S, ExitReason, PeerMonitor, RankWatchdog
from schemas.config import ParallelConfig, parse_config
from schemas.errors import ERROR_EXIT, FENCED_EXIT, RUN_FAILED_EXIT, UNFINISHED_EXIT, ConfigError
from schemas.system.lifecycle import StopFlag

QWEN = {
    "model_type": "qwen3",
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 16,
}
DEADLINE_S = 30.0


def write(folder: Path, **changes: Any) -> Path:
    (folder / "config.json").write_text(json.dumps({**QWEN, **changes}))
    return folder


def test_shard_is_what_is_left() -> None:
    layout = Layout.of(16, ParallelConfig(tensor=2, context=2, replicate=2))
    assert layout == Layout(replicate=2, shard=2, context=2, tensor=2)
    assert layout.dp_size == 4


def test_neighbours_share_samples() -> None:
    layout = Layout(replicate=1, shard=2, context=2, tensor=2)
    assert [layout.dp_rank_of(rank) for rank in range(8)] == [0, 0, 0, 0, 1, 1, 1, 1]


def test_ranks_that_make_up_no_mesh_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"^the trainer has 6 processes, .* multiple of 4, .*tensor 2, context 2"):
        Layout.of(6, ParallelConfig(tensor=2, context=2))


@pytest.mark.parametrize(
    ("trainer", "says"),
    [
        ({"processes": 6, "parallel": {"tensor": 4}}, "trainer.processes 6 must be a multiple of 4"),
        ({"processes": 4, "parallel": {"tensor": 2}, "lora": {}}, "trainer.lora with trainer.parallel.tensor 2"),
        (
            {"processes": 4, "parallel": {"tensor": 2}, "compile": True},
            "trainer.compile with trainer.parallel.tensor 2",
        ),
        (
            {"processes": 4, "parallel": {"tensor": 2}, "optimizer": {"name": "adamw_8bit"}},
            "trainer.optimizer.name adamw_8bit with trainer.parallel.tensor 2",
        ),
        ({"router_replay": True, "compile": True}, "trainer.router_replay with trainer.compile"),
        ({"activation_offload": True}, "trainer.activation_offload requires trainer.activation_checkpointing"),
        ({"parallel": {"tensor": 0}}, "trainer.parallel.tensor"),
        ({"parallel": {"tensor": 2, "expert": 4}}, "trainer.parallel.expert 4 must be 1 or that of tensor, 2"),
    ],
)
def test_settings_that_do_not_go_together_are_refused(trainer: dict[str, Any], says: str) -> None:
    config = {"model": {"path": "m"}, "train": {"name": "arithmetic"}, "reward": {"terms": [{"name": "exact"}]}}
    with pytest.raises(ConfigError, match=says):
        parse_config({**config, "trainer": trainer})


@pytest.mark.parametrize(
    ("changes", "layout", "says"),
    [
        ({}, Layout(tensor=4), "num_key_value_heads 2 cannot be cut into trainer.parallel.tensor 4 equal parts"),
        ({"intermediate_size": 97}, Layout(tensor=2), "intermediate_size 97 cannot be cut"),
        ({}, Layout(tensor=2, expert=2), "transformers has no plan for experts of it"),
        (
            {"model_type": "qwen3_moe", "num_experts": 5, "moe_intermediate_size": 32},
            Layout(tensor=2, expert=2),
            "number of experts 5 cannot be cut",
        ),
        (
            {"model_type": "apertus", "hidden_act": "xielu"},
            Layout(tensor=2),
            "activation function xielu has parameters",
        ),
        ({"model_type": "gpt2"}, Layout(tensor=2), "no tensor-parallel plan for it"),
        ({}, Layout(context=3), "8 attention heads cannot be dealt to trainer.parallel.context 3"),
        ({}, Layout(context=8, tensor=2), "4 attention heads of a rank at trainer.parallel.tensor 2 cannot be dealt"),
        ({"num_attention_heads": 12, "num_key_value_heads": 4}, Layout(context=6), "4 heads of keys and values must"),
        (
            {"model_type": "qwen3_next", "layer_types": ["linear_attention"] * 2},
            Layout(context=2),
            "chunked or linear attention",
        ),
    ],
)
def test_an_uncuttable_model_is_refused(tmp_path: Path, changes: dict[str, Any], layout: Layout, says: str) -> None:
    with pytest.raises(ConfigError, match=says) as error:
        check_model(write(tmp_path, **changes), layout)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    "layout", [Layout(tensor=2), Layout(context=4), Layout(context=8), Layout(tensor=2, context=4)]
)
def test_a_model_that_can_be_cut_is_not(tmp_path: Path, layout: Layout) -> None:
    check_model(write(tmp_path), layout)


@pytest.mark.parametrize(
    "changes",
    [
        {"model_type": "mistral", "sliding_window": 8},
        {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 0},
    ],
)
def test_tokens_of_a_model_with_windows_can_be_cut(tmp_path: Path, changes: dict[str, Any]) -> None:
    check_model(write(tmp_path, **changes), Layout(context=2))


@pytest.mark.parametrize(
    ("config", "plain", "windows"),
    [
        ({}, True, False),
        ({"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 8}, True, True),
        ({"layer_types": ["sliding_attention"], "local_window": 8}, False, False),
        ({"layer_types": ["full_attention"], "sliding_window": 8}, True, False),
        ({"layer_types": ["chunked_attention"], "sliding_window": 8}, False, False),
        ({"sliding_window": 8, "use_sliding_window": False}, True, False),
        ({"sliding_window": 9}, True, False),
    ],
)
def test_windows_are_known_by_one_setting(config: dict[str, Any], plain: bool, windows: bool) -> None:
    """Those of another setting could not be made short in the trial of a model."""
    assert has_plain_attention(SimpleNamespace(**config)) is plain
    assert has_windows(SimpleNamespace(**config), 9) is windows


def test_where_nothing_is_cut_the_model_is_not_looked_at() -> None:
    check_model("there is no such model", Layout(shard=8, replicate=2))


def test_a_peer_that_is_killed_ends_this_rank() -> None:
    peers = PeerMonitor(0, [1, 2], now=0.0)
    assert peers.check(1.0) is None
    peers.note_disconnect(2)
    reason = peers.check(1.0)
    assert reason == ExitReason("rank 2 of the trainer was killed or its machine is gone; all ranks end", 1)


def test_the_first_reason_stays() -> None:
    peers = PeerMonitor(0, [1, 2], now=0.0)
    peers.note_message(1, "failed with ValueError: no", 1.0)
    peers.note_disconnect(1)
    peers.note_disconnect(2)
    reason = peers.check(2.0)
    assert reason is not None
    assert reason.text == "rank 1 of the trainer failed with ValueError: no; all ranks end"


def test_a_peer_that_falls_silent_counts_as_dead() -> None:
    peers = PeerMonitor(1, [0], now=0.0)
    peers.note_message(0, "here", 10.0)
    assert peers.check(10.0 + SILENT_S) is None
    reason = peers.check(10.1 + SILENT_S)
    assert reason is not None
    assert "silent for 30 s" in reason.text


def test_who_ended_as_it_should_is_not_missed() -> None:
    peers = PeerMonitor(0, [1], now=0.0)
    peers.note_message(1, "ended", 1.0)
    peers.note_disconnect(1)
    assert peers.check(1000.0) is None


def test_a_rank_that_does_not_follow_the_end_of_rank_0_is_ended() -> None:
    peers = PeerMonitor(1, [0], now=0.0)
    peers.note_message(0, "ended", 1.0)
    peers.note_disconnect(0)
    assert peers.check(1.0 + LEAVE_S) is None
    reason = peers.check(1.1 + LEAVE_S)
    assert reason is not None
    assert reason.code == 1


@pytest.mark.parametrize(
    ("line", "code"),
    [
        ("failed with FencedError: replaced", FENCED_EXIT),
        ("failed with RunFailed: no group can be trained", RUN_FAILED_EXIT),
        ("failed with DiskError: full", ERROR_EXIT),
        ("failed: rank 2 of the trainer was killed or its machine is gone; all ranks end", ERROR_EXIT),
    ],
)
def test_the_failure_of_rank_0_is_told_by_rank_0_alone_and_its_exit_code_is_everyones(line: str, code: int) -> None:
    """A machine that ends with 0 is not started again, and one that ends with 1 is, though another trainer runs."""
    peers = PeerMonitor(1, [0], now=0.0)
    peers.note_message(0, line, 1.0)
    reason = peers.check(1.0)
    assert reason is not None
    assert (reason.code, reason.told) == (code, True)


class Wire:
    """Stands in for the channel between two ranks of one process."""

    def __init__(self) -> None:
        self.data: queue.Queue[bytes] = queue.Queue()

    def send(self, rank: int, data: bytes) -> None:
        self.data.put(data)

    def receive(self, rank: int) -> bytes:
        return self.data.get(timeout=DEADLINE_S)


@pytest.fixture
def pair() -> tuple[RankWatchdog, RankWatchdog, queue.Queue[ExitReason]]:
    return connect(None, None)


def connect(
    first_stop: StopFlag | None, second_stop: StopFlag | None
) -> tuple[RankWatchdog, RankWatchdog, queue.Queue[ExitReason]]:
    """Two connected ranks, and the reasons of the first."""
    reasons: queue.Queue[ExitReason] = queue.Queue()
    wire = Wire()
    # A machine may call itself what no other one reaches, as Debian's /etc/hosts does.
    first = RankWatchdog(0, 2, wire, "127.0.1.1", first_stop, reasons.put)  # type: ignore[arg-type]
    second = RankWatchdog(1, 2, wire, "127.0.0.1", second_stop, lambda reason: None)  # type: ignore[arg-type]
    meeting = threading.Thread(target=first.__enter__)
    meeting.start()
    second.__enter__()
    meeting.join(DEADLINE_S)
    return first, second, reasons


def test_an_error_of_a_rank_reaches_another(
    pair: tuple[RankWatchdog, RankWatchdog, queue.Queue[ExitReason]],
) -> None:
    first, second, reasons = pair
    second.__exit__(ValueError, ValueError("a bad\nnumber"), None)
    assert reasons.get(timeout=DEADLINE_S).text == (
        "rank 1 of the trainer failed with ValueError: a bad number; all ranks end"
    )
    first.__exit__(None, None, None)


def test_ranks_that_end_well_end_in_any_order(pair: tuple[RankWatchdog, RankWatchdog, queue.Queue[ExitReason]]) -> None:
    first, second, reasons = pair
    second.__exit__(None, None, None)
    first.__exit__(None, None, None)
    assert reasons.empty()


class Busy(StopFlag):
    """The flag of a process whose main thread waits in a collective: no handler in Python runs before that ends."""

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        """Do nothing yet."""


@pytest.mark.parametrize("how", ["signal, main thread at work", "flag"])
def test_a_rank_that_is_asked_to_end_tells_rank_0(how: str) -> None:
    """Else no checkpoint is written, and what started the rank kills it in the end."""
    first_stop, second_stop = StopFlag(), Busy()
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        second_stop.install()
        first, second, reasons = connect(first_stop, second_stop)
        if how == "flag":
            second_stop.set()
        else:
            os.kill(os.getpid(), signal.SIGTERM)
        assert first_stop.wait(DEADLINE_S)
        assert (first_stop.signalled, first_stop.unfinished_code) == (False, UNFINISHED_EXIT)
        second.__exit__(None, None, None)
        first.__exit__(None, None, None)
        assert reasons.empty()
    finally:
        signal.set_wakeup_fd(-1)
        for number, handler in handlers.items():
            signal.signal(number, handler)
