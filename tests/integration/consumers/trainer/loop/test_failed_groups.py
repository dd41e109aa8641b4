"""Groups that give the trainer nothing: one costs only itself, and when nothing else comes the run ends with why."""

import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from structlog.testing import capture_logs

from broker.client import Broker
from broker.queues.dead_letters import letter_bytes
from broker.queues.tasks import TaskQueue
from consumers.trainer.batch_source import NothingToLearn
from consumers.trainer.loop import Trainer
from consumers.trainer.model.policy import Policy
from schemas.codec import Array
from schemas.errors import InfraError, RunFailed
from schemas.messages import UNREWARDED, DeadLetter, RoutedExperts, Score
from schemas.run_folder import read_lines
from schemas.system.lifecycle import StopFlag
from tests.support.models.tiny_mixture import DENSE, EXPERTS, LAYERS, K, make_mixture
from tests.support.trainer.deterministic_run import Generate, Pipeline, Reward, by_sample, text_task
from tests.support.trainer.trainer_loop import make_trainer
from tests.support.trainer.trajectories import make_trajectory


def publish(tasks: TaskQueue, task_id: int, version: int, lengths: tuple[int, int] = (1, 1)) -> None:
    """Two samples of one token, or none, of the policy's own, of this version."""
    made = [
        make_trajectory(task_id, sample, completion=length, version=version - 1)
        for sample, length in enumerate(lengths)
    ]
    tasks.publish(task_id, made)


@pytest.fixture
def trainer(new_trainer: Callable[..., Trainer]) -> Callable[..., Trainer]:
    return partial(new_trainer, staleness=4, max_failed_groups=10)


def groups_of_steps(folder: Path) -> list[int]:
    """How many groups each step was trained on, by what is in trained.jsonl."""
    return [
        len({task for task, _ in line["samples"]})
        for line in read_lines(folder / "run" / "trained.jsonl")
        if "step" in line
    ]


def test_a_sample_without_tokens_costs_nothing(trainer: Callable[..., Trainer], broker: Broker, tmp_path: Path) -> None:
    def generate(tasks: TaskQueue, task_id: int, version: int) -> None:
        publish(tasks, task_id, version, (1, 0) if task_id % 2 else (1, 1))

    with Pipeline(broker, generate, by_sample):
        trainer(staleness=2).run(StopFlag())
    assert groups_of_steps(tmp_path) == [2] * 8
    state = broker.ledger.read_state()
    assert state.dropped.get("stale", 0) == 0
    lines = [line for line in read_lines(tmp_path / "run" / "trained.jsonl") if "step" in line]
    assert any(task % 2 for task, _ in lines[-1]["samples"]), "the groups with such samples are trained to the end"


def test_a_group_without_any_token_is_dropped(trainer: Callable[..., Trainer], broker: Broker, tmp_path: Path) -> None:
    def generate(tasks: TaskQueue, task_id: int, version: int) -> None:
        publish(tasks, task_id, version, (1, 1) if task_id % 3 else (0, 0))

    with Pipeline(broker, generate, by_sample):
        trainer().run(StopFlag())
    assert groups_of_steps(tmp_path) == [2] * 8
    assert set(broker.ledger.read_state().dropped) == {"no_tokens"}


def test_unrewarded_conversations_end_no_run(trainer: Callable[..., Trainer], broker: Broker, tmp_path: Path) -> None:
    """Eleven of twelve, more in a row than max_failed_groups."""

    def generate(tasks: TaskQueue, task_id: int, version: int) -> None:
        if task_id % 12 == 0:
            publish(tasks, task_id, version)
            return
        for sample in range(2):
            tasks.fail_sample(task_id, sample, "no reward came", kind=UNREWARDED)

    with Pipeline(broker, generate, by_sample):
        trainer(steps=2).run(StopFlag())
    assert groups_of_steps(tmp_path) == [2] * 2
    state = broker.ledger.read_state()
    assert state.dropped["unrewarded"] > 10
    assert not state.failed
    assert broker.connection.client.xlen(broker.connection.keys.dead) == 0


