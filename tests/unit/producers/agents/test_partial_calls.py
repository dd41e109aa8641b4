"""Unfinished episodes of agents: the calls that are kept for the generator that resumes them."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any, cast

import msgspec
import numpy as np
import pytest

from broker.queues.consumer_group import Delivery
from producers.generator.rollout import NotFinite, Rollout, check_finite, head, longest, with_earlier
from producers.workflows.trajectory_builder import SampledCompletion
from schemas.codec import Array
from schemas.messages import Call, FinishReason, Partial, Span, Task
from schemas.system.lifecycle import StopFlag
from tests.support.broker.prompt_groups import make_task


def call(key: str, length: int = 3, finish: FinishReason = "stop", version: int = 0) -> Call:
    tokens, logprobs = Array.of(np.arange(length), "i4"), Array.of(np.zeros(length), "f4")
    return Call(key=key.encode(), tokens=tokens, logprobs=logprobs, spans=[Span(version, 0, length)], finish=finish)


def episode(*calls: Call, **notes: str) -> Partial:
    none, no_logprobs = Array.of([], "i4"), Array.of([], "f4")
    return Partial(sample=0, tokens=none, logprobs=no_logprobs, spans=[], calls=list(calls), notes=notes)


def keys(partial: Partial) -> str:
    return "".join(item.key.decode() for item in partial.calls)


def test_an_episode_that_starts_again_keeps_the_calls_it_has_not_come_to_yet() -> None:
    earlier = episode(call("a"), call("b"), call("c"), n="1", m="2")
    assert keys(with_earlier(episode(), earlier)) == "abc"
    assert keys(with_earlier(episode(call("b")), earlier)) == "bac"
    assert keys(with_earlier(episode(call("a"), call("b"), call("c"), call("d")), earlier)) == "abcd"
    assert with_earlier(episode(call("a"), n="3"), earlier).notes == {"n": "3", "m": "2"}
    assert with_earlier(episode(call("a")), None) == episode(call("a"))


def test_an_episode_that_goes_another_way_drops_its_earlier_calls_once_it_has_as_much() -> None:
    earlier = episode(call("a", 4), call("b", 4))
    assert keys(with_earlier(episode(call("a", 4), call("x", 3)), earlier)) == "axb"
    assert keys(with_earlier(episode(call("a", 4), call("x", 4)), earlier)) == "ax"


def test_a_growing_call_replaces_what_was_saved_of_it() -> None:
    earlier = episode(call("a"), call("b", 2, "abort"))
    assert with_earlier(episode(call("a"), call("b", 1, "abort")), earlier).calls[1].tokens == call("b", 1).tokens


def test_the_longest_partial_of_a_sample_has_the_notes_of_all() -> None:
    short, long = episode(call("a"), n="1", m="1"), episode(call("a"), call("b"), n="2")
    for partials in ([short, long], [long, short]):
        (found,) = longest(partials)
        assert (keys(found), found.notes) == ("ab", {"n": "2", "m": "1"})
    (found,) = longest([episode(n="1"), episode()])
    assert found.notes == {"n": "1"}


def test_the_first_tokens_of_a_call_are_a_call_that_grows() -> None:
    whole = msgspec.structs.replace(call("a", 5), spans=[Span(1, 0, 3), Span(2, 3, 5)])
    assert head(whole, 5) is whole
    cut = head(whole, 4)
    assert (cut.finish, cut.tokens.numpy().tolist(), cut.spans) == (
        "abort",
        [0, 1, 2, 3],
        [Span(1, 0, 3), Span(2, 3, 4)],
    )


def test_all_calls_are_kept_wherever_their_tokens_stand() -> None:
    """The tokens of a helper stand behind those of the main agent, though they are older."""
    sample = SampledCompletion(
        index=0,
        tokens=[1, 2, 3, 4],
        loss_mask=[1, 1, 1, 1],
        logprobs=[-1.0, -1.0, -1.0, -1.0],
        spans=[Span(4, 0, 2), Span(3, 2, 4)],
        turns=[],
        finish="abort",
        prompt="",
        completion="",
        calls=[call("a", version=3), call("b", version=4)],
        notes={"n": "1"},
    )
    assert sample.to_partial(0) == episode(*sample.calls, n="1")
    sample.logprobs[2] = float("nan")
    with pytest.raises(NotFinite, match="version 3"):
        check_finite(sample, 4)


class Checked:
    """Of a generator, the weights whose probe is passed, and what it saves."""

    def __init__(self, version: int) -> None:
        self.version = version
        self.updates = self.weights = self.saver = self
        self.saved: list[Partial] = []
        self.checked = asyncio.Event()

    def trusted_length(self, spans: Sequence[Span], length: int) -> int:
        return min((span.start for span in spans if span.version > self.version), default=length)

    async def wait_trusted(self, spans: Sequence[Span], length: int) -> int:
        await self.checked.wait()
        return length

    def save_soon(self, delivery: Delivery[Task], partial: Partial) -> asyncio.Future[None]:
        self.saved.append(partial)
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        done.set_result(None)
        return done


async def test_no_token_of_weights_that_are_not_checked_yet_is_saved_and_who_waits_waits_for_the_check() -> None:
    async def save() -> None:
        context = Checked(version=1)
        rollout = Rollout(cast(Any, context), Delivery(b"1-1", "tasks", make_task(0)), cast(Any, None), StopFlag())
        mixed = msgspec.structs.replace(call("b", 5), spans=[Span(1, 0, 3), Span(2, 3, 5)])
        rollout._save(episode(call("a", version=2)))
        assert context.saved == []
        whole = episode(call("a", version=1), mixed, call("c", version=2), call("d", version=1))
        saving = asyncio.ensure_future(rollout._save(whole))
        (saved,) = context.saved
        assert [(item.key, len(item.tokens), item.finish) for item in saved.calls] == [
            (b"a", 3, "stop"),
            (b"b", 3, "abort"),
            (b"d", 3, "stop"),
        ]
        await asyncio.sleep(0.01)
        assert not saving.done()
        context.version = 2
        context.checked.set()
        await saving
        assert context.saved[1:] == [whole]

    await asyncio.wait_for(save(), 10)
