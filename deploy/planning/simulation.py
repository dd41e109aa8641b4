"""A run's flow of prompt groups on simulated GPUs: admission by slots, generation, choice of groups, training.

The rules are those of the ledger, of the generators and of the trainer, whose own GroupBuffer chooses; what is computed
takes as long as ClusterRates say. Events are played in order of their time, so that a simulated hour takes a second.

Generators on GPUs of the trainer generate in turns with it. The trainer takes the GPUs for each batch that is complete,
and gives them when it waits: at once if all generators are on them, else after as long as a hand-over there and back
takes. Generators that have to sleep hand their samples back, which others, or they in their next turn, continue.
"""

import heapq
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import islice

from broker.flow.pipeline import ScoredSample, Slot
from consumers.trainer.group_buffer import GroupBuffer
from deploy.planning.cluster import ClusterLayout, ClusterRates, LengthMix
from schemas.messages import Score

NO_SCORE = Score(reward=0.0)
"""Of a whole group, which is one sample to the buffer: what it earned decides nothing here."""


@dataclass(frozen=True)
class SimulationResult:
    """Metrics of the steps after the first ones. busy: shares of the time, of a generator's places those in use.

    oldest: largest age in versions of a trained group, by its admission. turns: of shared GPUs, those of the trainer.
    """

    seconds: float
    steps: int
    tokens: int
    trainer_busy: float
    generators_busy: float
    oldest: int
    turns: int = 0

    @property
    def tokens_per_s(self) -> float:
        """Trained tokens a second."""
        return self.tokens / self.seconds

    @property
    def step_s(self) -> float:
        """Mean seconds of a step."""
        return self.seconds / self.steps


@dataclass
class _Generator:
    """An engine. clock: tokens of a sample here from the beginning, at ``at``. ends: clock, task, length of each."""

    rates: ClusterRates
    clock: float = 0.0
    at: float = 0.0
    turn: int = 0
    ends: list[tuple[float, int, int]] = field(default_factory=list)
    place_s: float = 0.0


