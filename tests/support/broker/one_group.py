"""One prompt group through every hop, each role on a broker of its own: users, connections and nodes may differ."""

from collections.abc import Mapping
from pathlib import Path

from broker.client import Broker
from broker.flow.trainer_session import TrainerSession
from broker.telemetry.stream_lag import read_stream_lags
from broker.weights.local_copy import LocalWeights
from broker.weights.transports import Transport, make_transport
from schemas.messages import Adapter, Event, Heartbeat, Manifest, Score
from tests.support.broker.prompt_groups import claim_batch, make_task, make_trajectory
from tests.support.broker.trainer_sessions import take_over


def move_one_group(roles: Mapping[str, Broker], folder: Path) -> TrainerSession:
    """The first group of a run is admitted, generated, scored, trained and committed, its weights go out and in."""
    training = take_over(roles["trainer"])
    assert roles["feeder"].ledger.admit(make_task(0)).answer == "ok"
    tasks = roles["generator"].task_queue("g")
    (delivery,) = tasks.read(10, 10)
    assert tasks.publish(0, [make_trajectory(0, 0), make_trajectory(0, 1)]) == ["ok", "ok"]
    tasks.release(delivery)
    trajectories = roles["reward"].score_queue("r")
    scores = [(item, Score(reward=float(item.message.sample))) for item in trajectories.read(10, 10)]
    assert trajectories.publish(scores) == ["ok", "ok"]
    training.wait_for_scores(1)
    record = claim_batch(training)
    bodies = training.fetch_trajectories([member.trajectory_id for member in record.groups[0].members])
    assert [body is None for body in bodies] == [False, False]
    training.journal_batch(record)
    assert training.read_journal() == {0: record}
    training.complete_step(record)
    publish_weights(roles["trainer"], training.leader_term, 1, folder)
    training.commit_steps([record])
    assert fetch_weights(roles["generator"], folder).version == 1
    for role, broker in roles.items():
        if role not in ("observer", "operator"):
            broker.heartbeats.send(Heartbeat(service=role, role=role, host="h", pid=1, state="running"))
    roles["generator"].events.emit(Event(name="weights", service="g"))
    roles["trainer"].metrics.append({"step": 0})
    assert_status(roles["observer"], trained=1)
    return training


WEIGHTS = b"weights" * 100


def publish_weights(
    broker: Broker,
    leader_term: str,
    version: int,
    folder: Path,
    *,
    keep: int = 1,
    kind: str = "redis",
    content: bytes = WEIGHTS,
    adapter: Adapter | None = None,
    transport: Transport | None = None,
) -> None:
    """The weights of the trainer with this term, by default through the broker itself."""
    file = folder / "new.safetensors"
    file.write_bytes(content)
    transport = transport or make_transport(broker.connection, kind, folder)
    broker.weight_publication(transport, keep=keep).publish(
        file, version=version, step=version, leader_term=leader_term, tensors=[], probe=None, adapter=adapter
    )


def fetch_weights(broker: Broker, folder: Path) -> Manifest:
    """As a generator gets them."""
    manifest = broker.weights.wait_newer(0, 10)
    assert manifest is not None
    assert LocalWeights(broker.weights, folder / "in").fetch(manifest).read_bytes() == WEIGHTS
    return manifest


def assert_status(broker: Broker, trained: int) -> None:
    """All that a status or a dashboard shows."""
    state = broker.ledger.read_state()
    assert (state.trained, state.active, state.balanced) == (trained, 0, True)
    lags = {lag.name: lag.waiting + lag.pending for lag in read_stream_lags(broker.connection)}
    assert lags == {"tasks": 0, "eval_tasks": 0, "trajectories": 0, "scored": 0}
    assert [beat.service for beat in broker.heartbeats.list()] == ["feeder", "generator", "reward", "trainer"]
    assert [event.name for event in [stored.event for stored in broker.events.newest(8)]] == ["weights"]
    assert broker.metrics.read_after("0-0", 100)[1][-8:] == [{"step": 0}]
    assert broker.evals.read_results() == []
    assert broker.dead_letters.page(1000, None, newest=False)[0] == []
    assert broker.measure_memory() > 0
