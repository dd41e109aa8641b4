"""AReaL's files become configurations: backends, references, losses, normalization, and overrides of a script."""

from pathlib import Path
from typing import Any

import pytest

from deploy.migrate.areal import sizes
from deploy.migrate.convert import convert_file, render
from producers.datasets.rows import RowReader
from schemas.errors import ConfigError
from schemas.messages import ChatMessage
from tests.support.runs.converted_files import converted

FILE = """
experiment_name: Sums
trial_name: t0
total_train_steps: 500
rollout:
  backend: "sglang:d4p1t2"
  max_concurrent_rollouts: 64
  max_head_offpolicyness: 2
  fileroot: ${trial_name}
gconfig: {n_samples: 4, max_new_tokens: 64, temperature: 0.9}
actor:
  backend: "fsdp:d2p1t1c2"
  path: Qwen/Qwen3-0.6B
  optimizer: {type: adam, lr: 1e-5, warmup_steps_proportion: 0.1}
  eps_clip: 0.3
  temperature: ${gconfig.temperature}
  kl_ctl: 0.0
  ppo_n_minibatches: 1
  reward_norm: {mean_level: group, std_level: group, group_size: "${gconfig.n_samples}"}
sglang: {model_path: "${actor.path}", mem_fraction_static: 0.7}
train_dataset: {path: openai/gsm8k, type: rl, batch_size: 16, max_length: 100}
"""


def convert(tmp_path: Path, *changes: tuple[str, str], added: str = "") -> tuple[dict[str, Any], list[str]]:
    """The configuration and the notes of the file with some text replaced."""
    return converted(tmp_path / "areal.yaml", FILE + added, "AReaL", *changes)


def test_a_file(tmp_path: Path) -> None:
    config, notes = convert(tmp_path)
    trainer, generator = config["trainer"], config["generator"]
    assert (generator["engine"], generator["http"], generator["replicas"]) == ("http", {"dialect": "sglang"}, 4)
    assert generator["args"] == {"tensor_parallel_size": 2, "mem_fraction_static": 0.7}
    assert (generator["max_samples"], config["flow"]["staleness"]) == (16, 2)
    assert (trainer["processes"], trainer["parallel"], trainer["batch_groups"]) == (4, {"context": 2}, 16)
    assert (trainer["steps"], trainer["optimizer"]["lr"], trainer["optimizer"]["warmup_steps"]) == (500, 1e-5, 50)
    assert trainer["advantage"] == {"name": "grpo", "keep_zero_variance": True, "args": {"eps": 1e-5}}
    assert (config["model"]["max_length"], config["sampling"]["max_tokens"], config["sampling"]["n"]) == (164, 64, 4)
    read = RowReader(**{name: config["train"]["args"][name] for name in ("template", "chat", "answer")})
    asked = read.read({"question": "1+1?", "answer": "#### 2"}, "row")
    assert asked.messages == [ChatMessage("user", "1+1?\nPlease put your final answer within \\boxed{}.")]
    assert any("http starts SGLang, which needs pip install 'tidemill[sglang]'" in note for note in notes)
    assert [term["name"] for term in config["reward"]["terms"]] == ["gsm8k"]
    assert any("AReaL's sglang:d4p1t2 is 4 copies, GPUs for each: 2" in note for note in notes)
    assert not any("actor.temperature" in note or "group_size=" in note for note in notes), "references are named once"


@pytest.mark.parametrize(
    ("backend", "engine", "size"),
    [
        ("fsdp:d4p1t2", "fsdp", {"d": 4, "p": 1, "t": 2}),
        ("d8", None, {"d": 8}),
        ("sglang.d4t2", "sglang", {"d": 4, "t": 2}),
        ("fsdp[actor]:d4", "fsdp", {"d": 4}),
        ("megatron:(attn:d1p12t4|ffn:d1p12e4)", "megatron", {"d": 1, "p": 12, "t": 4}),
    ],
)
def test_sizes_of_a_backend(backend: str, engine: str | None, size: dict[str, int]) -> None:
    assert sizes(backend) == (engine, size)


def test_an_allocation_mode(tmp_path: Path) -> None:
    config, _ = convert(tmp_path, *ALONE, added="allocation_mode: vllm:d4p1t1+d2t2\n")
    assert (config["generator"]["engine"], config["generator"]["replicas"]) == ("vllm", 4)
    assert config["trainer"]["processes"] == 4


ALONE = [('  backend: "sglang:d4p1t2"\n', ""), ('  backend: "fsdp:d2p1t1c2"\n', "")]
"""Takes the backends of the sections out."""


def test_a_trainer_and_generators_on_the_same_gpus(tmp_path: Path) -> None:
    config, notes = convert(tmp_path, *ALONE, added="allocation_mode: sglang:d2t2|fsdp:d4\n")
    assert config["placement"] == {"trainer": "0-3", "generator": "0-3"}
    assert (config["trainer"]["processes"], config["generator"]["replicas"]) == (4, 2)
    assert any("placement: these share GPUs" in note for note in notes)
    _, done = convert_file(tmp_path / "areal.yaml")
    assert "placement:" in render(tmp_path / "areal.yaml", "AReaL", done)


