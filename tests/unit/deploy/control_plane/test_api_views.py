"""Whatever a payload or a model's output holds, the API can show it, in bounded time."""

from __future__ import annotations

import json
from collections.abc import Sequence

import msgspec
import pytest

from broker.telemetry.trajectories import StoredTrajectory
from deploy.cli.trajectories import print_trajectories, print_trajectory
from deploy.control_plane.routes.conversation import spoken_messages
from deploy.control_plane.routes.dead_letters import payload
from deploy.control_plane.routes.decoding import pieces
from deploy.control_plane.routes.trajectories import detail, head
from schemas.control_api import Trajectories
from schemas.messages import Segment, Turn
from tests.support.trainer.trajectories import make_trajectory


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


CONVERSATION = [
    {"role": "system", "content": "Use the tool."},
    {"role": "user", "content": [{"type": "text", "text": "37*84"}, {"type": "image_url", "image_url": {}}]},
    {
        "role": "assistant",
        "content": None,
        "reasoning_content": "It is a product.",
        "tool_calls": [
            {"id": "c1", "type": "function", "function": {"name": "calculator", "arguments": '{"a": 37}'}},
            {"id": "c2", "type": "function", "function": {"name": "clock", "arguments": {"zone": "UTC"}}},
        ],
    },
    {"role": "tool", "tool_call_id": "c1", "content": "3108"},
    {"role": "tool", "tool_call_id": "unknown", "content": "lost"},
    {"role": "assistant", "content": "3108"},
]


def test_an_episode_is_shown_as_its_messages_with_each_result_in_its_call() -> None:
    shown = spoken_messages(CONVERSATION)
    assert [(message.role, message.text) for message in shown] == [
        ("system", "Use the tool."),
        ("user", "37*84[image_url]"),
        ("assistant", ""),
        ("tool", "lost"),
        ("assistant", "3108"),
    ]
    assert shown[2].reasoning == "It is a product."
    assert [(tool.name, tool.arguments, tool.result) for tool in shown[2].tools] == [
        ("calculator", '{"a": 37}', "3108"),
        ("clock", '{"zone": "UTC"}', None),
    ]


def test_images_of_messages_and_of_results_of_tools_are_named_by_their_digests() -> None:
    image = {"type": "image", "digest": "0" * 32}
    shown = spoken_messages(
        [
            {"role": "user", "content": [{"type": "text", "text": "see"}, image, {"type": "image", "digest": "../x"}]},
            {"role": "assistant", "tool_calls": [{"id": "c1", "function": {"name": "look", "arguments": "{}"}}]},
            {"role": "tool", "tool_call_id": "c1", "content": [image, image]},
        ]
    )
    assert (shown[0].text, shown[0].images) == ("see[image][image]", ["0" * 32])
    assert shown[1].tools[0].images == ["0" * 32] * 2


@pytest.mark.parametrize(
    "messages",
    [
        None,
        3,
        "text",
        {"role": "user"},
        [None, 1, {}],
        [{"role": 1, "content": {1: b"x"}, "tool_calls": [1, {"function": 2}]}],
    ],
)
def test_messages_of_any_shape_can_be_shown(messages: object) -> None:
    for message in spoken_messages(messages):
        json.dumps(message.model_dump())


def test_an_episode_of_several_rows_is_shown_with_what_its_turns_earned(capsys: pytest.CaptureFixture[str]) -> None:
    episode = msgspec.structs.replace(
        make_trajectory(prompt=3, completion=4, finish="deadline"),
        segments=[Segment(0, 5), Segment(5, 7, 0, 3, "helper")],
        turns=[Turn("prompt", 0, 3), Turn("assistant", 3, 5, 0, 0.5), Turn("assistant", 5, 7, 1)],
        reward=0.25,
        metrics={"tools": 2.0},
        calls=2,
        data={"messages": CONVERSATION},
    )
    seen = StoredTrajectory(episode, None, "generated", 0.0)
    listed = head(seen)
    assert (listed.finish, listed.calls, listed.rows) == ("deadline", 2, 2)
    shown = detail(seen, None)
    assert [(s.start, s.end, s.parent, s.shared, s.name) for s in shown.segments] == [
        (0, 5, -1, 0, "main"),
        (5, 7, 0, 3, "helper"),
    ]
    assert [(turn.call, turn.reward) for turn in shown.turns] == [(-1, None), (0, 0.5), (1, None)]
    assert (shown.workflow_reward, shown.metrics, len(shown.messages)) == (0.25, {"tools": 2.0}, 5)
    print_trajectory(shown)
    printed = capsys.readouterr().out
    assert "finish deadline, 2 model calls in 2 rows" in printed
    assert 'reasoning: It is a product.\ncalls: calculator({"a": 37})\nresult: 3108\n' in printed
    assert "user: 37*84[image_url]\n" in printed
    for one, said in ((listed, True), (head(StoredTrajectory(make_trajectory(), None, "generated", 0.0)), False)):
        print_trajectories(Trajectories(trajectories=[one], examined=1, complete=True))
        assert (" 2/2 " in capsys.readouterr().out) == said
