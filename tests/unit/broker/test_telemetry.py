"""What users read through the broker: events, figures and samples, in order and bounded.

The streams are written by hand here and need no script, so an imitation of the server is enough.
"""

import os
import subprocess
import sys
import time
from importlib.metadata import version
from pathlib import Path
from types import ModuleType

import fakeredis
import msgspec
import pytest

from broker.connection.connection import Connection
from broker.connection.keys import Keys
from broker.evaluations.store import Evals
from broker.process_meter import ProcessMeter, read_processes
from broker.queues.dead_letters import DeadLetterStore
from broker.telemetry import trajectories
from broker.telemetry.events import Events
from broker.telemetry.heartbeats import Heartbeats
from broker.telemetry.metrics import Metrics
from broker.telemetry.trajectories import PAGE, TrajectoryStore
from schemas.codec import encode
from schemas.errors import RefusedError
from schemas.messages import DeadLetter, Event, Heartbeat, Score
from schemas.system import gpu_memory, processes
from tests.support.trainer.trajectories import make_trajectory

BUSY = "import sys, time; data = bytearray(64 << 20); print('begun', flush=True)\nwhile True: pass"


@pytest.fixture
def connection() -> Connection:
    connection = Connection("redis://127.0.0.1:1", Keys("tidemill", "readers"), 1.0)
    connection.client = fakeredis.FakeRedis()
    return connection


def event(text: str) -> bytes:
    return encode(Event(name="checkpoint", service="trainer", level="info", text=text))


def test_events_come_in_order_without_what_cannot_be_read(connection: Connection) -> None:
    for body in (event("one"), b"\xc1 nonsense", event("two"), event("three")):
        connection.client.xadd(connection.keys.events, {"b": body})
    connection.client.xadd(connection.keys.events, {"other": "field"})
    events = Events(connection)
    assert [found.text for found in [stored.event for stored in events.newest(10)]] == ["one", "two", "three"]
    assert [noted.event.text for noted in events.read_after("0-0", 10)] == ["one", "two", "three"]


def test_figures_go_on_where_they_were_read_up_to(connection: Connection) -> None:
    metrics = Metrics(connection)
    for step in range(1, 4):
        connection.client.xadd(connection.keys.metrics, {"j": f'{{"step": {step}}}'})
    position, lines = metrics.read_after("0-0", 2)
    assert [line["step"] for line in lines] == [1, 2]
    position, lines = metrics.read_after(position, 2)
    assert [line["step"] for line in lines] == [3]
    assert metrics.read_after(position, 2) == (position, [])
    assert [line["step"] for line in metrics.read_after("0-0", 100)[1][-2:]] == [2, 3]


def test_figures_that_cannot_be_read_hide_no_others(connection: Connection) -> None:
    for fields in ({"j": '{"step": 1}'}, {"j": b"\xff{"}, {"j": "[1]"}, {"other": "x"}, {"j": '{"step": 2}'}):
        connection.client.xadd(connection.keys.metrics, fields)
    metrics = Metrics(connection)
    assert [line["step"] for line in metrics.read_after("0-0", 100)[1][-10:]] == [1, 2]
    position, lines = metrics.read_after("0-0", 4)
    assert [line["step"] for line in lines] == [1]
    assert [line["step"] for line in metrics.read_after(position, 4)[1]] == [2]


def test_a_heartbeat_that_cannot_be_read_hides_no_other_service(connection: Connection) -> None:
    beats = {name: Heartbeat(service=name, role="generator", host="h", pid=1, state="running") for name in "ab"}
    other = msgspec.msgpack.decode(encode(beats["a"])) | {"schema": 99}
    for name, body in {
        "a": encode(beats["a"]),
        "x": msgspec.msgpack.encode(other),
        "y": b"",
        "b": encode(beats["b"]),
    }.items():
        connection.client.hset(connection.keys.services, name, body)
    assert [beat.service for beat in Heartbeats(connection).list()] == ["a", "b"]