def test_a_group_whose_first_sample_failed_has_the_advantage_of_its_dataset(
    trainer: Callable[..., Trainer], broker: Broker, tmp_path: Path
) -> None:
    """That of the run would drop it, because one reward has no variance."""

    def generate(tasks: TaskQueue, task_id: int, version: int) -> None:
        tasks.fail_sample(task_id, 0, "raised")
        sample = make_trajectory(task_id, 1, version=max(0, version - 1))
        tasks.publish(task_id, [msgspec.structs.replace(sample, dataset="arithmetic")])

    with Pipeline(broker, generate, lambda *_: Score(reward=1.0, dataset="arithmetic")):
        trainer(steps=2, advantage={"name": "centered"}, datasets={"arithmetic": {"advantage": {"name": "raw"}}}).run(
            StopFlag()
        )
    assert groups_of_steps(tmp_path) == [2] * 2
    assert not broker.ledger.read_state().dropped


@pytest.mark.parametrize(
    ("shape", "expert", "reason"),
    [
        ((LAYERS + 1, K), 0, "of 4 layers and 2 experts, the trainer's model has 3 and 2"),
        ((LAYERS, K), EXPERTS, "names expert 8, the model has 8"),
        ((LAYERS, K), None, "names fewer than 2 experts of a token"),
        ((LAYERS, K), 0, "names expert 0 twice for a token in layer 0"),
    ],
)
def test_choices_of_routers_that_are_not_the_models_cost_their_group_alone(
    broker: Broker, tmp_path: Path, shape: tuple[int, int], expert: int | None, reason: str
) -> None:
    def generate(tasks: TaskQueue, task_id: int, version: int) -> None:
        for sample in range(2):
            made = make_trajectory(task_id, sample, version=max(0, version - 1))
            wrong = task_id == 1
            chosen = np.zeros((made.tokens.shape, *(shape if wrong else (LAYERS, K))), np.uint8)
            chosen[..., 1] = 1
            # vLLM has zeros where a layer has no router.
            chosen[:, DENSE] = 0
            if wrong:
                chosen[0, 0, 1] = 255 if expert is None else expert
            routed = RoutedExperts.of(chosen)
            tasks.publish(task_id, [msgspec.structs.replace(made, routed_experts=routed)])

    model = make_mixture(tmp_path / "mixture")
    with Pipeline(broker, generate, by_sample), capture_logs() as logs:
        one = make_trainer(broker, model, tmp_path, 4, router_replay=True, steps=2, batch_timeout_s=30)
        one.run(StopFlag())
    assert groups_of_steps(tmp_path) == [2] * 2
    assert broker.ledger.read_state().failed == {"routed_experts": 1}
    assert [line["reason"] for line in logs if line.get("what") == "routed_experts"] == [f"routed_experts {reason}"]


def test_what_a_teacher_says_must_fit_the_tokens_and_equal_rewards_are_trained_with_it(
    trainer: Callable[..., Trainer], broker: Broker, tmp_path: Path
) -> None:
    def generate(tasks: TaskQueue, task_id: int, version: int) -> None:
        made = [make_trajectory(task_id, sample, version=max(0, version - 1)) for sample in range(2)]
        tasks.publish(task_id, [msgspec.structs.replace(one, dataset="arithmetic") for one in made])

    def reward(task_id: int, sample: int) -> Score:
        says = {1: None, 3: Array.of([-1.0] * 6, "f4")}.get(task_id, Array.of([-1.0] * 7, "f4"))
        # Without a teacher, a group of equal rewards would teach nothing.
        return Score(reward=float(says is None and sample), dataset="arithmetic", teacher_logprobs=says)

    terms = [{"name": "teacher", "args": {"model": "x"}}]
    with Pipeline(broker, generate, reward), capture_logs() as logs:
        trainer(terms=terms, steps=3, kl={"coef": 1.0, "reference": "teacher"}).run(StopFlag())
    assert groups_of_steps(tmp_path) == [2] * 3
    state = broker.ledger.read_state()
    assert (state.failed, state.dropped) == ({"unreadable": 2}, {})
    assert sorted(line["reason"] for line in logs if line.get("task_id") in (1, 3)) == [
        "its score has no log-probabilities of its teacher",
        "teacher_logprobs has 6 entries for 7 tokens",
    ]
    metrics = [line for line in read_lines(tmp_path / "run" / "metrics.jsonl") if "train/taught_fraction" in line]
    assert [line["train/taught_fraction"] for line in metrics] == [1.0] * 3


