"""The feeder: admits prompts in their deterministic order, and opens evaluations. It has no state of its own."""

from collections.abc import Mapping, Sequence

import structlog

from broker.client import Broker
from broker.flow.ledger import LedgerState, SkippedTask
from broker.heartbeat import HeartbeatThread
from broker.queues.dead_letters import UnusableTask
from broker.queues.tasks import eval_task_id
from producers.datasets.base import Dataset
from producers.datasets.curriculum import Curriculum, PromptStatistic
from producers.datasets.loading import ShortPrompts, build_dataset
from producers.datasets.mixture import Mixture, PromptRef, build_mixture
from producers.images.settings import image_settings
from producers.prompt_meter import PromptMeter
from producers.tasks import TaskLimits, task_of, task_seed
from schemas.config import EvalConfig, TidemillConfig
from schemas.errors import RunFailed
from schemas.messages import Event, Task
from schemas.run_record import JoinedRun
from schemas.system.lifecycle import StopFlag

AT_ONCE = 16
"""Most groups admitted in one round trip."""
END_S = 1.5
"""Most seconds from a signal to the end."""
LOOK_AHEAD = 256
"""Most positions that a curriculum decides on in one round trip."""

log = structlog.get_logger()


def run_feeder(config: TidemillConfig, name: str) -> None:
    """Feed the run until the process is asked to end."""
    stop = StopFlag().install()
    # It has no state: nothing is lost where it ends.
    with stop.ending_within(END_S):
        broker = Broker.connect(config)
        measure = PromptMeter.of(config)
        train = build_mixture(config.train, config.base, config.run.seed, measure)
        evaluated = config.eval.dataset if config.eval else []
        held_out = [build_dataset(one, config.base, measure) for one in evaluated]
        feeder = Feeder(config, broker, train, held_out)
        with HeartbeatThread(broker, name, "feeder", feeder.describe, probes=config.probes):
            feeder.run(stop)


