"""The curriculum on a real server: what it skips, what is remembered, and what restarts and losses change."""

from collections.abc import Callable
from pathlib import Path

import pytest

from broker.client import Broker
from broker.flow.progress import Progress, TakeoverRequest
from broker.flow.trainer_session import TrainerSession
from broker.queues.dead_letters import UnusableTask
from producers.datasets.curriculum import BYTES, PromptStatistic
from producers.datasets.mixture import DatasetPart, Mixture
from producers.feeder import Feeder
from schemas.config import CurriculumConfig, TidemillConfig
from schemas.messages import Score
from tests.support.broker.broker_loss import checkpoint, wipe
from tests.support.broker.feeding import feed_until
from tests.support.broker.prompt_groups import claim_batch, generate_and_score, make_task
from tests.support.broker.trainer_sessions import change_request, take_over, take_over_as
from tests.support.configurations import minimal_config
from tests.support.user_code.datasets import Numbers

PROMPTS, LEARNABLE = 40, 4
SETTINGS = CurriculumConfig(name="learnable")


@pytest.fixture
def config(tmp_path: Path) -> TidemillConfig:
    return minimal_config(
        run={"name": "f", "folder": str(tmp_path / "run")},
        model={"path": "unused"},
        train={"name": "numbers.py:Numbers", "curriculum": SETTINGS.model_dump()},
        sampling={"n": 2},
    )


def mixture() -> Mixture:
    return Mixture([DatasetPart("numbers", [Numbers(PROMPTS)], curriculum=SETTINGS)])


class Run:
    """A run of which every prompt below LEARNABLE is solved half of the time and no other ever is."""

    def __init__(self, broker: Broker, config: TidemillConfig, training: TrainerSession) -> None:
        self.broker, self.config, self.training = broker, config, training
        self.taken: list[int] = []
        self.trained: list[int] = []

    def feed(self, groups: int) -> None:
        """Have a new feeder admit until so many groups are in the pipeline."""
        feeder = Feeder(self.config, self.broker, mixture(), [])
        assert feed_until(feeder, lambda: self.broker.ledger.read_state().active >= groups) == []

    def finish(self) -> None:
        """Generate, score and train, or drop, every group in the pipeline, one after the other."""
        queue, places = self.broker.task_queue("g"), mixture()
        for item in queue.read(100, 10):
            task_id = item.message.task_id
            self.taken.append(task_id)
            learnable = places.at(task_id).index < LEARNABLE
            self.training.drop_group(
                task_id, "zero_variance" if not learnable else "test", [], "dropped", 0.5 * learnable
            )
            self.trained.append(task_id)
            queue.release(item)

    def advance(self, rounds: int) -> None:
        for _ in range(rounds):
            self.feed(8)
            self.finish()


def statistics(broker: Broker) -> list[PromptStatistic]:
    body = broker.connection.client.get(broker.connection.keys.prompts) or b""
    return [PromptStatistic.unpack(body[at : at + BYTES]) for at in range(0, len(body), BYTES)]


def test_prompts_never_solved_are_skipped_and_the_ledger_balances(broker: Broker, config: TidemillConfig) -> None:
    run = Run(broker, config, take_over(broker, steps=10_000))
    run.advance(20)
    state = broker.ledger.read_state()
    assert state.balanced
    assert state.cursor == state.admitted + state.skipped
    assert len(set(run.taken)) == len(run.taken)
    first = [task_id for task_id in run.taken if task_id < PROMPTS]
    later = [mixture().at(task_id).index for task_id in run.taken if task_id >= PROMPTS]
    assert first == list(range(PROMPTS)), "all of the first epoch: nothing is known of them"
    assert sum(index < LEARNABLE for index in later) > 0.5 * len(later), "a tenth of the prompts"
    known = statistics(broker)
    assert [round(one.solved, 1) for one in known[:LEARNABLE]] == [0.5] * LEARNABLE
    assert all(one.solved == 0 and one.groups for one in known[LEARNABLE:])


def test_a_restarted_feeder_gives_the_same_task_ids(make_broker: Callable[..., Broker], config: TidemillConfig) -> None:
    # Every round has a new feeder in one run; the other's lives from the beginning to the end.
    restarted = make_broker("restarted")
    run = Run(restarted, config, take_over(restarted, steps=10_000))
    run.advance(12)
    other = make_broker("living")
    living = Run(other, config, take_over(other, steps=10_000))
    feeder = Feeder(config, other, mixture(), [])

    while len(living.taken) < len(run.taken):
        # It stands still while outcomes come: how many of a round it knows would be chance.
        assert feed_until(feeder, lambda: other.ledger.read_state().active >= 8) == []
        living.finish()
    assert living.taken[: len(run.taken)] == run.taken
    assert run.taken != sorted(range(len(run.taken))), "some were skipped"


