"""The generator service on a real server, with the scripted engine: weights, evaluations, kills, and a fair share."""

import asyncio
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import msgspec
import numpy as np
import pytest
import yaml

from broker.client import Broker
from broker.connection.embedded import EmbeddedServer
from broker.queues.tasks import eval_task_id
from producers.generator import weight_updates as updates_module
from schemas.codec import Array
from schemas.config import TidemillConfig, TraceConfig, parse_config
from schemas.config.deploy import SupervisorConfig
from schemas.errors import OK_EXIT, InfraError
from schemas.messages import Partial, Sampling, Span, Task
from schemas.messages.moments import nest
from tests.support.broker.prompt_groups import make_trajectory
from tests.support.broker.trainer_sessions import take_over
from tests.support.models.tiny_model import make_tiny_model
from tests.support.producers.generator_service import (
    begin_run,
    make_config,
    make_engine,
    make_task,
    publish_version,
    read_published,
    run_generator_while,
    running_generator,
    versions_in,
    wait_until,
)
from tests.support.runs.light_service import METADATA, start_service
from tests.support.servers.metadata_server import metadata_server

TASKS = 60


async def test_a_finished_sample_leaves_before_slower_ones(model: Path, broker: Broker, tmp_path: Path) -> None:
    begin_run(broker, tmp_path, make_task(0, n=8))
    config = make_config(model, tmp_path)

    async with running_generator(config, broker, make_engine(config, max_length=400)):
        await read_published(broker, 8)
        entries = broker.connection.client.xrange(broker.connection.keys.trajectories)
        assert len({entry_id.partition(b"-")[0] for entry_id, _ in entries}) > 1, "published at several moments"


async def test_weights_that_fail_their_probe_are_taken_back(model: Path, broker: Broker, tmp_path: Path) -> None:
    training = begin_run(broker, tmp_path, *(make_task(task_id) for task_id in range(3)), staleness=4)
    config = make_config(model, tmp_path)
    engine = make_engine(config, min_length=300, max_length=600)
    engine.spoilt = {2}

    async with running_generator(config, broker, engine):
        await engine.generating.wait()
        publish_version(broker, training, tmp_path, 2)
        await wait_until(lambda: engine.loaded == [1, 2, 1])
        publish_version(broker, training, tmp_path, 3)
        found = await read_published(broker, 6)
        assert engine.loaded == [1, 2, 1, 3]
        assert versions_in(found) <= {1, 3}
        assert {(item.task_id, item.sample) for item in found} == {(t, s) for t in range(3) for s in range(2)}
        for item in found:
            assert sum(span.end - span.start for span in item.spans) == sum(item.loss_mask.data)
        assert [event.name for event in [stored.event for stored in broker.events.newest(5)]] == ["weights_rejected"]


async def test_weights_that_do_not_fit_leave_the_old_ones_in_use(model: Path, broker: Broker, tmp_path: Path) -> None:
    training = begin_run(broker, tmp_path)
    config = make_config(model, tmp_path)
    engine = make_engine(config)
    engine.misfits = {2}

    async with running_generator(config, broker, engine):
        await wait_until(lambda: engine.loaded == [1])
        publish_version(broker, training, tmp_path, 2)
        await wait_until(lambda: [stored.event for stored in broker.events.newest(5)])
        broker.ledger.admit(make_task(0))
        assert versions_in(await read_published(broker, 2)) == {1}


@pytest.mark.parametrize("how", ["spoilt too", "gone"])
async def test_a_generator_that_cannot_go_back_ends(model: Path, broker: Broker, tmp_path: Path, how: str) -> None:
    training = begin_run(broker, tmp_path, make_task(0))
    config = make_config(model, tmp_path)
    engine = make_engine(config, min_length=900, max_length=900, token_s=0.02)

    async def scene() -> None:
        await engine.generating.wait()
        engine.spoilt = {1, 2} if how == "spoilt too" else {2}
        if how == "gone":
            broker.connection.client.delete(broker.connection.keys.chunks)
        publish_version(broker, training, tmp_path, 2)
        await asyncio.Event().wait()

    with pytest.raises(ExceptionGroup) as caught:
        await run_generator_while(config, broker, engine, scene)
    assert caught.group_contains(InfraError, match="can't be restored" if how == "spoilt too" else "gone")
    assert broker.connection.client.xlen(broker.connection.keys.trajectories) == 0
    (delivery,) = broker.task_queue("other").claim_stale(0.0, 10)
    assert delivery.message.task_id == 0


