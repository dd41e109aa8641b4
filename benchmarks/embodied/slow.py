"""A slow environment: our collector and PPO beside Stable-Baselines3's with its SubprocVecEnv, in turns.

    python -m benchmarks.embodied.slow collect [--envs 16] [--ms 5] [--rounds 3]
    python -m benchmarks.embodied.slow train

``collect`` trains nothing; ``train`` is PPO in 10 epochs of 8 minibatches, ours with ``tidemill up`` and one generator.
Both policies have two layers of 64. Needs the extra embodied; without stable-baselines3 it measures only ours.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from producers.embodied.environment_process import EnvironmentSpec
from producers.embodied.fragment_collector import FragmentCollector
from producers.embodied.mlp_engine import Acted, Floats, Perceptron
from schemas.policy_shape import PolicyShape

MODULE = "benchmarks.embodied.slow_environment"
STEPS, SECONDS = 32, 5.0
TRAINED, SKIPPED = 40, 5


def collect_ours(envs: int, processes: int, id: str, args: dict[str, Any]) -> float:
    """Return the environment steps a second of one collector, in an environment with four numbers and two actions."""
    shape, rng = PolicyShape(4, 2), np.random.default_rng(0)
    sizes = [4, 64, 64, 2]
    tensors: dict[str, Floats] = {}
    for k in range(3):
        tensors[f"layers.{2 * k}.weight"] = rng.normal(size=(sizes[k + 1], sizes[k])).astype(np.float32)
        tensors[f"layers.{2 * k}.bias"] = np.zeros(sizes[k + 1], np.float32)
    policy = Perceptron.of(tensors, shape)

    def act(observations: Floats, rng: np.random.Generator) -> Acted:
        return Acted(*policy.sample(policy.outputs(observations), rng, greedy=False), 0)

    collector = FragmentCollector(EnvironmentSpec(id, args, [MODULE]), envs, 0, processes)
    rate = measured(lambda: collector.collect(STEPS, act), envs)
    collector.close()
    return rate


def make_theirs(envs: int, ms: float) -> tuple[Any, Any]:
    """Return Stable-Baselines3's environments and PPO."""
    sb3 = importlib.import_module("stable_baselines3")
    vectors = importlib.import_module("stable_baselines3.common.vec_env")
    tools = importlib.import_module("stable_baselines3.common.env_util")
    importlib.import_module("torch").set_num_threads(1)
    made = tools.make_vec_env(f"{MODULE}:Slow-v0", envs, env_kwargs={"ms": ms}, vec_env_cls=vectors.SubprocVecEnv)
    model = sb3.PPO("MlpPolicy", made, n_steps=STEPS, batch_size=STEPS * envs // 8, n_epochs=10, device="cpu")
    return made, model


def collect_theirs(envs: int, ms: float) -> float:
    """Return the same of Stable-Baselines3: a forward of its policy, and a step of its vector environment."""
    made, model = make_theirs(envs, ms)
    _, callback = model._setup_learn(1_000_000)
    rate = measured(lambda: model.collect_rollouts(made, callback, model.rollout_buffer, n_rollout_steps=STEPS), envs)
    made.close()
    return rate


def measured(collect: Callable[[], object], envs: int) -> float:
    """Call it again and again; returns environment steps a second, without the first call."""
    collect()
    count, started = 0, time.perf_counter()
    while time.perf_counter() - started < SECONDS:
        collect()
        count += STEPS * envs
    return count / (time.perf_counter() - started)


def train_ours(
    envs: int, processes: int, id: str, args: dict[str, Any], epochs: int = 10, minibatches: int = 8, steps: int = STEPS
) -> float:
    """Return the environment steps a second of a run with PPO and one generator, without its first steps."""
    with tempfile.TemporaryDirectory() as folder:
        played = {
            "id": id,
            "args": args,
            "modules": [MODULE],
            "envs": envs,
            "processes": processes,
            "steps": steps,
        }
        settings = {
            "run.folder": f"{folder}/run",
            "run.name": "slow",
            "control.port": 0,
            "eval": None,
            "train": {"name": "gymnasium", "args": played},
            "generator.replicas": 1,
            "trainer.steps": TRAINED,
            "trainer.epochs": epochs,
            "trainer.minibatches": minibatches,
        }
        changes = [f"{name}={json.dumps(value)}" for name, value in settings.items()]
        command = [sys.executable, "-m", "tidemill", "up", "examples/cartpole/config.yaml", *changes]
        subprocess.run(command, check=True, capture_output=True, timeout=600)
        lines = [json.loads(line) for line in Path(folder, "run", "metrics.jsonl").read_text().splitlines()]
    first, last = lines[SKIPPED], lines[-1]
    return float((last["step"] - first["step"]) * steps * envs / (last["wall_s"] - first["wall_s"]))


def train_theirs(envs: int, ms: float) -> float:
    """Return the same of Stable-Baselines3."""
    made, model = make_theirs(envs, ms)
    model.learn(SKIPPED * STEPS * envs)
    started = time.perf_counter()
    model.learn((TRAINED - SKIPPED) * STEPS * envs, reset_num_timesteps=False)
    made.close()
    return (TRAINED - SKIPPED) * STEPS * envs / (time.perf_counter() - started)


def main() -> None:
    """Print the medians."""
    parser = argparse.ArgumentParser()
    parser.add_argument("what", choices=["collect", "train"])
    parser.add_argument("--envs", type=int, default=16)
    parser.add_argument("--ms", type=float, default=5.0)
    parser.add_argument("--rounds", type=int, default=3)
    given = parser.parse_args()
    envs, ms = given.envs, given.ms
    runs: dict[str, Callable[[], float]] = {"ours": partial(train_ours, envs, envs, "Slow-v0", {"ms": ms})}
    if given.what == "collect":
        runs = {
            f"ours, {count} processes": partial(collect_ours, envs, count, "Slow-v0", {"ms": ms}) for count in (1, envs)
        }
    if importlib.util.find_spec("stable_baselines3"):
        runs["SubprocVecEnv"] = partial(train_theirs if given.what == "train" else collect_theirs, envs, ms)
    rates: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(given.rounds):
        for name, run in runs.items():
            rates[name].append(run())
    for name, found in rates.items():
        print(f"{name}: {statistics.median(found):.0f} environment steps/s, of {[round(each) for each in found]}")


if __name__ == "__main__":
    main()
