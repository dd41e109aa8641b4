"""A freeze is exact with real vLLM: nothing is sampled in it or lost by it, and a generator may leave in it."""

import asyncio
import importlib.util
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from broker.client import Broker
from producers.engines.base import EngineSettings
from producers.engines.vllm.engine import VllmEngine
from producers.generator.service import Generator
from tests.support.configurations import minimal_config
from tests.support.models.tiny_model import make_tiny_model
from tests.support.runs.pausable_system import PausableSystem

pytestmark = [
    pytest.mark.matrix("a pause with real vLLM; the engine contract and test_pause hold it with other engines"),
    pytest.mark.timeout(600),
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed"),
]
MAX_TOKENS = 360


class System(PausableSystem):
    """Its services with vLLM as the engine. What it has sampled is counted by vLLM itself."""

    deadline_s = 240.0

    def start_generator(self, name: str) -> None:
        self.engine = VllmEngine(EngineSettings(self.config.model.path, "float32", 512, 16, report_every=20))
        self.start(name, lambda stop: asyncio.run(Generator(self.config, name, self.connect(), self.engine).run(stop)))

    def growing(self) -> dict[str, int]:
        """Tokens so far of each request that vLLM holds."""
        states = dict(self.engine.llm.output_processor.request_states)
        return {name: state.detokenizer.num_output_tokens() for name, state in states.items() if state.detokenizer}

    @property
    def tokens(self) -> int:
        """All tokens: of finished samples as the broker counts them, and of those that grow."""
        return self.broker.ledger.read_state().tokens_generated + sum(self.growing().values())

    def freeze_under_way(self) -> None:
        """Freeze while samples are half done; on a quiet machine the first attempt does."""
        for _ in range(10):
            self.wait("samples that grow", lambda: any(count > 20 for count in self.growing().values()))
            self.pause("freeze")
            if self.growing():
                return
            self.broker.run_control.pause("none", "test")
        raise AssertionError("no freeze met a sample that grew")


@pytest.fixture
def system(tmp_path: Path, make_broker: Callable[..., Broker], monkeypatch: pytest.MonkeyPatch) -> Iterator[System]:
    monkeypatch.chdir(tmp_path)
    model = make_tiny_model(tmp_path / "model")
    name = f"freeze-{tmp_path.name[-8:]}".lower().replace("_", "-")
    config = minimal_config(
        run={"name": name, "folder": str(tmp_path / "run")},
        model={"path": str(model), "dtype": "float32", "max_length": 512},
        sampling={"n": 2, "max_tokens": MAX_TOKENS},
        generator={"engine": "vllm", "max_samples": 16, "lease_s": 30},
        trainer={
            "steps": 100_000,
            "batch_groups": 2,
            "checkpoint": {"every": 5},
            "advantage": {"name": "raw"},
            "threads": 1,
        },
    )
    system = System(config, lambda: make_broker(name))
    yield system
    system.end(*system.running)
    assert not system.errors


def test_nothing_is_sampled_in_a_freeze_and_a_generator_that_leaves_in_it_hands_everything_back(system: System) -> None:
    system.start_trainer()
    system.start_rest()
    system.start_generator("generator-0")
    system.wait("steps", lambda: system.step >= 1)

    system.freeze_under_way()
    kept = system.growing()
    for _ in range(3):
        system.stands_still()
    assert system.growing() == kept, "requests are kept as they were"
    system.broker.run_control.pause("none", "test")
    system.goes_on()

    system.freeze_under_way()
    half_done = sorted(system.growing().values())
    step = system.step
    system.end("generator-0")
    queue = system.broker.task_queue("reader")
    deliveries = queue.read(100, 100)
    tasks = [item.message for item in deliveries]
    parts = sorted(len(part.tokens) for task in tasks for part in task.partials)
    assert [length for length in parts if length] == [length for length in half_done if length]
    given_back = {(task.task_id, part.sample): part.tokens.numpy().tolist() for task in tasks for part in task.partials}
    assert given_back
    assert system.step == step
    for item in deliveries:
        assert queue.return_task(item, item.message)

    system.start_generator("generator-1")
    system.wait("the pause", system.paused)
    assert system.step == step
    system.broker.run_control.pause("none", "test")
    system.wait("steps", lambda: system.step > step + len(tasks))
    state = system.broker.ledger.read_state()
    assert state.balanced
    assert not state.failed
    found = system.broker.trajectory_store.search(lambda seen: True, 200, 2000).items
    finished = {
        (seen.trajectory.task_id, seen.trajectory.sample): seen.trajectory.tokens.numpy()[
            seen.trajectory.loss_mask.data.index(1) :
        ].tolist()
        for seen in found
        if (seen.trajectory.task_id, seen.trajectory.sample) in given_back
    }
    assert finished, "none of the samples that were handed back is among those kept for reading"
    for key, tokens in finished.items():
        assert tokens[: len(given_back[key])] == given_back[key], "what was sampled before the freeze is in the sample"
