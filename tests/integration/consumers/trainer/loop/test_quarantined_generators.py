"""A generator whose tokens are not from the policy: it is found with real models and quarantined."""

import threading
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import cycle
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

from broker.client import Broker
from broker.queues.tasks import TaskQueue
from consumers.trainer.generator_watches import find_quarantined
from consumers.trainer.loop import Trainer
from consumers.trainer.model.policy import load_model
from producers.engines.transformers.batching import BatchRow, ContinuousBatch, Draw
from schemas.codec import Array
from schemas.messages import Heartbeat, Sampling, Span, Task, Trajectory
from schemas.metric_names import describe
from schemas.run_folder import read_lines
from schemas.system.processes import identify_process
from tests.support.producers.generator_service import (
    begin_run,
    make_engine,
    make_task,
    read_published,
    running_generator,
    wait_until,
)
from tests.support.producers.generator_service import make_config as make_generator_config
from tests.support.trainer.deterministic_run import Pipeline
from tests.support.trainer.trainer_loop import run

NAMES = ("a", "b", "c")
STEPS = 16
SAMPLES = 8
"""Of a prompt. More of fewer prompts: they are sampled side by side."""
PROCESS = identify_process("h", "p", 1)
PROCESSES = cycle([PROCESS])
"""Of the samples, one after another."""


class Samplers:
    """Three generators of one thread; ``c`` samples with ``model`` and ``temperature``, the others as they should."""

    def __init__(self, folder: Path, wrong: PreTrainedModel, temperature: float = 1.0) -> None:
        correct = load_model(str(folder), "float32")
        self._batches = {name: ContinuousBatch(correct, {2}, lambda ids: "") for name in "ab"}
        self._batches["c"] = ContinuousBatch(wrong, {2}, lambda ids: "")
        self._temperature: Mapping[str, float] = {"a": 1.0, "b": 1.0, "c": temperature}
        self.sampled = dict.fromkeys(NAMES, 0)

    def __call__(self, tasks: TaskQueue, task_id: int, version: int) -> None:
        name = NAMES[task_id % 3]
        batch, prompt = self._batches[name], [3 + (task_id * 7 + at) % 250 for at in range(6)]
        rows = [BatchRow(Draw(self._temperature[name]), 24) for _ in range(SAMPLES)]
        batch.join([(prompt, rows)], version)
        while batch.rows:
            batch.step(version)
        self.sampled[name] += len(rows)
        tasks.publish(task_id, [make_sample(task_id, at, prompt, row, name) for at, row in enumerate(rows)])


def make_sample(task_id: int, sample: int, prompt: list[int], row: BatchRow, generator: str) -> Trajectory:
    length, before = len(prompt) + len(row.tokens), len(prompt)
    return Trajectory(
        run="r",
        task_id=task_id,
        sample=sample,
        kind="train",
        tokens=Array.of([*prompt, *row.tokens], "i4"),
        loss_mask=Array.of([0] * before + [1] * len(row.tokens), "u1"),
        logprobs=Array.of([0.0] * before + row.logprobs, "f4"),
        spans=[Span(row.spans[0].version, before, length)],
        turns=[],
        finish="stop",
        prompt="",
        completion="",
        generator=generator,
        process=next(PROCESSES),
    )


def make_group(task_id: int) -> tuple[Task, dict[str, bytes]]:
    return Task(task_id=task_id, kind="train", n=SAMPLES, sampling=Sampling(), text="?"), {}


def layer_off(model: PreTrainedModel) -> None:
    """Add noise of 1e-3 to the weights of one layer, which are 0.1 large."""
    torch.manual_seed(1)
    for weight in model.model.layers[0].parameters():
        weight.add_(torch.randn_like(weight) * 1e-3)


def eight_bits(model: PreTrainedModel) -> None:
    """Round each row of each matrix to 255 values, as weights of int8 are."""
    for weight in model.model.layers.parameters():
        if weight.ndim == 2:
            scale = weight.abs().amax(dim=1, keepdim=True) / 127
            weight.copy_((weight / scale).round() * scale)


