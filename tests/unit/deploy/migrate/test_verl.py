"""What decides the training in scripts of verl is carried over: tools, images, rewards, corrections and evaluation."""

from pathlib import Path
from typing import Any

import pytest

from deploy.checks.names import check_names
from schemas.config import parse_config
from schemas.errors import ConfigError
from tests.support.runs.converted_files import converted

ACTOR, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"


def convert(tmp_path: Path, *settings: str, engine: str = "vllm") -> tuple[dict[str, Any], list[str]]:
    """The configuration and the notes of a script with these settings."""
    given = [
        *("algorithm.adv_estimator=grpo", "data.train_files=~/data/gsm8k/train.parquet", f"{ROLLOUT}.name={engine}"),
        *("data.train_batch_size=64", f"{ACTOR}.ppo_mini_batch_size=32", f"{ROLLOUT}.n=4", "trainer.total_epochs=1"),
        *("actor_rollout_ref.model.path=Qwen/Qwen3-0.6B", *settings),
    ]
    return converted(tmp_path / "run.sh", "python3 -m verl.trainer.main_ppo " + " \\\n ".join(given) + "\n", "verl")


def test_tools_of_a_script(tmp_path: Path) -> None:
    """The script names verl's own configuration beside it, which turns the conversation on, and a file of tools."""
    (tmp_path / "config").mkdir()
    (tmp_path / "config" / "turns.yaml").write_text(
        "hydra: {searchpath: [a]}\nactor_rollout_ref: {rollout: {multi_turn: {enable: true, max_assistant_turns: 5}}}\n"
    )
    (tmp_path / "tools.yaml").write_text(
        "tools:\n"
        "- {class_name: own.Calc, config: {type: native}, tool_schema: {function: {name: calc}}}\n"
        "- {class_name: verl.tools.x.SandboxFusionTool, config: {type: native}}\n"
        "- {class_name: verl.tools.y.Search, config: {type: mcp}, mcp: {mcp_servers_config_path: s.json}}\n"
    )
    named = ("--config-path=config", "--config-name=turns", f"{ROLLOUT}.multi_turn.tool_config_path=$PWD/tools.yaml")
    config, notes = convert(tmp_path, *named, f"{ROLLOUT}.multi_turn.format=hermes")
    assert config["generator"]["workflow"] == {
        "name": "tools",
        "args": {"tools": ["verl_tools.py:calc", {"python": {}}, {"mcp": {"url": "FILL_IN"}}], "max_calls": 5},
    }
    assert config["generator"]["agents"] == {"tool_parser": "hermes"}
    for text in ("write the function calc there, which does what own.Calc does", "MCP server of verl.tools.y.Search"):
        assert any(text in note for note in notes), notes


@pytest.mark.parametrize("key", ["interaction_config_path", "tool_config_path"])
def test_a_conversation_never_becomes_a_single_turn(tmp_path: Path, key: str) -> None:
    config, notes = convert(tmp_path, f"{ROLLOUT}.multi_turn.{key}=$ELSEWHERE/x.yaml")
    assert "FILL_IN" in str(config["generator"]["workflow"])
    assert any(f"{key}" in note for note in notes)


def test_an_agent_loop_of_ones_own_is_asked_for(tmp_path: Path) -> None:
    config, _ = convert(tmp_path, f"{ROLLOUT}.agent.default_agent_loop=mine")
    with pytest.raises(ConfigError, match="FILL_IN"):
        check_names(parse_config(config))


def test_images(tmp_path: Path) -> None:
    config, notes = convert(
        tmp_path,
        *("data.image_key=pictures", "actor_rollout_ref.model.lora_rank=8", f"{ACTOR}.freeze_vision_tower=True"),
        *(f"{ACTOR}.ulysses_sequence_parallel_size=2", "data.val_files=b/test.parquet", "trainer.test_freq=5"),
        engine="sglang",
    )
    assert (config["model"]["kind"], config["model"]["freeze_vision"]) == ("vision", True)
    assert config["train"]["args"]["image"] == config["eval"]["dataset"]["args"]["image"] == "pictures"
    # An adapter is on the layers of the text.
    assert (config["trainer"]["lora"], "parallel" in config["trainer"]) == ({"rank": 8, "alpha": 16.0}, False)
    for text in ("size=2: not carried over", "not sglang, because of images"):
        assert any(text in note for note in notes), notes