async def test_a_rejected_version_that_no_newer_one_follows_ends_the_process(
    model: Path, broker: Broker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(updates_module, "REJECTED_DEADLINE_S", 0.0)
    training = begin_run(broker, tmp_path)
    config = make_config(model, tmp_path)
    engine = make_engine(config)
    engine.spoilt = {2}

    async def scene() -> None:
        await wait_until(lambda: engine.loaded == [1])
        publish_version(broker, training, tmp_path, 2)
        await asyncio.Event().wait()

    with pytest.raises(ExceptionGroup) as caught:
        await run_generator_while(config, broker, engine, scene)
    assert caught.group_contains(InfraError, match="version 2 fails its probe")
    assert engine.loaded == [1, 2, 1]


async def test_a_generator_stops_sampling_what_another_took_over(model: Path, broker: Broker, tmp_path: Path) -> None:
    begin_run(broker, tmp_path, make_task(0))
    config = make_config(model, tmp_path, lease_s=1.5)
    engine = make_engine(config, min_length=900, max_length=900, token_s=0.1)

    async with running_generator(config, broker, engine):
        await engine.generating.wait()
        other = broker.task_queue("other")
        assert await asyncio.to_thread(other.claim_stale, 0.0, 10)
        await wait_until(lambda: engine.growth() is None)
        assert await asyncio.to_thread(other.renew_leases) == [], "it is the other's, and stays so"
        broker.ledger.admit(make_task(1))
        await wait_until(lambda: engine.growth() is not None)
        assert other.publish(0, [make_trajectory(0, 0), make_trajectory(0, 1)]) == ["ok", "ok"]
    assert broker.ledger.read_state().dead_letters == 0
    assert [item.message.task_id for item in broker.task_queue("next").read(10, 10)] == [1], "only its own went back"


async def test_who_is_asked_to_end_hands_every_token_to_the_next(model: Path, broker: Broker, tmp_path: Path) -> None:
    begin_run(broker, tmp_path, make_task(0, n=4))
    config = make_config(model, tmp_path)
    engine = make_engine(config, min_length=900, max_length=900, token_s=0.02)  # 18 s, many times what noticing takes
    async with running_generator(config, broker, engine):
        await engine.generating.wait()
    (delivery,) = broker.task_queue("reader").read(1, 10)
    parts = {part.sample: part for part in delivery.message.partials}
    assert sorted(parts) == [0, 1, 2, 3]
    assert all(len(part.tokens) for part in parts.values())
    broker.task_queue("reader").return_task(delivery, delivery.message)

    async with running_generator(config, broker, make_engine(config, min_length=5, max_length=5), name="h"):
        for item in await read_published(broker, 4):
            assert item.process == "", "not all of its tokens are of the generator that it names"
            start = item.loss_mask.data.index(1)
            whole, before = item.tokens.numpy()[start:], parts[item.sample].tokens.numpy()
            np.testing.assert_array_equal(whole[: len(before)], before)
            np.testing.assert_array_equal(
                item.logprobs.numpy()[start:][: len(before)], parts[item.sample].logprobs.numpy()
            )


async def test_a_generator_with_older_weights_continues_and_publishes_a_sample_of_newer_ones(
    model: Path, broker: Broker, tmp_path: Path
) -> None:
    begin_run(broker, tmp_path, make_task(0))
    (delivery,) = await asyncio.to_thread(broker.task_queue("leaver").read, 1, 10)
    tokens, logprobs = Array.of([5, 6, 7], "i4"), Array.of([-0.5] * 3, "f4")
    partials = [Partial(sample=s, tokens=tokens, logprobs=logprobs, spans=[Span(2, 0, 3)]) for s in range(2)]
    broker.task_queue("leaver").return_task(delivery, msgspec.structs.replace(delivery.message, partials=partials))

    config = make_config(model, tmp_path)
    async with running_generator(config, broker, make_engine(config, min_length=5, max_length=5)):
        for item in await read_published(broker, 2):
            assert [span.version for span in item.spans] == [2, 1]
    assert broker.ledger.read_state().dead_letters == 0


IN_FLIGHT = 1
"""Tokens of a sample that its engine may make while it is asked to end the sample."""
COUNTING = """
import os
from producers.engines.scripted import ScriptedEngine


class Counting(ScriptedEngine):
    '''Keeps, for its murderer, how many tokens each sample has.'''

    def _step(self, samples, progress):
        super()._step(samples, progress)
        counts = os.environ["COUNTS"]
        with open(counts + ".new", "w") as file:
            file.write(" ".join(str(len(sample.tokens)) for sample in samples))
        os.replace(counts + ".new", counts)
"""


async def test_a_kill_loses_no_more_than_was_not_saved_and_another_goes_on(
    model: Path, make_broker: Callable[..., Broker], server: EmbeddedServer, tmp_path: Path
) -> None:
    broker = make_broker("g")
    begin_run(broker, tmp_path, make_task(0, n=3))
    (tmp_path / "counting.py").write_text(COUNTING)
    counts, flush = tmp_path / "counts", 50
    args = {"token_s": 0.01, "min_length": 900, "max_length": 900}
    config = make_config(model, tmp_path, flush_every=flush, lease_s=1, engine="counting.py:Counting", args=args)
    config = config.model_copy(update={"trace": TraceConfig()})
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(config.model_dump(mode="json", exclude_none=True)))
    victim = start_service("generator", tmp_path / "config.yaml", "victim", server.url, COUNTS=str(counts))

    def saved() -> list[int]:
        return [len(part.tokens) for part in broker.partials("g").load_partials(0, range(3))]

    try:
        await wait_until(lambda: victim.poll() is not None or sum(saved()) > 4 * 3 * flush, 60)
    finally:
        victim.kill()
        victim.wait(10)
    made = counts.read_text().split()
    assert all(int(count) - kept <= flush for count, kept in zip(made, saved(), strict=True))
    before = {part.sample: part for part in broker.partials("g").load_partials(0, range(3))}

    async with running_generator(config, broker, make_engine(config, min_length=5, max_length=5), name="heir"):
        for item in await read_published(broker, 3):
            start = item.loss_mask.data.index(1)
            tokens = item.tokens.numpy()[start:]
            np.testing.assert_array_equal(tokens[: len(before[item.sample].tokens)], before[item.sample].tokens.numpy())
            assert len(tokens) == len(before[item.sample].tokens) + 5, "it resumes from there"
            trace = [one for one, _ in nest(item.trace, item.seconds, 5) if one.kind != "chat"]
            assert [(one.kind, one.name) for one in trace] == [
                ("admitted", ""),
                ("attempt", "victim"),
                ("attempt", "heir"),
            ]
            assert sorted(trace, key=lambda one: one.start) == trace
            assert trace[1].end <= trace[2].start, "two attempts after a kill"
        await wait_until(lambda: broker.connection.client.hlen(broker.connection.keys.partials) == 0)


