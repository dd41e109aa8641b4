"""RLinf's Hydra files become configurations, with the files that they include and the references among settings."""

from pathlib import Path
from typing import Any

import pytest

from deploy.migrate.convert import convert_file
from deploy.migrate.hydra import compose, settings
from schemas.errors import ConfigError
from tests.support.runs.converted_files import converted

FILE = """
defaults:
  - ../engines/sharded@actor.fsdp_config
  - absent/thing@actor.other
  - override hydra/job_logging: stdout
cluster:
  component_placement: {actor: 0-3, rollout: 4-7}
runner: {task_type: reasoning, seq_length: 1000, max_steps: 10, val_check_interval: -1, experiment_name: Go 1}
algorithm:
  group_size: 8
  n_minibatches: 4
  adv_type: grpo
  kl_beta: 0.001
  kl_penalty_type: low_var_kl
  clip_ratio_c: null
  sampling_params: {temperature: 1.0, max_new_tokens: "${subtract:${runner.seq_length}, ${data.max_prompt_length}}"}
rollout:
  model: {model_path: org/m}
  rollout_backend: vllm
  tensor_parallel_size: 2
  gpu_memory_utilization: 0.5
data: {rollout_batch_size: 32, max_prompt_length: 400, train_data_paths: [d/rows.jsonl], answer_key: solutions}
actor:
  model: {model_path: "${rollout.model.model_path}", precision: bf16}
  optim: {lr: 2e-5, adam_beta2: 0.95}
reward: {reward_type: math, reward_scale: 5.0}
"""


def convert(tmp_path: Path, *changes: tuple[str, str], added: str = "") -> tuple[dict[str, Any], list[str]]:
    """The configuration and the notes of the file with some text replaced."""
    (tmp_path / "math").mkdir(exist_ok=True)
    (tmp_path / "engines").mkdir(exist_ok=True)
    (tmp_path / "engines" / "sharded.yaml").write_text("strategy: fsdp\n")
    return converted(tmp_path / "math" / "grpo.yaml", FILE + added, "RLinf", *changes)


def test_a_file(tmp_path: Path) -> None:
    config, notes = convert(tmp_path)
    trainer = config["trainer"]
    assert (config["model"]["path"], config["model"]["max_length"], config["run"]["name"]) == ("org/m", 1000, "go-1")
    assert (config["sampling"]["max_tokens"], config["sampling"]["n"]) == (600, 8)
    assert (trainer["batch_groups"], trainer["minibatches"], trainer["steps"]) == (32, 4, 10)
    assert trainer["loss"] == {"name": "ppo", "args": {"clip_low": 0.2, "clip_high": 0.2, "dual_clip": 1e9}}
    assert trainer["kl"] == {"coef": 0.001, "estimator": "k3", "place": "loss", "bias_correction": False}
    assert config["train"]["args"] == {"path": "d/rows.jsonl", "prompt": "prompt", "answer": "solutions"}
    assert config["generator"]["args"] == {"tensor_parallel_size": 2, "gpu_memory_utilization": 0.5}
    assert config["placement"] == {"trainer": "0-3", "generator": "4-7"}
    assert (trainer["processes"], config["generator"]["replicas"]) == (4, 2)
    for text in (
        "actor.fsdp_config.strategy=fsdp",
        "defaults.absent/thing@actor.other=included",
        "reward.reward_scale=5.0: not carried over",
    ):
        assert any(text in note for note in notes), (text, notes)


@pytest.mark.parametrize(
    ("theirs", "advantage"), [("reinpp", "reinforce_pp"), ("gae", "gae"), ("grpo_dynamic", "FILL_IN")]
)
def test_advantages(tmp_path: Path, theirs: str, advantage: str) -> None:
    config, _ = convert(tmp_path, ("adv_type: grpo", f"adv_type: {theirs}"))
    assert config["trainer"]["advantage"]["name"] == advantage


