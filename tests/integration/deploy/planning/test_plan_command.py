"""``tidemill plan``: what it reads of a run, its options, and the settings that it names."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from deploy.cli.app import app
from deploy.planning.cluster import ClusterRates
from deploy.planning.run_rates import of_run, sampling_at, stated

CONFIG = """
run: {{name: planned, folder: {folder}}}
model: {{path: somewhere}}
train: {{name: arithmetic}}
sampling: {{n: 4, max_tokens: 1000}}
reward: {{terms: [{{name: exact}}]}}
generator: {{max_samples: 16}}
trainer: {{batch_groups: 4, steps: 10}}
"""


def write_run(folder: Path, wait: float = 8.0, steps: int = 12) -> Path:
    """A run of 2 ranks: each step 4,000 tokens in 10 s, of which so many were waited."""
    folder.mkdir(parents=True, exist_ok=True)
    line = {
        "train/tokens": 4000.0,
        "time/total_s": 10.0,
        "time/wait_s": wait,
        "time/forward_s": 1.0,
        "time/backward_s": 1.0,
        "time/publish_s": 0.5,
        "perf/generated_tokens_per_s": 600.0,
        "train/length_mean": 250.0,
        "train/length_median": 200.0,
        "train/length_p95": 700.0,
    }
    file = folder / "metrics.jsonl"
    file.write_text("".join(json.dumps({"step": step, **line}) + "\n" for step in range(steps)) + '{"half": ')
    return file


def test_rates_are_read_from_a_run(tmp_path: Path) -> None:
    known = of_run(write_run(tmp_path), stated(1000, 16), ranks=2, generators=3)
    assert known.rates.trained_tokens_per_s == pytest.approx(1000.0)
    assert known.rates.sampled_tokens_per_s() == pytest.approx(200.0)
    assert known.rates.publish_s == 0.5
    assert known.mix.mean == 250.0
    assert known.mix.sigma == pytest.approx(0.76, abs=0.01)
    assert {name for name, text in known.source.items() if not text.startswith("measured, 9 steps")} == {"turns"}


def test_generators_that_were_not_waited_for_are_said_to_do_more(tmp_path: Path) -> None:
    known = of_run(write_run(tmp_path, wait=0.0), stated(1000, 16), ranks=1, generators=1)
    assert known.source["sampled"].endswith("the trainer was waited for, they can do more")


def test_a_run_of_too_few_steps_changes_nothing(tmp_path: Path) -> None:
    before = stated(1000, 16)
    assert of_run(write_run(tmp_path, steps=4), before, 1, 1) is before
    assert of_run(tmp_path / "none.jsonl", before, 1, 1) is before


def test_both_parts_of_a_token_scale_with_the_rate() -> None:
    rates = sampling_at(stated(1000, 16).rates, 100.0)
    assert rates.sampled_tokens_per_s() == pytest.approx(100.0)


def test_the_command_names_settings_that_share_out_all_gpus(tmp_path: Path) -> None:
    config = tmp_path / "my.yaml"
    config.write_text(CONFIG.format(folder=tmp_path / "run"))
    write_run(tmp_path / "run")
    given = ["flow.staleness=8", "--gpus", "6", "--trained-tokens-per-s", "500", "--json"]
    done = CliRunner().invoke(app, ["plan", str(config), *given])
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    assert found["sources"]["trained"] == "given"
    assert found["sources"]["lengths"].startswith("measured")
    assert [plan["staleness"] for plan in found["plans"]] == [0, 1, 2, 4, 8]
    start = found["start_from"]
    assert start["trainer.processes"] + start["generator.replicas"] == 6
    speeds = {plan["staleness"]: plan["tokens_per_s"] for plan in found["plans"]}
    assert speeds[start["flow.staleness"]] >= 0.95 * max(speeds.values())
    assert speeds[0] < speeds[4]


@pytest.mark.parametrize("bound", [0, 2, 8])
def test_no_staleness_above_the_configured_one_is_recommended(tmp_path: Path, bound: int) -> None:
    config = tmp_path / "my.yaml"
    config.write_text(CONFIG.format(folder=tmp_path / "run") + f"flow: {{staleness: {bound}}}\n")
    done = CliRunner().invoke(app, ["plan", str(config), "--json"])
    found = json.loads(done.stdout)
    assert found["start_from"]["flow.staleness"] <= bound
    assert [one["staleness"] for one in found["plans"]] == [0, 1, 2, 4, 8], "the others are shown all the same"


def test_a_placement_is_compared_with_the_best_split_and_turns_are_named_when_worth_it(tmp_path: Path) -> None:
    config = tmp_path / "my.yaml"
    placed = "placement: {trainer: 0-5, generator: 6-7}\n"
    config.write_text(CONFIG.format(folder=tmp_path / "run").replace("steps: 10", "steps: 10, processes: 6") + placed)
    rates = ["trainer.batch_groups=16", "--trained-tokens-per-s", "5000", "--sampled-tokens-per-s", "500"]
    done = CliRunner().invoke(app, ["plan", str(config), *rates])
    assert done.exit_code == 0, done.output
    last = " ".join(done.stdout.split("start from:")[1].split())
    assert "placement: 6 GPUs for the trainer, 2 generators: " in last
    assert " of the best split of these GPUs at its staleness (" in last
    assert "turns on shared GPUs, 13.0 s for each there and back (stated): not worth it" in last
    found = json.loads(CliRunner().invoke(app, ["plan", str(config), *rates, "--json"]).stdout)
    placement, split = found["placement"], found["best_split"]
    assert (placement["generators"], placement["trainers"]) == (2, 6)
    assert split["generators"] + split["trainers"] == 8
    share = f"{placement['tokens_per_s'] / split['tokens_per_s']:.2f}"
    assert float(share) < 0.8
    assert f"{share} of the best split" in last
    assert found["placement_in_turns"]["shared"] == 6


def test_each_pool_has_its_own_rate_and_its_own_number_of_generators(tmp_path: Path) -> None:
    config = tmp_path / "my.yaml"
    pools = """
