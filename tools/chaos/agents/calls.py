"""Every trained token of an agent was sampled: what engines sampled, call by call, held against what was trained.

Each process writes a file in the folder ``calls``, because these lines are many and are read once. Kinds, with
``c`` the checksum of all token ids before the answer:
  sampled: c, x=[tokens and log-probabilities of each choice, packed]
  trained: t, s, finish, reward (the agent's own), untold (loss tokens outside of any call), x=[c, packed] by call

An answer may be of several pieces, since a generator that ends hands it over, and another continues after any token of
it. So it is walked through: from each place that was reached, whatever was sampled there, as far as it is the same.
"""

from __future__ import annotations

import base64
import zlib
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from schemas.messages import Trajectory
from tools.chaos.agents.agent import checksum
from tools.chaos.judging.evidence import Line, read_logs
from tools.chaos.judging.oracle import Judgement

FOLDER = "calls"
SMALLEST = 1e-6
UNREWARDED = ("deadline", "calls", "length")
"""Ends of episodes that reached a limit: their reward is 0 where the agent said none."""
PAIR = np.dtype([("token", "<i4"), ("logprob", "<f4")])


def context(ids: Sequence[int] | np.ndarray[Any, Any], before: int = 0) -> int:
    """Checksum of token ids that follow ids whose checksum is ``before``."""
    return zlib.crc32(np.asarray(ids, "<i4").tobytes(), before)


def pack(tokens: Any, logprobs: Any) -> str:
    """Tokens and log-probabilities of an answer, as text."""
    pairs = np.empty(len(tokens), PAIR)
    pairs["token"], pairs["logprob"] = tokens, logprobs
    return base64.b64encode(pairs.tobytes()).decode()


def describe(trajectory: Trajectory) -> dict[str, Any]:
    """The line ``trained`` of an agent's sample."""
    tokens, mask = trajectory.tokens.numpy(), trajectory.loss_mask.numpy()
    logprobs = trajectory.logprobs.numpy()
    untold, found = mask.copy(), []
    for row in trajectory.rows():
        first, end = int(row.places[row.shared]), int(row.places[-1]) + 1
        for turn in trajectory.turns:
            if turn.role != "assistant" or turn.call < 0 or not first <= turn.start < end:
                continue
            untold[turn.start : turn.end] = 0
            before = context(tokens[row.places[: row.shared + turn.start - first]])
            answer = slice(turn.start, turn.end)
            found.append((turn.call, before, pack(tokens[answer], logprobs[answer])))
    return {
        "t": trajectory.task_id,
        "s": trajectory.sample,
        "finish": trajectory.finish,
        "reward": trajectory.reward,
        "untold": int(untold.sum()),
        "x": [[before, packed] for _, before, packed in sorted(found)],
    }


def judge_calls(folder: Path, judgement: Judgement, own_rewards: bool = True) -> None:
    """Hold every line ``trained`` of a run's folder against the lines ``sampled``. own_rewards: agents give them."""
    logs = read_logs(folder / FOLDER)
    sampled: dict[int, list[bytes]] = defaultdict(list)
    for log in logs:
        for line in log.lines:
            if line.kind == "sampled":
                judgement.counts["calls sampled"] += len(line.data["x"])
                sampled[line.data["c"]] += [base64.b64decode(packed) for packed in line.data["x"]]
    seen: set[tuple[int, int]] = set()
    for log in logs:
        for line in log.lines:
            if line.kind == "trained":
                _check(line, sampled, judgement, log.process, own_rewards)
                seen.add((line.data["t"], line.data["s"]))
    judgement.counts["episodes trained"] = len(seen)


def _check(line: Line, sampled: dict[int, list[bytes]], judgement: Judgement, process: str, own_rewards: bool) -> None:
    data = line.data
    here = f"sample {data['t']}:{data['s']} in {process}"
    if data["untold"]:
        judgement.broken("not sampled", f"{here}: {data['untold']} trained tokens are of no model call")
    answers = []
    for number, (before, packed) in enumerate(data["x"]):
        pairs = np.frombuffer(base64.b64decode(packed), PAIR)
        answers.append(pairs["token"].tolist())
        if (reached := walk(before, pairs, sampled)) < len(pairs):
            judgement.broken(
                "not sampled", f"{here}: token {reached} of {len(pairs)} of call {number} was not sampled there"
            )
    judgement.counts["calls trained"] += len(answers)
    if not own_rewards:
        return
    if data["reward"] is None:
        judgement.broken("wrong reward", f"{here}: the agent ended with {data['finish']} and has no reward")
    elif data["finish"] in UNREWARDED and data["reward"] == 0.0:
        judgement.counts["agents without a reward"] += 1
    elif abs(data["reward"] - checksum(answers)) > SMALLEST:
        judgement.broken("wrong reward", f"{here}: the agent was answered otherwise than is trained")


def walk(before: int, pairs: np.ndarray[Any, Any], sampled: dict[int, list[bytes]]) -> int:
    """How many of an answer's tokens were sampled, with these log-probabilities, after what is before them."""
    reached = 0
    for at in range(len(pairs)):
        if at > reached or reached == len(pairs):
            break
        for piece in sampled.get(context(pairs["token"][:at], before), ()):
            other = np.frombuffer(piece, PAIR)
            size = min(len(other), len(pairs) - at)
            different = np.flatnonzero(other[:size] != pairs[at : at + size])
            reached = max(reached, at + (int(different[0]) if len(different) else size))
    return reached