def test_an_agent_is_never_a_single_turn(tmp_path: Path) -> None:
    config, notes = convert(tmp_path, added="agentloop: {max_turns: 4}\n")
    assert config["generator"]["workflow"] == {"name": "FILL_IN"}
    assert any("agentloop.max_turns=4" in note for note in notes)


@pytest.mark.parametrize(
    ("placed", "processes", "ours", "note"),
    [
        ("{'actor,rollout,reward': all}", None, None, "placement, trainer.processes, generator.replicas: RLinf places"),
        ("{'actor,rollout,reward': all}", 8, {"trainer": "0-7", "generator": "0-7"}, ""),
        ("{'actor, inference': 0-3, rollout: '2-3,5,6'}", None, {"trainer": "0-3", "generator": "2-3,5,6"}, ""),
        ("{actor: 0-3, rollout: '0-1:0-3'}", None, None, "generator.replicas: RLinf places"),
        ("{actor: {node_group: a, placement: 0-3}, rollout: {placement: 4-7}}", None, None, "pools: RLinf places"),
        ("{actor: 0-15, rollout: 16-19}\n  num_nodes: 3", None, None, "on 3 machines"),
    ],
)
def test_placement(tmp_path: Path, placed: str, processes: int | None, ours: dict[str, str] | None, note: str) -> None:
    convert(tmp_path, ("{actor: 0-3, rollout: 4-7}", placed))
    _, done = convert_file(tmp_path / "math" / "grpo.yaml", processes=processes)
    assert done.config.get("placement") == ours
    assert note in " ".join(done.to_do)
    if "num_nodes" in placed:
        assert (done.config["trainer"]["processes"], done.config["generator"]["replicas"]) == (16, 2)


def test_images(tmp_path: Path) -> None:
    config, _ = convert(
        tmp_path, ("answer_key: solutions", "image_keys: [picture]"), ("_backend: vllm", "_backend: sglang")
    )
    assert (config["model"]["kind"], config["train"]["args"]["image"]) == ("vision", "picture")
    assert config["generator"]["engine"] == "vllm"


@pytest.mark.parametrize(
    ("change", "wrong"),
    [
        (
            ("task_type: reasoning", "task_type: embodied"),
            "trains by grpo, None of None: PPO and GRPO of mlp_policy, openvla",
        ),
        (("algorithm:", "other:"), "has no section algorithm"),
    ],
)
def test_what_is_not_read_is_told_in_a_line(tmp_path: Path, change: tuple[str, str], wrong: str) -> None:
    with pytest.raises(ConfigError, match=wrong):
        convert(tmp_path, change)


EMBODIED = """
cluster: {component_placement: {actor: 0-0, env: 0-0, rollout: 0-0}}
runner: {task_type: embodied, max_epochs: 30}
algorithm: {ALGORITHM, group_size: 4, clip_ratio_low: 0.2, clip_ratio_high: 0.28, filter_rewards: true}
env: {train: {total_num_envs: 16, max_steps_per_rollout_epoch: 64, max_episode_steps: 64, init_params: {id: A-v1}}}
rollout: {sampling_params: {temperature_train: 1.6}}
actor:
  global_batch_size: 32
  model: {model_type: KIND, model_path: org/oft, action_dim: 7, obs_dim: 5, num_action_chunks: 8}
  optim: {lr: 1e-4}
"""


def embodied(tmp_path: Path, kind: str, algorithm: str) -> tuple[dict[str, Any], list[str]]:
    """The configuration and the notes of an embodied recipe."""
    text = EMBODIED.replace("KIND", kind).replace("ALGORITHM", algorithm)
    if kind == "mlp_policy":
        text = text.replace(", num_action_chunks: 8", "")
    return converted(tmp_path / "robot.yaml", text, "RLinf's embodied recipes")


