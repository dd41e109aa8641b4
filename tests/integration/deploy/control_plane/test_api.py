"""The control plane's API on a real server: what it answers, refuses, streams and orders."""

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import msgspec
import pytest

from broker.client import Broker
from broker.heartbeat import HeartbeatThread
from broker.telemetry.trajectories import KEEP_BYTES, LONGEST_KEPT
from schemas.control_api.status import RunStatus
from schemas.digests import digest
from schemas.images import ImageSettings, probe_image
from schemas.messages import Event, Heartbeat, Score, Segment, Turn
from tests.support.broker.control_plane import DEADLINE_S, ControlPlane
from tests.support.broker.one_group import WEIGHTS, publish_weights
from tests.support.broker.prompt_groups import make_task, make_trajectory
from tests.support.broker.trainer_sessions import take_over

ROOMS = {"room:generator": 1.0, "room:reward": 1.0}
NODES_HAVE = "the machines of `tidemill node` that are here have room for"


@pytest.fixture
def api(broker: Broker) -> Iterator[ControlPlane]:
    with ControlPlane(broker, "api") as api:
        yield api


def test_the_status_of_a_run_that_has_not_begun(api: ControlPlane) -> None:
    status, body = api.ask("GET", "/v1/status")
    assert status == 200
    found = RunStatus.model_validate(body)
    assert (found.state, found.pause.mode, found.ledger.balanced) == ("starting", "none", True)
    assert not found.scaling.possible


def test_weight_versions_are_listed_with_their_sizes(api: ControlPlane, broker: Broker, tmp_path: Path) -> None:
    assert api.ask("GET", "/v1/weights") == (200, {"weights": [], "next": None})
    training = take_over(broker)
    for version in (3, 4):
        publish_weights(broker, training.leader_term, version, tmp_path, keep=2)
    found = api.ask("GET", "/v1/weights")[1]["weights"]
    assert [one["version"] for one in found] == [3, 4]
    assert (found[1]["bytes"], found[1]["whole"], found[1]["transport"]) == (len(WEIGHTS), True, "redis")
    assert (found[1]["delta_base"], found[1]["adapter_rank"], found[1]["leader_term"]) == (None, None, 1)


def test_orders_are_idempotent_and_the_timeline_says_who_gave_them(api: ControlPlane) -> None:
    take_over(api.broker)
    api.broker.heartbeats.send(Heartbeat(service="g", role="generator", host="h", pid=1, state="running"))
    first = api.ask("POST", "/v1/pause", {"mode": "freeze"}, x_tidemill_by="ann@desk")[1]
    again = api.ask("POST", "/v1/pause", {"mode": "freeze"})[1]
    assert (first["changed"], first["done"], first["waiting_for"]) == (True, False, ["g"])
    assert (again["changed"], again["state"]) == (False, "pausing")
    assert api.broker.ledger.admit(make_task(0)).answer == "paused"
    order = api.broker.run_control.read()
    assert order is not None
    beat = Heartbeat(
        service="g", role="generator", host="h", pid=1, state="paused", acknowledged={"pause": order.pause_id}
    )
    api.broker.heartbeats.send(beat)
    assert api.ask("POST", "/v1/pause", {"wait_s": 5})[1]["done"]
    assert api.ask("GET", "/v1/status")[1]["state"] == "paused"
    assert api.ask("POST", "/v1/resume")[1]["changed"]
    events = api.ask("GET", "/v1/timeline")[1]["events"]
    assert [(event["name"], event["data"]["by"]) for event in events] == [
        ("paused", "ann@desk"),
        ("resumed", "127.0.0.1"),
    ]


def test_questions_without_an_answer_hold_up_no_order(api: ControlPlane) -> None:
    """Each waits for its answer, and more of them than there are threads for orders."""
    take_over(api.broker)
    question = {"prompt": "1+1=", "wait_s": 15}

    def ask() -> None:
        with suppress(OSError, json.JSONDecodeError):  # The control plane ends first.
            api.ask("POST", "/v1/generate", question)

    asking = [threading.Thread(target=ask, daemon=True) for _ in range(16)]
    for thread in asking:
        thread.start()
    connection = api.broker.connection
    api.wait("all questions", lambda: connection.client.llen(connection.keys.questions) == 16)
    assert api.ask("POST", "/v1/generate", question)[0] == 503, "no more than these"
    assert api.ask("POST", "/v1/pause", {"mode": "drain"})[0] == 200
    assert all(thread.is_alive() for thread in asking)


