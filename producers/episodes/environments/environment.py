"""The workflow ``environment``: anything with ``reset`` and ``step`` over text or images, which rewards each turn."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import functools
import math
import shutil
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any

import msgspec
import structlog
from pydantic import Field

from producers.conversation.images import Content, content_of, join_content, task_messages
from producers.conversation.messages import Message
from producers.episodes.environments import ENVIRONMENTS
from producers.episodes.environments.worker import EnvironmentWorker
from producers.episodes.episode import Episode, EpisodeEnded, LoopParts
from producers.episodes.user_code import DeadlineExceeded, call_user
from producers.workflows.base import FailedSample, RolloutContext, WorkflowServices, play_each
from producers.workflows.trajectory_builder import SampledCompletion
from schemas.errors import ConfigError, DataError, describe_error, printable
from schemas.messages import REWARD_RANGE, FinishReason, Task, is_reward
from schemas.plugins import check_method, fit_arguments, load
from schemas.system.processes import locate_interpreter

log = structlog.get_logger()

HELD_OUT_SEEDS = 1 << 30
"""The first seed of evaluations."""
_WHERE = "generator.workflow.args.environment"


@dataclass
class EnvironmentLoop:
    """Plays each sample in an environment of its own, until that is done.

    environment: a class, as file.py:Name, or one of ENVIRONMENTS by name. args: what it is built with. python: an
    interpreter for it, a path from the configuration's folder or a command, with packages that need not fit ours; it
    lives in a process then, as these do. max_turns: most answers of an episode, ``agents.max_calls`` where None; one
    that reaches it ends with finish ``calls``. timeout_s: longest time of a step. history: whether a prompt shows the
    turns before; if not, it is the task's with the newest observation.

    The reward is the sum over the steps, 0 for an episode that was cut at a limit before any of them has paid. An
    environment that raises or takes too long fails its sample, which is then not trained.
    """

    environment: str
    args: dict[str, Any] | None = None
    python: str | None = None
    max_turns: Annotated[int, Field(ge=1)] | None = None
    timeout_s: Annotated[float, Field(gt=0)] = 60.0
    history: bool = True

    def __post_init__(self) -> None:
        self._make: Any = None
        self._worker: EnvironmentWorker | None = None
        self._parts: LoopParts | None = None

    @staticmethod
    def check(base: Path, environment: Any = None, args: Any = None, python: Any = None, **_: Any) -> None:
        """Raise ConfigError unless the environment has reset and step, and takes its arguments.

        One for another interpreter is looked for at the start.
        """
        if python is not None and shutil.which(locate_interpreter(str(python), base)) is None:
            raise ConfigError(f"generator.workflow.args.python {python!r} must be an interpreter that can be run")
        if python is None or environment in ENVIRONMENTS:
            _find_environment(ENVIRONMENTS.get(environment, environment), args or {}, base)

    async def start(self, services: WorkflowServices) -> None:
        base = services.config.base
        if self.environment in ENVIRONMENTS or self.python is not None:
            name = ENVIRONMENTS.get(self.environment, self.environment)
            python = None if self.python is None else locate_interpreter(self.python, base)
            self._worker = EnvironmentWorker(name, base, python, services.config.generator.agents.env)
            await self._worker.start()
            self._make = functools.partial(self._worker.open, self.args or {})
        else:
            self._make = _find_environment(self.environment, self.args or {}, base)
        self._parts = await LoopParts.create(services)

    async def close(self) -> None:
        if self._worker is not None:
            await self._worker.close()

    def run(self, rollout: RolloutContext) -> AsyncIterator[SampledCompletion | FailedSample]:
        return play_each(lambda index: self._play(rollout, index), rollout.indices)

    async def _play(self, rollout: RolloutContext, index: int) -> SampledCompletion | FailedSample:
        if self._parts is None:
            raise ConfigError("the workflow environment was not started")
        episode = Episode(self._parts, rollout, index, self.max_turns or self._parts.settings.max_calls)
        finish: FinishReason = "stop"
        rewards: list[float] = []
        environment: Any = None
        try:
            environment = await self._use(episode, "__init__", self._make)
            task = describe_task(rollout.task, index, rollout.files)
            begun = await self._use(episode, "reset", environment.reset, task)
            if isinstance(begun, dict) and "type" not in begun:
                turn = await asyncio.to_thread(read_turn, begun, "reset")
                await self._play_turns(episode, environment, turn, rewards, self._parts.settings.train)
            else:
                messages = await asyncio.to_thread(begin, episode.first_messages(), begun)
                await self._steps(episode, environment, messages, rewards)
        except EpisodeEnded as ended:
            finish = ended.finish
        finally:
            await self._close(environment)
        # Broken off by the policy before any step has paid: left out of training, that would be no loss to it.
        paid = rewards or finish in ("length", "calls")
        return episode.finish(finish, math.fsum(rewards) if paid else None)

    async def _steps(self, episode: Episode, environment: Any, messages: list[Message], rewards: list[float]) -> None:
        while True:
            answer, message = await episode.ask(messages)
            stepped = await self._use(episode, "step", environment.step, answer.content or "")
            observed, reward, done = await asyncio.to_thread(read_step, stepped)
            if reward is not None:
                episode.conversation.set_reward(episode.last_call, reward)
                rewards.append(reward)
            if done:
                return
            if self.history:
                messages += [message, {"role": "user", "content": observed}]
            else:
                messages = await asyncio.to_thread(begin, episode.first_messages(), observed)

    async def _play_turns(
        self, episode: Episode, environment: Any, turn: PlayerTurn, rewards: list[float], trained: list[str] | None
    ) -> None:
        """Play a game of several players, all of them the policy: each has its own conversation and rows."""
        told: dict[str, list[Message]] = {}
        calls: dict[str, int] = {}
        earned: dict[int, float] = defaultdict(float)
        while not turn.done:
            if turn.player not in told:
                told[turn.player] = await asyncio.to_thread(begin, episode.first_messages(), turn.text)
            else:
                told[turn.player].append({"role": "user", "content": turn.text})
            answer, message = await episode.ask(told[turn.player], name=turn.player)
            calls[turn.player] = episode.last_call
            told[turn.player].append(message)
            stepped = await self._use(episode, "step", environment.step, answer.content or "")
            turn = await asyncio.to_thread(read_turn, stepped, "step")
            for player, reward in turn.rewards.items():
                if player in calls and (trained is None or player in trained):
                    # It may come after others have played: it is for what the player did last.
                    earned[calls[player]] += reward
                    episode.conversation.set_reward(calls[player], earned[calls[player]])
                    rewards.append(reward)

    async def _use(self, episode: Episode, what: str, method: Any, *args: Any) -> Any:
        began = time.monotonic()
        try:
            return await episode.until_interrupted(call_user(method, self.timeout_s, *args))
        except DeadlineExceeded as error:
            raise DataError(f"{what} of {self.environment} {error}") from error
        finally:
            episode.note_tool(what, began)

    async def _close(self, environment: Any) -> None:
        close = getattr(environment, "close", None)
        if close is None:
            return
        try:
            await call_user(close, self.timeout_s)
        except Exception as error:  # noqa: BLE001 - user code: the episode is over, whatever this does
            log.warning(
                "an environment could not be closed", environment=self.environment, reason=describe_error(error)
            )


def describe_task(task: Task, sample: int, files: Mapping[str, bytes] | None = None) -> dict[str, Any]:
    """Return the task for an environment: prompt, data, and a seed that each attempt at the sample has.

    Seeds of training are below HELD_OUT_SEEDS, those of evaluations are as many from there on, and the same in each
    evaluation. files: of the task's images by digest.
    """
    prompt: dict[str, Any] = {"text": task.text} if task.text is not None else {}
    if task.messages is not None:
        prompt = {"messages": task_messages(task, files or {})}
    # The version that an evaluation's task id begins with is a multiple of HELD_OUT_SEEDS.
    seed = (task.task_id * 1000 + sample) % HELD_OUT_SEEDS + (HELD_OUT_SEEDS if task.kind == "eval" else 0)
    # A copy: the samples of a task must not share lists that one of them may change.
    return {**prompt, "data": copy.deepcopy(task.data), "task_id": task.task_id, "sample": sample, "seed": seed}


def begin(messages: list[Message], observed: Any) -> list[Message]:
    """Return the first prompt: the task's with the first observation, or the messages that ``reset`` returned."""
    if observed is None:
        return messages
    if isinstance(observed, list) and observed and all(map(_is_message, observed)):
        contents = [content_of(message["content"]) for message in observed]
        if None not in contents:
            return [{**message, "content": content} for message, content in zip(observed, contents, strict=True)]
    elif (content := content_of(observed)) is not None:
        if messages and messages[-1]["role"] == "user":
            # Many templates refuse two turns of the user in a row.
            return [*messages[:-1], {"role": "user", "content": join_content(messages[-1]["content"], content)}]
        return [*messages, {"role": "user", "content": content}]
    raise DataError(
        "reset must return text, images, None, or a list of messages with role and content;"
        f" it returned {printable(repr(observed))[:200]}"
    )


