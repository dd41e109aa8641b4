"""Whatever a payload or a model's output holds, the API can show it, in bounded time."""

from __future__ import annotations

import json
from collections.abc import Sequence

import msgspec
import pytest

from broker.api.routes.views import detail, payload, pieces
from broker.telemetry.trajectories import StoredTrajectory
from tests.support.trajectories import make_trajectory


class CountingDecoder:
    """Decoder of a tokenizer with a token for each byte, which counts the tokens it was given."""

    def __init__(self) -> None:
        self.tokens = 0

    def __call__(self, ids: Sequence[int]) -> str:
        self.tokens += len(ids)
        return bytes(ids).decode(errors="replace")


def test_the_pieces_of_a_text_of_broken_characters_cost_as_much_for_each_token_however_many_there_are() -> None:
    costs = []
    for count in (100, 1000):
        decode = CountingDecoder()
        assert "".join(pieces(decode, [0xFF] * count)) == "\ufffd" * count
        costs.append(decode.tokens / count)
    assert costs[1] < 1.1 * costs[0]


def test_whole_characters_after_broken_ones_are_shown() -> None:
    raw = b"\xff" * 20 + "é🎉b".encode()
    found = pieces(CountingDecoder(), list(raw))
    assert len(found) == len(raw)
    assert "".join(found) == raw.decode(errors="replace")
    assert found[-1] == "b"


@pytest.mark.parametrize(
    "value",
    [
        msgspec.msgpack.Ext(5, b"x"),
        {1: {(1, 2): "x"}},
        {None: 1},
        float("nan"),
        msgspec.Raw(b"\x91" * 5000 + b"\xc0"),
        {"deep": msgspec.Raw(b"\x91" * 500 + b"\xc0")},
        2**64 - 1,
        "\ud800".encode("utf-8", "surrogatepass"),
    ],
    ids=["extension", "tuple key", "None key", "NaN", "nested", "nested a little", "large", "surrogate"],
)
def test_any_payload_of_a_dead_letter_can_be_shown(value: object) -> None:
    json.dumps(payload(msgspec.msgpack.encode(value)))


@pytest.mark.parametrize("value", [msgspec.msgpack.Ext(5, b"x"), {None: 1}])
def test_any_data_of_a_trajectory_can_be_shown(value: object) -> None:
    trajectory = msgspec.structs.replace(make_trajectory(), data={"good": 1, "bad": value})
    shown = detail(StoredTrajectory(trajectory, None, "generated", 0.0), None).data
    assert shown["good"] == 1
    json.dumps(shown)