class Simulation:
    """Simulate a layout::

    outcome = Simulation(layout, ClusterRates(), LengthMix()).run(steps=20)
    """

    def __init__(self, layout: ClusterLayout, rates: ClusterRates, mix: LengthMix, any_order: bool = False) -> None:
        """any_order: groups are trained as they finish, which no bound allows, to see what the order costs."""
        self._layout, self._rates, self._mix = layout, rates, mix
        self._complete: deque[int] | None = deque() if any_order else None
        kinds = [pool.rates for pool in layout.pools for _ in range(pool.generators)] or [rates] * layout.generators
        self._generators = [_Generator(rates) for rates in kinds]
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = 0
        self._now = 0.0
        self._waiting: deque[int] = deque()  # tasks that no generator has
        self._returned: list[tuple[int, float, int]] = []  # samples that were handed back: task, tokens left, length
        self._awake = list(self._generators)
        self._holds = not layout.shared  # whether the trainer has its GPUs
        self._turns = 0
        self._wait = -1  # number of the step that the trainer waits for
        self._left: dict[int, int] = {}  # samples that are being generated, by task
        self._admitted: dict[int, int] = {}  # version at the admission, by task in a slot
        self._untaken: dict[int, None] = {}  # tasks in slots that the next step doesn't have yet, the oldest first
        self._tokens: dict[int, int] = {}
        self._buffer = GroupBuffer(layout.window)
        self._taken: list[int] = []
        self._cursor = 0
        self._version = 0
        self._training = False
        self._trained: list[tuple[float, float, int, int]] = []  # end, seconds, tokens and oldest age of each step

    def run(self, steps: int, first: int = 3) -> SimulationResult:
        """Train so many steps after the first ones, which fill the pipeline."""
        self._admit()
        began = 0.0
        while len(self._trained) < first + steps:
            self._now, _, happen = heapq.heappop(self._events)
            happen()
            if not began and len(self._trained) == first:
                began = self._now
                for generator in self._generators:
                    self._advance(generator)
                    generator.place_s = 0.0
        for generator in self._generators:
            self._advance(generator)
        seconds, measured = self._now - began, self._trained[first:]
        places = sum(generator.rates.most for generator in self._generators)
        return SimulationResult(
            seconds,
            steps,
            sum(tokens for _, _, tokens, _ in measured),
            sum(spent for _, spent, _, _ in measured) / seconds,
            sum(generator.place_s for generator in self._generators) / places / seconds,
            max(age for _, _, _, age in self._trained),
            self._turns,
        )

    def _at(self, when: float, happen: Callable[[], None]) -> None:
        self._numbers += 1
        heapq.heappush(self._events, (when, self._numbers, happen))

    def _admit(self) -> None:
        """Fill the free slots; generators may start these tasks when they have the newest weights."""
        new = range(self._cursor, self._cursor + self._layout.slots - len(self._admitted))
        self._cursor = new.stop
        self._admitted.update(dict.fromkeys(new, self._version))
        self._untaken.update(dict.fromkeys(new))
        self._at(self._now + (self._rates.publish_s if self._version else 0.0), lambda: self._start(new))

    def _start(self, tasks: range) -> None:
        self._waiting += tasks
        self._deal()

    def _deal(self) -> None:
        """Give samples that were handed back, then waiting tasks, to the generators with the largest share of room."""
        while self._awake and (self._returned or self._waiting):
            generator = min(self._awake, key=lambda one: len(one.ends) / one.rates.most)
            if len(generator.ends) >= generator.rates.most:
                return
            self._advance(generator)
            if self._returned:
                task, left, length = heapq.heappop(self._returned)
                generator.at += (length - left) / generator.rates.prefilled_tokens_per_s
                heapq.heappush(generator.ends, (generator.clock + left, task, length))
            else:
                task = self._waiting.popleft()
                lengths = self._mix.of_group(task, self._layout.samples)
                self._tokens[task], self._left[task] = int(lengths.sum()), len(lengths)
                for length in lengths:
                    heapq.heappush(generator.ends, (generator.clock + float(length), task, int(length)))
            self._expect(generator)

    def _token_s(self, generator: _Generator) -> float:
        return generator.rates.step_s + len(generator.ends) * generator.rates.row_s

    def _advance(self, generator: _Generator) -> None:
        """Bring an engine to the present, or leave it in the future until which it reads samples again."""
        passed = max(0.0, self._now - generator.at)
        generator.at += passed
        if generator.ends:
            generator.clock += passed / self._token_s(generator)
            generator.place_s += passed * min(len(generator.ends), generator.rates.most)

    def _expect(self, generator: _Generator) -> None:
        """Note when the engine's next sample ends, if nothing joins before."""
        generator.turn += 1
        if generator.ends:
            turn = generator.turn
            seconds = max(0.0, generator.ends[0][0] - generator.clock) * self._token_s(generator)
            self._at(generator.at + seconds, lambda: self._end_sample(generator, turn))

    def _end_sample(self, generator: _Generator, turn: int) -> None:
        if turn != generator.turn:
            return
        self._advance(generator)
        complete = False
        while generator.ends and generator.ends[0][0] <= generator.clock + 1e-6:
            _, task, _ = heapq.heappop(generator.ends)
            self._left[task] -= 1
            if self._left[task] == 0:
                complete = True
                if self._complete is not None:
                    self._complete.append(task)
                else:
                    self._buffer.add(ScoredSample(b"", task, 0, 1, b"", NO_SCORE))
        self._expect(generator)
        self._deal()
        if complete:
            self._train()

    def _train(self) -> None:
        if self._training:
            return
        while len(self._taken) < self._layout.batch:
            task = self._choose()
            if task is None:
                self._wait_for_samples()
                return
            del self._untaken[task]
            self._taken.append(task)
        if not self._holds:
            self._hold()
            return
        self._training = True
        tokens = sum(self._tokens.pop(task) for task in self._taken)
        seconds = tokens / (self._rates.trained_tokens_per_s * self._layout.trainers)
        self._at(self._now + seconds, lambda: self._end_step(seconds, tokens))

    def _hold(self) -> None:
        """Let the generators on the trainer's GPUs sleep, so that it has them after a hand-over."""
        self._training, self._turns = True, self._turns + 1
        for generator in self._generators[: self._layout.shared]:
            self._advance(generator)
            self._returned += [(task, end - generator.clock, length) for end, task, length in generator.ends]
            generator.ends.clear()
            self._expect(generator)
        heapq.heapify(self._returned)
        self._awake = self._generators[self._layout.shared :]
        self._deal()
        self._at(self._now + self._rates.hold_s, self._take_gpus)

    def _take_gpus(self) -> None:
        self._holds, self._training = True, False
        self._train()

    def _wait_for_samples(self) -> None:
        """Give shared GPUs to their generators, at the latest after as long as a hand-over there and back takes."""
        layout, step = self._layout, len(self._trained)
        if layout.shared and self._holds and self._wait < step:
            self._wait = step
            patience = 0.0 if layout.shared == layout.generators else self._rates.hold_s + self._rates.give_s
            self._at(self._now + patience, lambda: self._give(step))

    def _give(self, step: int) -> None:
        if self._holds and not self._training and step == len(self._trained):
            self._holds, turn = False, self._turns
            self._at(self._now + self._rates.give_s, lambda: self._wake(turn))

    def _wake(self, turn: int) -> None:
        if turn == self._turns:  # else the trainer has them back
            self._awake = list(self._generators)
            for generator in self._generators[: self._layout.shared]:
                self._advance(generator)
            self._deal()

    def _choose(self) -> int | None:
        if self._complete is not None:
            return self._complete.popleft() if self._complete else None
        slot = self._buffer.choose([Slot(task, task) for task in islice(self._untaken, self._layout.window)])
        if slot is None:
            return None
        self._buffer.take(slot.task_id)
        return slot.task_id

    def _end_step(self, seconds: float, tokens: int) -> None:
        age = self._version - min(self._admitted[task] for task in self._taken)
        for task in self._taken:
            del self._admitted[task], self._left[task]
        self._taken, self._training = [], False
        self._version += 1
        self._trained.append((self._now, seconds, tokens, age))
        self._admit()
        self._train()
