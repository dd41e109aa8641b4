"""Dead letters: oversized work goes there with its reason, and they never take the memory that work needs."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from broker.client import Broker
from broker.connection import acl
from broker.connection.connection import Connection, open_client
from broker.connection.embedded import EmbeddedServer
from broker.connection.keys import Keys
from broker.queues.dead_letters import letter_bytes
from broker.queues.tasks import eval_task_id
from schemas.codec import DEFAULT_MAX_BYTES, Array, encode
from schemas.config import BrokerConfig
from schemas.messages import DeadLetter, Partial, Score, Span, Task
from tests.support.broker.prompt_groups import count_entries, make_task, make_trajectory
from tests.support.broker.trainer_sessions import take_over

KEYS = Keys("tidemill", "letters")
MB = 1024 * 1024
LIMIT = 1024


@pytest.fixture
def small_server(tmp_path: Path) -> Iterator[EmbeddedServer]:
    with EmbeddedServer(tmp_path, fsync="no") as server:
        yield server


def connect(url: str) -> Broker:
    config = BrokerConfig(deadline_s=2)
    return Broker(Connection(url, KEYS, config.deadline_s), config)


def fail_samples(broker: Broker, count: int, payload: bytes) -> None:
    """Admit a group, and fail each of its samples but the last."""
    take_over(broker)
    broker.ledger.admit(make_task(0, n=count + 1))
    broker.task_queue("g").read(1, 10)
    for sample in range(count):
        letter = DeadLetter(source="x", reason="no", deliveries=1, payload=payload, task_id=0, sample=sample)
        score = Score(status="error", reason="no")
        filed = letter_bytes(letter, len(payload))
        broker.connection.run_script("fail_sample", 0, sample, filed, encode(score), "", "", "")


def test_the_newest_letters_are_kept_up_to_a_number_of_bytes(broker: Broker) -> None:
    fail_samples(broker, 9, b"x" * (8 * MB))
    used: Any = broker.connection.client.memory_usage(broker.connection.keys.dead, samples=0)
    assert 48 * MB < used <= 64 * MB
    samples = [filed.letter.sample for filed in broker.dead_letters.page(1000, None, newest=False)[0]]
    assert samples == list(range(9))[-len(samples) :]
    assert broker.ledger.read_state().dead_letters == 9, "all are counted"


def test_old_dead_letters_make_room_for_work_when_memory_is_full(small_server: EmbeddedServer) -> None:
    broker = connect(small_server.url)
    fail_samples(broker, 40, b"x" * (MB // 2))
    fill_memory(small_server)
    assert broker.task_queue("g").publish(0, [make_trajectory(0, 40)]) == ["ok"]
    left = [filed.letter.sample for filed in broker.dead_letters.page(1000, None, newest=False)[0]]
    assert left, "no more of them go than is needed"
    assert left[-1] == 39


def test_texts_of_evaluations_make_room_before_dead_letters(small_server: EmbeddedServer) -> None:
    broker = connect(small_server.url)
    fail_samples(broker, 4, b"x")
    client: Any = open_client(small_server.url)
    for _ in range(40):
        client.xadd(broker.connection.keys.eval_samples, {"j": b"x" * (MB // 2)})
    fill_memory(small_server)
    assert broker.task_queue("g").publish(0, [make_trajectory(0, 40)]) == ["ok"]
    assert len(broker.dead_letters.page(1000, None, newest=False)[0]) == 4
    assert 0 < client.xlen(broker.connection.keys.eval_samples) < 40, "no more of them go than is needed"


def test_the_user_of_each_service_may_make_room(small_server: EmbeddedServer) -> None:
    fail_samples(connect(small_server.url), 40, b"x" * (MB // 2))
    client: Any = open_client(small_server.url)
    passwords = acl.new_passwords()
    for line in acl.acl_lines(KEYS, passwords):
        client.execute_command(*line.split())
    fill_memory(small_server)
    roles = {
        role: connect(f"unix://{acl.user(role, KEYS)}:{password}@{small_server.socket}")
        for role, password in passwords.items()
    }
    assert roles["feeder"].ledger.admit(make_task(1)).answer == "ok"
    fill_memory(small_server)
    assert roles["generator"].task_queue("g").publish(0, [make_trajectory(0, 40)]) == ["ok"]
    fill_memory(small_server)
    for role in ("feeder", "generator", "reward", "trainer"):
        roles[role].connection.run_script("drop_dead_letters", MB)


def fill_memory(server: EmbeddedServer) -> None:
    """Let the server refuse whatever needs memory, as one that letters have filled."""
    client = open_client(server.url)
    used: Any = client.info("memory")["used_memory"]
    client.config_set("maxmemory", used - MB)


@pytest.fixture
def small(make_broker: Callable[..., Broker]) -> Broker:
    return make_broker(max_message_bytes=LIMIT)


def big(task_id: int, n: int = 2, kind: str = "train") -> Task:
    made = make_task(task_id, n=n, kind=kind)
    made.text = "x" * (2 * LIMIT)
    return made


def reasons(broker: Broker) -> list[tuple[str, int, int]]:
    letters = [filed.letter for filed in broker.dead_letters.page(1000, None, newest=False)[0]]
    assert all(f"over the limit of {LIMIT}" in letter.reason for letter in letters)
    return [(letter.source, letter.task_id, letter.sample) for letter in letters]


def test_a_prompt_too_large_to_be_sent_fails_and_those_around_it_are_admitted(small: Broker) -> None:
    take_over(small)
    admission = small.ledger.admit_all([make_task(0), big(1), make_task(2)])
    assert (admission.answer, admission.next, admission.admitted) == ("ok", 3, [0, 1, 2])
    assert [item.message.task_id for item in small.task_queue("g").read(10, 10)] == [0, 2]
    state = small.ledger.read_state()
    assert (state.active, state.failed, state.balanced) == (2, {"dead_letter": 1}, True)
    assert reasons(small) == [("feeder", 1, -1)]


def test_a_prompt_that_was_too_large_can_be_asked_for_again(small: Broker, make_broker: Callable[..., Broker]) -> None:
    take_over(small)
    small.ledger.admit(big(0))
    (filed,) = small.dead_letters.page(1000, None, newest=False)[0]
    assert small.dead_letters.requeue(filed.id) == "ok"
    wider = make_broker(small.connection.keys.base.rpartition(":")[2].rstrip("}"))
    assert wider.ledger.admit(big(0)).answer == "ok"
    assert [item.message.task_id for item in wider.task_queue("g").read(10, 10)] == [0]
    assert wider.ledger.read_state().balanced


def test_a_held_out_prompt_too_large_to_be_sent_counts_as_failed_and_the_evaluation_ends(small: Broker) -> None:
    take_over(small)
    ids = [eval_task_id(3, index) for index in range(2)]
    assert small.evals.open(3, [big(ids[0], kind="eval"), make_task(ids[1], kind="eval")])
    (delivery,) = small.task_queue("g").read(10, 10)
    small.task_queue("g").publish(ids[1], [make_trajectory(ids[1], i, kind="eval") for i in range(2)])
    rewards = small.score_queue("r")
    rewards.publish([(item, Score(reward=1.0)) for item in rewards.read(10, 10)])
    (result,) = small.evals.read_results()
    assert (result.n, result.scored, result.failed, result.complete, delivery.version) == (4, 2, 2, True, 3)
    assert reasons(small) == [("feeder", ids[0], -1)]


def test_a_sample_too_large_to_be_sent_fails_and_those_beside_it_go_on(small: Broker) -> None:
    training = take_over(small)
    for task_id in (0, 1):
        small.ledger.admit(make_task(task_id))
    queue = small.task_queue("g")
    queue.read(10, 10)
    large = make_trajectory(0, 0)
    large.completion = "x" * (2 * LIMIT)
    answers = queue.publish_all(
        [(0, [large, make_trajectory(0, 1)]), (1, [make_trajectory(1, 0), make_trajectory(1, 1)])]
    )
    assert answers == [["failed", "ok"], ["ok", "ok"]]
    assert reasons(small) == [("generator", 0, 0)]
    rewards = small.score_queue("r")
    rewards.publish([(item, Score(reward=1.0)) for item in rewards.read(10, 10)])
    outcomes = {(item.task_id, item.sample): item.trajectory_id is not None for item in training.claim_scores(10)}
    assert outcomes == {(0, 0): False, (0, 1): True, (1, 0): True, (1, 1): True}
    assert count_entries(small)["tasks"] == 0


def test_of_partial_samples_too_large_to_be_sent_the_largest_are_left_out(small: Broker) -> None:
    take_over(small)
    small.ledger.admit(make_task(0, n=3))
    (delivery,) = small.task_queue("leaving").read(10, 10)
    task = make_task(0, n=3)
    for sample, length in enumerate((10, LIMIT, 20)):
        tokens, logprobs = Array.of(range(length), "i4"), Array.of([0.0] * length, "f4")
        task.partials.append(Partial(sample=sample, tokens=tokens, logprobs=logprobs, spans=[Span(0, 0, length)]))
    assert small.task_queue("leaving").return_task(delivery, task)
    (again,) = small.task_queue("other").read(10, 10)
    assert [partial.sample for partial in again.message.partials] == [0, 2]


def test_what_was_given_back_without_a_partial_sample_may_have_samples_that_are_published(small: Broker) -> None:
    take_over(small)
    small.ledger.admit(make_task(0))
    (delivery,) = small.task_queue("leaving").read(10, 10)
    assert small.task_queue("leaving").return_task(delivery, make_task(0))
    (again,) = small.task_queue("other").read(10, 10)
    assert again.message == delivery.message
    assert again.redelivered


def test_a_score_too_large_to_be_sent_excludes_its_sample(small: Broker) -> None:
    training = take_over(small)
    small.ledger.admit(make_task(0, n=1))
    small.task_queue("g").publish(0, [make_trajectory(0, 0)])
    rewards = small.score_queue("r")
    (item,) = rewards.read(10, 10)
    large = Score(reward=1.0, components={f"component {number}": 1.0 for number in range(LIMIT)})
    assert rewards.publish([(item, large)]) == ["ok"]
    (outcome,) = training.claim_scores(10)
    assert (outcome.trajectory_id, outcome.score.status, outcome.excluded) == (None, "error", True)
    assert reasons(small) == [("reward", 0, 0)]


@pytest.mark.parametrize("stream", ["tasks", "trajectories"])
def test_a_message_that_leaves_no_room_for_its_letter_is_buried_with_its_head(broker: Broker, stream: str) -> None:
    take_over(broker)
    client, keys = broker.connection.client, broker.connection.keys
    body: bytes | str = bytes(DEFAULT_MAX_BYTES + 1)
    if stream == "trajectories":
        client.hset(keys.bodies, "large", body)  # type: ignore[arg-type]
        body = "large"
    client.xadd(getattr(keys, stream), {"t": 7, "s": 0, "b": body})
    queue = broker.task_queue("g") if stream == "tasks" else broker.score_queue("r")
    assert queue.read(10, 10) == []
    (filed,) = broker.dead_letters.page(1000, None, newest=False)[0]
    assert "over the limit" in filed.letter.reason
    assert len(filed.letter.payload) == DEFAULT_MAX_BYTES
    assert client.xlen(getattr(keys, stream)) == 0