def test_evaluations_that_cannot_be_read_hide_no_others(connection: Connection) -> None:
    fields = {"3:n": "4", "3:scored": "4", "3:sum": "2", "x:n": "1", "nonsense": "1", b"\xff": "1", "5:n": "x"}
    for name, value in fields.items():
        connection.client.hset(connection.keys.evals, name, value)
    found = Evals(connection, 1 << 20).read_results()
    assert [(result.version, result.n, result.mean) for result in found] == [(3, 4, 0.5)]


def test_a_letter_that_cannot_be_read_is_shown_as_such_and_hides_no_other(connection: Connection) -> None:
    good = encode(DeadLetter(source="reward", reason="no", deliveries=1, payload=b"p", task_id=1, sample=0))
    for fields in ({"b": good}, {"b": b"\xc1 nonsense"}, {"other": "field"}, {"b": good}):
        connection.client.xadd(connection.keys.dead, fields)
    letters = DeadLetterStore(connection)
    found = letters.page(1000, None, newest=False)[0]
    assert [filed.letter.source for filed in found] == ["reward", "unreadable", "unreadable", "reward"]
    assert found[1].letter.payload == b"\xc1 nonsense"
    assert "cannot be read" in letters.get(found[1].id).letter.reason
    with pytest.raises(RefusedError, match="can only be dropped"):
        letters.requeue(found[1].id)
    letters.drop(found[1].id)
    assert len(letters.page(1000, None, newest=False)[0]) == 3


def add_trajectory(connection: Connection, task: int, body: bytes) -> None:
    connection.client.hset(connection.keys.bodies, f"w.{task}", body)  # type: ignore[arg-type]
    connection.client.xadd(connection.keys.trajectories, {"b": f"w.{task}"})


def test_a_search_goes_over_pages_newest_first_and_says_whether_it_saw_all(connection: Connection) -> None:
    count = 2 * PAGE + 3
    for task in range(count):
        add_trajectory(connection, task, encode(make_trajectory(task)))
    add_trajectory(connection, count, b"nonsense")
    scored = {"t": "7", "n": "1", "0:1-1/w.7": encode(Score(reward=0.5))}
    connection.client.xadd(connection.keys.scored, scored)
    samples = TrajectoryStore(connection, 1 << 20)
    every = samples.search(lambda seen: True, limit=count, examine=count + 1)
    assert [seen.trajectory.task_id for seen in every.items] == list(reversed(range(count)))
    (one,) = samples.search(lambda seen: seen.score is not None, limit=2, examine=count + 1).items
    assert (one.trajectory.task_id, one.state, one.score and one.score.reward) == (7, "scored", 0.5)
    few = samples.search(lambda seen: seen.trajectory.task_id == 0, limit=1, examine=PAGE)
    assert (few.items, few.examined, few.complete) == ([], PAGE, False)


def test_a_search_reads_few_bytes_in_small_replies(connection: Connection, monkeypatch: pytest.MonkeyPatch) -> None:
    count, replies = 60, []
    for task in range(count):
        add_trajectory(connection, task, encode(make_trajectory(task, completion=1000)))
    body = len(encode(make_trajectory(0, completion=1000)))
    monkeypatch.setattr(trajectories, "SEARCH_BYTES", 30 * body)
    monkeypatch.setattr(trajectories, "PAGE_BYTES", 3 * body)
    original = connection.client.xrevrange

    def read(*args: object, **options: object) -> object:
        found = original(*args, **options)
        replies.append(len(found))
        return found

    monkeypatch.setattr(connection.client, "xrevrange", read)
    found = TrajectoryStore(connection, 1 << 20).search(lambda seen: False, limit=1, examine=1000)
    assert not found.complete
    assert 29 <= found.examined <= 32
    assert max(replies) <= 4


def cpu_seconds(pid: int) -> float:
    (use,) = read_processes(pid, alone=True).values()
    return use.cpu_s


