"""One generator service with a workflow of a user that raises, or yields what can't be published, for some samples."""

import asyncio
import shutil
import sys
import time
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from broker.client import Broker
from broker.queues.tasks import TaskQueue
from producers.workflows.base import RolloutContext
from producers.workflows.trajectory_builder import SampledCompletion, TrajectoryBuilder
from schemas.config import TidemillConfig, parse_config
from schemas.digests import digest
from schemas.errors import ConfigError, InfraError
from schemas.messages import ChatMessage, PlacedImage, Span
from tests.support.producers.generator_service import (
    begin_run,
    make_config,
    make_engine,
    make_task,
    read_published,
    running_generator,
    wait_until,
)

BAD_TASK = 3
WORKFLOW = f"{__name__}:Spoilt"
SEEN = PlacedImage(digest(b"seen"), 0, 1)


class Spoilt:
    """Of the tasks, one goes wrong: ``before`` it is sampled, or in what ``after`` makes of its sample 0."""

    before: Callable[[RolloutContext], None] | None = None
    after: Callable[[SampledCompletion], Any] | None = None

    def run(self, rollout: RolloutContext) -> AsyncIterator[SampledCompletion]:
        return rollout.each(self.sample)

    async def sample(self, rollout: RolloutContext, trajectory: TrajectoryBuilder) -> Any:
        bad = rollout.task.task_id == BAD_TASK
        if bad and Spoilt.before is not None:
            Spoilt.before(rollout)
        trajectory.prompt(rollout.prompt_ids)
        await rollout.generate(trajectory)
        sample = trajectory.finish()
        return Spoilt.after(sample) if bad and Spoilt.after is not None and sample.index == 0 else sample


@pytest.fixture(autouse=True)
def harmless(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Spoilt, "before", None)
    monkeypatch.setattr(Spoilt, "after", None)


@pytest.fixture
def config(model: Path, tmp_path: Path) -> TidemillConfig:
    plain = make_config(model, tmp_path, max_samples=16).model_dump(mode="json")
    plain["generator"]["workflow"] = {"name": WORKFLOW}
    return parse_config(plain)


async def generate(broker: Broker, config: TidemillConfig, folder: Path, good: int) -> list[tuple[int, int]]:
    """Four tasks of two samples each through a generator, until ``good`` are there and the others failed."""
    begin_run(broker, folder, *(make_task(task_id, max_tokens=20) for task_id in range(4)))
    async with running_generator(config, broker, make_engine(config, min_length=5, max_length=20)):
        found = sorted((item.task_id, item.sample) for item in await read_published(broker, good))
        await wait_until(lambda: broker.ledger.read_state().dead_letters == 8 - good)
        await wait_until(lambda: broker.connection.client.xlen(broker.connection.keys.tasks) == 0)
    return found


