"""What a page shows: any payload in bounded time, the minutes before it opened, and events until it closes."""

import asyncio
import json
from collections.abc import MutableMapping, Sequence
from typing import Any

import msgspec
import pytest
from starlette.requests import ClientDisconnect

from broker.telemetry.trajectories import StoredTrajectory
from deploy.cli.trajectories import print_trajectories, print_trajectory
from deploy.control_plane.app import make_app
from deploy.control_plane.routes.context import Context
from deploy.control_plane.routes.conversation import spoken_messages
from deploy.control_plane.routes.dead_letters import payload
from deploy.control_plane.routes.decoding import pieces
from deploy.control_plane.routes.trajectories import detail, trajectory_as
from deploy.control_plane.status.collector import PlannedRun
from deploy.control_plane.status.poller import StatusPoller
from deploy.control_plane.status.series import POINTS_KEPT, SERIES_KEPT, MetricsSeries, ThroughputSeries
from deploy.control_plane.web.sse import MAX_PAGES, Hub
from schemas.control_api.trajectories import Trajectories, TrajectoryHead
from schemas.messages import Segment, Turn
from tests.support.broker.run_statuses import make_status
from tests.support.configurations import minimal_config
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
    listed = trajectory_as(TrajectoryHead, seen)
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
    plain = trajectory_as(TrajectoryHead, StoredTrajectory(make_trajectory(), None, "generated", 0.0))
    for one, said in ((listed, True), (plain, False)):
        print_trajectories(Trajectories(trajectories=[one], examined=1, complete=True))
        assert (" 2/2 " in capsys.readouterr().out) == said


def looks(pace: ThroughputSeries, times: list[float]) -> None:
    seen = make_status()
    for time in times:
        rates = seen.throughput.model_copy(update={"generated_tokens": time})
        pace.add(seen.model_copy(update={"time": time, "throughput": rates}))


def test_one_point_a_second_is_kept_however_often_the_run_is_looked_at() -> None:
    pace = ThroughputSeries()
    looks(pace, [10.0, 10.1, 10.2, 11.0, 11.5, 12.0])
    history = pace.history()
    assert history.time == [10.0, 11.0, 12.0]
    assert history.generated_tokens == [10.0, 11.0, 12.0]
    assert len(history.trained_tokens) == 3


def test_the_oldest_are_forgotten() -> None:
    pace = ThroughputSeries()
    looks(pace, [float(second) for second in range(POINTS_KEPT + 5)])
    assert pace.history().time[0] == 5.0
    assert len(pace.history().time) == POINTS_KEPT


def test_figures_of_several_parts_are_series_too_and_their_number_is_bounded() -> None:
    series = MetricsSeries()
    series.add({"step": 1, "loss": 1, "reward/histogram": {"0.0": 3, "name": "x"}, "text": "no number"})
    series.add({"step": 2, "loss": 2.0})
    found = series.since(-1, 10)
    assert found.series == {"loss": [1.0, 2.0], "reward/histogram/0.0": [3.0, None]}
    series.add({"step": 3, **{f"made-up-{number}": number for number in range(2 * SERIES_KEPT)}})
    assert len(series.names) == SERIES_KEPT


def test_only_the_newest_steps_are_kept() -> None:
    series = MetricsSeries(keep=3)
    for step in range(5):
        series.add({"step": step, "loss": float(step), "staleness/histogram": {str(step): 1}})
    found = series.since(-1, 10)
    assert found.step == [2, 3, 4]
    assert found.series == {"loss": [2.0, 3.0, 4.0]}
    assert found.staleness == [{"2": 1}, {"3": 1}, {"4": 1}]


@pytest.fixture
def app() -> Any:
    config = minimal_config(model={"path": "m"})
    hub = Hub()
    hub.close()  # A stream ends as soon as it has sent what there is.
    poller = StatusPoller(None, PlannedRun.of(config))  # type: ignore[arg-type]
    return make_app(Context(PlannedRun.of(config), "control", None, poller, hub))  # type: ignore[arg-type]


async def follow(app: Any, spec_version: str, rude: bool) -> int:
    """Ask for the events, as a client that is gone before the first byte if ``rude``; return the status."""
    scope = {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": spec_version},
        "method": "GET",
        "path": "/v1/events",
        "raw_path": b"/v1/events",
        "query_string": b"",
        "headers": [(b"host", b"localhost")],
        "client": ("127.0.0.1", 1),
    }
    status = 0

    async def receive() -> MutableMapping[str, Any]:
        await asyncio.Event().wait()
        raise AssertionError

    async def send(message: MutableMapping[str, Any]) -> None:
        nonlocal status
        status = message.get("status", status)
        if rude:
            raise OSError("the client has gone")

    try:
        await app(scope, receive, send)
    except (OSError, ClientDisconnect):
        assert rude
    return status


@pytest.mark.parametrize("spec_version", ["2.3", "2.4"])
async def test_clients_that_leave_before_the_first_byte_lock_nobody_out(app: Any, spec_version: str) -> None:
    for _ in range(MAX_PAGES + 1):
        await follow(app, spec_version, rude=True)
    assert await follow(app, spec_version, rude=False) == 200