def test_a_yaml_file_includes_others_and_names_what_only_a_run_tells(tmp_path: Path) -> None:
    (tmp_path / "base.yaml").write_text("data: {max_response_length: 100, max_prompt_length: 50, train_files: '???'}\n")
    text = """
defaults: [ppo_trainer, base, _self_]
hydra: {searchpath: ["file://verl/trainer/config"]}
data: {max_prompt_length: 60, made_up: "${oc.env:ROWS}", other: "${oc.env:ROWS,7}"}
algorithm: {adv_estimator: grpo}
actor_rollout_ref:
  actor: {optim: {lr: "${oc.env:LR}", weight_decay: "${oc.env:DECAY,0.2}"}}
  rollout: {n: "${oc.select:data.unset,4}", prompt_length: "${oc.select:data.max_prompt_length,512}"}
  model: {path: org/m}
critic: {model: {path: "${actor_rollout_ref.model.path}"}}
"""
    config, notes = converted(tmp_path / "ppo.yaml", text, "verl")
    assert (config["model"]["max_length"], config["sampling"]["max_tokens"], config["sampling"]["n"]) == (160, 100, 4)
    assert config["trainer"]["optimizer"]["weight_decay"] == 0.2
    for told in (
        "actor.optim.lr is ${oc.env:LR}, which only a run",
        "data.train_files is ???, which only a run",
        "data.made_up is ${oc.env:ROWS}, which only a run",
        "data.other=7",
        "defaults.ppo_trainer=included",
        "hydra.searchpath=",
    ):
        assert any(told in note for note in notes), (told, notes)
    assert not any("prompt_length" in note or "critic.model.path" in note for note in notes), "named where it stands"


def test_a_script_of_its_fully_asynchronous_trainer_is_verls(tmp_path: Path) -> None:
    text = "python -m verl.experimental.fully_async_policy.fully_async_main --config-path=c --config-name=f.yaml"
    config, _ = converted(
        tmp_path / "run.sh", f"{text} actor_rollout_ref.actor.ppo_epochs=2 rollout.nnodes=1\n", "verl"
    )
    assert config["trainer"]["epochs"] == 2


def test_a_script_overrides_the_yaml_that_it_names(tmp_path: Path) -> None:
    """Also where the file refers to what the script sets."""
    (tmp_path / "base.yaml").write_text("data: {max_prompt_length: 70}\n")
    (tmp_path / "mine.yaml").write_text(
        "defaults: [base]\nactor_rollout_ref: {actor: {ppo_mini_batch_size: '${data.train_batch_size}'}}\n"
    )
    named = ("--config-path=.", "--config-name=mine", "data.train_batch_size=32", "data.max_response_length=30")
    text = f"python3 -m verl.trainer.main_ppo algorithm.adv_estimator=grpo {' '.join(named)}\n"
    config, _ = converted(tmp_path / "run.sh", text, "verl")
    assert (config["trainer"]["batch_groups"], config["model"]["max_length"]) == (32, 100)
    assert "minibatches" not in config["trainer"]


def test_rewards(tmp_path: Path) -> None:
    config, _ = convert(tmp_path, "reward_model.enable=True", "reward_model.model.path=org/judge")
    assert config["reward"]["terms"] == [{"name": "reward_model", "args": {"path": "org/judge"}}]
    own = "custom_reward_function"
    config, _ = convert(tmp_path, f"{own}.path=r.py", f"{own}.name=judge", f"+{own}.reward_kwargs.top=2")
    assert config["reward"]["terms"] == [{"name": "r.py:judge", "args": {"top": 2}}]


def test_rewards_by_the_newer_keys(tmp_path: Path) -> None:
    own, model = "reward.custom_reward_function", "reward.reward_model"
    config, notes = convert(tmp_path, f"{own}.path=r.py", f"{own}.name=judge", f"+{own}.reward_kwargs.top=2")
    assert config["reward"]["terms"] == [{"name": "r.py:judge", "args": {"top": 2}}]
    assert not any("is a guess" in note for note in notes)
    config, _ = convert(tmp_path, f"{model}.enable=True", f"{model}.model_path=org/judge")
    assert config["reward"]["terms"] == [{"name": "reward_model", "args": {"path": "org/judge"}}]
    config, notes = convert(tmp_path, f"{model}.enable=True", f"{own}.path=r.py")
    assert config["reward"]["terms"] == [{"name": "r.py:compute_score"}]
    assert any("r.py may ask verl's reward model" in note for note in notes)
    config, _ = convert(tmp_path, "reward.reward_manager.source=register", "reward.reward_manager.name=naive")
    assert config["reward"]["terms"] == [{"name": "gsm8k"}]
    buffer = "+reward.reward_kwargs.overlong_buffer_cfg"
    config, _ = convert(tmp_path, f"{buffer}.enable=True", f"{buffer}.len=256", "reward.reward_manager.name=dapo")
    assert config["reward"]["terms"][1]["args"] == {"max_tokens": 512, "overlong_buffer": 256, "factor": 1.0}


