"""One student with two teachers, each in a process of its own: it becomes as good as each of them at its half."""

import json
import socket
from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path

import pytest

from consumers.offline.sft import train_sft
from deploy.offline.tiny_model import byte_tokenizer, write_tiny_model
from producers.tokenizer import HfTokenizer
from schemas.config import DatasetConfig, ModelConfig, WarmStartConfig
from tests.e2e.system.test_teachers import start_server
from tests.support.runs.up_runs import UpRun

pytestmark = [
    pytest.mark.matrix("two teachers that are worth learning from; test_teachers has two that are not"),
    pytest.mark.e2e,
]

STEPS = 160
TASKS: dict[str, Callable[[int, int], int]] = {"sums": lambda a, b: a + b, "differences": lambda a, b: a - b}
Pairs = list[tuple[str, str]]


def examples(task: str) -> Pairs:
    """All pairs of a prompt and its answer; with single digits there is nothing to hold out."""
    sign = "+" if task == "sums" else "-"
    return [(f"{a}{sign}{b}=", str(TASKS[task](a, b))) for a in range(10) for b in range(10)]


def build(folder: Path, seed: int) -> None:
    """An untrained model of digits."""
    tokenizer = byte_tokenizer(["<pad>", "<eos>"], "0123456789+-=", pad_token="<pad>", eos_token="<eos>")
    sizes = {"hidden": 64, "intermediate": 128, "layers": 2, "heads": 2, "max_length": 64}
    write_tiny_model(folder, tokenizer, seed, **sizes, initializer_range=0.08)


def train(out: Path, tasks: Sequence[str], accuracy: float) -> float:
    """Train a model on these tasks up to an accuracy, and return the one that it reached."""
    pairs = [pair for task in tasks for pair in examples(task)]
    data = DatasetConfig(name="jsonl")
    settings = WarmStartConfig(
        model="", dataset=data, eval=data, lr=5e-3, batch_size=100, stop_accuracy=accuracy, max_steps=3000
    )
    model = ModelConfig(path=str(out), dtype="float32", max_length=16)
    return train_sft(model, build, pairs, pairs, settings, load_tokenizer=HfTokenizer).accuracy


@pytest.mark.timeout(1800)
def test_a_student_comes_within_two_points_of_each_of_its_teachers(tmp_path: Path) -> None:
    reached = {task: train(tmp_path / task, [task], 0.98) for task in TASKS}
    train(tmp_path / "student", [*TASKS], 0.3)
    for task in TASKS:
        lines = [json.dumps({"prompt": prompt, "answer": answer}) for prompt, answer in examples(task)]
        (tmp_path / f"{task}.jsonl").write_text("\n".join(lines))
    with closing(socket.socket()) as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    server = start_server(tmp_path / "differences", port)
    url = f"http://127.0.0.1:{port}/v1"

    data = [{"name": "jsonl", "label": task, "args": {"path": str(tmp_path / f"{task}.jsonl")}} for task in TASKS]

    config = {
        "model": {"path": str(tmp_path / "student"), "dtype": "float32", "max_length": 16},
        "train": data,
        "eval": {
            "dataset": data,
            "every": 40,
            "sampling": {"n": 1, "temperature": 0.0, "max_tokens": 4},
            "terms": [{"name": "exact"}],
        },
        "sampling": {"n": 1, "max_tokens": 4},
        "reward": {
            "terms": [
                {"name": "teacher", "args": {"model": str(tmp_path / "sums")}, "datasets": ["sums"]},
                {"name": "teacher_server", "args": {"base_url": url, "model": "t"}, "datasets": ["differences"]},
            ],
            "timeout_s": 60.0,
        },
        "flow": {"staleness": 1},
        "generator": {"engine": "transformers", "max_samples": 256},
        "trainer": {
            "steps": STEPS,
            "batch_groups": 400,
            "threads": 1,
            "kl": {"coef": 1.0, "reference": "teacher"},
            "advantage": {"name": "raw"},
            "optimizer": {"lr": 2e-3, "warmup_steps": 10, "schedule": "linear"},
        },
        "control": {"enabled": False},
    }
    run = UpRun(tmp_path, config)
    try:
        summary = run.finish(1200.0)
    finally:
        server.kill()
        server.wait(10)
        if run.process.poll() is None:
            run.process.terminate()
            run.process.wait(60)
    assert (summary["trajectories_lost"], summary["trajectories_trained_twice"]) == (0, 0)
    found = [json.loads(line) for line in (run.folder / "evaluations.jsonl").read_text().splitlines()]
    print(json.dumps({"teachers": reached, "evaluations": found}))
    last = {task: found[-1]["datasets"][task]["mean"] for task in TASKS}
    for task, accuracy in reached.items():
        assert last[task] >= accuracy - 0.02, (task, last, reached)
