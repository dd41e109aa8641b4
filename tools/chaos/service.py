"""One service as the suite starts it: the product's own command, with a witness at a few of its methods.

``python -m tools.chaos.service ROLE CONFIG --name NAME --folder FOLDER [a.b=c ...]``

What is different from production, all of it here: methods are wrapped to write evidence; generators use a
byte tokenizer, since loading a real one imports PyTorch (4 s of CPU for every restart of a service that
samples by script); the reward service's lease is the generators' (the product's is 10 s and more, longer
than the suite stops a service). A full disk is injected: while the file FULL_DISK lies in the folder, the
trainer's fsync fails with ENOSPC, from the call on whose number the file holds.

Lines of evidence, by kind (x: one list for each sample or group):
  started · ready (model or engine is loaded) · answered (first answer of the broker to this service's work)
  admit: t, a (answer), c (next task id); what the curriculum skips ends · evaluation: v (opened for this version)
  held out: x=[version, prompt, the reward that it must get] of an evaluation's samples, before they are published
  publish?: x=[t, s, digest] before, publish: x=[t, s, digest, answer] after
  score?: x=[t, s, status], score: x=[t, s, status, answer] · end?: t, how, reason (and s, for one sample
  alone) before, end: the same and a after
  loaded: step, term · saving (its state is copied): step, term · begin: term, step, lost
  step: step, term, version, x=[t, s, digest, oldest version], wrong=[t, s] with the reward of another sample
"""

from __future__ import annotations

import errno
import functools
import os
import signal
import stat
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from typing_extensions import Buffer

from broker.connection.connection import Connection
from broker.evaluations.store import Evals
from broker.flow.ledger import Ledger, SkippedTask
from broker.flow.progress import TakeoverRequest
from broker.flow.trainer_session import TrainerSession
from broker.queues.dead_letters import UnusableTask
from broker.queues.scores import ScoreQueue
from broker.queues.tasks import EVAL_BASE, TaskQueue, eval_version
from deploy.cli import app
from producers.images.placeholders import ImagePlaceholders
from producers.images.settings import image_settings
from producers.workflows.base import RolloutContext
from schemas.messages import Task, Trajectory
from schemas.system import guard
from tools.chaos.agents import calls
from tools.chaos.judging.evidence import EvidenceWriter, digest
from tools.chaos.outside import witness
from tools.chaos.settings import INJECTED, JUDGE_SAYS, is_for_agents
from tools.chaos.tokenizer import PLACE, ByteTokenizer
from tools.chaos.turns import watch_generator, watch_trainer
from tools.chaos.user_code import SMALLEST, TextTurn, expected

FULL_DISK = "full-disk"


def main(arguments: Sequence[str]) -> None:
    """Wrap, then run the product's command with what is left of the arguments."""
    guard.prctl(guard.PR_SET_PDEATHSIG, signal.SIGKILL)
    role, config = arguments[0], arguments[1]
    options = dict(zip(arguments[2:6:2], arguments[3:6:2], strict=True))
    folder, name = Path(options["--folder"]), options["--name"]
    evidence = EvidenceWriter(folder / "evidence", name)
    evidence.write("started")
    _watch_ends(evidence)
    {"feeder": _feeder, "generator": _generator, "reward": _reward, "trainer": _trainer, "control": _control}[role](
        evidence, folder
    )
    sys.argv = ["tidemill", role, config, *arguments[6:], "--name", name]
    app.main()


