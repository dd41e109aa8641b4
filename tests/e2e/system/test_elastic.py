"""Generators come and go as processes, with notice and without, and the run neither loses nor repeats anything.

The generators are real processes with a scripted engine; the test itself feeds, rewards and trains through the
broker, and publishes weights as deltas.
"""

import itertools
import json
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml

from benchmarks.pipelines.tidemill import reference
from broker.client import Broker
from broker.connection.embedded import EmbeddedServer
from broker.flow.trainer_session import TrainerSession
from consumers.trainer.group_buffer import GroupBuffer
from schemas.messages import BatchRecord, Sampling, Score, Task, Trajectory
from tests.support.broker.trainer_sessions import take_over
from tests.support.models.changing_weights import ChangingWeights
from tests.support.runs.light_service import start_service

BATCH, SAMPLES, MAX_TOKENS = 3, 3, 400
DEADLINE_S = 150.0
ENGINE = """
import json, os
from producers.engines.scripted import ScriptedEngine


class Watched(ScriptedEngine):
    '''Writes down when it was first at work, and what each request gave, however that ended.'''

    def _step(self, samples, progress):
        super()._step(samples, progress)
        open(os.environ["DIARY"], "a").close()

    async def generate(self, prompt_ids, sampling, n=1, prefix=(), progress=None):
        completions = await super().generate(prompt_ids, sampling, n, prefix, progress)
        with open(os.environ["DIARY"], "a") as diary:
            for completion in completions:
                line = {"prompt": list(prompt_ids), "tokens": [*prefix, *completion.tokens], "end": completion.finish}
                diary.write(json.dumps(line) + chr(10))
        return completions
"""


class World:
    """A run in which this process is everything but the generators."""

    def __init__(self, broker: Broker, url: str, folder: Path) -> None:
        self.broker = broker
        self.folder = folder
        self.trained: list[Trajectory] = []
        self.steps = 0
        self._url = url
        self._stop = threading.Event()
        self._errors: list[BaseException] = []
        self.generators: dict[str, subprocess.Popen[bytes]] = {}
        self._training = take_over(broker, batch=BATCH, staleness=4, steps=1000, max_uncommitted=5)
        self._weights = ChangingWeights(broker, folder, "redis", self._training.leader_term)
        self._weights.publish(0)
        (folder / "watched.py").write_text(ENGINE)
        config: dict[str, Any] = {
            "run": {"name": "elastic", "folder": str(folder / "run")},
            "model": {"path": "none", "dtype": "float32", "max_length": 2 * MAX_TOKENS},
            "train": {"name": "arithmetic"},
            "sampling": {"n": SAMPLES, "max_tokens": MAX_TOKENS},
            "reward": {"terms": [{"name": "exact"}]},
            "generator": {
                "engine": "watched.py:Watched",
                "args": {"token_s": 0.01, "min_length": 40, "max_length": 200},
                "max_samples": 2 * SAMPLES,
                "lease_s": 2,
            },
        }
        (folder / "config.yaml").write_text(yaml.safe_dump(config))

    def start(self, name: str) -> None:
        diary = str(self.folder / f"{name}.jsonl")
        self.generators[name] = start_service("generator", self.folder / "config.yaml", name, self._url, DIARY=diary)

    def diary(self, name: str) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (self.folder / f"{name}.jsonl").read_text().splitlines()]

    def works(self, name: str) -> bool:
        """Whether a generator is in the middle of samples."""
        return (self.folder / f"{name}.jsonl").exists()

    def makers(self) -> set[str]:
        return {item.generator for item in list(self.trained)}

    def trained_with(self, name: str) -> dict[str, list[list[int]]]:
        """Generated tokens of all trained samples of each prompt that a generator had been at; none of some, maybe."""
        found: dict[str, list[list[int]]] = {str(line["prompt"]): [] for line in self.diary(name)}
        for item in list(self.trained):
            start = item.loss_mask.data.index(1)
            samples = found.get(str(item.tokens.numpy()[:start].tolist()))
            if samples is not None:
                samples.append(item.tokens.numpy()[start:].tolist())
        return found

    def version_of(self, name: str) -> int:
        return next((beat.version for beat in self.broker.heartbeats.list() if beat.service == name), -1)

    def wait(self, condition: Callable[[], object], what: str) -> None:
        end = time.monotonic() + DEADLINE_S
        while not condition():
            assert not self._errors, self._errors
            assert time.monotonic() < end, f"not seen after {DEADLINE_S:.0f} s: {what}"
            time.sleep(0.02)

    def run(self) -> Iterator[None]:
        """Feed, score and train in threads until the block ends; no generator outlives it."""
        jobs = [threading.Thread(target=self._guarded, args=(job,)) for job in (self._feed, self._score, self._train)]
        for job in jobs:
            job.start()
        try:
            yield
        finally:
            self._stop.set()
            for process in self.generators.values():
                process.kill()
                process.wait(10)
            for job in jobs:
                job.join(20)
        assert not self._errors, self._errors

    def _guarded(self, job: Callable[[], None]) -> None:
        try:
            while not self._stop.is_set():
                job()
        except BaseException as error:
            self._errors.append(error)
            raise

    def _feed(self) -> None:
        position, cursor = self.broker.ledger.change_position(), self.broker.ledger.read_state().cursor
        text = f"{cursor}+1="
        task = Task(task_id=cursor, kind="train", n=SAMPLES, sampling=Sampling(max_tokens=MAX_TOKENS), text=text)
        if self.broker.ledger.admit(task).answer not in ("ok", "moved"):
            self.broker.ledger.wait_change(position, 200)

    def _score(self) -> None:
        queue = self.broker.score_queue("r")
        while not self._stop.is_set():
            queue.publish([(item, Score(reward=1.0)) for item in queue.read(64, 200)])

    def _train(self) -> None:
        training, buffer, done = self._training, GroupBuffer(window=1), []
        for step in itertools.count():
            chosen = self._batch(training, buffer)
            if chosen is None:
                break
            groups = [buffer.take(task_id) for task_id in chosen]
            record = BatchRecord(
                step=step, version=step, new_version=step + 1, groups=[reference(group) for group in groups]
            )
            bodies = training.fetch_trajectories([item.trajectory_id or b"" for group in groups for item in group])
            self.trained += [body for body in bodies if isinstance(body, Trajectory)]
            training.journal_batch(record)
            training.complete_step(record)
            self._weights.publish(step + 1)
            done.append(record)
            self.steps = step + 1
        training.commit_steps(done)

    def _batch(self, training: TrainerSession, buffer: GroupBuffer) -> list[int] | None:
        while not self._stop.is_set():
            chosen = [slot.task_id for slot in training.read_pipeline().slots[:BATCH]]
            if len(chosen) == BATCH and all(buffer.is_complete(task_id) for task_id in chosen):
                return chosen
            outcomes = training.claim_scores(100)
            for outcome in outcomes:
                buffer.add(outcome)
            if not outcomes:
                training.wait_for_scores(200)
        return None


