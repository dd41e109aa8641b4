"""Whatever settings a file of another system holds, it becomes a configuration and notes, or is refused in one line."""

from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deploy.migrate.conversion import Conversion, Unread
from deploy.migrate.convert import SYSTEMS, convert_text, render
from schemas.errors import ConfigError

SCALARS = st.one_of(st.none(), st.booleans(), st.integers(-3, 3), st.floats(), st.text(max_size=5), st.just("$X"))
VALUES = st.one_of(SCALARS, st.lists(SCALARS, max_size=3), st.dictionaries(st.text(max_size=3), SCALARS, max_size=2))


@pytest.mark.parametrize("name", SYSTEMS)
@settings(max_examples=60)
@given(data=st.data())
def test_no_value_ends_in_anything_but_a_line(name: str, data: st.DataObject) -> None:
    keys = st.sampled_from([rule.theirs.replace("*", "other") for rule in SYSTEMS[name].rules])
    drawn: dict[str, Any] = data.draw(st.dictionaries(keys, VALUES, max_size=12))
    found = {key: Unread(value) if value == "$X" else value for key, value in drawn.items()}
    system = replace(SYSTEMS[name], read=lambda file, text: found)
    with suppress(ConfigError):
        done = convert_text(Path("file"), "", system)
        assert render(Path("file"), name, done)


@pytest.mark.parametrize(
    ("name", "found", "named"),
    [
        (
            "rlinf",
            {"runner.max_steps": 10**15, "actor.optim.lr_warmup_steps_ratio": "half"},
            "share of all steps is 'half'",
        ),
        (
            "rlinf_control",
            {"env.train.total_num_envs": "all", "env.train.rollout_epoch": 10**15},
            "total_num_envs is 'all'",
        ),
        ("trl", {"per_device_train_batch_size": "auto", "gradient_accumulation_steps": 10**15}, "batch_size is 'auto'"),
        ("trl", {"per_device_train_batch_size": 1.5}, "batch_size is 1.5"),
        (
            "verl",
            {"actor_rollout_ref.actor.ppo_mini_batch_size": "all", "async_training.require_batches": 10**15},
            "size is 'all'",
        ),
    ],
)
def test_a_text_is_not_repeated_as_often_as_a_number_says(name: str, found: dict[str, Any], named: str) -> None:
    """It would take all memory of the machine, or say MemoryError."""
    with pytest.raises(ConfigError, match=named):
        convert_found(name, found)


@pytest.mark.parametrize("name", SYSTEMS)
def test_each_setting_is_carried_over_or_named(name: str) -> None:
    """A setting of no rule, and one of each rule that has no counterpart."""
    keys = [rule.theirs.replace("*", "other") for rule in SYSTEMS[name].rules if not rule.ours]
    found = {"made.up": 7, **{key: 100 + at for at, key in enumerate(keys) if key != "shown_flags"}}
    done = convert_text(Path("file"), "", replace(SYSTEMS[name], read=lambda file, text: found))
    notes = " ".join(done.notes())
    assert [key for key, value in found.items() if f"{key}={value}" not in notes] == []


def convert_found(name: str, found: dict[str, Any]) -> Conversion:
    """The conversion of these settings of a system."""
    return convert_text(Path("file"), "", replace(SYSTEMS[name], read=lambda file, text: found))


V = "actor_rollout_ref.actor.optim"
RL = {"orchestrator.group_size": 8}


