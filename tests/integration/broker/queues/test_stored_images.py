"""Images in the broker: each is there once, from the admission of its task to the end of the last group that has it."""

import os
from collections.abc import Callable

import msgspec
import pytest
import redis

from broker.client import Broker
from broker.queues.consumer_group import BYTES_AT_ONCE
from broker.queues.tasks import eval_task_id
from schemas.digests import digest
from schemas.errors import BrokerDamaged
from schemas.messages import ChatMessage, ContentPart, Image, PlacedImage, Sampling, Score, Task
from tests.support.broker.broker_loss import wipe
from tests.support.broker.prompt_groups import (
    claim_batch,
    generate_and_score,
    make_batch_record,
    make_trajectory,
    train_record,
)
from tests.support.broker.trainer_sessions import take_over

MB = 1 << 20


def make_image(data: bytes) -> Image:
    return Image(digest(data), 56, 56, len(data))


def task_with(task_id: int, *images: bytes, n: int = 2, kind: str = "train") -> Task:
    content = [ContentPart("image")] * len(images) + [ContentPart("text", "what?")]
    return Task(
        task_id=task_id,
        kind=kind,
        n=n,
        sampling=Sampling(),
        messages=[ChatMessage("user", content)],
        images=[make_image(data) for data in images],
    )


def files(*images: bytes) -> dict[str, bytes]:
    return {digest(data): data for data in images}


def stored(broker: Broker) -> int:
    return broker.connection.client.hlen(broker.connection.keys.images) // 2


def received(broker: Broker) -> int:
    return int(broker.connection.client.info("stats")["total_net_input_bytes"])


def test_an_image_is_there_until_a_checkpoint_covers_the_step_of_its_group(broker: Broker) -> None:
    training = take_over(broker)
    assert broker.ledger.admit_all([task_with(0, b"one", b"two")], images=files(b"one", b"two")).answer == "ok"
    assert broker.images.fetch([digest(b"two"), digest(b"none")]) == files(b"two")
    generate_and_score(broker, 0, (Score(reward=1.0), Score(reward=0.0)))
    record = train_record(training, claim_batch(training))
    assert stored(broker) == 2, "a trainer that has to replay the step needs them"
    training.commit_steps([record])
    assert stored(broker) == 0


def test_groups_with_the_same_image_share_it_and_the_last_one_takes_it_along(broker: Broker) -> None:
    training = take_over(broker)
    tasks = [task_with(0, b"same", b"same"), task_with(1, b"same", b"other")]
    broker.ledger.admit_all(tasks, images=files(b"same", b"other"))
    assert stored(broker) == 2
    assert training.drop_group(1, "stale", [])
    assert broker.images.fetch(files(b"same", b"other")) == files(b"same")
    assert training.drop_group(0, "stale", [])
    assert stored(broker) == 0


def test_a_task_that_is_admitted_twice_counts_once(broker: Broker) -> None:
    training = take_over(broker)
    for answer in ("ok", "moved"):
        assert broker.ledger.admit_all([task_with(0, b"one")], images=files(b"one")).answer == answer
    training.drop_group(0, "stale", [])
    assert stored(broker) == 0


def test_images_of_an_evaluation_go_with_its_prompts(broker: Broker) -> None:
    take_over(broker)
    tasks = [task_with(eval_task_id(0, index), b"one", kind="eval") for index in range(2)]
    assert broker.evals.open(0, tasks, images=files(b"one"))
    assert stored(broker) == 1
    queue, rewards = broker.task_queue("g"), broker.score_queue("r")
    for delivery in queue.read(10, 10):
        number = delivery.message.task_id
        queue.publish(number, [make_trajectory(number, i, "eval") for i in range(2)])
    rewards.publish([(item, Score(reward=1.0)) for item in rewards.read(10, 10)])
    assert stored(broker) == 0


def open_with(broker: Broker, version: int, *images: bytes) -> bool:
    """Open an evaluation with a task for each of these images."""
    numbers = [eval_task_id(version, index) for index in range(len(images))]
    tasks = [task_with(number, image, n=1, kind="eval") for number, image in zip(numbers, images, strict=True)]
    return broker.evals.open(version, tasks, images=files(*images))


