"""Questions to the policy: what the broker keeps of their answers."""

from typing import Any

from broker.client import Broker
from broker.queues.questions import MOST_ANSWERS, MOST_BYTES
from schemas.messages import QuestionAnswer


def test_answers_are_kept_within_a_bound_of_bytes(broker: Broker) -> None:
    position = broker.questions.position()
    for number in range(MOST_ANSWERS):
        broker.questions.answer(QuestionAnswer(id=str(number), generator="g0", error="x" * 1_000_000))
    client: Any = broker.connection.client
    assert client.memory_usage(broker.connection.keys.answers, samples=0) <= MOST_BYTES
    newest, _ = broker.questions.find_answer(str(MOST_ANSWERS - 1), position)
    assert newest is not None
    assert client.xlen(broker.connection.keys.answers) >= MOST_BYTES // 2_000_000, "only as many as necessary go"