def test_sac_of_a_small_network(tmp_path: Path) -> None:
    """32 updates a step of 16 * 64 transitions."""
    more = "update_epoch: 32, gamma: 0.8, tau: 0.01, critic_actor_ratio: 2, q_head_type: crossq"
    config, notes = embodied(tmp_path, "mlp_policy", f"adv_type: embodied_sac, loss_type: embodied_sac, {more}")
    assert config["trainer"]["sac"] == {
        **{"updates_per_transition": 1 / 32, "gamma": 0.8, "tau": 0.01, "policy_every": 2, "batch": 32, "norm": "batch"}
    }
    assert not {"loss", "advantage", "critic", "epochs"} & config["trainer"].keys()
    assert any('"squashed": true' in note for note in notes), notes
    assert any("clip_ratio_low=0.2: not carried over" in note for note in notes), notes


def test_grpo_of_a_small_network(tmp_path: Path) -> None:
    config, _ = embodied(tmp_path, "mlp_policy", "adv_type: grpo, loss_type: actor")
    trainer = config["trainer"]
    assert (config["sampling"]["n"], trainer["advantage"]) == (4, {"name": "grpo", "keep_zero_variance": False})
    assert trainer["loss"] == {"name": "ppo", "args": {"dual_clip": 1e9, "clip_low": 0.2, "clip_high": 0.28}}
    assert "critic" not in trainer


def test_a_model_whose_tokens_are_actions(tmp_path: Path) -> None:
    config, notes = embodied(tmp_path, "openvla_oft", "adv_type: grpo, loss_type: actor")
    args = config["generator"]["workflow"]["args"]
    assert (config["model"]["kind"], config["model"]["path"], config["model"]["output_tokens"]) == (
        *("vision", "FILL_IN", r"<a\d+>"),
    )
    assert (config["sampling"]["max_tokens"], config["sampling"]["temperature"], args["max_turns"]) == (56, 1.6, 8)
    assert (args["args"]["chunk"], config["trainer"]["batch_groups"], config["trainer"]["minibatches"]) == (8, 4, 4)
    assert any("in place of org/oft a Qwen2.5-VL or Qwen3-VL" in note for note in notes), notes


@pytest.mark.parametrize(
    ("kind", "algorithm"),
    [
        ("openpi", "adv_type: grpo, loss_type: actor"),
        ("openvla", "adv_type: embodied_sac, loss_type: embodied_sac"),
        ("mlp_policy", "adv_type: gae, loss_type: embodied_dagger"),
    ],
)
def test_other_embodied_recipes_are_refused_by_name(tmp_path: Path, kind: str, algorithm: str) -> None:
    with pytest.raises(ConfigError, match=rf"of {kind}: PPO and GRPO of mlp_policy, openvla, openvla_oft, SAC of mlp"):
        embodied(tmp_path, kind, algorithm)


def test_files_that_a_file_includes_come_in_hydras_order(tmp_path: Path) -> None:
    """Of two files the later one counts, the file itself where ``_self_`` stands, else last."""
    (tmp_path / "opt").mkdir()
    (tmp_path / "opt" / "a.yaml").write_text("lr: 1\nwd: 1\n")
    (tmp_path / "base.yaml").write_text("opt: {wd: 2}\nn: 1\n")
    tree = {"defaults": [{"opt": "a"}, "base"], "opt": {"lr": 3}}
    assert compose(tmp_path / "x.yaml", tree) == {"opt": {"lr": 3, "wd": 2}, "n": 1}
    tree = {"defaults": ["_self_", "base"], "n": 5}
    assert compose(tmp_path / "x.yaml", tree)["n"] == 1


def test_references(tmp_path: Path) -> None:
    tree = {"a": 3, "b": "${a}", "c": "x-${a}", "d": {"e": "${oc.env:HOME}"}, "s": {"t": 1}, "u": "${s}", "none": None}
    found = settings(tree, {"a": 4})
    assert (found["b"].value, found["c"], found["u.t"].value, "none" in found) == (4, "x-4", 1, False)
    assert type(found["d.e"]).__name__ == "Unread"
    assert settings({"a": "${b}", "b": "${a}"}).keys() == {"a", "b"}, "a circle ends"