def watch_calls(broker: Broker, monkeypatch: pytest.MonkeyPatch, before: Callable[[int], None]) -> list[int]:
    """Sizes of the calls of scripts from here on, in bytes. before: called with the number of each call."""
    sizes, evaluate = list[int](), broker.connection._evaluate

    def watched(client: redis.Redis, name: str, args: tuple[str | bytes | int, ...]) -> object:
        before(len(sizes))
        sizes.append(sum(len(arg) for arg in args if isinstance(arg, bytes)))
        return evaluate(client, name, args)

    monkeypatch.setattr(broker.connection, "_evaluate", watched)
    return sizes


def test_an_evaluations_images_are_sent_in_parts_once_each(broker: Broker, monkeypatch: pytest.MonkeyPatch) -> None:
    take_over(broker)
    images = [bytes([number]) * (5 * MB) for number in range(8)]
    sizes = watch_calls(broker, monkeypatch, lambda number: None)
    assert open_with(broker, 0, *images, images[0])
    assert max(sizes) <= BYTES_AT_ONCE
    assert 40 * MB <= sum(sizes) < 41 * MB
    assert broker.images.fetch(files(*images)) == files(*images)
    sizes.clear()
    assert not open_with(broker, 0, *images)
    assert len(sizes) == 1, "it was opened before: the rest is not sent"
    monkeypatch.undo()
    score_all(broker)
    (result,) = broker.evals.read_results()
    assert (result.complete, result.n, stored(broker)) == (True, 9, 0)