pools:
  quick: {generator: {replicas: 2}}
  slow: {generator: {replicas: 2, max_samples: 4}}
  far: {nodes: ["x*"], generator: {replicas: 3, max_samples: 4}}
"""
    config.write_text(CONFIG.format(folder=tmp_path / "run") + "flow: {staleness: 8}\n" + pools)
    file = write_run(tmp_path / "run")
    (file.parent / "config.yaml").write_text(config.read_text())
    tokens = '"pool/quick/tokens": 3000, "pool/slow/tokens": 200, "pool/far/tokens": 2800, "time/publish_s"'
    file.write_text(file.read_text().replace('"time/publish_s"', tokens))
    done = CliRunner().invoke(app, ["plan", str(config), "--gpus", "6", "--json"])
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    sampled = {name: ClusterRates(**rates).sampled_tokens_per_s() for name, rates in found["pools"].items()}
    assert sampled == pytest.approx({"quick": 150.0, "slow": 10.0, "far": 280 / 3})
    start = found["start_from"]
    assert start["pools.far.generator.replicas"] == 3, "they have machines of their own"
    assert start["pools.quick.generator.replicas"] + start["trainer.processes"] <= 6
    assert start["pools.slow.generator.replicas"] == 0, "their answers would be waited for"
    text = CliRunner().invoke(app, ["plan", str(config), "--gpus", "6"]).stdout
    assert "a full generator of pool slow: 10 tokens a second (measured, 9 steps of run" in " ".join(text.split())


def test_the_seconds_of_a_hand_over_are_those_of_the_run(tmp_path: Path) -> None:
    file = write_run(tmp_path)
    file.write_text(file.read_text().replace('"time/publish_s"', '"time/hand_over_s": 2.6, "time/publish_s"'))
    known = of_run(file, stated(1000, 16), ranks=1, generators=1)
    assert [known.rates.hold_s, known.rates.give_s] == pytest.approx([0.8, 1.8])
    assert known.source["turns"].startswith("measured")
