"""The chaos suite's judge of agents: a trained token that was not sampled is seen, whatever is around it."""

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from schemas.codec import Array
from schemas.messages import Segment, Span, Trajectory, Turn
from tools.chaos.agents import agent, calls
from tools.chaos.judging.evidence import EvidenceWriter
from tools.chaos.judging.oracle import Judgement
from tools.chaos.proxy import Proxy

FIRST, SECOND = [11, 12, 13], [21, 22]
PROMPT, MORE = [1, 2], [3]
NEW_ROW = [7]
"""The prompt of a second row, after the first token of the first row's."""


def trajectory(**changed: Any) -> Trajectory:
    """Two answers in one row, and a third one in another that shares its first token."""
    parts = [(PROMPT, 0), (FIRST, 1), (MORE, 0), (SECOND, 1), (NEW_ROW, 0), (SECOND, 1)]
    tokens = [token for part, _ in parts for token in part]
    mask = [sampled for part, sampled in parts for _ in part]
    fields: dict[str, Any] = {
        "tokens": Array.of(tokens, "i4"),
        "loss_mask": Array.of(mask, "u1"),
        "logprobs": Array.of(
            [-token / 100 if sampled else 0.0 for token, sampled in zip(tokens, mask, strict=True)], "f4"
        ),
        "turns": [Turn("assistant", 2, 5, 0), Turn("assistant", 6, 8, 1), Turn("assistant", 9, 11, 2)],
        "reward": agent.checksum([FIRST, SECOND, SECOND]),
    }
    return Trajectory(
        **{
            "run": "r",
            "task_id": 4,
            "sample": 1,
            "kind": "train",
            "spans": [Span(0, 0, 11)],
            "finish": "stop",
            "prompt": "",
            "completion": "",
            "generator": "g",
            "segments": [Segment(0, 8), Segment(8, 11, 0, 1)],
            "calls": 3,
            **fields,
            **changed,
        }
    )


def sampled(before: Sequence[int], tokens: Sequence[int]) -> tuple[int, list[str]]:
    return calls.context(before), [calls.pack(tokens, [-token / 100 for token in tokens])]


GOOD = (sampled(PROMPT, FIRST), sampled([*PROMPT, *FIRST, *MORE], SECOND), sampled([PROMPT[0], *NEW_ROW], SECOND))


def judge(folder: Path, trained: Trajectory, lines: Sequence[tuple[int, list[str]]] = GOOD) -> list[str]:
    """What is found broken in a run of one trained sample."""
    engine, trainer = (EvidenceWriter(folder / calls.FOLDER, name) for name in ("generator-0", "trainer"))
    for before, packed in lines:
        engine.write("sampled", c=before, x=packed)
    trainer.write("trained", **calls.describe(trained))
    judgement = Judgement()
    calls.judge_calls(folder, judgement)
    assert (judgement.counts["episodes trained"], judgement.counts["calls trained"]) == (1, 3)
    return [violation.promise for violation in judgement.violations]


def test_an_episode_whose_every_token_was_sampled_breaks_nothing(tmp_path: Path) -> None:
    assert judge(tmp_path, trajectory()) == []


def test_an_answer_that_another_generator_went_on_with_after_any_of_its_tokens_was_sampled(tmp_path: Path) -> None:
    pieces = [sampled(PROMPT, [*FIRST[:2], 99]), sampled([*PROMPT, *FIRST[:2]], FIRST[2:])]
    assert judge(tmp_path, trajectory(), [*pieces, *GOOD[1:]]) == []


@pytest.mark.parametrize("missing", range(3))
def test_an_answer_that_was_sampled_elsewhere_is_found(tmp_path: Path, missing: int) -> None:
    lines = [line for number, line in enumerate(GOOD) if number != missing]
    assert judge(tmp_path, trajectory(), [*lines, (12345, GOOD[missing][1])]) == ["not sampled"]


def test_another_log_probability_than_the_sampled_one_is_found(tmp_path: Path) -> None:
    logprobs = trajectory().logprobs.numpy().copy()
    logprobs[3] -= 0.01
    assert judge(tmp_path, trajectory(logprobs=Array.of(logprobs.tolist(), "f4"))) == ["not sampled"]


def test_a_trained_token_of_no_call_is_found(tmp_path: Path) -> None:
    mask = np.array(trajectory().loss_mask.numpy())
    mask[5] = 1
    assert judge(tmp_path, trajectory(loss_mask=Array.of(mask.tolist(), "u1"))) == ["not sampled"]


@pytest.mark.parametrize(
    ("finish", "reward", "promises"),
    [
        ("stop", 0.5, ["wrong reward"]),
        ("stop", 0.0, ["wrong reward"]),
        ("stop", None, ["wrong reward"]),
        ("deadline", None, ["wrong reward"]),
        ("deadline", 0.0, []),
        ("calls", 0.0, []),
    ],
)
def test_the_agents_own_reward_is_that_of_what_is_trained(
    tmp_path: Path, finish: Any, reward: float | None, promises: list[str]
) -> None:
    assert judge(tmp_path, trajectory(finish=finish, reward=reward)) == promises


async def test_an_agent_asks_again_when_its_connection_is_cut(tmp_path: Path) -> None:
    heard: list[bytes] = []

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        heard.append(await reader.readuntil(b"\r\n\r\n"))
        if len(heard) == 1:
            proxy.reset(["agents"])
            return
        body = b'{"choices": []}'
        writer.write(b"HTTP/1.0 200 OK\r\ncontent-length: %d\r\n\r\n" % len(body) + body)
        writer.close()

    async def play() -> dict[str, Any]:
        server = await asyncio.start_server(answer, "127.0.0.1", 0)
        port = proxy.open("agents", server.sockets[0].getsockname()[1])
        async with server:
            return await agent.ask(f"http://127.0.0.1:{port}/s/x/v1", {"messages": []})

    proxy = Proxy(tmp_path / "no.sock")
    try:
        assert await play() == {"choices": []}
    finally:
        proxy.close()
    assert [b"retry-count: 0" in heard[0], b"retry-count: 1" in heard[1]] == [True, True]