def test_a_childs_processor_and_memory_count() -> None:
    child = subprocess.Popen([sys.executable, "-c", BUSY], stdout=subprocess.PIPE)
    try:
        assert child.stdout is not None
        assert child.stdout.readline()
        meter, alone = ProcessMeter(), ProcessMeter(alone=True)
        for one in (meter, alone):
            one.measure(time.monotonic())
        assert "cpu" not in meter.figures
        began, deadline = cpu_seconds(child.pid), time.monotonic() + 60
        while cpu_seconds(child.pid) < began + 0.2:
            assert time.monotonic() < deadline, "the child is given no processor"
            time.sleep(0.01)
        for one in (meter, alone):
            one.measure(time.monotonic())
        assert meter.figures["memory_bytes"] >= alone.figures["memory_bytes"] + (64 << 20)
        assert meter.figures["cpu"] > alone.figures["cpu"] >= 0
    finally:
        child.kill()
        child.wait()
        child.stdout.close()


@pytest.mark.parametrize(
    ("answer", "used", "patience_s"),
    [
        ('echo "$CHILD, 700"; echo "1, 5000"; echo "$OWN, 24"', 724 << 20, 60.0),
        ('echo "1, 5000"', 0, 60.0),
        ("echo No devices were found; exit 6", None, 60.0),
        ("exec sleep 60", None, 0.2),
    ],
    ids=["own and child's", "only others'", "no driver", "hangs"],
)
def test_memory_of_gpus_is_that_of_the_process_and_its_children(
    answer: str, used: int | None, patience_s: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    tool = tmp_path / "nvidia-smi"
    query = "--query-compute-apps=pid,used_memory --format=csv,noheader,nounits"
    tool.write_text(f'#!/bin/sh\n[ "$*" = "{query}" ] || exit 2\nOWN={os.getpid()} CHILD={child.pid}\n{answer}\n')
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.setattr(processes, "ASK_S", patience_s)
    try:
        meter = ProcessMeter()
        meter.measure(time.monotonic())
        assert meter.figures.get("gpu_memory_bytes") == used
        tool.unlink()
        meter.measure(time.monotonic())
        assert meter.figures.get("gpu_memory_bytes") == used, "asked again only after a while"
    finally:
        child.kill()
        child.communicate()


def test_gpu_memory_is_summed_by_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_memory, "ask", lambda command: "12, 100\n12, 20\n7, [N/A]\nno processes\n")
    assert gpu_memory.memory_by_process() == {12: 120 << 20}


def test_free_memory_is_that_of_the_gpus_that_a_process_may_use(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_memory, "ask", lambda command: "0, GPU-a, 10\n1, GPU-b, 20\n2, GPU-c, [N/A]\n")
    for visible, known in (("", {}), ("0,1,2", {"0": 10, "1": 20}), ("1", {"1": 20}), ("GPU-a,2", {"0": 10})):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        assert gpu_memory.free_memory() == {name: mib << 20 for name, mib in known.items()}


def test_a_heartbeat_says_with_which_driver_and_packages_a_service_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    gpus = "0, GPU-a, 580.95, NVIDIA H200\n1, GPU-b, 580.95, NVIDIA H200\n2, GPU-c, 580.95, NVIDIA L40S\n"
    monkeypatch.setattr(gpu_memory, "ask", lambda command: gpus if "driver_version" in command[1] else "")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1,GPU-a")
    # Only what a process has imported changes what it samples.
    monkeypatch.setitem(sys.modules, "torch", ModuleType("torch"))
    monkeypatch.delitem(sys.modules, "transformers", raising=False)
    meter = ProcessMeter()
    assert meter.software == {}
    meter.measure(time.monotonic())
    assert (meter.software["driver"], meter.software["gpu"]) == ("580.95", "NVIDIA H200")
    assert meter.software["torch"] == version("torch")
    assert "transformers" not in meter.software
    monkeypatch.setattr(gpu_memory, "ask", lambda command: "")
    meter = ProcessMeter()
    meter.measure(time.monotonic())
    assert not {"driver", "gpu"} & meter.software.keys()
    assert meter.software["torch"] == version("torch")