def saved(training: TrainerSession) -> TakeoverRequest:
    """What a checkpoint of this moment holds, as it is read again."""
    request = checkpoint(training)
    request.progress.prompts = training.read_prompts()
    again = Progress()
    again.restore(request.progress.step, request.progress.version, request.progress.to_json())
    assert again == request.progress
    return change_request(request, prompts=again.prompts)


def test_a_wiped_broker_loses_only_what_is_newer_than_the_checkpoint(broker: Broker, config: TidemillConfig) -> None:
    run = Run(broker, config, take_over(broker, steps=10_000))
    run.advance(8)
    checkpointed = saved(run.training)
    known, skipped = statistics(broker), broker.ledger.read_state().skipped
    assert skipped > 0
    run.feed(8)
    wipe(broker)
    run.training, takeover = take_over_as(broker, checkpointed)
    assert takeover.lost
    state = broker.ledger.read_state()
    assert (state.balanced, state.skipped, state.cursor) == (True, skipped, checkpointed.progress.cursor)
    assert statistics(broker) == known
    run.advance(6)
    assert len(set(run.trained)) == len(run.trained)
    assert broker.ledger.read_state().balanced


def test_after_a_wipe_the_task_ids_are_the_same(make_broker: Callable[..., Broker], config: TidemillConfig) -> None:
    plain, wiped = make_broker("plain"), make_broker("wiped")
    runs = [Run(one, config, take_over(one, steps=10_000)) for one in (plain, wiped)]
    for run in runs:
        run.advance(8)
    request = saved(runs[1].training)
    wipe(wiped)
    runs[1].training, _ = take_over_as(wiped, request)
    for run in runs:
        run.advance(8)
    assert runs[0].taken == runs[1].taken


def test_a_broker_that_went_back_knows_the_skipped_positions_again(broker: Broker, config: TidemillConfig) -> None:
    run = Run(broker, config, take_over(broker, steps=10_000))
    run.advance(6)
    client, keys = broker.connection.client, broker.connection.keys
    before = {key: client.dump(key) for key in client.keys("*")}
    run.feed(8)
    newer = saved(run.training)
    for key in client.keys("*"):
        client.delete(key)
    for key, value in before.items():
        client.restore(key, 0, value)
    assert client.exists(keys.ctl)
    training, takeover = take_over_as(broker, newer)
    assert takeover.lost
    state = broker.ledger.read_state()
    assert state.balanced
    assert (state.cursor, state.skipped) == (newer.progress.cursor, newer.progress.counts["skipped"])
    assert training.read_pipeline().balanced


def test_a_group_that_is_made_again_is_not_skipped(broker: Broker, config: TidemillConfig) -> None:
    run = Run(broker, config, take_over(broker, steps=10_000))
    run.advance(6)
    run.feed(8)
    again = {slot.task_id for slot in run.training.read_pipeline().slots}
    request = saved(run.training)
    # Every prompt has turned out to be hopeless.
    hopeless = change_request(request, prompts=bytes([0, 255, 0, 0]) * PROMPTS)
    wipe(broker)
    run.training, _ = take_over_as(broker, hopeless)
    run.feed(8)
    assert again <= {slot.task_id for slot in run.training.read_pipeline().slots}


def test_a_trained_step_counts_once_in_the_statistics_of_its_prompts(broker: Broker) -> None:
    training = take_over(broker, batch=1)
    broker.ledger.admit_all([make_task(0)], prompts={0: 5})
    generate_and_score(broker, 0, (Score(reward=1.0, correct=True), Score(reward=0.0)))
    record = claim_batch(training)
    training.journal_batch(record)
    for _ in range(2):
        training.complete_step(record, {0: 0.5})
    assert statistics(broker)[5] == PromptStatistic(128 / 255, 1, 0)
    assert broker.connection.client.strlen(broker.connection.keys.prompts) == 4 * 6
    training.commit_steps([record])
    assert broker.connection.client.hlen(broker.connection.keys.groups) == 0


def test_a_group_that_failed_counts_as_a_try(make_broker: Callable[..., Broker]) -> None:
    broker = make_broker(max_deliveries=1)
    take_over(broker)
    broker.ledger.admit_all([make_task(0), UnusableTask(1, 2, "bad")], prompts={0: 0, 1: 1})
    assert broker.task_queue("dies").read(1, 10)
    assert broker.task_queue("next").claim_stale(0.0, 1) == [], "its generator died once too often"
    assert broker.ledger.read_state().failed == {"dead_letter": 2}
    assert statistics(broker) == [PromptStatistic(0.0, 1, 0)] * 2
