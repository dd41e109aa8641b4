"""An episode: one sample of a task, played by an agent from its start to its sample, failure or handover."""

import asyncio
import functools
import json
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any, Protocol

from producers.agents.outcomes import OUTCOMES, EpisodeFailure, EpisodeOutcome, FailureAlarm, judge
from producers.agents.protocol import NOT_SAVED, SessionError
from producers.agents.session import PolicyHandle, Session
from producers.agents.sessions import Sessions
from producers.agents.workers.notes import Notes
from producers.agents.workers.protocol import AgentJob, AgentResult
from producers.conversation.calls import with_earlier
from producers.conversation.chat_template import ChatTemplate
from producers.conversation.conversation import BEGINNINGS, Conversation
from producers.conversation.images import ImageLimits, episode_images, task_messages
from producers.workflows.base import FailedSample, RolloutContext
from producers.workflows.trajectory_builder import SampledCompletion, size_metrics
from schemas.config import AgentsConfig
from schemas.messages import UNREWARDED, Task

SETTLE_S = 5.0
"""The longest wait for requests that are being aborted, so that their tokens are handed over, too."""


class AgentRunner(Protocol):
    """Where agents run. keep_requests: see Session."""

    keep_requests: bool

    async def start(self) -> None: ...

    async def close(self) -> None: ...

    async def run(self, job: AgentJob, notes: Notes) -> AgentResult:
        """Run the agent of one episode to its end."""


@dataclass(frozen=True)
class EpisodeServices:
    """The services that all episodes of a generator share.

    base_url: of the endpoint, without a session. clock: for deadlines. images: limits for images that agents send.
    """

    settings: AgentsConfig
    policy: PolicyHandle
    template: ChatTemplate
    sessions: Sessions
    workers: AgentRunner
    alarm: FailureAlarm
    base_url: str
    images: ImageLimits
    clock: Callable[[], float] = time.monotonic