@contextmanager
def running(world: World) -> Iterator[None]:
    yield from world.run()


@pytest.mark.timeout(290)
def test_generators_join_leave_and_die_and_every_prompt_is_trained_once(
    make_broker: Callable[..., Broker], server: EmbeddedServer, tmp_path: Path
) -> None:
    world = World(make_broker("elastic"), server.url, tmp_path)
    with running(world):
        world.start("g-0")
        world.wait(lambda: world.steps >= 1, "a step with one generator")
        for name in ("g-1", "g-2", "g-3"):
            world.start(name)
        for name in ("g-1", "g-2", "g-3"):
            world.wait(lambda name=name: world.works(name), f"{name} at work")
        world.generators["g-1"].terminate()
        world.generators["g-1"].wait(60)
        world.generators["g-2"].kill()
        newest = world.steps
        world.start("g-4")
        world.wait(lambda: world.version_of("g-4") >= 0, "the late one with weights")
        first = world.version_of("g-4")
        assert first >= newest, "it begins with the newest weights, not with those of the past"
        world.wait(lambda: "g-4" in world.makers(), "a trained sample of the late one")
        world.wait(lambda: all(world.trained_with("g-1").values()), "what was handed back is trained")

    assert world.generators["g-1"].returncode == 0
    samples = [(item.task_id, item.sample) for item in world.trained]
    assert sorted(samples) == [(task_id, sample) for task_id in range(world.steps * BATCH) for sample in range(SAMPLES)]
    trained = world.trained_with("g-1")
    handed_back = [line for line in world.diary("g-1") if line["end"] == "abort" and line["tokens"]]
    assert handed_back
    for line in handed_back:
        length = len(line["tokens"])
        assert line["tokens"] in [tokens[:length] for tokens in trained[str(line["prompt"])]], "tokens were lost"
    kinds = {manifest.version: manifest.whole for manifest in world.broker.weights.published()}
    assert not all(kinds.values()), "weights travelled as deltas"
