"""Make tests/integration/consumers/trainer/fragments/sac_update.json: an update by Stable-Baselines3's own SAC.

    python tests/support/embodied/sac_oracle.py

needs stable-baselines3 (2.9.2 made the file), which no test installs. The noise of the policy is recorded, and given to
the same update of ours.
"""

import json
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import stable_baselines3
import torch
from stable_baselines3 import SAC
from stable_baselines3.common.logger import Logger

BATCH, OUT = 16, Path(__file__).parents[2] / "integration/consumers/trainer/fragments/sac_update.json"


def plain(tensors: dict[str, torch.Tensor]) -> dict[str, Any]:
    return {name: [round(float(x), 9) for x in value.flatten()] for name, value in tensors.items()}


def state(model: SAC) -> dict[str, Any]:
    parts = {"actor": model.actor, "critic": model.critic, "target": model.critic_target}
    found = {f"{part}.{name}": value for part, module in parts.items() for name, value in module.state_dict().items()}
    return plain({**found, "log_alpha": model.log_ent_coef.detach()})


def main() -> None:
    torch.manual_seed(0)
    env = gymnasium.make("Pendulum-v1")
    model = SAC(
        "MlpPolicy", env, batch_size=BATCH, policy_kwargs={"net_arch": [8, 8]}, learning_rate=1e-3, device="cpu"
    )
    model.set_logger(Logger(None, []))
    rng = np.random.default_rng(1)
    for _ in range(BATCH):
        seen, following = rng.normal(size=(2, 1, 3)).astype(np.float32)
        action = rng.uniform(-1, 1, (1, 1)).astype(np.float32)
        done = rng.random() < 0.25
        model.replay_buffer.add(seen, following, action, rng.normal(size=1), np.array([done]), [{}])
    data = model.replay_buffer.sample(BATCH)
    model.replay_buffer.sample = lambda *args, **named: data
    noise: list[torch.Tensor] = []
    drawn = torch.distributions.normal._standard_normal

    def recorded(*args: Any, **named: Any) -> torch.Tensor:
        noise.append(drawn(*args, **named))
        return noise[-1]

    torch.distributions.normal._standard_normal = recorded
    before = state(model)
    model.train(gradient_steps=1, batch_size=BATCH)
    columns = {
        "observations": data.observations,
        "actions": data.actions,
        "rewards": data.rewards[:, 0],
        "terminated": data.dones[:, 0],
        "next_observations": data.next_observations,
    }
    made = {
        "made_by": f"stable-baselines3 {stable_baselines3.__version__}, SAC.train, {Path(__file__).name}",
        "data": plain(columns),
        "noise": [plain({"x": each})["x"] for each in noise],
        "before": before,
        "after": state(model),
    }
    OUT.write_text(json.dumps(made) + "\n")


main()
