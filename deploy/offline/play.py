"""``tidemill play``: an episode of a run's newest policy as an animated GIF, and its return."""

import io
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from consumers.trainer.checkpoint.convert import load_trained
from consumers.trainer.checkpoint.store import CheckpointStore, WantedStep
from consumers.trainer.model.hf_weights import named_weights
from producers.embodied.environment_process import EnvironmentLost, EnvironmentProcess, scale_actions, spec_of
from producers.embodied.mlp_engine import Perceptron
from schemas.config import TidemillConfig
from schemas.errors import ConfigError
from schemas.messages.fragments import TRUNCATED
from schemas.policy_shape import PolicyShape
from schemas.system.files import atomic_write

FRAME_MS = 40


def play(config: TidemillConfig, step: WantedStep, seed: int | None, steps: int, to: Path | None) -> dict[str, Any]:
    """Play one episode, of at most ``steps`` steps, with the most probable actions; returns what happened.

    seed: by default the evaluation's first. ConfigError without a checkpoint, or if the environment gives no pictures.
    """
    from PIL import Image

    if config.model.kind != "mlp":
        raise ConfigError(f"tidemill play is for model.kind mlp, not {config.model.kind}")
    path, shape = CheckpointStore(config.folder / "checkpoints").at(step), PolicyShape.read(config.model.path)
    weights = {name: value.numpy() for name, value in named_weights(load_trained(config, path))}
    policy, rng = Perceptron.of(weights, shape), np.random.default_rng(0)
    args = (config.eval.dataset if config.eval is not None else config.train)[0].args
    seed = args.get("first_seed", 0) if seed is None else seed
    spec = spec_of(args, config.base)
    frames: list[npt.NDArray[np.uint8]] = []
    earned, end = 0.0, "unfinished"
    try:
        process = EnvironmentProcess(replace(spec, args={**spec.args, "render_mode": "rgb_array"}), 1)
        try:
            process.reset(seed)
            found = process.receive()
            while len(frames) < steps and end == "unfinished":
                # Before the step: one that ends an episode resets the environment.
                frames.append(process.frame())
                actions, _ = policy.sample(policy.outputs(found.observations), rng, greedy=True)
                process.step(scale_actions(actions, process.bounds, shape.squashed))
                found = process.receive()
                earned += float(found.rewards[0])
                if found.ends[0]:
                    end = "truncated" if found.ends[0] == TRUNCATED else "terminated"
        finally:
            process.close()
    except EnvironmentLost as error:
        raise ConfigError(f"environment {spec.id}: {error}") from error
    to = to or config.folder / f"{path.name}-seed-{seed}.gif"
    pictures, file = [Image.fromarray(frame) for frame in frames], io.BytesIO()
    pictures[0].save(file, "GIF", save_all=True, append_images=pictures[1:], duration=FRAME_MS, loop=0)
    atomic_write(to, file.getvalue())
    return {
        "checkpoint": path.name,
        "environment": spec.id,
        "seed": seed,
        "steps": len(frames),
        "return": earned,
        "end": end,
        "file": str(to),
    }