@pytest.mark.parametrize(
    ("name", "found", "ours"),
    [
        ("trl", {"optim": "adamw_bnb_8bit"}, {"name": "adamw_8bit"}),
        ("trl", {"optim": "lion_8bit"}, {"name": "FILL_IN"}),
        ("trl", {"learning_rate": 2e-6, "lr_scheduler_kwargs": '{"min_lr": 1e-6}'}, {"min_lr_ratio": 0.5}),
        ("trl", {"lr_scheduler_kwargs": {"min_lr_rate": 0.1}}, {"min_lr_ratio": 0.1}),
        ("verl", {f"{V}.optimizer": "muon", f"{V}.lr_decay_style": "cosine"}, {"name": "muon", "schedule": "cosine"}),
        ("verl", {f"{V}.lr": 1e-6, f"{V}.min_lr": 1e-7}, {"min_lr_ratio": pytest.approx(0.1)}),
        ("areal", {"actor.optimizer.type": "sgd"}, {"name": "FILL_IN"}),
        (
            "areal",
            {"actor.optimizer.type": "adam", "actor.optimizer.warmup_steps": 7},
            {"name": "adamw", "warmup_steps": 7},
        ),
        ("rlinf", {"actor.optim.lr": 4e-6, "actor.lr_sched.min_lr": 2e-6}, {"min_lr_ratio": 0.5}),
        ("rlinf", {"actor.optim.min_lr_rate": 0.1, "actor.optim.min_lr": 1.0}, {"min_lr_ratio": 0.1}),
        (
            "rlinf",
            {"actor.optim.optimizer": "adam", "actor.optim.lr_scheduler": "torch_cosine"},
            {"schedule": "cosine"},
        ),
        ("rlinf", {"runner.max_steps": 100, "actor.lr_sched.lr_warmup_fraction": 0.1}, {"warmup_steps": 10}),
        ("prime_rl", RL | {"trainer.optim.type": "muon"}, {"name": "muon", "betas": [0.9, 0.95]}),
        ("prime_rl", RL | {"trainer.optim.type": "sign_sgd"}, {"name": "FILL_IN", "betas": [0.9, 0.999]}),
        (
            "prime_rl",
            RL | {"trainer.optim.lr": 2e-6, "trainer.scheduler.type": "cosine", "trainer.scheduler.min_lr": 1e-6},
            {"schedule": "cosine", "warmup_steps": 10, "min_lr_ratio": 0.5},
        ),
        (
            "prime_rl",
            RL | {"trainer.scheduler.type": "linear", "trainer.scheduler.decay_steps": 0},
            {"schedule": "constant"},
        ),
    ],
)
def test_the_optimizer_and_its_schedule(name: str, found: dict[str, Any], ours: dict[str, Any]) -> None:
    optimizer = convert_found(name, found).config["trainer"]["optimizer"]
    assert {key: optimizer.get(key) for key in ours} == ours


def test_what_of_a_schedule_is_not_built_in_is_named() -> None:
    for name, found, note in (
        ("trl", {"lr_scheduler_kwargs": {"num_cycles": 2}}, "{'num_cycles': 2} is not built in"),
        ("trl", {"lr_scheduler_type": "cosine_with_restarts"}, "lr_scheduler_type=cosine_with_restarts: not carried"),
        ("prime_rl", RL | {"trainer.scheduler.type": "linear", "max_steps": 100}, "falls over the last 10 steps"),
    ):
        done = convert_found(name, found)
        assert any(note in one for one in done.notes()), done.notes()


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("areal", {"actor.optimizer.lr_scheduler_type": "constant"}),
        ("areal", {"rollout.backend": "sglang:d4p1t1", "rollout.max_concurrent_rollouts": 256}),
        ("verl", {"data.train_files": "~/data/gsm8k/train.parquet"}),
        ("trl", {"report_to": "none", "dataset_name": "json", "dataset_config": None, "data_files": "sums.jsonl"}),
        ("rlinf", {"rollout.rollout_backend": "vllm", "runner.task_type": "reasoning"}),
    ],
)
def test_what_is_carried_over_is_not_said_to_be_left_out(name: str, found: dict[str, Any]) -> None:
    """Even if a value that is nearly the same becomes the same setting."""
    done = convert_text(Path("file"), "", replace(SYSTEMS[name], read=lambda file, text: found))
    assert set(found) & {key for key, reason in done.left_out.items() if "not carried over" in reason} == set()
