"""Learning beside Stable-Baselines3: the same environment, steps and settings, seed by seed in turns.

    python -m benchmarks.embodied.seeds cartpole [--seeds 5]     # PPO, examples/cartpole
    python -m benchmarks.embodied.seeds pendulum [--seeds 3]     # SAC, examples/pendulum
    python -m benchmarks.embodied.seeds halfcheetah [--steps 1000000]   # PPO; needs gymnasium[mujoco]

Ours is ``tidemill up`` with a broker and processes, and its seconds include starts and evaluations. The return is the
mean of 20 held-out episodes with the most probable actions. Needs the extra embodied; without stable-baselines3 it
measures only ours.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import json
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

EPISODES, HELD_OUT = 20, 1_000_000
DEADLINE_S = 3 * 3600.0


@dataclass(frozen=True)
class Contest:
    """One environment. steps: of it, in all. per_step: of it, in a step of the trainer. theirs: arguments of an
    algorithm of Stable-Baselines3. wrapped: observations and rewards are normalised, as by its VecNormalize."""

    id: str
    config: str
    steps: int
    per_step: int
    envs: int
    algorithm: str
    theirs: dict[str, Any]
    ours: dict[str, Any] = field(default_factory=dict)
    wrapped: bool = False


CONTESTS = {
    "cartpole": Contest(
        "CartPole-v1",
        "examples/cartpole/config.yaml",
        60_160,
        256,
        8,
        "PPO",
        {
            "n_steps": 32,
            "batch_size": 256,
            "n_epochs": 20,
            "gamma": 0.98,
            "gae_lambda": 0.8,
            "ent_coef": 0.0,
            "learning_rate": lambda left: 1e-3 * left,
        },
        # As theirs it is evaluated at the end alone, and before the first step.
        {"eval.every": 1000},
    ),
    "pendulum": Contest(
        "Pendulum-v1",
        "examples/pendulum/config.yaml",
        9_600,
        32,
        4,
        "SAC",
        {"learning_rate": 1e-3, "batch_size": 256, "train_freq": 8, "gradient_steps": 32, "learning_starts": 100},
    ),
    "halfcheetah": Contest(
        "HalfCheetah-v5",
        "examples/cartpole/config.yaml",
        1_000_000,
        2048,
        8,
        "PPO",
        {
            "n_steps": 256,
            "batch_size": 64,
            "n_epochs": 10,
            "gamma": 0.98,
            "gae_lambda": 0.92,
            "ent_coef": 0.0,
            "learning_rate": 3e-4,
        },
        {},
        True,
    ),
}


def train_ours(contest: Contest, seed: int, steps: int) -> tuple[float, float]:
    """Return the mean return of the last version and the seconds of the whole command."""
    with tempfile.TemporaryDirectory() as folder:
        changes = {"run.folder": f"{folder}/run", "run.seed": seed, "control.port": 0, **contest.ours}
        changes["trainer.steps"] = steps // contest.per_step
        if contest.wrapped:
            changes |= _cheetah(Path(folder), contest, steps)
        words = [f"{name}={json.dumps(value)}" for name, value in changes.items()]
        started = time.perf_counter()
        command = [sys.executable, "-m", "tidemill", "up", contest.config, *words]
        subprocess.run(command, check=True, capture_output=True, timeout=DEADLINE_S)
        seconds = time.perf_counter() - started
        lines = [json.loads(line) for line in Path(folder, "run", "evaluations.jsonl").read_text().splitlines()]
    return float(max(lines, key=lambda line: line["version"])["mean"]), seconds


def _cheetah(folder: Path, contest: Contest, steps: int) -> dict[str, Any]:
    """Write a policy for 17 numbers and 6 actions, and return the settings that make PPO of the example fit it."""
    (folder / "policy").mkdir()
    shape = {"model_type": "mlp", "observations": 17, "actions": 6, "hidden": [64, 64], "continuous": True}
    (folder / "policy" / "config.json").write_text(json.dumps(shape | {"normalise": True}))
    optimizer = {"lr": 3e-4, "betas": [0.9, 0.999], "eps": 1e-5, "max_grad_norm": 0.5, "schedule": "constant"}
    return {
        "model.path": str(folder / "policy"),
        "train.args": {"id": contest.id, "envs": contest.envs, "steps": 256},
        "generator.replicas": 1,
        "trainer.epochs": 10,
        "trainer.minibatches": 32,
        "trainer.scale_rewards": True,
        "trainer.optimizer": optimizer,
        "trainer.critic.optimizer": optimizer,
        "trainer.advantage.args": {"gamma": 0.98, "lam": 0.92},
        "eval.dataset.args": {"id": contest.id, "seeds": EPISODES, "first_seed": HELD_OUT},
        "eval.every": max(1, steps // contest.per_step // 5),
    }


def train_theirs(contest: Contest, seed: int, steps: int) -> tuple[float, float]:
    """Return the same of Stable-Baselines3, in a process of its own."""
    command = [sys.executable, "-m", "benchmarks.embodied.seeds", contest.id, "--theirs", str(seed), str(steps)]
    started = time.perf_counter()
    told = subprocess.run(command, check=True, capture_output=True, text=True, timeout=DEADLINE_S).stdout
    return float(told.split()[-1]), time.perf_counter() - started


def learn(contest: Contest, seed: int, steps: int) -> float:
    """Train with Stable-Baselines3, and return the mean return of held-out episodes."""
    sb3: Any = importlib.import_module("stable_baselines3")
    tools: Any = importlib.import_module("stable_baselines3.common.env_util")
    vectors: Any = importlib.import_module("stable_baselines3.common.vec_env")
    importlib.import_module("torch").set_num_threads(1)
    made = tools.make_vec_env(contest.id, contest.envs, seed=seed)
    if contest.wrapped:
        made = vectors.VecNormalize(made, gamma=contest.theirs["gamma"])
    model = getattr(sb3, contest.algorithm)("MlpPolicy", made, seed=seed, device="cpu", **contest.theirs)
    model.learn(steps)
    gymnasium: Any = importlib.import_module("gymnasium")
    returns = []
    for episode in range(EPISODES):
        environment = gymnasium.make(contest.id)
        observation, _ = environment.reset(seed=HELD_OUT + episode)
        earned, ended = 0.0, False
        while not ended:
            seen = made.normalize_obs(observation) if contest.wrapped else observation
            action, _ = model.predict(seen, deterministic=True)
            observation, reward, terminated, truncated, _ = environment.step(action)
            earned, ended = earned + float(reward), terminated or truncated
        returns.append(earned)
    return sum(returns) / len(returns)


def main() -> None:
    """Print a line for each seed and side."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("environment", choices=[*CONTESTS, *(one.id for one in CONTESTS.values())])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, help="steps of the environment, by default the contest's")
    parser.add_argument("--ours", action="store_true", help="only ours")
    parser.add_argument("--theirs", nargs=2, type=int, metavar=("SEED", "STEPS"), help=argparse.SUPPRESS)
    given = parser.parse_args()
    contest = next(one for name, one in CONTESTS.items() if given.environment in (name, one.id))
    if given.theirs:
        print(learn(contest, *given.theirs))
        return
    steps = given.steps or contest.steps
    sides = {"tidemill": train_ours}
    if importlib.util.find_spec("stable_baselines3") and not given.ours:
        sides["stable-baselines3"] = train_theirs
    for seed in range(given.seeds):
        for name, train in sides.items():
            earned, seconds = train(contest, seed, steps)
            print(f"{contest.id} seed {seed} {name}: return {earned:.1f}, {seconds:.0f} s", flush=True)


if __name__ == "__main__":
    main()