def send_heartbeats(broker: Broker, names: Sequence[str]) -> None:
    for name in names:
        broker.heartbeats.send(Heartbeat(service=name, role="generator", host="h", pid=1, state="running", place="p"))


@torch.no_grad()
def train(
    trainer: Trainer,
    broker: Broker,
    folder: Path,
    spoil: Callable[[PreTrainedModel], None] = lambda model: None,
    temperature: float = 1.0,
    alive: Sequence[str] = NAMES,
) -> Samplers:
    """Train on the samples of three generators, of which these are alive."""
    wrong = load_model(str(folder), "float32")
    spoil(wrong)
    samplers, ended = Samplers(folder, wrong, temperature), threading.Event()

    def beat() -> None:
        while not ended.wait(1.0):
            send_heartbeats(broker, alive)

    send_heartbeats(broker, alive)
    beats = threading.Thread(target=beat, daemon=True)
    beats.start()
    with Pipeline(broker, samplers, make_task=make_group), torch.enable_grad():
        run(trainer)
    ended.set()
    beats.join(20)
    assert not beats.is_alive()
    return samplers


@pytest.fixture
def still_trainer(new_trainer: Callable[..., Trainer]) -> Callable[..., Trainer]:
    """A trainer whose rate is so small that its weights do not change."""
    return partial(
        new_trainer, steps=STEPS, batch_groups=3, optimizer={"lr": 1e-9}, publish={"transport": "redis"}, log_groups=0
    )


def trained_of_c(folder: Path) -> int:
    lines = read_lines(folder / "run" / "trained.jsonl")
    return sum(NAMES[task % 3] == "c" for line in lines for task, _ in line.get("samples", []))


def mismatch_events(broker: Broker) -> list[str]:
    return [event.text for event in [stored.event for stored in broker.events.newest(100)] if event.name == "mismatch"]