def test_an_evaluation_whose_feeder_died_sending_is_not_open(broker: Broker, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its successor opens another one, and the images of both go with that."""
    take_over(broker)
    images = [bytes([number]) * (9 * MB) for number in range(4)]

    def die(number: int) -> None:
        if number == 2:
            raise KeyboardInterrupt

    watch_calls(broker, monkeypatch, die)
    with pytest.raises(KeyboardInterrupt):
        open_with(broker, 0, *images)
    monkeypatch.undo()
    assert stored(broker) == 2
    assert broker.evals.read_results() == []
    assert broker.task_queue("g").read(10, 10) == []
    assert open_with(broker, 1, images[0], b"another")
    assert broker.images.fetch(files(*images, b"another")) == files(images[0], b"another")
    score_all(broker)
    (result,) = broker.evals.read_results()
    assert (result.version, result.complete, stored(broker)) == (1, True, 0)


def test_images_lost_before_their_evaluation_opened_are_resent(broker: Broker, monkeypatch: pytest.MonkeyPatch) -> None:
    take_over(broker)
    images = [bytes([number]) * (9 * MB) for number in range(2)]

    def lose(number: int) -> None:
        if number == 2:
            broker.connection.client.delete(broker.connection.keys.images, broker.connection.keys.groups)

    watch_calls(broker, monkeypatch, lose)
    assert open_with(broker, 0, *images)
    assert broker.images.fetch(files(*images)) == files(*images)
    score_all(broker)
    assert stored(broker) == 0


def score_all(broker: Broker) -> None:
    """Generate and score what is queued, of evaluations with one sample a task."""
    queue, rewards = broker.task_queue("g"), broker.score_queue("r")
    for delivery in queue.read(100, 10):
        queue.publish(delivery.message.task_id, [make_trajectory(delivery.message.task_id, 0, "eval")])
    rewards.publish([(item, Score(reward=1.0)) for item in rewards.read(100, 10)])


def test_a_task_that_kills_its_generators_takes_its_images_along(make_broker: Callable[..., Broker]) -> None:
    broker = make_broker(max_deliveries=1)
    take_over(broker)
    broker.ledger.admit_all([task_with(0, b"one")], images=files(b"one"))
    broker.task_queue("a").read(1, 10)
    for name in ("b", "c"):
        broker.task_queue(name).claim_stale(0.0, 10)
    assert stored(broker) == 0
    assert broker.ledger.read_state().failed == {"dead_letter": 1}


def test_an_image_of_a_megabyte_crosses_the_broker_once_for_eight_samples(broker: Broker) -> None:
    training = take_over(broker)
    image, before = os.urandom(MB), received(broker)
    broker.ledger.admit_all([task_with(0, image, n=8)], images=files(image))
    assert broker.images.fetch([digest(image)]) == files(image)
    generate_and_score(broker, 0, tuple(Score(reward=1.0) for _ in range(8)))
    train_record(training, claim_batch(training), commit=True)
    assert received(broker) - before < 1.1 * MB
    assert stored(broker) == 0


def test_a_group_whose_image_is_gone_is_damaged(broker: Broker) -> None:
    training = take_over(broker)
    broker.ledger.admit_all([task_with(0, b"one")], images=files(b"one"))
    assert training.diagnose_group(0) == "waiting"
    broker.connection.client.delete(broker.connection.keys.images)
    with pytest.raises(BrokerDamaged, match="lost a part of prompt group 0"):
        training.diagnose_group(0)


def test_images_of_an_episode_are_there_once_and_go_with_its_group(broker: Broker) -> None:
    training, queue = take_over(broker), broker.task_queue("g")
    tasks = [task_with(0, b"one"), task_with(1, b"other", n=1)]
    broker.ledger.admit_all(tasks, images=files(b"one", b"other"))
    for _ in range(2):
        # Both samples of the group have it, and a repeat after a lost answer counts once, too.
        queue.keep_images(0, files(b"one", b"seen"))
    queue.keep_images(1, files(b"seen"))
    assert broker.images.fetch(files(b"one", b"seen")) == files(b"one", b"seen")
    assert training.diagnose_group(0) == "waiting"
    assert training.drop_group(0, "stale", [])
    assert broker.images.fetch(files(b"one", b"seen")) == files(b"seen")
    assert training.drop_group(1, "stale", [])
    assert stored(broker) == 0
    queue.keep_images(0, files(b"late"))
    assert stored(broker) == 0, "the group has ended"


def test_a_sample_is_taken_only_with_its_images_whatever_was_lost_since_they_were_kept(broker: Broker) -> None:
    take_over(broker)
    queue, client = broker.task_queue("g"), broker.connection.client
    broker.ledger.admit_all([task_with(0, b"one")], images=files(b"one"))
    placed = [PlacedImage(digest(b"one"), 0, 1), PlacedImage(digest(b"seen"), 1, 2)]
    sample = msgspec.structs.replace(make_trajectory(0, 0), images=placed)
    queue.keep_images(0, files(b"seen"))
    wipe(broker)
    assert queue.publish(0, [sample]) == ["closed"]
    training = take_over(broker)
    broker.ledger.admit_all([task_with(0, b"one")], images=files(b"one"))
    assert queue.publish(0, [sample, make_trajectory(0, 1)]) == ["images", "ok"]
    assert client.hlen(broker.connection.keys.bodies) == 1
    queue.keep_images(0, files(b"seen"))
    assert queue.publish(0, [sample]) == ["ok"]
    assert queue.publish(0, [sample]) == ["dup"]
    assert broker.images.fetch(files(b"one", b"seen")) == files(b"one", b"seen")
    assert training.diagnose_group(0) == "waiting"


def test_a_task_names_as_many_images_as_its_messages_have_places() -> None:
    with pytest.raises(ValueError, match="a task has 0 images, its messages have placeholders for 1"):
        Task(task_id=0, kind="train", n=1, sampling=Sampling(), messages=[ChatMessage("user", [ContentPart("image")])])


def test_nothing_is_left_of_the_images_of_200_tasks_whose_generator_is_killed_on_the_way(broker: Broker) -> None:
    training = take_over(broker, batch=10, staleness=1)
    dead, alive, rewards = broker.task_queue("dead"), broker.task_queue("alive"), broker.score_queue("r")
    admitted = step = 0
    while step < 20:
        while admitted < 200:
            image = f"image {admitted // 2}".encode()
            if broker.ledger.admit_all([task_with(admitted, image, n=1)], images=files(image)).answer != "ok":
                break
            admitted += 1
        if step < 10:
            # It takes tasks, and is never heard of again.
            assert dead.read(7, 10)
        taken = [*alive.claim_stale(0.0, 100), *alive.read(100, 10)]
        for delivery in taken:
            task = delivery.message
            assert broker.images.fetch([task.images[0].digest]), "its image is there as long as a group needs it"
            alive.publish(task.task_id, [make_trajectory(task.task_id, 0)])
            alive.release(delivery)
        rewards.publish([(item, Score(reward=1.0)) for item in rewards.read(100, 10)])
        outcomes = training.claim_scores(1000)
        for first in range(0, len(outcomes), 10):
            train_record(training, make_batch_record(outcomes[first : first + 10], step), commit=True)
            step += 1
    assert broker.ledger.read_state().trained == 200
    assert stored(broker) == 0
    assert not broker.connection.client.exists(broker.connection.keys.images)
