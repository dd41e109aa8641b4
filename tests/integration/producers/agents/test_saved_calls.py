"""Generators that are killed, or asked to end, during episodes of several calls, and what the next one resumes."""

import signal
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest

from broker.client import Broker
from broker.connection.embedded import EmbeddedServer
from producers.engines.base import EngineSettings
from tests.support.broker.trainer_sessions import take_over
from tests.support.producers.generator_service import (
    Engine,
    make_config,
    make_engine,
    make_task,
    publish_version,
    read_published,
    running_generator,
    wait_until,
)
from tests.support.producers.killed_agents import play

pytestmark = pytest.mark.timeout(180)

EPISODES = """
import msgspec
from producers.workflows.base import RolloutContext
from producers.workflows.trajectory_builder import SampledCompletion, TrajectoryBuilder
from schemas.codec import Array
from schemas.messages import Call, Partial


class Episodes:
    '''Three calls of a sample, each a turn; one with a saved key is answered from the record.'''

    def run(self, rollout):
        return rollout.each(self.sample)

    async def sample(self, rollout, builder):
        builder.prompt(rollout.prompt_ids)
        saved = rollout.saved.get(builder.index)
        record = {call.key: call for call in saved.calls} if saved else {}
        calls, replayed = [], 0
        for turn in range(3):
            key = f"{builder.index}:{turn}".encode()
            if key in record and record[key].finish != "abort":
                call, replayed = record[key], replayed + 1
                builder.resumed(Partial(sample=0, tokens=call.tokens, logprobs=call.logprobs, spans=call.spans))
                finish = call.finish
            else:
                (answer,) = await rollout.engine.generate(builder.tokens, rollout.sampling)
                builder.generated(answer)
                finish = answer.finish
                call = Call(key=key, tokens=Array.of(answer.tokens, "i4"), logprobs=Array.of(answer.logprobs, "f4"),
                            spans=answer.spans, finish=finish)
            if len(call.tokens):
                calls.append(call)
            if finish == "abort":
                break
            rollout.save(Partial(sample=builder.index, tokens=Array.of([], "i4"), logprobs=Array.of([], "f4"),
                                 spans=[], calls=list(calls), notes={"turn": str(turn)}))
            builder.observed([2])
        sample = builder.finish(finish)
        sample.calls, sample.metrics = calls, {"replayed": float(replayed)}
        return sample
"""
SAMPLES = [(task_id, sample) for task_id in range(4) for sample in range(2)]


class HoldsLast(Engine):
    """An engine that takes long over the third call of an episode."""

    def _sample(self, prompt: Sequence[int], *args: Any) -> Any:
        running = super()._sample(prompt, *args)
        if prompt.count(2) == 2:
            running.until = 900
        return running


@pytest.mark.parametrize("end", ["asked to end", "killed"])
async def test_calls_are_there_for_the_next_generator(model: Path, broker: Broker, tmp_path: Path, end: str) -> None:
    training = take_over(broker)
    publish_version(broker, training, tmp_path, 1)
    broker.ledger.admit(make_task(0))
    (tmp_path / "episodes.py").write_text(EPISODES)
    config = make_config(model, tmp_path, workflow={"name": f"{tmp_path}/episodes.py:Episodes"})
    script = {"token_s": 0.01, "min_length": 5, "max_length": 5}
    reader = broker.partials("reader")

    first = HoldsLast(EngineSettings("none", "float32", 2000, 8, args=script))
    async with running_generator(config, broker, first):
        await wait_until(lambda: [len(item.calls) for item in reader.load_partials(0, range(2))] == [2, 2])
        rounds = first.growth() or 0
        await wait_until(lambda: (first.growth() or 0) > rounds + 5)  # the third calls grow
    saved = reader.load_partials(0, range(2))
    assert [item.notes for item in saved] == [{"turn": "1"}] * 2
    (delivery,) = broker.task_queue("reader").read(1, 10)
    handed = delivery.message.partials
    assert [[call.finish for call in item.calls] for item in handed] == [["stop", "stop", "abort"]] * 2
    assert [item.calls[:2] for item in sorted(handed, key=lambda item: item.sample)] == [item.calls for item in saved]
    given = delivery.message if end == "asked to end" else msgspec.structs.replace(delivery.message, partials=[])
    assert broker.task_queue("reader").return_task(delivery, given)

    async with running_generator(config, broker, make_engine(config, **script), name="heir"):
        for item in await read_published(broker, 2):
            assert item.metrics == {"replayed": 2.0}
            assert item.calls == 3
            record = {piece.sample: piece.calls for piece in saved}[item.sample]
            sampled = item.tokens.numpy()[item.loss_mask.numpy() == 1]
            assert sampled[:10].tolist() == [token for call in record for token in call.tokens.numpy()]


def test_episodes_under_kills_are_those_without_and_no_call_with_an_answer_is_made_again(
    server: EmbeddedServer, make_broker: Callable[..., Broker], tmp_path: Path
) -> None:
    killed = play(tmp_path / "killed", make_broker("killed"), server.url, episodes=8, calls=4, ends=2)
    quiet = play(tmp_path / "quiet", make_broker("quiet"), server.url, episodes=8, calls=4, ends=0)
    assert sorted((found.task_id, found.sample) for found in killed.published) == SAMPLES
    assert killed.answers == quiet.answers
    assert (killed.calls, killed.answered_again) == (32, 0)
    assert killed.made_again <= killed.in_flight
    assert sum(found.metrics["replayed"] for found in killed.published) > 0
    assert (quiet.calls, quiet.made_again) == (32, 0)
    assert all(len(found.rows()) == 1 for found in killed.published)


def test_a_generator_that_is_asked_to_end_hands_over_every_call_that_was_sampled(
    server: EmbeddedServer, make_broker: Callable[..., Broker], tmp_path: Path
) -> None:
    found = play(
        tmp_path, make_broker("ended"), server.url, episodes=8, calls=4, ends=2, tool_s=0.1, sign=signal.SIGTERM
    )
    assert sorted((sample.task_id, sample.sample) for sample in found.published) == SAMPLES
    assert (found.calls, found.ended_again) == (32, 0)
    assert sum(sample.metrics["replayed"] for sample in found.published) > 0
    assert all(sample.calls == 4 and len(sample.rows()) == 1 for sample in found.published)
    assert found.slowest_end_s < 20