class Feeder:
    """One step at a time: admit until the ledger says no, then wait for a change."""

    def __init__(self, config: TidemillConfig, broker: Broker, train: Mixture, held_out: Sequence[Dataset]) -> None:
        """held_out: the datasets of ``config.eval`` in its order; without any there is no evaluation."""
        self._config = config
        self._broker = broker
        self._train = train
        self._held_out = held_out
        self._run = JoinedRun(config.folder)
        self._images = image_settings(config)
        self._curricula = [Curriculum(part.curriculum, config.run.seed, config.sampling.n) for part in train.parts]
        self._chooses = any(curriculum.chooses for curriculum in self._curricula)
        self._sampling = config.sampling
        self._supervised = frozenset(config.supervised_weights)
        self._cursor = self._skipped = self._step = 0
        self._again = False
        self._evaluated = -1
        self._ordered = -1
        """The version of the last order to evaluate that was followed."""
        self._unusable = 0
        self._broker_lifetime = ""
        self._balanced = True
        self._state = "starting"
        for dataset in (*(level for part in train.parts for level in part.levels), *held_out):
            if isinstance(dataset, ShortPrompts):
                log.info("prompts above max_prompt_tokens are left out", dataset=dataset.label, count=dataset.left_out)

    def describe(self) -> tuple[str, int, dict[str, float]]:
        figures = {"cursor": float(self._cursor)}
        return self._state, -1, figures | ({"skipped": float(self._skipped)} if self._chooses else {})

    def run(self, stop: StopFlag) -> None:
        """Until stop. A finished run needs no more prompts, but may be given more steps."""
        while not stop:
            position = self._broker.ledger.change_position()
            state = self._broker.ledger.read_state()
            self._run.check(state.run_id, state.run_since)
            self._check(state)
            if state.broker_lifetime != self._broker_lifetime:
                # The broker was rebuilt: an evaluation under way may be gone.
                self._broker_lifetime, self._evaluated, self._ordered = state.broker_lifetime, -1, -1
            if state.state in ("running", "finishing"):
                if not state.paused and self._config.eval is not None and self._held_out:
                    self._evaluate(state, self._config.eval)
                self._state = self.admit(stop, state)
            else:
                self._state = state.state
            self._broker.ledger.wait_change(position)

    def _check(self, state: LedgerState) -> None:
        """Report once when slots leak: the feeder reads the ledger all the time anyway."""
        if state.leader_term and state.balanced != self._balanced:
            self._balanced = state.balanced
            text = "the ledger is " + ("balanced again" if state.balanced else f"not balanced: {state.describe()}")
            log.error(text)
            self._broker.events.emit(Event(name="ledger", service="feeder", level="error", text=text))

    def admit(self, stop: StopFlag, state: LedgerState) -> str:
        """Admit as long as there is room; returns what stopped it. state: of the ledger just now."""
        self._step, self._skipped = state.step, state.skipped
        self._follow(state.control.settings)
        room = state.capacity - state.active
        while not stop:
            count = min(max(room, 1), AT_ONCE)
            images: dict[str, bytes] = {}
            tasks, prompts = self._propose(count, images)
            admission = self._broker.ledger.admit_all(tasks, self._run, prompts, images)
            self._cursor, self._again = admission.next, admission.answer == "again"
            self._skipped += len(admission.skipped)
            room -= len(admission.admitted)
            for task_id in admission.admitted:
                self._count_unusable(admission.unusable.get(task_id))
            if admission.answer not in ("ok", "moved", "again"):
                return admission.answer
        return "stopping"

    def _follow(self, settings: Mapping[str, float]) -> None:
        """Sample new tasks with the ordered temperature, else the configured one; evaluations don't change."""
        configured = self._config.sampling
        temperature = float(settings.get("temperature", configured.temperature))
        if temperature != self._sampling.temperature:
            log.info("sampling temperature changed", temperature=temperature)
            self._sampling = configured.model_copy(update={"temperature": temperature})

    def _propose(
        self, count: int, images: dict[str, bytes]
    ) -> tuple[list[Task | UnusableTask | SkippedTask], dict[int, int]]:
        """Up to ``count`` tasks from the cursor on, and what the curriculum skips between them.

        Their images are put into ``images``. Also, by task id, the prompts in whose statistics the outcomes count. A
        task that is made again is not skipped.
        """
        if not self._chooses:
            positions = range(self._cursor, self._cursor + count)
            return [self._task(position, self._train.at(position), images) for position in positions], {}
        ahead = {position: self._train.at(position) for position in range(self._cursor, self._cursor + LOOK_AHEAD)}
        known = self._broker.ledger.read_prompts([prompt.statistic for prompt in ahead.values()])
        tasks: list[Task | UnusableTask | SkippedTask] = []
        prompts: dict[int, int] = {}
        taken = 0
        for (position, prompt), body in zip(ahead.items(), known, strict=True):
            curriculum = self._curricula[prompt.part]
            again = self._again and position == self._cursor
            if again or curriculum.takes(position, PromptStatistic.unpack(body), self._step):
                tasks.append(self._task(position, prompt, images))
                taken += 1
                if curriculum.chooses:
                    prompts[position] = prompt.statistic
            else:
                tasks.append(SkippedTask(position))
            if taken == count:
                break
        return tasks, prompts

    def _task(self, position: int, prompt: PromptRef, images: dict[str, bytes]) -> Task | UnusableTask:
        part, limits = self._train.parts[prompt.part], self._limits(images)
        dataset, level = self._train.dataset(prompt), prompt.level if len(part.levels) > 1 else -1
        seed, sampling = self._seed(position), self._sampling
        if part.label in self._supervised:
            sampling = sampling.model_copy(update={"n": 1})
        return task_of(dataset, part.label, prompt.index, position, "train", sampling, limits, level, seed)

    def _seed(self, task_id: int) -> int | None:
        return task_seed(self._config.run.seed, task_id) if self._config.generator.exact else None

    def _limits(self, images: dict[str, bytes]) -> TaskLimits:
        return TaskLimits(self._config.broker.max_message_bytes, self._images, images)

    def _count_unusable(self, task: UnusableTask | None) -> None:
        """Tell of an example that can't be used, None for a good one; RunFailed when there are nothing but such."""
        if task is None:
            self._unusable = 0
            return
        log.warning("prompt group failed: its example can't be used", task_id=task.task_id, reason=task.reason)
        self._unusable += 1
        if self._unusable >= self._config.trainer.failed_groups_limit:
            raise RunFailed(f"{self._unusable} examples in a row can't be used, the last: {task.reason}")

    def _evaluate(self, state: LedgerState, evaluation: EvalConfig) -> None:
        """Open the due evaluation, and an ordered one when its version exists; each once, even across restarts."""
        every = int(state.control.settings.get("eval_every", evaluation.every))
        # The version that is due, not a later one: generators stop at it for the evaluation.
        newest = self._evaluated < 0 or state.step >= state.steps
        due = state.version if newest else state.version // every * every
        if due > self._evaluated:
            self._open_evaluation(evaluation, due)
            self._evaluated = due
        ordered = state.control.evaluate
        if self._ordered != ordered <= state.version:
            if ordered >= 0:
                self._open_evaluation(evaluation, ordered)
            self._ordered = ordered

    def _open_evaluation(self, evaluation: EvalConfig, version: int) -> None:
        tasks: list[Task | UnusableTask] = []
        images: dict[str, bytes] = {}
        limits = self._limits(images)
        for settings, dataset in zip(evaluation.dataset, self._held_out, strict=True):
            sampling, first = evaluation.sampling_of(settings), len(tasks)
            for index in range(len(dataset)):
                task_id = eval_task_id(version, first + index)
                seed = self._seed(task_id)
                tasks.append(task_of(dataset, settings.label, index, task_id, "eval", sampling, limits, seed=seed))
        if self._broker.evals.open(version, tasks, self._run, images):
            log.info("evaluation opened", version=version, prompts=len(tasks))