def test_settings_are_checked_changed_and_logged(api: ControlPlane) -> None:
    assert api.ask("PATCH", "/v1/settings", {"batch": 4})[0] == 409
    take_over(api.broker)
    assert api.ask("PATCH", "/v1/settings", {"batch": 4, "concurrency": 9})[1]["batch"] == 4
    assert api.broker.ledger.read_state().control.settings["concurrency"] == 9
    status, problem = api.ask("PATCH", "/v1/settings", {"batch": 100_000})
    assert (status, problem["detail"]) == (409, "batch 100000 is not allowed: at most 8 in a run configured with 1")
    for wrong in ({"batch": 0}, {"batch": "x"}, {"batch": True}, {"lr": True}, {"bach": 3}, {}, {"staleness": 10**9}):
        assert api.ask("PATCH", "/v1/settings", wrong)[0] == 422


def test_scale_and_stop_are_refused_where_nobody_could_obey(api: ControlPlane) -> None:
    status, problem = api.ask("POST", "/v1/scale", {"role": "generator", "replicas": 3})
    assert status == 409
    assert "kubectl scale deployment generator --replicas=3" in problem["detail"]
    assert api.ask("POST", "/v1/stop")[0] == 409
    with HeartbeatThread(api.broker, "up", "supervisor", lambda: ("running", -1, ROOMS)):
        api.wait("the supervisor", lambda: api.ask("GET", "/v1/status")[1]["scaling"]["possible"])
        assert api.ask("POST", "/v1/scale", {"role": "generator", "replicas": 3})[1]["changed"]
        assert api.ask("POST", "/v1/scale", {"role": "trainer", "replicas": 3})[0] == 422
    orders = api.broker.run_control.read()
    assert orders is not None
    assert orders.replicas == {"generator": 3}


def test_a_pool_is_scaled_by_its_name(broker: Broker) -> None:
    with (
        ControlPlane(broker, "pools", pools={"fast": {}, "old": {}}) as api,
        HeartbeatThread(broker, "up", "supervisor", lambda: ("running", -1, {"room:generator.old": 1.0})),
    ):
        api.wait("the supervisor", lambda: api.ask("GET", "/v1/status")[1]["scaling"]["possible"])
        answer = api.ask("POST", "/v1/scale", {"role": "generator", "pool": "old", "replicas": 2})[1]
        assert answer["text"] == "0 of 2 generator.old services are alive"
        for wrong, name in (({}, "generator"), ({"pool": "new"}, "generator.new")):
            status, problem = api.ask("POST", "/v1/scale", {"role": "generator", "replicas": 2, **wrong})
            assert status == 409
            assert problem["detail"] == (
                f"{name} cannot be scaled in this run, these can: generator.fast, generator.old, reward"
            )
    orders = broker.run_control.read()
    assert orders is not None
    assert orders.replicas == {"generator.old": 2}


