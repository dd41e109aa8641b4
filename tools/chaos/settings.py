"""The system under test: small enough for two cores, quick enough that faults hit it in every state."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

RUN = "chaos"
LEASE_S = 3.0
GROUPS, CHECKPOINT_EVERY = 8, 5


@dataclass(frozen=True)
class Flow:
    """samples: n of a group. window: some combinations of it with other settings leave no room for a batch."""

    samples: int = 8
    staleness: int = 4
    window: int = 4


TASKS, CONVERSATIONS = Flow(), Flow(samples=1, staleness=32, window=129)
CURRICULUM = [
    "train.limit=64",
    "train.curriculum.name=band",
    "train.curriculum.between=[0.45,0.6]",
    "reward.correct_from=0.5",
]
"""Overrides with which few prompts come back often, and of those that were seen many are skipped."""
JUDGE_SAYS = 7.0
"""The verdict of the flaky judge on every sample, so that a verdict that it never gave is seen."""
WORKLOADS = ("text", "agents", "both", "programs", "live")
INJECTED = "injected by the chaos suite"
"""In the text of an error that a service only pretends to meet."""
DEADLINE_S = 8.0
"""Of an agent's episode."""
REWARD_S = 75.0
"""Of a conversation: users reward it within a minute, if they can."""
EVALUATE_EVERY, EVALUATED = 25, 16
"""Versions between two evaluations, and prompts of one."""
TEXT_MODEL = (
    "import sys, pathlib; from tests.support.models.tiny_model import make_tiny_model as make; "
    "make(pathlib.Path(sys.argv[1]), hidden=32, layers=1)"
)
VISION_MODEL = (
    "import sys, pathlib; from deploy.offline.tiny_vision_model import write_tiny_vision_model as make; "
    "make(pathlib.Path(sys.argv[1]))"
)
AGENT = Path(__file__).with_name("agents") / "agent.py"
USER_CODE, USER_TRACKER = Path(__file__).with_name("user_code.py"), Path(__file__).with_name("user_tracker.py")
SERVICES = {
    "feeder": "feeder",
    "generator-0": "generator",
    "generator-1": "generator",
    "reward-0": "reward",
    "reward-1": "reward",
    "trainer": "trainer",
}


def services(workload: str) -> dict[str, str]:
    """Return the role of each service, by name. Users need a control plane."""
    return SERVICES | ({"control": "control"} if workload == "live" else {})


def flow(workload: str) -> Flow:
    """Return the flow of tasks of a workload."""
    return CONVERSATIONS if workload == "live" else TASKS


def is_for_agents(task_id: int, workload: str) -> bool:
    """Whether a task is played by agents, or by users."""
    return workload in ("agents", "live") or (workload in ("both", "programs") and task_id % 3 == 0)


def configuration(
    folder: Path,
    seed: int,
    workload: str,
    judge_url: str | None = None,
    teacher_url: str | None = None,
    pictures: bool = False,
) -> dict[str, Any]:
    """The configuration of every service; broker.url comes with each service's command. judge_url, teacher_url: of
    further terms. pictures: the model reads images, and prompts have them.

    Weights travel through the broker with an odd seed, through the file system with an even one.
    """
    workflow: dict[str, Any] = {"name": f"{USER_CODE}:TextTurn", "args": {"folder": str(folder)}}
    if workload != "text":
        workflow = {"name": "agent", "args": {"run": f"{AGENT}:run", "args": {"folder": str(folder)}}}
    if workload == "programs":
        workflow["args"] = {"command": [sys.executable, str(AGENT), str(folder)]}
    terms: list[dict[str, Any]] = [
        {"name": f"{USER_CODE}:inline"},
        {"name": f"{USER_CODE}:pooled", "args": {"folder": str(folder)}},
    ]
    if judge_url is not None:
        asked = {
            "base_url": judge_url,
            "model": "judge",
            "template": "{completion}",
            "parse": {"regex": r"Score: (\d+)"},
        }
        terms.append({"name": "judge", "args": asked})
    examples = {"name": f"{USER_CODE}:Examples", "args": {"folder": str(folder), "pictures": pictures}}
    correct, train = terms[0]["name"], examples
    advantage: dict[str, Any] = {"keep_zero_variance": True}
    held_out: dict[str, Any] = {
        "eval": {"dataset": {**examples, "limit": EVALUATED}, "every": EVALUATE_EVERY, "hold_s": 10}
    }
    if workload == "live":
        workflow, train, advantage = {"name": "live"}, {"name": "live"}, {"name": "reinforce_pp"}
        correct, terms, held_out = "", [], {}
    taught: dict[str, Any] = {}
    if teacher_url is not None:
        terms.append({"name": "teacher_server", "args": {"base_url": teacher_url, "model": "teacher"}})
        # Without its teacher every sample is excluded, for as long as a server takes to start.
        taught = {"kl": {"coef": 0.1, "reference": "teacher"}, "max_failed_groups": 100_000}
    shape = flow(workload)
    return {
        "run": {"name": RUN, "folder": str(folder / "run"), "seed": seed},
        "model": {
            "path": str(folder / "model"),
            "dtype": "float32",
            "max_length": (64 if workload == "text" else 224) + 160 * pictures,
            **({"kind": "vision"} if pictures else {}),
        },
        "train": train,
        **held_out,
        "sampling": {"n": shape.samples, "max_tokens": 30},
        "reward": {"terms": terms, **({"correct_term": correct} if correct else {}), "timeout_s": 2, "workers": 1},
        "flow": {"staleness": shape.staleness, "window": shape.window},
        "generator": {
            "engine": "scripted",
            "workflow": workflow,
            "agents": {
                **{"processes": 2, "episodes": 256, "deadline_s": DEADLINE_S, "max_calls": 12, "grace_s": 1},
                "live": {"reward_s": REWARD_S, "rate": 1e6},
            },
            "args": {"tokens": 200, "min_length": 8, "max_length": 30, "token_s": 0.02},
            "max_samples": 256,
            "lease_s": LEASE_S,
            "probe_tolerance": 1e3,
        },
        "broker": {"deadline_s": 60, "max_deliveries": 10},
        "trainer": {
            "steps": 10_000_000,
            "batch_groups": GROUPS,
            "threads": 1,
            "advantage": advantage,
            **taught,
            "optimizer": {"lr": 1e-4},
            "checkpoint": {"every": CHECKPOINT_EVERY, "keep": 3},
            "batch_timeout_s": 300,
            "trackers": [f"{USER_TRACKER}:Tracker"],
            "publish": {"transport": ("file", "redis", "peer")[seed % 3]},
        },
        "log": {"format": "json", "level": "info"},
    }


def prepare(folder: Path, config: dict[str, Any]) -> Path:
    """Write the model (in a process of its own, so that this one never loads PyTorch) and the configuration."""
    folder.mkdir(parents=True, exist_ok=True)
    if not (folder / "model" / "model.safetensors").is_file():
        make = VISION_MODEL if config["model"].get("kind") == "vision" else TEXT_MODEL
        subprocess.run([sys.executable, "-c", make, str(folder / "model")], check=True, timeout=120)
    file = folder / "config.yaml"
    file.write_text(yaml.safe_dump(config))
    return file