@pytest.mark.parametrize("claimed", [False, True], ids=["before the trainer looked", "after"])
def test_a_group_that_is_asked_for_again_is_trained_on_its_new_samples(
    trainer: Callable[..., Trainer], broker: Broker, claimed: bool
) -> None:
    """Outcomes of its first life are not mixed with them: the samples behind these are deleted."""
    tasks, rewards = broker.task_queue("g"), broker.score_queue("r")

    def score(sample: int, reward: float) -> None:
        tasks.publish(0, [make_trajectory(0, sample, version=0)])
        rewards.publish([(item, Score(reward=reward)) for item in rewards.read(9, 1)])

    one = trainer(batch_groups=1, batch_timeout_s=5)
    one.leadership.restore(from_checkpoint=False)
    one.take_over()
    broker.ledger.admit(text_task(0)[0])
    (delivery,) = tasks.read(1, 1)
    score(0, 0.0)
    if claimed:
        one.batches.intake.claim()
    letter = letter_bytes(DeadLetter(source="x", reason="no", deliveries=9, payload=b"", task_id=0), 9)
    broker.connection.run_script("fail_task", "tasks", delivery.entry_id, 0, letter)
    (filed,) = broker.dead_letters.page(9, None, newest=False)[0]
    assert broker.dead_letters.requeue(filed.id) == "ok"
    broker.ledger.admit(text_task(0)[0])
    score(1, 1.0)
    one.batches.intake.claim()
    score(0, 0.5)
    batch = one.batches.next(1, StopFlag())
    assert batch is not None
    assert [reward for group in batch.groups for _, reward in group.samples] == [0.5, 1.0]
    assert broker.connection.client.xlen(broker.connection.keys.scored) == 2, "the others are deleted"


def fail(reason: str, broken_version: int = -1, samples: tuple[int, ...] = (0, 1)) -> Generate:
    def generate(tasks: TaskQueue, task_id: int, version: int) -> None:
        for sample in samples:
            tasks.fail_sample(task_id, sample, reason, broken_version)
        if len(samples) < 2:
            tasks.publish(task_id, [make_trajectory(task_id, 1)])

    return generate


def raising(task_id: int, sample: int) -> Score:
    return Score(status="error", reason="mine.py:f: ValueError: no")


BROKEN = "weights version 0 are numerically broken: they give log-probabilities that are not finite"


@pytest.mark.parametrize(
    ("generate", "reward", "settings", "reason"),
    [
        (publish, raising, {}, "reward mine.py:f: ValueError: no"),
        (fail("workflow mine.py:W: KeyError: 'x'"), by_sample, {}, "workflow mine.py:W: KeyError: 'x'"),
        (fail("not finite", 0), by_sample, {}, BROKEN),
        (
            lambda tasks, task_id, version: publish(tasks, task_id, version, (0, 0)),
            by_sample,
            {},
            "no sample has a token that the policy sampled",
        ),
        (fail("one raises", samples=(0,)), by_sample, {"advantage": {"partial_groups": "drop"}}, "one raises"),
    ],
    ids=["reward", "workflow", "weights", "no tokens", "partial"],
)
def test_when_every_group_fails_the_run_ends_with_the_reason(
    trainer: Callable[..., Trainer],
    broker: Broker,
    generate: Generate,
    reward: Reward,
    settings: dict[str, Any],
    reason: str,
) -> None:
    with Pipeline(broker, generate, reward), pytest.raises(RunFailed) as caught:
        trainer(**settings).run(StopFlag())
    assert str(caught.value) == f"10 prompt groups in a row failed, the last: {reason}"
    state = broker.ledger.read_state()
    assert state.step == 0
    assert state.balanced
    assert 10 <= sum(state.failed.values()) + sum(state.dropped.values()) < 40
    assert str(caught.value) in [event.text for event in [stored.event for stored in broker.events.newest(9)]]


def test_a_reward_that_fails_from_some_step_on_ends_the_run(trainer: Callable[..., Trainer], broker: Broker) -> None:
    def reward(task_id: int, sample: int) -> Score:
        return by_sample(task_id, sample) if task_id < 6 else raising(task_id, sample)

    with Pipeline(broker, publish, reward), pytest.raises(RunFailed, match="10 prompt groups in a row failed"):
        trainer().run(StopFlag())
    assert 1 <= broker.ledger.read_state().step <= 3, "some good groups may not have had their turn"


def test_groups_without_a_signal_or_too_old_are_no_failure(trainer: Callable[..., Trainer], broker: Broker) -> None:
    def reward(task_id: int, sample: int) -> Score:
        return Score(reward=0.0 if task_id < 60 else float(sample))

    with Pipeline(broker, publish, reward):
        trainer(steps=2).run(StopFlag())
    assert broker.ledger.read_state().dropped["zero_variance"] >= 60