def test_a_pool_of_other_machines_is_scaled_on_those_that_are_here(broker: Broker) -> None:
    order = {"role": "generator", "pool": "far"}
    with ControlPlane(broker, "nodes", pools={"far": {"nodes": ["*"]}, "here": {}}) as api, ExitStack() as stack:

        def start(name: str, role: str, kind: str, room: float) -> None:
            figures = {f"room:generator.{kind}": room}
            stack.enter_context(HeartbeatThread(broker, name, role, lambda: ("running", -1, figures)))

        start("up", "supervisor", "here", 1.0)
        api.wait("the supervisor", lambda: api.ask("GET", "/v1/status")[1]["scaling"]["possible"])
        status, problem = api.ask("POST", "/v1/scale", {**order, "replicas": 1})
        assert (status, problem["detail"]) == (409, f"{NODES_HAVE} 0 generator.far")
        start("node-b", "node", "far", 1.0)
        start("node-a", "node", "far", 4.0)
        api.wait("the nodes", lambda: len(api.ask("GET", "/v1/status")[1]["services"]) == 3)
        assert api.ask("POST", "/v1/scale", {**order, "replicas": 4})[0] == 200
        orders = broker.run_control.read()
        assert orders is not None
        assert orders.replicas == {"generator.far@a": 3, "generator.far@b": 1}
        status, problem = api.ask("POST", "/v1/scale", {**order, "replicas": 6})
        assert (status, problem["detail"]) == (409, f"{NODES_HAVE} 5 generator.far")
        api.wait("the number", lambda: api.ask("GET", "/v1/status")[1]["scaling"]["replicas"]["generator.far"] == 4)


def test_a_run_is_not_scaled_beyond_its_quota(broker: Broker) -> None:
    with (
        ControlPlane(broker, "quota", quota=4) as api,
        HeartbeatThread(broker, "up", "supervisor", lambda: ("running", -1, ROOMS)),
    ):
        api.wait("the supervisor", lambda: api.ask("GET", "/v1/status")[1]["scaling"]["possible"])
        assert api.ask("GET", "/v1/status")[1]["scaling"]["max_devices"] == 4
        status, problem = api.ask("POST", "/v1/scale", {"role": "generator", "replicas": 4})
        assert (status, problem["detail"]) == (
            409,
            "4 generator and the trainer's 1 would hold 5 devices, and supervisor.max_devices is 4",
        )
        assert api.ask("POST", "/v1/scale", {"role": "generator", "replicas": 3})[1]["changed"]
        assert api.ask("POST", "/v1/scale", {"role": "reward", "replicas": 9})[1]["changed"]


def test_a_refusal_names_the_command_that_scales_here(broker: Broker) -> None:
    with ControlPlane(broker, "hint", scale_hint="docker-compose up -d --scale {role}={replicas}") as api:
        problem = api.ask("POST", "/v1/scale", {"role": "reward", "replicas": 3})[1]
        assert problem["detail"].endswith("run: docker-compose up -d --scale reward=3")
        assert api.ask("GET", "/v1/status")[1]["scaling"]["refusal"].endswith("--scale generator=N")


def test_trajectories_are_found_by_what_they_are(api: ControlPlane) -> None:
    take_over(api.broker)
    api.broker.ledger.admit(make_task(0))
    tasks = api.broker.task_queue("g")
    tasks.read(1, 10)
    tasks.publish(0, [make_trajectory(0, 0), make_trajectory(0, 1)])
    scores = api.broker.score_queue("r")
    scores.publish([(item, Score(reward=float(item.message.sample))) for item in scores.read(2, 10)])
    assert len(api.ask("GET", "/v1/trajectories")[1]["trajectories"]) == 2
    (only,) = api.ask("GET", "/v1/trajectories?reward_min=0.5&state=scored")[1]["trajectories"]
    assert (only["sample"], only["reward"]) == (1, 1.0)
    assert api.ask("GET", "/v1/trajectories?version=99")[1]["trajectories"] == []
    whole = api.ask("GET", "/v1/trajectories/0/1")[1]
    table = whole["token_table"]
    assert len(table["id"]) == len(table["mask"]) == len(table["logprob"]) == len(table["version"])
    assert api.ask("GET", "/v1/trajectories/7/7")[0] == 404
    assert api.ask("GET", "/v1/trajectories?limit=0")[0] == 422