@pytest.mark.parametrize(
    "given",
    [
        "reward.reward_manager.module.path=mine.py",
        "reward.made_up=1",
        "custom_reward_function.path=$ELSEWHERE",
        "reward.custom_reward_function.path=$ELSEWHERE",
    ],
)
def test_a_reward_of_ones_own_is_never_guessed(tmp_path: Path, given: str) -> None:
    config, notes = convert(tmp_path, given)
    assert config["reward"]["terms"] == [{"name": "FILL_IN"}]
    assert any(f"{given.partition('=')[0]} chooses verl's reward" in note for note in notes), notes


def test_the_overlong_penalty_and_the_filter_of_dapo(tmp_path: Path) -> None:
    buffer = "+reward_model.reward_kwargs.overlong_buffer_cfg"
    config, _ = convert(
        tmp_path,
        *(f"{buffer}.enable=True", f"{buffer}.len=256", f"{buffer}.penalty_factor=0.5"),
        *("+reward_model.reward_kwargs.max_resp_len=1024", "data.max_response_length=1024"),
        *("algorithm.filter_groups.enable=True", "algorithm.filter_groups.metric=acc"),
    )
    assert config["reward"]["terms"][1:] == [
        {"name": "length", "args": {"max_tokens": 1024, "overlong_buffer": 256, "factor": 0.5}}
    ]
    assert config["reward"]["correct_term"] == "gsm8k"
    advantage = {"name": "grpo", "keep_zero_variance": False, "filter_term": "gsm8k"}
    assert config["trainer"]["advantage"] == advantage


def test_rollout_correction(tmp_path: Path) -> None:
    of = "algorithm.rollout_correction"
    config, _ = convert(
        tmp_path,
        *(f"{of}.rollout_is=token", f"{of}.rollout_is_threshold=3.0"),
        *(f"{of}.rollout_rs='token_k1,seq_mean_k3'", f"{of}.rollout_rs_threshold='0.5_2.0,0.1'"),
    )
    loss = config["trainer"]["loss"]
    assert (loss["name"], loss["args"]["weight_limit"], loss["args"]["weight_action"]) == (
        "decoupled_ppo",
        3.0,
        "clamp",
    )
    assert config["trainer"]["rejection"] == [
        {"measure": "ratio", "level": "token", "lower": 0.5, "upper": 2.0},
        {"measure": "k3", "level": "sequence", "upper": 0.1},
    ]
    config, _ = convert(tmp_path, f"{of}.bypass_mode=true", f"{of}.loss_type=reinforce")
    assert config["trainer"]["loss"] == {"name": "reinforce"}


def test_evaluation(tmp_path: Path) -> None:
    values = (f"{ROLLOUT}.val_kwargs.{text}" for text in ("top_p=0.7", "temperature=0.6", "n=8", "do_sample=True"))
    config, _ = convert(tmp_path, "data.val_files=b/test.parquet", "trainer.test_freq=5", *values)
    sampling = {"n": 8, "temperature": 0.6, "top_p": 0.7}
    assert (config["eval"]["sampling"], config["eval"]["every"]) == (sampling, 5)
    _, notes = convert(tmp_path, "data.val_files=b/test.parquet", "trainer.test_freq=-1")
    assert any("data.val_files=b/test.parquet: not carried over" in note for note in notes)


def test_a_server_of_sglang(tmp_path: Path) -> None:
    memory = f"{ROLLOUT}.gpu_memory_utilization=0.7"
    config, _ = convert(tmp_path, memory, f"+{ROLLOUT}.engine_kwargs.sglang.attention_backend=fa3", engine="sglang")
    generator = config["generator"]
    assert (generator["engine"], generator["http"]) == ("http", {"dialect": "sglang"})
    assert generator["args"] == {"mem_fraction_static": 0.7, "attention_backend": "fa3"}


@pytest.mark.parametrize(
    ("given", "staleness", "batch", "parts"),
    [
        (["trainer.v1.trainer_mode=sync"], 0, 64, 2),
        (["trainer.v1.trainer_mode=colocate_async", "trainer.v1.sampler.max_off_policy_threshold=3"], 2, 64, 2),
        (["trainer.v1.trainer_mode=separate_async", "trainer.v1.separate_async.parameter_sync_step=2"], 7, 64, 2),
        (["async_training.staleness_threshold=0.5", "async_training.require_batches=2"], 1, 256, 8),
        (["trainer.balance_batch=True"], None, 64, 2),
    ],
)
def test_asynchronous_trainers(tmp_path: Path, given: list[str], staleness: int | None, batch: int, parts: int) -> None:
    config, _ = convert(tmp_path, *given)
    assert config.get("flow", {}).get("staleness") == staleness
    assert (config["trainer"]["batch_groups"], config["trainer"]["minibatches"]) == (batch, parts)


