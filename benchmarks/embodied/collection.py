"""Environment steps a second of a slow environment: our collector beside Stable-Baselines3's SubprocVecEnv, in turns.

    python -m benchmarks.embodied.collection [--envs 16] [--ms 5] [--seconds 5] [--rounds 3]

Needs the extra embodied. Without stable-baselines3 it measures only ours, in one process and in several. Both policies
have two layers of 64; nothing is trained.
"""

from __future__ import annotations

import argparse
import importlib.util
import statistics
import time
from collections.abc import Callable

import numpy as np

from producers.embodied.environment_process import EnvironmentSpec
from producers.embodied.fragment_collector import FragmentCollector
from producers.embodied.mlp_engine import Acted, Floats, Perceptron
from schemas.policy_shape import PolicyShape

MODULE = "benchmarks.embodied.slow_environment"
STEPS = 32


def ours(envs: int, processes: int, ms: float, seconds: float) -> float:
    """Return the environment steps a second of one collector."""
    shape, rng = PolicyShape(4, 2), np.random.default_rng(0)
    sizes = [4, 64, 64, 2]
    tensors: dict[str, Floats] = {}
    for k in range(3):
        tensors[f"layers.{2 * k}.weight"] = rng.normal(size=(sizes[k + 1], sizes[k])).astype(np.float32)
        tensors[f"layers.{2 * k}.bias"] = np.zeros(sizes[k + 1], np.float32)
    policy = Perceptron.of(tensors, shape)

    def act(observations: Floats, rng: np.random.Generator) -> Acted:
        outputs = policy.outputs(observations)
        actions = policy.sample(outputs, rng, greedy=False)
        return Acted(actions, policy.logprobs(outputs, actions), 0)

    collector = FragmentCollector(EnvironmentSpec("Slow-v0", {"ms": ms}, [MODULE]), envs, 0, processes)
    rate = measured(lambda: collector.collect(STEPS, act), envs, seconds)
    collector.close()
    return rate


def theirs(envs: int, ms: float, seconds: float) -> float:
    """Return the same of Stable-Baselines3: a forward of its policy, and a step of its vector environment."""
    importlib.import_module(MODULE)
    sb3 = importlib.import_module("stable_baselines3")
    vectors = importlib.import_module("stable_baselines3.common.vec_env")
    tools = importlib.import_module("stable_baselines3.common.env_util")
    torch = importlib.import_module("torch")
    torch.set_num_threads(1)
    made = tools.make_vec_env(f"{MODULE}:Slow-v0", envs, env_kwargs={"ms": ms}, vec_env_cls=vectors.SubprocVecEnv)
    model = sb3.PPO("MlpPolicy", made, n_steps=STEPS, batch_size=STEPS * envs, device="cpu")
    _, callback = model._setup_learn(1_000_000)
    rate = measured(
        lambda: model.collect_rollouts(made, callback, model.rollout_buffer, n_rollout_steps=STEPS), envs, seconds
    )
    made.close()
    return rate


def measured(collect: Callable[[], object], envs: int, seconds: float) -> float:
    """Call it again and again; returns environment steps a second, without the first call."""
    collect()
    count, started = 0, time.perf_counter()
    while time.perf_counter() - started < seconds:
        collect()
        count += STEPS * envs
    return count / (time.perf_counter() - started)


def main() -> None:
    """Print the medians."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--envs", type=int, default=16)
    parser.add_argument("--ms", type=float, default=5.0)
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--rounds", type=int, default=3)
    given = parser.parse_args()
    runs: dict[str, Callable[[], float]] = {
        "ours, 1 process": lambda: ours(given.envs, 1, given.ms, given.seconds),
        f"ours, {given.envs} processes": lambda: ours(given.envs, given.envs, given.ms, given.seconds),
    }
    if importlib.util.find_spec("stable_baselines3"):
        runs["SubprocVecEnv"] = lambda: theirs(given.envs, given.ms, given.seconds)
    rates: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(given.rounds):
        for name, run in runs.items():
            rates[name].append(run())
    for name, found in rates.items():
        print(f"{name}: {statistics.median(found):.0f} environment steps/s, of {[round(each) for each in found]}")


if __name__ == "__main__":
    main()