def _replace(owner: Any, name: str, make: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    setattr(owner, name, make(getattr(owner, name)))


def _once(evidence: EvidenceWriter, owner: Any, name: str, kind: str) -> None:
    """Write ``kind`` when a method of this process has returned for the first time."""
    done = False

    def make(original: Callable[..., Any]) -> Callable[..., Any]:
        def method(*args: Any, **kwargs: Any) -> Any:
            nonlocal done
            result = original(*args, **kwargs)
            if not done:
                done = True
                evidence.write(kind)
            return result

        return method

    _replace(owner, name, make)


def _watch_ends(evidence: EvidenceWriter) -> None:
    """Every way in which a group ends without being trained goes through these scripts."""

    def make(original: Callable[..., Any]) -> Callable[..., Any]:
        def script(self: Connection, name: str, *args: Any, **options: Any) -> Any:
            if name == "close_group":
                end = {"t": int(args[0]), "how": args[1], "reason": args[2]}
            elif name == "fail_task" and args[2] != "":
                end = {"t": int(args[2]), "how": "failed", "reason": "dead_letter"}
            elif name == "fail_sample":
                end = {"t": int(args[0]), "s": int(args[1]), "how": "failed", "reason": "not generated"}
            else:
                return original(self, name, *args, **options)
            evidence.write("end?", **end)
            answer = original(self, name, *args, **options)
            evidence.write("end", **end, a=answer.decode())
            return answer

        return script

    _replace(Connection, "run_script", make)


def _feeder(evidence: EvidenceWriter, folder: Path) -> None:
    _once(evidence, Ledger, "admit_all", "answered")

    def make(original: Callable[..., Any]) -> Callable[..., Any]:
        def admit_all(self: Ledger, tasks: Sequence[Task | UnusableTask | SkippedTask], *args: Any) -> Any:
            skipped = [task for task in tasks if isinstance(task, SkippedTask)]
            for task in skipped:
                evidence.write("end?", t=task.task_id, how="skipped", reason="curriculum")
            unusable = [task.task_id for task in tasks if isinstance(task, UnusableTask)]
            for task_id in unusable:
                evidence.write("end?", t=task_id, how="failed", reason="bad example")
            losses = self._connection.losses
            admission = original(self, tasks, *args)
            for task_id in unusable:
                if task_id in admission.unusable:
                    evidence.write("end", t=task_id, how="failed", reason="bad example", a="ok")
                elif self._connection.losses == losses:
                    # An attempt whose answer was lost may have admitted it: then it stays without an answer.
                    evidence.write("end", t=task_id, how="failed", reason="bad example", a="no")
            for task in skipped:
                if (done := task.task_id in admission.skipped) or self._connection.losses == losses:
                    evidence.write("end", t=task.task_id, how="skipped", reason="curriculum", a="ok" if done else "no")
            for task_id in admission.admitted:
                evidence.write("admit", t=task_id, a="ok", c=admission.next)
            if len(admission.admitted) + len(admission.skipped) < len(tasks):
                evidence.write("admit", t=tasks[0].task_id, a=admission.answer, c=admission.next)
            return admission

        return admit_all

    _replace(Ledger, "admit_all", make)

    def opening(original: Callable[..., Any]) -> Callable[..., Any]:
        def open_evaluation(self: Evals, version: int, *args: Any) -> Any:
            is_new = original(self, version, *args)
            if is_new:
                evidence.write("evaluation", v=version)
            return is_new

        return open_evaluation

    _replace(Evals, "open", opening)


def _generator(evidence: EvidenceWriter, folder: Path) -> None:
    from producers.engines.scripted import ScriptedEngine
    from producers.generator import context

    assert hasattr(context, "HfTokenizer")
    setattr(context, "HfTokenizer", ByteTokenizer)  # noqa: B010 - the name is an import of that module's
    # Without transformers, which would read the number of this token from the model's folder.
    ImagePlaceholders.of = classmethod(  # type: ignore[method-assign, assignment]
        lambda cls, config: cls(PLACE, settings) if (settings := image_settings(config)) else None
    )
    watch_generator(folder, evidence.name)
    witness.watch_generator(evidence, folder)
    _once(evidence, ScriptedEngine, "start", "ready")
    _watch_agents(EvidenceWriter(folder / calls.FOLDER, evidence.name), folder)
    _once(evidence, TaskQueue, "read", "answered")

    def make(original: Callable[..., Any]) -> Callable[..., Any]:
        def publish_all(self: TaskQueue, results: Sequence[tuple[int, Sequence[Any]]]) -> Any:
            tries = [
                [task_id, trajectory.sample, digest(trajectory)]
                for task_id, trajectories in results
                for trajectory in trajectories
            ]
            evidence.write("publish?", x=tries)
            held_out = [
                [eval_version(trajectory.task_id), trajectory.task_id % EVAL_BASE, reward_of(trajectory)]
                for _, trajectories in results
                for trajectory in trajectories
                if trajectory.task_id >= EVAL_BASE
            ]
            if held_out:
                evidence.write("held out", x=held_out)
            answers = original(self, results)
            words = [word for answer in answers for word in answer]
            evidence.write("publish", x=[[*item, word] for item, word in zip(tries, words, strict=True)])
            return answers

        return publish_all

    _replace(TaskQueue, "publish_all", make)


def _watch_agents(sampled: EvidenceWriter, folder: Path) -> None:
    """Write what is sampled for agents, and let all other tasks be completed as texts."""
    from producers.engines.scripted import ScriptedEngine

    workload = os.environ["CHAOS_WORKLOAD"]
    if workload == "text":
        return
    from producers.agents.workflow import AgentWorkflow

    texts = TextTurn(str(folder))

    def choosing(original: Callable[..., Any]) -> Callable[..., Any]:
        def run(self: AgentWorkflow, rollout: RolloutContext) -> Any:
            return original(self, rollout) if is_for_agents(rollout.task.task_id, workload) else texts.run(rollout)

        return run

    def sampling(original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        async def generate(self: ScriptedEngine, prompt: Sequence[int], *args: Any, **kwargs: Any) -> Any:
            completions = await original(self, prompt, *args, **kwargs)
            # Texts are followed as they grow, agents' calls are not.
            if "progress" not in kwargs:
                before = calls.context([*prompt, *kwargs.get("prefix", ())])
                sampled.write("sampled", c=before, x=[calls.pack(one.tokens, one.logprobs) for one in completions])
            return completions

        return generate

    _replace(AgentWorkflow, "run", choosing)
    _replace(ScriptedEngine, "generate", sampling)


def _control(evidence: EvidenceWriter, folder: Path) -> None:
    """Nothing: what it does for users, they write themselves."""


def _reward(evidence: EvidenceWriter, folder: Path) -> None:
    from consumers.reward.service import RewardService

    _once(evidence, ScoreQueue, "read", "answered")

    def make(original: Callable[..., Any]) -> Callable[..., Any]:
        def publish(self: ScoreQueue, results: Sequence[tuple[Any, Any]]) -> Any:
            items = [[one.message.task_id, one.message.sample, score.status] for one, score in results]
            if items:
                evidence.write("score?", x=items)
            answers = original(self, results)
            if items:
                evidence.write("score", x=[[*item, word] for item, word in zip(items, answers, strict=True)])
            return answers

        return publish

    _replace(ScoreQueue, "publish", make)
    lease_s = float(os.environ["CHAOS_LEASE_S"])

    def shorten(original: Callable[..., Any]) -> Callable[..., Any]:
        def init(self: RewardService, *args: Any, **kwargs: Any) -> None:
            original(self, *args, **{**kwargs, "lease_s": lease_s})

        return init

    _replace(RewardService, "__init__", shorten)


def _trainer(evidence: EvidenceWriter, folder: Path) -> None:
    from consumers.trainer import service
    from consumers.trainer.checkpoint.store import CheckpointStore
    from consumers.trainer.data.plan import StepPlanner
    from consumers.trainer.step.train_step import TrainStep
    from consumers.trainer.step_log import StepLog

    watch_trainer(folder, evidence.name)
    witness.watch_trainer(evidence, folder)
    _once(evidence, service, "build_learner", "ready")
    trained = EvidenceWriter(folder / calls.FOLDER, evidence.name)
    last: dict[str, Any] = {"x": [], "wrong": [], "version": -1}
    is_live = os.environ["CHAOS_WORKLOAD"] == "live"
    judged = JUDGE_SAYS if "name: judge" in (folder / "config.yaml").read_text() else 0.0

    def saving(original: Callable[..., Any]) -> Callable[..., Any]:
        def take(self: CheckpointStore, *args: Any, **kwargs: Any) -> Any:
            evidence.write("saving", step=kwargs["step"], leader_term=kwargs["leader_term"])
            return original(self, *args, **kwargs)

        return take

    def loading(original: Callable[..., Any]) -> Callable[..., Any]:
        def load(self: CheckpointStore, path: Path, *args: Any) -> Any:
            restored = original(self, path, *args)
            # step-00000100-t0003 is of leader term 3.
            evidence.write("loaded", step=restored.step, leader_term=int(path.name.rpartition("-t")[2]))
            return restored

        return load

    def beginning(original: Callable[..., Any]) -> Callable[..., Any]:
        def begin(self: TrainerSession, request: TakeoverRequest) -> Any:
            takeover = original(self, request)
            evidence.write("begin", leader_term=takeover.leader_term, step=request.progress.step, lost=takeover.lost)
            return takeover

        return begin

    def planning(original: Callable[..., Any]) -> Callable[..., Any]:
        def plan(self: StepPlanner, groups: Any) -> Any:
            samples = [sample for group in groups for sample in group.samples]
            last["x"] = [[body.task_id, body.sample, digest(body), body.oldest_version] for body, _ in samples]
            last["wrong"] = [
                [body.task_id, body.sample]
                for body, score in samples
                if not is_live and not _is_own(body, score - judged)
            ]
            for body, _ in samples:
                if body.calls:
                    trained.write("trained", **calls.describe(body))
            return original(self, groups)

        return plan

    def running(original: Callable[..., Any]) -> Callable[..., Any]:
        def run(self: TrainStep, batch: Any, version: int) -> Any:
            last["version"] = version
            return original(self, batch, version=version)

        return run

    def logging(original: Callable[..., Any]) -> Callable[..., Any]:
        def log_trained(self: StepLog, batch: Any) -> None:
            original(self, batch)
            evidence.write("step", step=batch.record.step, leader_term=self._context.session.leader_term, **last)

        return log_trained

    _replace(CheckpointStore, "take", saving)
    _replace(CheckpointStore, "load", loading)
    _replace(TrainerSession, "take_over", beginning)
    _replace(StepPlanner, "plan", planning)
    _replace(TrainStep, "run", running)
    _replace(StepLog, "trained", logging)
    _fill_disk(folder / FULL_DISK, (evidence.descriptor, trained.descriptor))


def _fill_disk(flag: Path, spared: Sequence[int]) -> None:
    """While the flag is there, the disk is full from its n-th call on; the write that meets the end is cut in half."""
    calls = 0
    fsync, write = os.fsync, os.write
    full = OSError(errno.ENOSPC, f"No space left on device ({INJECTED})")

    def is_full() -> bool:
        nonlocal calls
        calls = calls + 1 if flag.exists() else 0
        return calls > 0 and calls >= int(flag.read_text() or 1)

    def full_fsync(descriptor: int) -> None:
        if is_full():
            raise full
        fsync(descriptor)

    def full_write(descriptor: int, data: Buffer) -> int:
        if descriptor in spared or not stat.S_ISREG(os.fstat(descriptor).st_mode) or not is_full():
            return write(descriptor, data)
        half = memoryview(data)[: memoryview(data).nbytes // 2] if calls % 2 else b""
        if not half:
            raise full
        return write(descriptor, half)

    os.fsync = full_fsync  # type: ignore[assignment]
    os.write = full_write


def _is_own(body: Trajectory, score: float) -> bool:
    """Whether a sample has the reward that its own completion gets."""
    return abs(reward_of(body) - score) < SMALLEST


def reward_of(body: Trajectory) -> float:
    """The reward of a sample, by its own completion."""
    tokens = body.tokens.numpy().tolist()
    start = body.loss_mask.numpy().tolist().index(1) if body.loss_mask.numpy().any() else len(tokens)
    return expected(tokens[start:], body.reward)


if __name__ == "__main__":
    main(sys.argv[1:])