@dataclass(frozen=True)
class PlayerTurn:
    """Whose turn it is in a game of several players, what that player reads, and what has been earned.

    player: empty at the end. rewards: by player.
    """

    player: str = ""
    text: Any = ""
    rewards: dict[str, float] = field(default_factory=dict)
    done: bool = False


def read_turn(result: Any, method: str) -> PlayerTurn:
    """Read the turn that an environment of several players returned. DataError if it is not a turn."""
    try:
        turn = msgspec.convert(result, PlayerTurn, strict=False)
        named = turn.done or turn.player.isidentifier()
        content = content_of(turn.text)
        if named and content is not None and all(map(is_reward, turn.rewards.values())):
            return replace(turn, text=content)
        problem = f"a player needs a name of letters, digits and _, and rewards must be {REWARD_RANGE}"
    except msgspec.ValidationError as error:
        problem = str(error)
    raise DataError(
        f"{method} must return player, text, rewards and done for a game of several players; it returned"
        f" {printable(repr(result))[:200]}: {problem}"
    )


def read_step(result: Any) -> tuple[Content, float | None, bool]:
    """Read the result of ``step``: observation, reward (or None), and whether the episode ended. DataError if not."""
    with contextlib.suppress(TypeError, ValueError):
        observed, reward, done = result
        seen, reward, done = content_of(observed), None if reward is None else float(reward), bool(done)
        if (seen is not None or done) and (reward is None or is_reward(reward)):
            return seen or "", reward, done
    raise DataError(
        f"step must return (text or images, reward, done), a reward {REWARD_RANGE} or None; it returned"
        f" {printable(repr(result))[:200]}"
    )


def _is_message(message: Any) -> bool:
    return isinstance(message, dict) and isinstance(message.get("role"), str) and "content" in message


def _find_environment(name: Any, args: Any, base: Path) -> Any:
    if not isinstance(name, str) or ":" not in name:
        raise ConfigError(f"{_WHERE} {name!r}: name a class as file.py:Name or package.module:Name")
    if not isinstance(args, dict):
        raise ConfigError(f"generator.workflow.args.args {args!r} must be a mapping, the arguments of {name}")
    found = load(name, "environment", base)
    check_method(_WHERE, found, "reset", ("task",))
    check_method(_WHERE, found, "step", ("text",))
    return functools.partial(found, **fit_arguments(_WHERE, found, args))