def test_an_agents_episode_is_shown_with_its_end_its_rows_and_what_its_turns_earned(api: ControlPlane) -> None:
    take_over(api.broker)
    api.broker.ledger.admit(make_task(0))
    tasks = api.broker.task_queue("g")
    tasks.read(1, 10)
    episode = msgspec.structs.replace(
        make_trajectory(0, 0),
        finish="deadline",
        segments=[Segment(0, 2), Segment(2, 3, 0, 1, "helper")],
        turns=[Turn("prompt", 0, 2), Turn("assistant", 2, 3, 0, 0.5)],
    )
    tasks.publish(0, [episode, make_trajectory(0, 1)])
    (only,) = api.ask("GET", "/v1/trajectories?finish=deadline")[1]["trajectories"]
    assert (only["sample"], only["finish"]) == (0, "deadline")
    whole = api.ask("GET", "/v1/trajectories/0/0")[1]
    assert whole["segments"] == [
        {"start": 0, "end": 2, "parent": -1, "shared": 0, "name": "main"},
        {"start": 2, "end": 3, "parent": 0, "shared": 1, "name": "helper"},
    ]
    assert [(turn["call"], turn["reward"]) for turn in whole["turns"]] == [(-1, None), (0, 0.5)]


def test_trained_trajectories_are_found_while_the_pipeline_still_holds_them(api: ControlPlane) -> None:
    take_over(api.broker)
    api.broker.ledger.admit(make_task(0))
    tasks = api.broker.task_queue("g")
    tasks.read(1, 10)
    tasks.publish(0, [make_trajectory(0, 0)])
    api.broker.trajectory_store.keep(3, [(make_trajectory(0, 0), 1.0)])
    (only,) = api.ask("GET", "/v1/trajectories?state=trained")[1]["trajectories"]
    assert (only["task_id"], only["step"]) == (0, 3)
    assert api.ask("GET", "/v1/trajectories/0/0")[1]["state"] == "trained"


def test_dead_letters_are_shown_and_dropped(api: ControlPlane) -> None:
    take_over(api.broker)
    api.broker.ledger.admit(make_task(0))
    queue = api.broker.task_queue("g")
    queue.read(1, 10)
    queue.fail_sample(0, 0, "too long")
    found = api.ask("GET", "/v1/dead-letters")[1]
    assert (found["total"], found["letters"][0]["reason"]) == (1, "too long")
    id = found["letters"][0]["id"]
    assert api.ask("GET", f"/v1/dead-letters/{id}")[1]["task_id"] == 0
    assert api.ask("POST", f"/v1/dead-letters/{id}/requeue")[0] == 409
    assert api.ask("DELETE", f"/v1/dead-letters/{id}")[0] == 200
    assert api.ask("DELETE", f"/v1/dead-letters/{id}")[0] == 404


def test_events_resume_where_they_broke_off(api: ControlPlane) -> None:
    for number in range(3):
        api.broker.events.emit(Event(name="e", service="s", text=str(number)))
    first = api.broker.events.newest(3)[0].id

    def read(count: int, last: str) -> list[str]:
        texts: list[str] = []
        request = Request(f"{api.url}/v1/events", headers={"Last-Event-ID": last})
        with urlopen(request, timeout=DEADLINE_S) as stream:
            name = b""
            while len(texts) < count:
                line = stream.readline().strip()
                if line.startswith(b"event: "):
                    name = line
                if line.startswith(b"data: ") and name == b"event: event":
                    texts.append(json.loads(line[6:])["text"])
                if len(texts) == 2 and count == 3:
                    api.broker.events.emit(Event(name="e", service="s", text="live"))
                    count, texts = 1, []
        return texts

    assert read(2, first) == ["1", "2"]
    assert read(3, first) == ["live"]


def test_metrics_and_history_follow_the_steps(api: ControlPlane) -> None:
    api.broker.metrics.append({"step": 1, "reward/mean": 0.5, "staleness/histogram": {"0": 4, "2": 1}})
    api.wait("the step", lambda: api.ask("GET", "/v1/metrics-history")[1]["step"] == [1])
    assert api.ask("GET", "/v1/metrics-history?name=reward/mean")[1]["series"] == {"reward/mean": [0.5]}
    status, problem = api.ask("GET", "/v1/metrics-history?name=reward/meen")
    assert (status, problem["detail"]) == (404, "the run has no metric 'reward/meen'; did you mean reward/mean?")
    assert api.ask("GET", "/v1/metrics-history?name=train/loss")[1]["series"] == {}, "one that is not measured yet"
    with urlopen(f"{api.url}/metrics", timeout=DEADLINE_S) as page:
        text = page.read().decode()
    assert 'tidemill_staleness_versions_bucket{le="1.0"} 4.0' in text
    assert "tidemill_reward_mean 0.5" in text
    assert api.broker.connection.url not in text