def test_a_trainer_alone_is_no_generator(tmp_path: Path) -> None:
    config, _ = convert(tmp_path, *ALONE, added="allocation_mode: fsdp:d8\n")
    assert (config["trainer"]["processes"], "engine" in config.get("generator", {})) == (8, False)


@pytest.mark.parametrize(
    ("mean", "std", "more", "advantage"),
    [
        ("group", "batch", "", "lite_ppo"),
        ("group", "null", "", "centered"),
        ("group", "null", ", mean_leave1out: true", "rloo"),
        ("batch", "batch", "", "FILL_IN"),
    ],
)
def test_norms_of_rewards(tmp_path: Path, mean: str, std: str, more: str, advantage: str) -> None:
    norm = f"reward_norm: {{mean_level: {mean}, std_level: {std}{more}}}"
    config, _ = convert(
        tmp_path, ('reward_norm: {mean_level: group, std_level: group, group_size: "${gconfig.n_samples}"}', norm)
    )
    assert config["trainer"]["advantage"]["name"] == advantage


@pytest.mark.parametrize(
    ("norm", "note"),
    [
        (
            "reward_norm: {mean_level: group, std_level: group}",
            "Left out: actor.reward_bias=-0.5: the mean of a group takes it away",
        ),
        ("", "To do: reward.terms: AReaL adds reward_bias -0.5 to each reward: add a term of your own that is -0.5"),
    ],
)
def test_a_bias_of_rewards_is_left_out_only_where_it_changes_nothing(tmp_path: Path, norm: str, note: str) -> None:
    """AReaL trains (reward + reward_bias) * reward_scaling, less the mean of a group where reward_norm has one."""
    before = 'reward_norm: {mean_level: group, std_level: group, group_size: "${gconfig.n_samples}"}'
    config, notes = convert(tmp_path, (before, f"reward_bias: -0.5\n  reward_scaling: 10.0\n  {norm}"))
    assert [text for text in notes if "reward_bias" in text] == [note + (", with weight 10" if not norm else "")]
    assert config["reward"]["terms"][0].get("weight") == (None if norm else 10.0)


@pytest.mark.parametrize(
    ("more", "loss", "args"),
    [
        ("importance_sampling_level: sequence", "gspo", {"clip_low": 0.3, "clip_high": 0.3}),
        ("use_sapo_loss: true", "sapo", {"tau_positive": 1.0, "tau_negative": 1.05}),
        ("use_decoupled_loss: true", "decoupled_ppo", {"clip_low": 0.3, "clip_high": 0.3, "dual_clip": 1e9}),
        ("use_cispo_loss: true\n  eps_clip_higher: 4.0", "cispo", {"clip_high": 4.0}),
        ("eps_clip_higher: 0.4\n  c_clip: 3", "ppo", {"clip_low": 0.3, "clip_high": 0.4, "dual_clip": 3}),
        ("importance_sampling_level: turn", "FILL_IN", {}),
    ],
)
def test_losses(tmp_path: Path, more: str, loss: str, args: dict[str, float]) -> None:
    config, _ = convert(tmp_path, ("  eps_clip: 0.3\n", f"  eps_clip: 0.3\n  {more}\n"))
    assert (config["trainer"]["loss"]["name"], config["trainer"]["loss"].get("args", {})) == (loss, args)


def test_an_agent_of_ones_own_is_never_a_single_turn(tmp_path: Path) -> None:
    config, notes = convert(tmp_path, added="workflow: my.Agent\n")
    assert config["generator"]["workflow"] == {"name": "FILL_IN"}
    assert any("workflow=my.Agent" in note for note in notes)


def test_settings_that_files_without_an_agent_have_make_no_agent(tmp_path: Path) -> None:
    inline = "  fileroot: ${trial_name}\n  agent: {mode: inline, export_style: individual, turn_discount: 1.0}\n"
    config, _ = convert(tmp_path, ("  fileroot: ${trial_name}\n", inline))
    assert "workflow" not in config["generator"]
    config, _ = convert(tmp_path, ("  fileroot: ${trial_name}\n", inline.replace("inline", "online")))
    assert config["generator"]["workflow"] == {"name": "FILL_IN"}


def test_a_file_includes_others(tmp_path: Path) -> None:
    (tmp_path / "base.yaml").write_text("actor: {eps_clip: 0.1, entropy_coeff: 0.5}\n")
    config, notes = convert(
        tmp_path, ("experiment_name: Sums", "defaults: [base, other, _self_]\nexperiment_name: Sums")
    )
    assert config["trainer"]["loss"]["args"]["clip_low"] == 0.3
    for text in ("actor.entropy_coeff=0.5", "defaults.other=included"):
        assert any(text in note for note in notes), notes


def test_overrides_of_a_script(tmp_path: Path) -> None:
    (tmp_path / "base.yaml").write_text(FILE)
    file = tmp_path / "run.sh"
    file.write_text(
        "N=$((4 * 2))\npython train.py --config base.yaml scheduler.type=local train_dataset.batch_size=$N\n"
    )
    _, done = convert_file(file)
    assert (done.config["trainer"]["batch_groups"], done.config["trainer"]["steps"]) == (8, 500)
    assert any("scheduler.type=local" in note for note in done.notes())


def test_supervised_training_is_refused_in_a_line(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"train_dataset\.type sft has no counterpart"):
        convert(tmp_path, ("type: rl", "type: sft"))