def test_a_generator_is_not_blamed_for_the_tokens_of_another_process(
    still_trainer: Callable[..., Trainer], model: Path, broker: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The name may have been that of a process at fault, or samples were begun by a generator at fault."""
    monkeypatch.setattr(f"{__name__}.PROCESSES", cycle([identify_process("h", "p", 2), ""]))
    train(still_trainer(), broker, model, layer_off)
    control = broker.run_control.read()
    assert control is None or not control.mismatch
    assert mismatch_events(broker) == []


MORE = pytest.mark.matrix("one more way to be another policy")


@pytest.mark.parametrize(
    ("spoil", "temperature"),
    [
        pytest.param(layer_off, 1.0, id="a layer off by 1e-3"),
        pytest.param(lambda model: None, 1.05, id="another temperature", marks=MORE),
        pytest.param(eight_bits, 1.0, id="8-bit weights", marks=MORE),
    ],
)
def test_a_generator_of_another_policy_is_out_within_200_samples(
    still_trainer: Callable[..., Trainer],
    model: Path,
    broker: Broker,
    tmp_path: Path,
    spoil: Callable[[PreTrainedModel], None],
    temperature: float,
) -> None:
    samplers = train(still_trainer(), broker, model, spoil, temperature)
    control = broker.run_control.read()
    assert control is not None
    assert dict(control.mismatch) == {"c": PROCESS}
    assert find_quarantined(control, broker.heartbeats) == {"c"}
    lines = read_lines(tmp_path / "run" / "metrics.jsonl")
    assert "mismatch/c/gap" not in lines[-1], "none of its samples is trained any more"
    assert 32 <= trained_of_c(tmp_path) <= 200
    assert samplers.sampled["c"] > trained_of_c(tmp_path)
    assert sum(line.get("groups/dropped_mismatch", 0) for line in lines) > 0
    assert [name for name in lines[0] if not describe(name)] == []
    (text,) = mismatch_events(broker)
    assert text.startswith("c: ")
    assert text.endswith("; it gets no more tasks, and its samples end as mismatch")
    # Another process of the same name is trusted until it is found wrong, too.
    broker.heartbeats.send(Heartbeat(service="c", role="generator", host="h", pid=2, state="running", place="p"))
    assert find_quarantined(control, broker.heartbeats) == set()


def test_correct_generators_have_a_tiny_gap_and_no_alarm(
    still_trainer: Callable[..., Trainer], model: Path, broker: Broker, tmp_path: Path
) -> None:
    train(still_trainer(), broker, model)
    lines = read_lines(tmp_path / "run" / "metrics.jsonl")
    gaps = [line[name] for line in lines for name in line if name.startswith("mismatch/") and name.endswith("gap")]
    assert gaps
    assert max(gaps) < 1e-5
    assert trained_of_c(tmp_path) > 100
    assert mismatch_events(broker) == []


@pytest.mark.parametrize(
    ("alive", "action", "end"),
    [(["c"], "quarantine", "; no other generator is alive"), (NAMES, "report", "; trainer.mismatch.action is report")],
)
def test_the_last_generator_and_a_reported_one_go_on(
    still_trainer: Callable[..., Trainer],
    model: Path,
    broker: Broker,
    tmp_path: Path,
    alive: Sequence[str],
    action: str,
    end: str,
) -> None:
    train(still_trainer(mismatch={"action": action}), broker, model, layer_off, alive=alive)
    control = broker.run_control.read()
    assert control is None or not control.mismatch
    (text,) = mismatch_events(broker)
    assert text.endswith(end)
    assert "mismatch/c/gap" in read_lines(tmp_path / "run" / "metrics.jsonl")[-1]


def test_a_generator_at_fault_is_quarantined_once_another_is_alive_and_again_if_the_broker_forgets_it(
    still_trainer: Callable[..., Trainer], broker: Broker
) -> None:
    watch = still_trainer().mismatch_watch

    def find(*alive: str) -> list[str]:
        send_heartbeats(broker, alive)
        for _ in range(2):
            watch._report("c", "its tokens are not those of the policy", dict.fromkeys({"c", *alive}, PROCESS))
        control = broker.run_control.read()
        return [] if control is None else [*control.mismatch]

    assert find("c") == []
    assert find("a", "c") == ["c"]
    broker.connection.client.delete(broker.connection.keys.run_control)
    assert find("a", "c") == ["c"]
    ends = [text.rpartition("; ")[2] for text in mismatch_events(broker)]
    assert ends == ["no other generator is alive", *["it gets no more tasks, and its samples end as mismatch"] * 2]
    watch._report("b", "it ended before it was judged", {"a": PROCESS})
    assert len(mismatch_events(broker)) == len(ends)


async def test_a_quarantined_generator_takes_no_task_but_another_does(
    broker: Broker, model: Path, tmp_path: Path
) -> None:
    config = make_generator_config(model, tmp_path)
    begin_run(broker, tmp_path)
    async with running_generator(config, broker, make_engine(config, token_s=0.0), "c"):
        await wait_until(lambda: state_of(broker, "c") == "running")
        broker.run_control.quarantine("c", "another process", "trainer")
        broker.ledger.admit(make_task(0, max_tokens=5))
        assert {one.generator for one in await read_published(broker, 2)} == {"c"}
        broker.run_control.quarantine("c", identify_process(), "trainer")
        await wait_until(lambda: state_of(broker, "c") == "mismatch")
        for task_id in (1, 2, 3):
            broker.ledger.admit(make_task(task_id, max_tokens=5))
        async with running_generator(config, broker, make_engine(config, token_s=0.0), "a"):
            found = await read_published(broker, 8)
    assert [one.generator for one in found] == ["c"] * 2 + ["a"] * 6


def state_of(broker: Broker, name: str) -> str:
    heartbeat = broker.heartbeats.read(name)
    return heartbeat.state if heartbeat else ""
