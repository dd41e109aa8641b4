"""How many steps of environments a second go through the broker, and through one collector.

    python -m benchmarks.embodied.rate broker [--envs 8] [--steps 128]
    python -m benchmarks.embodied.rate collect [--envs 64] [--processes 2]
    python -m benchmarks.embodied.rate train [--envs 64] [--processes 2]

``broker`` has the processes of ``tidemill bench transport``, with fragments made before: each is published, scored,
journaled, fetched, checked and trained by a step that learns nothing. ``collect`` steps an environment that computes
nothing, with a policy of two layers of 64; ``train`` does so in ``tidemill up``, with PPO of one epoch.
"""

from __future__ import annotations

import argparse
import secrets
import statistics
from functools import partial
from typing import Any

import msgspec
import numpy as np

from benchmarks.embodied.slow import collect_ours, train_ours
from benchmarks.harness.processes import RoleProcesses, ServerUsage, serving
from benchmarks.harness.workload import PipelineShape, TrajectoryPool, open_broker
from benchmarks.pipelines import tidemill
from schemas.codec import Array, encode
from schemas.errors import InfraError
from schemas.messages import Fragment, Span, Task, Trajectory

FLOW = PipelineShape(samples=1, batch=4, staleness=1)
ROLES: dict[str, Any] = {
    "producer": tidemill.Producer,
    "reward": tidemill.Rewarder,
    "assembler": tidemill.Assembler,
}
DEADLINE_S, FRAGMENTS = 120.0, 2000


class FragmentPool(TrajectoryPool):
    """The same fragment of ``envs`` environments and ``steps`` steps for every sample, of four numbers observed."""

    def __init__(self, envs: int, steps: int) -> None:
        super().__init__(steps)
        rng, played = np.random.default_rng(0), envs * steps
        self._fragment = Fragment(
            envs=envs,
            observations=Array.of(rng.normal(size=(steps + 1) * envs * 4), "f4"),
            actions=Array.of(rng.integers(0, 2, played), "i4"),
            logprobs=Array.of(np.full(played, -0.7), "f4"),
            rewards=Array.of(np.ones(played), "f4"),
            ends=Array.of(rng.random(played) < 0.01, "u1"),
            last=Array.of(np.zeros(0), "f4"),
        )

    def trajectory(self, task: Task, sample: int, version: int) -> Trajectory:
        """Return the fragment as it travels."""
        steps = self._fragment.steps
        return msgspec.structs.replace(
            super().trajectory(task, sample, version),
            tokens=Array.of(np.zeros(steps), "i4"),
            loss_mask=Array.of(np.ones(steps), "u1"),
            logprobs=Array.of(np.zeros(steps), "f4"),
            spans=[Span(version, 0, steps)],
            prompt="",
            completion="",
            fragment=self._fragment,
        )

    def first_token(self, task_id: int, sample: int) -> int:
        """Return 0: a token stands for a step."""
        return 0


class Role:
    """A role of the pipeline in its process."""

    def __init__(self, role: str, url: str, run: str, envs: int, steps: int) -> None:
        self._role = ROLES[role](url, run, FragmentPool(envs, steps), FLOW)

    def run(self, job: str, amount: float) -> dict[str, Any]:
        """Take so many steps."""
        found: dict[str, Any] = self._role.run(int(amount))
        return found


def through_broker(envs: int, steps: int, rounds: int) -> None:
    """Print fragments and environment steps a second, and the processor time of each role."""
    size = len(encode(FragmentPool(envs, steps).trajectory(TrajectoryPool(steps).task(0, 1), 0, 0)))
    with serving(None, "everysec") as url:
        run = f"bench-{secrets.token_hex(4)}"
        with RoleProcesses({role: partial(Role, role, url, run, envs, steps) for role in ROLES}) as roles:
            rates, used = [], []
            for _ in range(rounds + 1):
                before = ServerUsage.of(url).cpu_s
                shares = roles.run("fragments", FRAGMENTS // FLOW.per_step, DEADLINE_S)
                seconds = max(one.ended for one in shares.values()) - min(one.started for one in shares.values())
                rates.append(FRAGMENTS / seconds)
                each = {role: share.cpu_s for role, share in shares.items()}
                used.append({**each, "server": ServerUsage.of(url).cpu_s - before})
        if not open_broker(url, run).ledger.read_state().balanced:
            raise InfraError("the ledger does not add up")
    rate, played = statistics.median(rates[1:]), envs * steps
    print(f"{envs} environments, {steps} steps, {size:,} bytes: {rate:.0f} fragments/s, {rate * played:,.0f} steps/s")
    spent = {name: statistics.median(one[name] for one in used[1:]) / FRAGMENTS * 1e6 for name in used[0]}
    print(", ".join(f"{name} {value:.0f} us" for name, value in spent.items()), "of processor time a fragment")


def main() -> None:
    """Print what was asked for."""
    parser = argparse.ArgumentParser()
    parser.add_argument("what", choices=["broker", "collect", "train"])
    parser.add_argument("--envs", type=int, default=8)
    parser.add_argument("--steps", type=int, default=128)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    given = parser.parse_args()
    if given.what == "broker":
        return through_broker(given.envs, given.steps, given.rounds)
    run = collect_ours if given.what == "collect" else partial(train_ours, epochs=1, minibatches=1, steps=given.steps)
    found = [round(run(given.envs, given.processes, "Still-v0", {})) for _ in range(given.rounds)]
    print(f"{given.envs} environments, {given.processes} processes: {statistics.median(found):,.0f} steps/s of {found}")
    return None


if __name__ == "__main__":
    main()