async def test_a_spot_machine_that_is_taken_back_hands_its_samples_over(
    model: Path, make_broker: Callable[..., Broker], server: EmbeddedServer, tmp_path: Path
) -> None:
    broker = make_broker("spot")
    begin_run(broker, tmp_path, make_task(0, n=3))
    (tmp_path / "counting.py").write_text(COUNTING)
    counts = tmp_path / "counts"
    args = {"token_s": 0.01, "min_length": 900, "max_length": 900}
    config = make_config(model, tmp_path, engine="counting.py:Counting", args=args)
    run = config.run.model_copy(update={"name": "spot"})
    config = config.model_copy(update={"run": run, "supervisor": SupervisorConfig(spot_notices="aws")})
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(config.model_dump(mode="json", exclude_none=True)))

    def made() -> int:
        return min((int(count) for count in counts.read_text().split()), default=0) if counts.exists() else 0

    with metadata_server() as (address, _, ended):
        variables = {"COUNTS": str(counts), METADATA: address}
        spot = start_service("generator", tmp_path / "config.yaml", "spot", server.url, **variables)
        try:
            await wait_until(lambda: spot.poll() is not None or made() > 50, 60)
            ended.set()
            assert await asyncio.to_thread(spot.wait, 60) == OK_EXIT
        finally:
            spot.kill()

    async with running_generator(config, broker, make_engine(config, min_length=5, max_length=5), name="heir"):
        for item in await read_published(broker, 3):
            start = item.loss_mask.data.index(1)
            kept = len(item.tokens.numpy()[start:]) - 5
            assert made() - IN_FLIGHT <= kept <= made(), "it resumes with what came back, which is all"