class AgentEpisode:
    """Plays one sample."""

    def __init__(self, services: EpisodeServices, rollout: RolloutContext, index: int) -> None:
        self._services = services
        self._rollout = rollout
        self._index = index
        self._began = time.monotonic()
        self._deadline = services.clock() + services.settings.deadline_s

    async def play(self) -> SampledCompletion | FailedSample:
        """Run the agent, and retry if its process dies, until there is an outcome or the attempts are used up."""
        settings, rollout = self._services.settings, self._rollout
        partial = rollout.saved.get(self._index)
        attempt = 0
        while True:
            session = Session(
                self._services.policy,
                Conversation(self._services.template, settings.history, episode_images(rollout, self._services.images)),
                rollout.sampling,
                partial,
                rollout.save,
                self._index,
                self._services.workers.keep_requests,
            )
            session.note = functools.partial(rollout.note, self._index)
            self._services.sessions.add(session)
            try:
                result = await self._run_agent(session, attempt)
                if result is not None:
                    await session.repeat_requests()
            except SessionError as error:
                if error.code != NOT_SAVED:
                    raise
                result = None  # the generator that has the task repeats them
            finally:
                self._services.sessions.end(session)
            if result is None:
                sample = await asyncio.to_thread(session.conversation.sample, self._index, "abort")
                sample.notes = dict(session.notes)
                return sample
            verdict = judge(result, session.limit, settings)
            if isinstance(verdict, EpisodeFailure) and verdict.again:
                partial = with_earlier(session.partial(), partial)
                if verdict.kind == "neighbour":
                    # The fault of another episode costs this one neither an attempt nor time.
                    self._began = time.monotonic()
                    self._deadline = self._services.clock() + settings.deadline_s
                else:
                    attempt += 1
                if attempt < settings.attempts:
                    continue
            return await self._end(session, result, verdict)

    async def _run_agent(self, session: Session, attempt: int) -> AgentResult | None:
        """Run the agent to its end; None if the episode must be handed over. InfraError if the engine has failed."""
        task = self._rollout.task
        job = AgentJob(
            episode_id=f"{task.task_id}-{self._index}",
            task=task_for_agent(task, self._rollout.files),
            base_url=f"{self._services.base_url}/s/{session.token}/v1",
            api_key=session.token,
            deadline_s=self._deadline - self._services.clock(),
            attempt=attempt,
        )
        running = asyncio.ensure_future(self._services.workers.run(job, session.notes))
        signs = (session.interrupted, self._rollout.interrupted, session.finished)
        waits = [asyncio.ensure_future(event.wait()) for event in signs]
        try:
            await asyncio.wait({running, *waits}, return_when=asyncio.FIRST_COMPLETED)
            if session.broken is not None:
                # Whatever the agent makes of it, its sample can succeed elsewhere.
                if self._rollout.interrupted.is_set():
                    return None
                raise session.broken
            if running.done():
                return running.result()
            if session.finished.is_set():
                return AgentResult("returned")
            await session.settle(SETTLE_S)
            return None
        finally:
            running.cancel()
            for wait in waits:
                wait.cancel()
            # Its process must release the session before another one starts.
            await asyncio.wait({running})

    async def _end(
        self, session: Session, result: AgentResult, verdict: EpisodeOutcome | EpisodeFailure
    ) -> SampledCompletion | FailedSample:
        alarm = self._services.alarm.add(verdict)
        if alarm is not None:
            self._rollout.report("agents_failing", alarm)
        if isinstance(verdict, EpisodeFailure):
            return FailedSample(self._index, f"agent: {verdict.reason}", verdict.kind)
        for completion_id, value in result.turns.items():
            try:
                session.set_reward(value, completion_id)
            except SessionError as error:
                return FailedSample(self._index, f"agent: {error.message}", "raised")
        session.forget_unreceived()
        if not session.conversation.calls:
            # A user may reward what was never asked, as often as it likes: no fault of the run.
            kind = UNREWARDED if self._services.workers.keep_requests else "no_call"
            return FailedSample(self._index, "agent: it ended without an answered model call", kind)
        reward = verdict.reward if verdict.reward is not None else session.reward
        if reward is None and result.turns:
            reward = sum(result.turns.values())
        if reward is None and verdict.finish is not None:
            # The policy reached a limit, so its agent could not set a reward.
            reward = 0.0
        # In a thread: decoding and joining long conversations would delay the requests of all other episodes.
        return await asyncio.to_thread(self._sample, session, result, verdict, reward)

    def _sample(
        self, session: Session, result: AgentResult, outcome: EpisodeOutcome, reward: float | None
    ) -> SampledCompletion:
        settings = self._services.settings
        sample = session.conversation.sample(
            self._index,
            outcome.finish or session.finish_of_last,
            reward=reward,
            data={**result.data, **_shortened(session.conversation.messages(), settings.keep_messages)},
            train=settings.train,
        )
        seconds = time.monotonic() - self._began
        # Counts of rare events are always present, because their mean is reported.
        sample.metrics = {
            **{f"outcome_{kind}": float(kind == outcome.kind) for kind in OUTCOMES},
            **{f"segments_{why.replace(' ', '_')}": float(session.begun[why]) for why in BEGINNINGS},
            **{name: float(value) for name, value in asdict(session.counts).items()},
            **size_metrics(sample),
            "agent_s": max(0.0, seconds - session.busy_s - session.counts.tools_s),
            **session.metrics,
            **result.metrics,
        }
        return sample


def task_for_agent(task: Task, files: Mapping[str, bytes]) -> dict[str, Any]:
    """Return the task as agents see it: id, prompt as messages, text or token ids, and the dataset's data.

    files: of its images by digest.
    """
    messages = task_messages(task, files)
    prompt = {"messages": messages} if messages else {"token_ids": task.token_ids}
    text = {"text": task.text} if task.text is not None else {}
    return {"data": task.data, "id": task.task_id, **text, **prompt}


def _shortened(messages: list[dict[str, Any]], limit: int) -> dict[str, Any]:
    """Return the messages as data of the sample; above ``limit`` bytes, the first and the newest that fit."""
    sizes = [len(json.dumps(message).encode()) for message in messages]
    if sum(sizes) <= limit:
        return {"messages": messages} if limit else {}
    newest, left = list[dict[str, Any]](), limit - sizes[0]
    for message, size in zip(reversed(messages[1:]), reversed(sizes[1:]), strict=True):
        if size > left:
            break
        newest.insert(0, message)
        left -= size
    first = messages[:1] if left >= 0 else []
    return {"messages": [*first, *newest], "messages_left_out": len(messages) - len(first) - len(newest)}