def test_generators_that_have_gpus_of_their_own(tmp_path: Path) -> None:
    trainer = ("trainer.nnodes=2", "trainer.n_gpus_per_node=8", f"{ROLLOUT}.tensor_model_parallel_size=2")
    for section in ("rollout", ROLLOUT):
        config, notes = convert(tmp_path, *trainer, f"{section}.n_gpus_per_node=4", f"{section}.nnodes=1")
        assert (config["trainer"]["processes"], config["generator"]["replicas"]) == (16, 2)
        assert not any("shared out" in note for note in notes)
    config, notes = convert(tmp_path, *trainer, f"{ROLLOUT}.n_gpus_per_node=4", f"{ROLLOUT}.nnodes=0")
    assert "processes" not in config["trainer"]
    assert any("16 GPUs are to be shared out" in note for note in notes)


def test_offloaded_activations_are_those_that_are_saved(tmp_path: Path) -> None:
    config, _ = convert(tmp_path, "actor_rollout_ref.model.enable_activation_offload=True")
    assert config["trainer"]["activation_checkpointing"] is True


def test_a_teacher_is_asked_for(tmp_path: Path) -> None:
    config, notes = convert(tmp_path, "distillation.enabled=True", "distillation.teacher_models.t.model_path=org/big")
    assert [term["name"] for term in config["reward"]["terms"]] == ["gsm8k", "FILL_IN"]
    assert any("distillation.teacher_models.t.model_path=org/big" in note for note in notes)


def test_supervised_training_becomes_a_warm_start(tmp_path: Path) -> None:
    text = (
        "torchrun -m verl.trainer.sft_trainer engine=fsdp model.path=org/m model.lora_rank=8 optim.lr=1e-4"
        " data.train_files=d/train.parquet data.val_files=d/test.parquet data.train_batch_size=64"
        " engine.ulysses_sequence_parallel_size=2 trainer.default_local_dir=out trainer.total_epochs=3\n"
    )
    config, notes = converted(tmp_path / "run.sh", text, "verl's SFT")
    found = config["warm_start"]
    assert (config["model"]["path"], found["model"], found["lr"], found["batch_size"]) == ("out", "org/m", 1e-4, 64)
    assert found["eval"]["args"] == {"path": "d", "split": "test", "prompt": "messages", "answer": "FILL_IN"}
    assert (found["stop_accuracy"], config["trainer"]["parallel"]["context"]) == (None, 2)
    for part in ("3 epochs (trainer.total_epochs) are 3 * rows", "lora_rank=8: tidemill sft trains all", "engine=fsdp"):
        assert any(part in note for note in notes), notes
    with_answers = text.replace("data.train_batch_size=64", "data.prompt_key=q data.response_key=a")
    config, _ = converted(tmp_path / "run.sh", with_answers, "verl's SFT")
    assert config["warm_start"]["dataset"]["args"] == {"path": "d", "split": "train", "prompt": "q", "answer": "a"}


def test_files_of_several_kinds_are_each_judged_by_their_rule(tmp_path: Path) -> None:
    """verl chooses the rule by a column of each row, which a file of one kind has the same in all."""
    both = ("data.train_files=['a/gsm8k/train.parquet','a/math/train.parquet']", "trainer.test_freq=5")
    config, notes = convert(tmp_path, *both, "data.val_files=['a/math/test.parquet','a/gsm8k/test.parquet']")
    assert config["reward"]["terms"] == [
        {"name": "gsm8k", "datasets": ["gsm8k-train-0", "gsm8k-test-1"]},
        {"name": "math", "datasets": ["math-train-1", "math-test-0"]},
    ]
    assert any("reward.terms: verl chooses by data_source; gsm8k, math" in note for note in notes), notes


def test_a_group_of_one_is_rewarded_as_it_is(tmp_path: Path) -> None:
    config, notes = convert(tmp_path, f"{ROLLOUT}.n=1")
    assert config["trainer"]["advantage"]["name"] == "raw"
    assert any("sampling.n is 1" in note for note in notes)


def test_text_around_a_reference_to_itself_is_only_known_to_a_run(tmp_path: Path) -> None:
    text = 'actor_rollout_ref: {model: {path: "x${actor_rollout_ref.model.path}"}, rollout: {n: 4}}\n'
    config, notes = converted(tmp_path / "a.yaml", text, "verl")
    assert config["sampling"]["n"] == 4
    assert any("actor_rollout_ref.model.path" in note for note in notes), notes
