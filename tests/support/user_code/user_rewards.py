"""Reward functions of a user that do whatever functions do, and scores by them."""

import asyncio
from pathlib import Path
from typing import Any

from consumers.reward.scorer import Scorer
from schemas.codec import Array
from schemas.config import RewardConfig, RewardTerm
from schemas.messages import Score, Span, Trajectory

USERS_OWN = '''
import asyncio, os, subprocess, sys, time

def by_data(prompt, completion, prompt_ids, completion_ids, do, answer="", **data):
    if do == "hang":
        while True:
            time.sleep(3600)
    if do == "raise":
        raise RuntimeError("two\\nlines")
    if do == "exit":
        os._exit(7)
    if do == "print":
        print("noise on stdout", flush=True)
    return {"nan": float("nan"), "text": "1.0", "none": None, "true": True}.get(do, 0.5)

async def later(prompt, completion, prompt_ids, completion_ids, **data):
    await asyncio.sleep(0)
    return float(len(completion_ids))

DAEMON = """
import os, pathlib, sys, time
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        pathlib.Path(sys.argv[1]).with_suffix(".part").write_text(str(os.getpid()))
        os.rename(pathlib.Path(sys.argv[1]).with_suffix(".part"), sys.argv[1])
        time.sleep(3600)
    os._exit(0)
"""

def daemonizing(prompt, completion, prompt_ids, completion_ids, do, **data):
    subprocess.run([sys.executable, "-S", "-c", DAEMON, "daemon"], check=True)
    while not os.path.exists("daemon"):
        time.sleep(0.01)
    if do == "exit":
        os._exit(7)
    while True:
        time.sleep(3600)

def returning_twice(prompt, completion, prompt_ids, completion_ids, **data):
    return 99.0 if completion == "1" and os.fork() == 0 else float(completion)

def forging(prompt, completion, prompt_ids, completion_ids, forged, **data):
    if completion == "forge":
        for fd in range(3, 64):
            if os.path.exists(f"/proc/self/fd/{fd}") and os.readlink(f"/proc/self/fd/{fd}").startswith("socket:"):
                os.write(fd, forged)
    return float(os.getpid())

def secrets(prompt, completion, prompt_ids, completion_ids, names, **data):
    return float(sum(name in os.environ for name in names))

def pid(prompt, completion, prompt_ids, completion_ids):
    return float(os.getpid())

def strict(prompt, completion, prompt_ids, completion_ids, answer, scale=1):
    return scale * float(answer)

def seen(prompt, completion, prompt_ids, completion_ids, *, messages, reward, metrics, turns, calls, finish="none"):
    earned = sum(turn.reward or 0.0 for turn in turns)
    return reward + metrics.get("tools", 0.0) + calls + earned + len(messages[0]["content"])

def everything(prompt, completion, prompt_ids, completion_ids, **data):
    return float(len(data))

def of_both(prompts, completions, completion, **data):
    return 0.0

def few(text, answer):
    return 0.0

def pooled_bonus(prompt, completion, prompt_ids, completion_ids, **data):
    return 0.25


def third(prompt, completion, prompt_ids, completion_ids, **data):
    return 1 / 3


number = 3
'''


def trajectory(completion: str = "46", /, mask: tuple[int, ...] = (0, 0, 1, 1), **data) -> Trajectory:
    spans = [Span(0, 0, len(mask))] if mask else []
    return Trajectory(
        run="r", task_id=0, sample=0, kind="train", tokens=Array.of(range(len(mask)), "i4"),
        loss_mask=Array.of(mask, "u1"), logprobs=Array.of([0.0] * len(mask), "f4"), spans=spans, turns=[],
        finish="stop", prompt="12+34=", completion=completion, generator="g", data=data,
    )  # fmt: skip


def terms(*names: str | dict) -> list[RewardTerm]:
    return [RewardTerm(name=n) if isinstance(n, str) else RewardTerm(**n) for n in names]


def score(
    terms_: list[RewardTerm],
    base: Path,
    *trajectories: Trajectory,
    workers: int = 1,
    timeout_s: float = 30.0,
    **settings: Any,
) -> list[Score]:
    async def score_all() -> list[Score]:
        async with Scorer(RewardConfig(terms=terms_, workers=workers, timeout_s=timeout_s, **settings), base) as scorer:
            return await scorer.score_all(trajectories)

    return asyncio.run(score_all())