async def test_a_workflow_that_blocks_the_event_loop_loses_its_lease(
    broker: Broker, config: TidemillConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its heartbeats come from a thread, which must not hold tasks for a loop that does not answer."""
    silent_ms: list[int] = []

    def block(rollout: RolloutContext) -> None:
        time.sleep(2.0)
        keys, client = broker.connection.keys, broker.connection.client
        pending = client.xpending_range(keys.tasks, "generators", "-", "+", 10)
        silent_ms.extend(one["time_since_delivered"] for one in pending)

    monkeypatch.setattr(Spoilt, "before", staticmethod(block))
    short = config.generator.model_copy(update={"lease_s": 0.6})
    await generate(broker, config.model_copy(update={"generator": short}), tmp_path, 8)
    assert min(silent_ms) > 1000


def letters(broker: Broker) -> list[tuple[str, int, int]]:
    return [
        (one.letter.source, one.letter.task_id, one.letter.sample)
        for one in broker.dead_letters.page(1000, None, newest=False)[0]
    ]


def cancelled(rollout: RolloutContext) -> None:
    raise asyncio.CancelledError


def grouped(rollout: RolloutContext) -> None:
    raise ExceptionGroup("two", [KeyError("a"), ValueError("b")])


@pytest.mark.parametrize(
    ("before", "reason"),
    [
        (lambda rollout: {}["x"], "KeyError: 'x'"),
        (lambda rollout: 1 / 0, "ZeroDivisionError: division by zero"),
        (cancelled, "CancelledError"),
        (grouped, "ExceptionGroup: two (2 sub-exceptions)"),
        (lambda rollout: sys.exit(3), "RuntimeError: it called sys.exit(3)"),
    ],
    ids=["key", "zero", "cancelled", "group", "exit"],
)
async def test_a_workflow_that_raises_fails_its_task_alone(
    broker: Broker,
    config: TidemillConfig,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    before: Callable[[RolloutContext], None],
    reason: str,
) -> None:
    monkeypatch.setattr(Spoilt, "before", staticmethod(before))
    assert await generate(broker, config, tmp_path, 6) == [
        (task_id, sample) for task_id in range(3) for sample in range(2)
    ]
    assert sorted(letters(broker)) == [("generator", BAD_TASK, 0), ("generator", BAD_TASK, 1)]
    assert {one.letter.reason for one in broker.dead_letters.page(1000, None, newest=False)[0]} == {
        f"workflow {WORKFLOW}: {reason}"
    }


def with_logprob(value: float) -> Callable[[SampledCompletion], SampledCompletion]:
    return lambda sample: replace(sample, logprobs=[*sample.logprobs[:-1], value])


def raising(sample: SampledCompletion) -> SampledCompletion:
    raise ValueError("this one is lost")


BAD_SAMPLES: dict[str, tuple[Callable[[SampledCompletion], Any], str]] = {
    "raises": (raising, "ValueError: this one is lost"),
    "nan": (with_logprob(float("nan")), "log-probabilities are not finite"),
    "infinity": (with_logprob(float("-inf")), "log-probabilities are not finite"),
    "positive": (with_logprob(0.5), "logprobs must be 0 or less"),
    "numpy": (lambda sample: replace(sample, data={"hits": np.float32(1)}), "trajectory.data['hits']"),
    "surrogate": (lambda sample: replace(sample, completion="\ud800"), "trajectory.completion"),
    "no data": (lambda sample: replace(sample, data=None), "TypeError"),
    "no tokens": (lambda sample: replace(sample, tokens=None), "TypeError"),
    "short mask": (lambda sample: replace(sample, loss_mask=[1]), "loss_mask has 1 entries"),
    "large token": (lambda sample: replace(sample, tokens=[2**40] * len(sample.tokens)), "OverflowError"),
    "no spans": (lambda sample: replace(sample, spans=[]), "spans do not cover"),
    "tuple for a span": (lambda sample: replace(sample, spans=[(1, 0, 3)]), "AttributeError"),
    "unknown image": (
        lambda sample: replace(sample, images=[SEEN]),
        "belongs neither to its prompt nor to its episode",
    ),
    "weights to come": (lambda sample: replace(sample, spans=[Span(9, 0, len(sample.tokens))]), "version 9"),
}


@pytest.mark.parametrize("kind", BAD_SAMPLES)
async def test_a_sample_that_can_not_be_published_fails_alone(
    broker: Broker, config: TidemillConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    after, reason = BAD_SAMPLES[kind]
    monkeypatch.setattr(Spoilt, "after", staticmethod(after))
    expected = [(task_id, sample) for task_id in range(4) for sample in range(2) if (task_id, sample) != (BAD_TASK, 0)]
    assert await generate(broker, config, tmp_path, 7) == expected
    assert letters(broker) == [("generator", BAD_TASK, 0)]
    assert reason in broker.dead_letters.page(1000, None, newest=False)[0][0].letter.reason
    events = [event.text for event in [stored.event for stored in broker.events.newest(9)]]
    assert events == (["weights version 1 gave log-probabilities that are not finite"] if "finite" in reason else [])


async def test_a_sample_whose_images_the_broker_lost_before_it_came_is_published_with_them(
    broker: Broker, config: TidemillConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files, times = {SEEN.digest: b"seen"}, list[int]()
    keep = TaskQueue.keep_images

    def keep_and_lose(self: TaskQueue, task_id: int, images: Mapping[str, bytes]) -> None:
        keep(self, task_id, images)
        times.append(task_id)
        if len(times) == 1:
            broker.connection.client.delete(broker.connection.keys.images)
            broker.connection.client.hdel(broker.connection.keys.groups, f"{task_id}:images")

    monkeypatch.setattr(TaskQueue, "keep_images", keep_and_lose)
    monkeypatch.setattr(Spoilt, "after", staticmethod(lambda sample: replace(sample, images=[SEEN], files=files)))
    assert len(await generate(broker, config, tmp_path, 8)) == 8
    assert times == [BAD_TASK, BAD_TASK]
    assert broker.images.fetch([SEEN.digest]) == files


async def test_a_sample_that_is_always_yielded_unfinished_though_nothing_ends_it_fails_alone(
    broker: Broker, config: TidemillConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Spoilt, "after", staticmethod(lambda sample: replace(sample, finish="abort")))
    expected = [(task_id, sample) for task_id in range(4) for sample in range(2) if (task_id, sample) != (BAD_TASK, 0)]
    assert await generate(broker, config, tmp_path, 7) == expected
    assert letters(broker) == [("generator", BAD_TASK, 0)]
    assert broker.dead_letters.page(1000, None, newest=False)[0][0].letter.reason == (
        f"workflow {WORKFLOW}: its finish is 'abort' without a new token, though the generator is not ending; it was"
        f" returned {config.broker.max_deliveries} times for that"
    )


@pytest.mark.parametrize(
    ("after", "reason"),
    [
        (lambda sample: None, "AttributeError"),
        (lambda sample: replace(sample, index=7), "yielded sample 7, but the samples asked for are 0, 1"),
        (lambda sample: replace(sample, index=np.int64(0)), "yielded sample np.int64(0)"),
    ],
    ids=["nothing", "unasked", "numpy"],
)
async def test_what_is_no_sample_of_the_task_fails_the_task_alone(
    broker: Broker,
    config: TidemillConfig,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    after: Callable[[SampledCompletion], Any],
    reason: str,
) -> None:
    monkeypatch.setattr(Spoilt, "after", staticmethod(after))
    begin_run(broker, tmp_path, *(make_task(task_id, max_tokens=20) for task_id in range(4)))

    async with running_generator(config, broker, make_engine(config, min_length=5, max_length=20)):
        await wait_until(lambda: broker.connection.client.xlen(broker.connection.keys.tasks) == 0)
    failed = broker.dead_letters.page(1000, None, newest=False)[0]
    assert {one.letter.task_id for one in failed} == {BAD_TASK}
    assert reason in failed[0].letter.reason


class Leaving(Spoilt):
    """Ends the process where nothing is between it and the generator."""

    async def run(self, rollout: RolloutContext) -> AsyncIterator[SampledCompletion]:  # type: ignore[override]
        if rollout.task.task_id == BAD_TASK:
            sys.exit(3)
        async for sample in rollout.each(self.sample):
            yield sample


async def test_a_workflow_that_wants_to_end_the_process_fails_its_task_alone(
    broker: Broker, config: TidemillConfig, tmp_path: Path
) -> None:
    config.generator.workflow.name = f"{__name__}:Leaving"
    assert len(await generate(broker, config, tmp_path, 6)) == 6
    assert {one.letter.reason for one in broker.dead_letters.page(1000, None, newest=False)[0]} == {
        f"workflow {__name__}:Leaving: SystemExit: 3"
    }


class Forgetful(Spoilt):
    """Yields sample 0 only."""

    async def run(self, rollout: RolloutContext) -> AsyncIterator[SampledCompletion]:  # type: ignore[override]
        async for sample in rollout.each(self.sample):
            if sample.index == 0:
                yield sample


async def test_samples_that_a_workflow_forgets_fail(broker: Broker, config: TidemillConfig, tmp_path: Path) -> None:
    config.generator.workflow.name = f"{__name__}:Forgetful"
    assert await generate(broker, config, tmp_path, 4) == [(task_id, 0) for task_id in range(4)]
    assert {one.letter.sample for one in broker.dead_letters.page(1000, None, newest=False)[0]} == {1}
    assert "ended without this sample" in broker.dead_letters.page(1000, None, newest=False)[0][0].letter.reason


async def test_messages_without_a_template_fail_alone(broker: Broker, config: TidemillConfig, tmp_path: Path) -> None:
    base = tmp_path / "base"
    shutil.copytree(config.model.path, base)
    (base / "chat_template.jinja").unlink()
    config.model.path = str(base)
    chat = msgspec.structs.replace(make_task(1), text=None, messages=[ChatMessage("user", "hi")])
    begin_run(broker, tmp_path, make_task(0, max_tokens=20), chat, make_task(2, max_tokens=20))
    async with running_generator(config, broker, make_engine(config, min_length=5, max_length=20)):
        assert {item.task_id for item in await read_published(broker, 4)} == {0, 2}
        await wait_until(lambda: broker.ledger.read_state().dead_letters == 2)
    assert {
        "has no chat template" in one.letter.reason for one in broker.dead_letters.page(1000, None, newest=False)[0]
    } == {True}


@pytest.mark.parametrize(
    "error",
    [InfraError("the sandbox is down"), ConfigError("no key"), ExceptionGroup("tasks", [InfraError("down")])],
    ids=["infra", "config", "group"],
)
async def test_what_can_succeed_elsewhere_or_is_configured_wrong_ends_the_generator_and_fails_no_sample(
    broker: Broker, config: TidemillConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def fail(rollout: RolloutContext) -> None:
        raise error

    monkeypatch.setattr(Spoilt, "before", staticmethod(fail))
    # After the start, no error of one generator may end the run as a wrong configuration does.
    with pytest.raises((InfraError, ExceptionGroup)) as caught:
        await generate(broker, config, tmp_path, 6)
    assert isinstance(caught.value, InfraError) or caught.group_contains(InfraError)
    assert broker.dead_letters.page(1000, None, newest=False)[0] == []