def test_the_document_names_every_answer(api: ControlPlane) -> None:
    document = api.ask("GET", "/openapi.json")[1]
    for path, item in document["paths"].items():
        for operation in item.values():
            assert operation["responses"]["503"]["content"].keys() == {"application/problem+json"}, path
    assert "HTTPValidationError" not in json.dumps(document)
    assert api.ask("GET", "/nothing")[0] == 404
    assert api.ask("PUT", "/v1/status")[0] == 405


def test_long_episodes_are_kept_for_reading_and_few_of_them(api: ControlPlane) -> None:
    take_over(api.broker)
    store, recent = api.broker.trajectory_store, api.broker.connection.keys.recent
    for step in range(20):
        episode = make_trajectory(step, 0)
        episode.data = {"messages": [{"role": "user", "content": "x" * (LONGEST_KEPT - 1000)}]}
        store.keep(step, [(episode, 1.0)])
    size = LONGEST_KEPT * api.broker.connection.client.xlen(recent)
    assert LONGEST_KEPT <= size <= KEEP_BYTES
    assert api.ask("GET", "/v1/trajectories/19/0")[1]["messages"][0]["role"] == "user"
    too_long = make_trajectory(99, 0)
    too_long.prompt = "x" * LONGEST_KEPT
    store.keep(99, [(too_long, 1.0), (make_trajectory(98, 0), 0.0)])
    assert api.ask("GET", "/v1/trajectories/98/0")[0] == 200
    assert api.ask("GET", "/v1/trajectories/99/0")[0] == 404


def test_what_the_trainer_adds_to_a_sample_may_exceed_a_message(make_broker: Callable[..., Broker]) -> None:
    """A teacher's log-probabilities, and moments of the trace."""
    small = make_broker(max_message_bytes=4096)
    take_over(small)
    sample = make_trajectory(7, 0)
    assert len(small.trajectory_store.keep(1, [(sample, 1.0)], moment=bytes(5000))) == 1
    found = small.trajectory_store.get(7, 0)
    assert found is not None
    assert found.trajectory.trace == bytes(5000)


def test_images_are_handed_out_as_png_files_to_those_who_may_read(broker: Broker, tmp_path: Path) -> None:
    image, page = probe_image(ImageSettings(14, 2, 2, 784, 12544, (0.5,) * 3, (0.5,) * 3)), b"<html><script>"
    (tmp_path / "samples" / "images").mkdir(parents=True)
    kept = tmp_path / "samples" / "images" / f"{'1' * 32}.png"
    kept.write_bytes(image)
    kept.with_name(f"{'2' * 32}.png").write_bytes(page)
    take_over(broker)
    broker.ledger.admit(make_task(0))
    broker.task_queue("g").keep_images(0, {digest(image): image, digest(page): page})

    def get(url: str, token: str) -> tuple[int, bytes, str, str]:
        try:
            with urlopen(Request(url, headers={"Authorization": f"Bearer {token}"}), timeout=20) as answer:
                headers = answer.headers
                return answer.status, answer.read(), headers["content-type"], headers["x-content-type-options"]
        except HTTPError as error:
            return error.code, b"", error.headers["content-type"], error.headers["x-content-type-options"]

    with ControlPlane(broker, "api", folder=tmp_path, token="the-token-of-orders-123") as api:
        images = f"{api.url}/v1/images"
        for name in (digest(image), "1" * 32):
            assert get(f"{images}/{name}", "the-token-of-orders-123") == (200, image, "image/png", "nosniff")
            assert get(f"{images}/{name}", "another-token-of-nobody")[0] == 401
        for wrong in (digest(page), "2" * 32, "3" * 32):
            assert get(f"{images}/{wrong}", "the-token-of-orders-123")[0] == 404
        assert get(f"{images}/..%2F..%2Fconfig", "the-token-of-orders-123")[0] in (404, 422)
