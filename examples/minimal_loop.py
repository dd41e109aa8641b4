"""GRPO from top to bottom on one page: Tidemill's engine, reward and training step, and no broker.

    python examples/minimal_loop.py

A model of half a million parameters learns to add, on a CPU, in about a minute. Each iteration samples a group
of completions for each of a few prompts, scores them, takes one optimizer step and gives the engine the new weights.
A run under `tidemill up` does the same with each of the four in a process of its own, none of which waits for another.
"""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import Iterator
from pathlib import Path

import torch
import yaml

from consumers.reward.scorer import Scorer
from consumers.trainer.data.groups import Group
from consumers.trainer.model.snapshot import Snapshots
from consumers.trainer.step.build import build_train_step
from deploy.offline.warm_start import make_model
from producers.datasets.mixture import build_mixture
from producers.engines.base import Engine, EngineSettings
from producers.engines.transformers.engine import TransformersEngine
from producers.tasks import make_task
from producers.tokenizer import HfTokenizer
from producers.workflows.trajectory_builder import TrajectoryBuilder
from schemas.config import TidemillConfig, parse_config
from schemas.messages import FileSource, Task, Trajectory

CONFIG = """
model: {path: runs/minimal_loop/start, dtype: float32, max_length: 32}
warm_start:                # supervised first, so that some samples are right and there is something to reinforce
  model: arithmetic/model.py:build_small
  dataset: {name: arithmetic, args: {max: 19, split: train}}
  eval: {name: arithmetic, args: {max: 19, split: heldout}}
  lr: 2.0e-3
  eval_every: 10
  stop_accuracy: 0.25
train: {name: arithmetic, args: {max: 19, split: train}}
reward: {terms: [{name: exact}]}
sampling: {n: 8, temperature: 1.0, max_tokens: 4}
trainer:
  steps: 40
  batch_groups: 64
  optimizer: {lr: 1.0e-3, warmup_steps: 5}
  advantage: {name: grpo}  # (reward - mean) / standard deviation within the group: arXiv 2402.03300
  loss: {name: ppo}        # the clipped ratio of policy and rollout policy: arXiv 1707.06347
"""


async def train(config: TidemillConfig) -> None:
    """Run the loop; one line of figures for each step."""
    file = Path(config.model.path).with_name("weights.safetensors")
    tokenizer = HfTokenizer(config.model.path)
    step = build_train_step(config)
    snapshots = Snapshots(step.policy, config.model.dtype)
    engine = TransformersEngine(
        EngineSettings(
            model_path=config.model.path,
            dtype=config.model.dtype,
            max_length=config.model.max_length,
            max_samples=config.trainer.batch_groups * config.sampling.n,
            seed=config.run.seed,
        )
    )
    await engine.start()
    prompts = tasks(config)
    async with Scorer(config.reward, config.base) as scorer:
        for version in range(config.trainer.steps):
            # Sample: G prompts, S completions of each; the engine keeps the log-probability of every token.
            batch = [next(prompts) for _ in range(config.trainer.batch_groups)]
            trajectories_G_S = await asyncio.gather(*(sample_group(engine, tokenizer, task) for task in batch))

            # Score: a function of the text. A sample that cannot be scored is left out, it is never a zero.
            groups = []
            for task, trajectories_S in zip(batch, trajectories_G_S, strict=True):
                scored = zip(trajectories_S, await scorer.score_all(trajectories_S), strict=True)
                groups.append(Group(task.task_id, [(t, score.reward) for t, score in scored if score.status == "ok"]))

            # Train: rewards become advantages in their group; these and the log-probabilities make one update.
            result = step.run(step.planner.plan(groups).batch(), version)

            # Hand over: the engine samples the next batch with the weights that this step made, so that none is stale.
            snapshots.take(file).fill()
            await engine.load(FileSource(file), version + 1)

            rewards = [reward for group in groups for _, reward in group.samples]
            print(
                f"step {version + 1:3d}/{config.trainer.steps}  reward {sum(rewards) / len(rewards):.3f}"
                f"  loss {result.metrics['loss']:+.4f}  grad {result.metrics['grad_norm']:.3f}"
                f"  entropy {result.metrics['entropy']:.3f}",
                flush=True,
            )
    await engine.close()


def tasks(config: TidemillConfig) -> Iterator[Task]:
    """Prompts without end, in a new order each epoch."""
    mixture = build_mixture(config.train, config.base, config.run.seed)
    task_id = 0
    while True:
        prompt = mixture.at(task_id)
        example = mixture.dataset(prompt)[prompt.index]
        yield make_task(task_id, "train", example, config.sampling, mixture.parts[prompt.part].label)
        task_id += 1


async def sample_group(engine: Engine, tokenizer: HfTokenizer, task: Task) -> list[Trajectory]:
    """The S completions of one prompt, as what the trainer takes."""
    prompt_ids = tokenizer.prompt_ids(task)
    trajectories_S = []
    for index, completion in enumerate(await engine.generate(prompt_ids, task.sampling, n=task.n)):
        sample = TrajectoryBuilder(index, tokenizer).prompt(prompt_ids).generated(completion).finish()
        trajectories_S.append(sample.to_trajectory(task, run="minimal_loop", generator="engine"))
    return trajectories_S


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=40, help="optimizer steps")
    parser.add_argument("--prompts", type=int, default=64, help="groups in a step")
    parser.add_argument("--samples", type=int, default=8, help="completions of each prompt")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folder", type=Path, default=Path("runs/minimal_loop"), help="where models are written")
    arguments = parser.parse_args()
    settings = yaml.safe_load(CONFIG)
    settings["run"] = {"seed": arguments.seed}
    settings["model"]["path"] = str(arguments.folder / "start")
    settings["sampling"]["n"] = arguments.samples
    settings["trainer"] |= {"steps": arguments.steps, "batch_groups": arguments.prompts}
    config = parse_config(settings, base=Path(__file__).parent)
    torch.manual_seed(config.run.seed)
    make_model(config, config.warm_start)
    asyncio.run(train(config))


if __name__ == "__main__":
    main()