def eval_task(version: int, index: int) -> Task:
    return Task(
        task_id=eval_task_id(version, index),
        kind="eval",
        n=1,
        sampling=Sampling(temperature=0, max_tokens=200),
        text=f"{index}+1=",
    )


def evaluated(config: TidemillConfig) -> TidemillConfig:
    settings = config.model_dump(mode="json", exclude_none=True)
    return parse_config(settings | {"eval": {"dataset": {"name": "arithmetic"}, "every": 2}})


async def test_an_evaluation_is_of_its_version_not_the_newest(model: Path, broker: Broker, tmp_path: Path) -> None:
    training = begin_run(broker, tmp_path, *(make_task(task_id) for task_id in range(4)))
    config = evaluated(make_config(model, tmp_path, max_samples=4))
    engine = make_engine(config, min_length=20, max_length=100)

    async with running_generator(config, broker, engine):
        await engine.generating.wait()
        publish_version(broker, training, tmp_path, 2)
        publish_version(broker, training, tmp_path, 3)
        broker.evals.open(2, [eval_task(2, index) for index in range(12)])
        found = await read_published(broker, 20)
        await wait_until(lambda: engine.version == 3)
        evaluation = [item for item in found if item.kind == "eval"]
        assert len(evaluation) == 12
        assert versions_in(evaluation) == {2}
        assert engine.loaded == [1, 2, 3]
        (result,) = broker.evals.read_results()
        assert (result.version, result.n, result.off_version) == (2, 12, 0)


async def test_an_evaluation_of_lost_weights_is_answered_as_such(model: Path, broker: Broker, tmp_path: Path) -> None:
    training = take_over(broker)
    publish_version(broker, training, tmp_path, 3)
    broker.evals.open(2, [eval_task(2, index) for index in range(5)])
    config = evaluated(make_config(model, tmp_path))

    async with running_generator(config, broker, make_engine(config)):
        found = await read_published(broker, 5)
        assert versions_in(found) == {3}
        (result,) = broker.evals.read_results()
        assert (result.n, result.off_version) == (5, 5)


def test_evaluation_tasks_are_left_to_who_has_their_version(broker: Broker) -> None:
    take_over(broker)
    broker.evals.open(4, [eval_task(4, index) for index in range(3)])
    broker.evals.open(6, [eval_task(6, 0)])
    ahead, right = broker.task_queue("ahead"), broker.task_queue("right")
    found = ahead.take_evaluations(5, 10)
    assert (found.pending, found.opened, found.taken) == (4, False, [])
    assert ahead.read(10, 10, evaluations=False) == []
    first = right.take_evaluations(4, 2)
    assert (first.pending, first.opened, len(first.taken)) == (4, True, 2)
    rest = right.take_evaluations(4, 10)
    assert (rest.pending, [item.version for item in rest.taken]) == (6, [4])
    assert ahead.take_evaluations(7, 10).pending == 6
    late = ahead.take_evaluations(7, 10, late=True)
    assert (late.pending, [item.version for item in late.taken]) == (-1, [6])
    assert right.take_evaluations(6, 10).pending == -1


async def test_a_slow_and_a_fast_generator_share_the_tasks_by_their_speed(broker: Broker, tmp_path: Path) -> None:
    begin_run(broker, tmp_path, staleness=TASKS)
    broker.ledger.admit_all([make_task(task_id) for task_id in range(TASKS)])
    config = make_config(make_tiny_model(tmp_path / "model"), tmp_path, max_samples=4)
    made: Counter[str] = Counter()
    done = asyncio.Event()

    async def count() -> None:
        made.update(item.generator for item in await read_published(broker, 2 * TASKS))
        done.set()

    fast = make_engine(config, min_length=20, max_length=20, token_s=0.002)
    slow = make_engine(config, min_length=20, max_length=20, token_s=0.02)
    await asyncio.gather(
        run_generator_while(config, broker, fast, count, "fast"),
        run_generator_while(config, broker, slow, done.wait, "slow"),
    )
    assert made["fast"] > 2 * made["slow"] > 0
