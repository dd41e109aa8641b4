"""A trainer is killed: a receiver of traces has the spans that an undisturbed run sends, with the same ids.

A span may come twice, because a step may be trained twice. It is the same span then; only a step has a new time.
"""

import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from broker.client import Broker
from broker.connection.connection import Connection
from broker.connection.embedded import EmbeddedServer
from broker.connection.keys import Keys
from broker.queues.tasks import TaskQueue
from schemas.config import BrokerConfig
from schemas.messages import Sampling, Score, Task
from schemas.messages.moments import Moment, pack
from tests.support.servers.scripted_server import ScriptedServer, serving
from tests.support.trainer.deterministic_run import STEPS, Pipeline, make_config
from tests.support.trainer.killed_trainers import run_trainer_to_its_end
from tests.support.trainer.trajectories import make_trajectory

N, RUN = 3, "traced"
LOST = 4
"""Of every five groups, the number of the one without a reward: it is dropped as soon as its scores are there."""
LAST = 11
"""Task of the last group that is trained: two a step, and none of those without a reward."""
BEGAN = 1_700_000_000_000_000
KILLS = {
    "optimizer step": ["optimizer step"],
    "not committed": ["not committed"],
    "half committed": ["half committed"],
    "committed": ["committed"],
    "while a checkpoint is written": ["weights published, while a checkpoint is written"],
    "again and again": ["slots not returned", "replayed", "all trained, not finished"],
}


def attempts(task_id: int, sample: int) -> bytes:
    """The trace of a sample that a second generator has finished, after the first was killed."""
    at = BEGAN + 1_000_000 * task_id + 1000 * sample
    victim, heir = Moment("attempt", "g-0", at + 10, at + 200), Moment("attempt", "g-1", at + 300, at + 900)
    return pack(Moment("admitted", "", at, at), victim, heir, Moment("chat", "", at + 300, at + 900, 5))


def generate(tasks: TaskQueue, task_id: int, version: int) -> None:
    found = [make_trajectory(task_id, sample, completion=5 + task_id % 3) for sample in range(N)]
    for body in found:
        body.trace = attempts(task_id, body.sample)
    tasks.publish(task_id, found)


def reward(task_id: int, sample: int) -> Score:
    """A group of five fails, and of each other one the last sample does."""
    at = BEGAN + 10**9
    failed = task_id % 5 == LOST or sample == N - 1
    term = pack(Moment("term", "exact", at, at + 50, 0, failed))
    if failed:
        return Score(status="error", reason="it timed out", trace=attempts(task_id, sample) + term)
    return Score(reward=float(sample), trace=term)


def task(task_id: int) -> tuple[Task, dict[str, bytes]]:
    return Task(task_id=task_id, kind="train", n=N, sampling=Sampling(), text="?"), {}


def play(folder: Path, model: Path, server: EmbeddedServer, kills: list[str]) -> list[dict[str, Any]]:
    """The spans of a run whose trainer is killed at these points: the run's name is the same, its keys are not."""
    prefix = folder.name.replace(":", "-")
    broker = Broker(Connection(server.url, Keys(prefix, RUN), 30), BrokerConfig(prefix=prefix))
    with serving((200, {})) as receiver, Pipeline(broker, generate, reward, task):
        data = make_config(folder / "run", model, broker)
        data["broker"]["prefix"], data["sampling"]["n"] = prefix, N
        data |= {"trace": {"url": receiver.url, "share": 1.0}}
        output = folder / "output.txt"
        for point in kills:
            assert run_trainer_to_its_end(data, output, point) == [-signal.SIGKILL], output.read_text()[-3000:]
        assert run_trainer_to_its_end(data, output) == [0], output.read_text()[-3000:]
        return spans_of(receiver)


def spans_of(receiver: ScriptedServer) -> list[dict[str, Any]]:
    """All spans as they came. How far the pipeline is ahead of the last step depends on time: those are left out."""
    scopes = [scope for body in receiver.requests for one in body["resourceSpans"] for scope in one["scopeSpans"]]
    spans = [span for scope in scopes for span in scope["spans"]]
    trained = {span["traceId"] for span in spans if 0 <= attributes(span).get("tidemill.task_id", LAST + 1) <= LAST}
    return [span for span in spans if span["traceId"] in trained]


def attributes(span: Mapping[str, Any]) -> dict[str, Any]:
    return {
        one["key"]: int(one["value"]["intValue"]) if "intValue" in one["value"] else next(iter(one["value"].values()))
        for one in span["attributes"]
    }


def told(spans: list[dict[str, Any]]) -> dict[tuple[str, str], set[str]]:
    """What the receiver knows of each span by its ids, as text; more than one text is a contradiction.

    A step is trained when it is, and with it the episode ends.
    """
    found: dict[tuple[str, str], set[str]] = {}
    for span in spans:
        known = dict(span)
        if span["name"].startswith("train step"):
            known = {name: value for name, value in known.items() if not name.endswith("TimeUnixNano")}
        if "parentSpanId" not in span:
            del known["endTimeUnixNano"]
        found.setdefault((span["traceId"], span["spanId"]), set()).add(repr(sorted(known.items())))
    return found


@pytest.fixture(scope="module")
def undisturbed(server: EmbeddedServer, model: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    spans = play(tmp_path_factory.mktemp("undisturbed"), model, server, [])
    assert len({(span["traceId"], span["spanId"]) for span in spans}) == len(spans), "nothing is double"
    return told(spans)


def test_an_undisturbed_run_sends_every_sample(undisturbed: dict[tuple[str, str], set[str]]) -> None:
    traces = {trace for trace, _ in undisturbed}
    assert len(traces) == N * (LAST + 1)
    trained = 2 * STEPS * (N - 1)
    assert sum("'train step" in text for texts in undisturbed.values() for text in texts) == trained
    assert sum("it timed out" in text for texts in undisturbed.values() for text in texts) == len(traces) - trained
    assert sum("'attempt'" in text for texts in undisturbed.values() for text in texts) == 2 * len(traces)


@pytest.mark.parametrize("kills", KILLS.values(), ids=KILLS)
def test_after_kills_the_spans_are_those_of_an_undisturbed_run(
    kills: list[str], model: Path, server: EmbeddedServer, undisturbed: Any, tmp_path: Path
) -> None:
    assert told(play(tmp_path, model, server, kills)) == undisturbed