def test_a_learned_task_ends_the_run_with_a_line_and_weights(trainer: Callable[..., Trainer], broker: Broker) -> None:
    def reward(task_id: int, sample: int) -> Score:
        return Score(reward=float(sample) if task_id < 6 else 1.0)

    with Pipeline(broker, publish, reward), pytest.raises(NothingToLearn) as caught:
        trainer(batch_timeout_s=3).run(StopFlag())
    state = broker.ledger.read_state()
    assert re.fullmatch(
        rf"step {state.step} has [01] of 2 prompt groups after 3 s: (\d+) of the \d+ prompt groups that came back were"
        r" left out, because their rewards tell nothing: every sample was right in \1 of all, none in 0; .*",
        str(caught.value),
    )
    assert "keep_zero_variance: true" in str(caught.value)
    told = {event.name for event in [stored.event for stored in broker.events.newest(99)]}
    assert {"nothing_to_learn", "run_failed"} <= told
    assert (state.step, state.uncommitted_steps) == (3, 0), "a checkpoint holds all steps"


def test_generators_that_stop_are_no_learned_task(trainer: Callable[..., Trainer], broker: Broker) -> None:
    """The last groups that came taught nothing, but then none came: another start may find generators again."""

    def generate(tasks: TaskQueue, task_id: int, version: int) -> None:
        if task_id < 10:
            publish(tasks, task_id, version)

    with Pipeline(broker, generate, lambda task_id, sample: Score(reward=1.0)), pytest.raises(InfraError) as caught:
        trainer(batch_timeout_s=6).run(StopFlag())
    assert "the oldest prompt group, 10, has no sample scored yet" in str(caught.value)
    assert str(caught.value).endswith("dropped meanwhile: 10 zero_variance")
    assert "run_failed" not in {event.name for event in [stored.event for stored in broker.events.newest(99)]}


def test_a_learned_task_goes_on_where_groups_without_a_signal_are_kept(
    trainer: Callable[..., Trainer], broker: Broker, tmp_path: Path
) -> None:
    with Pipeline(broker, publish, lambda task_id, sample: Score(reward=1.0)):
        trainer(steps=3, advantage={"name": "grpo", "keep_zero_variance": True}).run(StopFlag())
    assert groups_of_steps(tmp_path) == [2] * 3


def test_a_failing_group_here_and_there_is_left_out(trainer: Callable[..., Trainer], broker: Broker) -> None:
    def reward(task_id: int, sample: int) -> Score:
        return by_sample(task_id, sample) if task_id % 8 == 0 else raising(task_id, sample)

    with Pipeline(broker, publish, reward):
        trainer(steps=4).run(StopFlag())
    assert broker.ledger.read_state().failed["no_reward"] >= 20


def test_a_group_of_mostly_broken_samples_is_not_trained(trainer: Callable[..., Trainer], broker: Broker) -> None:
    def generate(tasks: TaskQueue, task_id: int, version: int) -> None:
        make = fail("not finite", version) if task_id % 2 else publish
        make(tasks, task_id, version)

    with Pipeline(broker, generate, by_sample):
        trainer(steps=3).run(StopFlag())
    assert set(broker.ledger.read_state().failed) == {"not_finite"}


def test_steps_that_are_all_skipped_end_a_run(trainer: Callable[..., Trainer], broker: Broker, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "from consumers.trainer.algorithms.losses import LossOutput\n"
        "def nan(inputs):\n"
        "    return LossOutput(inputs.logprobs * float('nan'), {})\n"
    )
    with Pipeline(broker, publish, by_sample), pytest.raises(RunFailed) as caught:
        trainer(steps=20, loss={"name": f"{tmp_path}/mine.py:nan"}).run(StopFlag())
    assert str(caught.value) == "10 steps in a row were skipped: their loss or gradient is not finite"
    assert broker.ledger.read_state().step == 9


def test_weights_that_give_no_numbers_end_the_run_unpublished(trainer: Callable[..., Trainer], broker: Broker) -> None:
    def spoil(policy: Policy) -> None:
        with torch.no_grad():
            next(policy.causal_lm.parameters()).fill_(float("nan"))

    one = trainer(spoil=spoil)
    with pytest.raises(RunFailed, match=r"^weights version 0 are numerically broken: .* not finite"):
        one.run(StopFlag())
    assert one.state == "starting", "it ends before it waits for any batch"
    assert broker.weights.newest() is None
