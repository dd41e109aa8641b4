"""The benchmarks in small: comparable work for every library, honest ratios, and the table of GPUs."""

import asyncio
import json
import os
import sys
from pathlib import Path

import pytest

from benchmarks.gpu import __main__ as command
from benchmarks.gpu import recipe
from benchmarks.gpu.__main__ import Case, list_cases, measure, newest
from benchmarks.gpu.table import table
from benchmarks.harness.trajectories import random_groups
from benchmarks.services.generator import count_tokens
from benchmarks.services.trainer import LONGEST, MEAN, PROMPT, SPREAD, VOCABULARY, _padded, _row
from deploy.launchers.gpus import Gpu, find_gpus, plan_gpus
from schemas.config import load_config


def names(gpus: list[Gpu]) -> list[str]:
    return [f"{case.part} {case.name}" for case in list_cases(Path("out"), gpus, Path("data"), 12)]


def test_without_a_gpu_every_part_runs_with_the_tiny_model() -> None:
    assert names([]) == [
        "trainer tiny",
        "trainer tiny compile",
        "generator tiny",
        "weights 1M file",
        "weights 1M peer",
        "recipe tiny CPU",
    ]


def test_only_a_gpu_of_70_gb_gets_the_adapter_of_7b() -> None:
    assert "trainer 7B LoRA" in names([Gpu("0", 80.0)])
    assert "trainer 7B LoRA" not in names([Gpu("0", 24.0)])


def test_eight_gpus_are_split_between_trainer_and_generators() -> None:
    cases = list_cases(Path("out"), [Gpu(str(i), 80.0) for i in range(8)], Path("data"), 12)
    (split,) = [case for case in cases if case.name == "1.5B 8 GPUs"]
    assert {"trainer.processes=4", "generator.replicas=4"} <= set(split.command)


@pytest.mark.parametrize("count", [1, 8])
def test_a_run_in_turns_is_one_that_can_be(count: int) -> None:
    gpus = [Gpu(str(i), 80.0) for i in range(count)]
    (case,) = [case for case in list_cases(Path("out"), gpus, Path("data"), 12) if case.name.endswith("in turns")]
    assert plan_gpus(load_config(recipe.CONFIG, case.command[6:]), gpus).sharing == [
        f"generator-{index}" for index in range(count)
    ]


def test_all_cases_of_a_machine_are_rehearsed_with_the_tiny_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", "", prepend=os.pathsep)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    seen: list[Case] = []
    monkeypatch.setattr(command, "run_all", lambda cases, *_: seen.extend(cases))
    (tmp_path / "train.jsonl").touch()
    given = ["gpu.sh", str(tmp_path / "out"), "--data", str(tmp_path), "--rehearse", "h100x2"]
    monkeypatch.setattr(sys, "argv", given)
    command.main()
    assert [gpu.memory_gb for gpu in find_gpus()] == [81559 / 1024] * 2
    assert [f"{case.part} {case.name}" for case in seen] == [
        "trainer tiny",
        "trainer tiny compile",
        "trainer tiny checkpointing",
        "trainer tiny LoRA",
        "generator tiny",
        "weights 1M file",
        "weights 1M peer",
        "recipe tiny 2 GPUs",
        "recipe tiny 2 GPUs in turns",
    ]
    turns = load_config(recipe.CONFIG, seen[-1].command[6:])
    assert plan_gpus(turns, find_gpus()).sharing == ["generator-0", "generator-1"]
    assert (turns.generator.engine, turns.model.dtype) == ("transformers", "float32")
    monkeypatch.setattr(sys, "argv", [*given[:-1], "h300x2"])
    with pytest.raises(SystemExit):
        command.main()
    assert "--rehearse 'h300x2': must be 1 to 8 of a100-40, " in capsys.readouterr().err


def test_a_case_that_fails_is_a_row_that_names_its_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bad = Case("trainer", "bad", ["-c", "import sys; print('why', file=sys.stderr); sys.exit(3)"])
    row = measure(bad, tmp_path)
    assert row == {"failed": f"exit code 3, see {tmp_path / 'trainer-bad.log'}"}
    assert (tmp_path / "trainer-bad.log").read_text() == "why\n"
    monkeypatch.setattr(command, "CASE_DEADLINE_S", 0.2)
    assert (
        "not done within" in measure(Case("trainer", "slow", ["-c", "import time; time.sleep(60)"]), tmp_path)["failed"]
    )


def test_figures_are_the_last_line_or_the_first_row(tmp_path: Path) -> None:
    line = Case("trainer", "line", ["-c", "print('loading'); print('{\"mfu\": 0.4}')"])
    assert measure(line, tmp_path) == {"mfu": 0.4}
    rows = json.dumps({"rows": [{"ratio": 0.9}]}, indent=2)
    assert measure(Case("generator", "rows", ["-c", f"print({rows!r})"]), tmp_path) == {"ratio": 0.9}


def test_the_table_shows_the_newest_row_of_a_case_and_a_dash_where_nothing_was_measured() -> None:
    rows = [
        {"part": "trainer", "name": "0.5B", "failed": "exit code 1"},
        {"part": "trainer", "name": "0.5B", "tokens_per_s": 1234.6, "mfu": 0.412, "kernel": "varlen", "peak_gb": 12.34},
    ]
    text = table(newest(rows))
    assert "| 0.5B | 1,235 | - | 41.2 | varlen | 12.3 | - |" in text
    assert "failed" not in text


def test_an_unknown_part_is_refused(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["gpu.sh", "out", "--parts", "trainer,fuel"])
    with pytest.raises(SystemExit):
        command.main()
    assert "--parts: 'fuel' is not one of trainer, generator, weights, recipe" in capsys.readouterr().err


def step(seconds: float, peak: float) -> dict[str, float]:
    return {"seconds": seconds, "cpu_seconds": seconds, "tokens": 100.0, "peak_rss_mb": peak}


def test_ratios_are_how_many_times_as_fast_ours_is() -> None:
    first = {"ours": step(2.0, 50), "limit": step(1.0, 100), "trl": step(6.0, 90)}
    row = _row([first, first | {"ours": step(1.0, 60)}], 1)
    assert (row["vs_trl"], row["vs_limit"]) == (pytest.approx(4.5), pytest.approx(0.75))
    assert row["tokens_per_s"] == pytest.approx(75.0)
    assert row["peak_rss_vs_limit"] == pytest.approx(0.6)
    assert all(row.cells())


def test_without_trl_its_ratio_is_missing() -> None:
    row = _row([{"ours": step(2.0, 50), "limit": step(1.0, 100)}], 1)
    assert row["vs_trl"] is None
    assert row["vs_compiled"] is None


def test_compiled_layers_are_compared_like_the_others() -> None:
    row = _row([{"ours": step(3.0, 50), "limit": step(1.0, 100), "compiled": step(2.0, 100)}], 1)
    assert row["vs_compiled"] == pytest.approx(2 / 3)


def test_trajectories_have_a_heavy_tail() -> None:
    groups = random_groups(512, PROMPT, MEAN, SPREAD, LONGEST, VOCABULARY)
    lengths = [len(t.tokens) for group in groups for t, _ in group.samples]
    assert 130 < sum(lengths) / len(lengths) < 170
    assert max(lengths) == LONGEST


def test_samples_of_a_group_answer_one_prompt() -> None:
    groups = random_groups(24, PROMPT, MEAN, SPREAD, LONGEST, VOCABULARY)
    prompts = [{t.tokens.numpy()[:PROMPT].tobytes() for t, _ in group.samples} for group in groups]
    assert [len(found) for found in prompts] == [1, 1, 1]
    assert len(set.union(*prompts)) == 3


def test_everybody_trains_the_same_tokens() -> None:
    pytest.importorskip("torch")
    groups = random_groups(24, PROMPT, MEAN, SPREAD, LONGEST, VOCABULARY)
    batches = _padded(groups)
    assert [len(batch["prompt_ids"]) for batch in batches] == [8, 8, 8]
    trained = sum(int(t.loss_mask.numpy().sum()) for group in groups for t, _ in group.samples)
    assert sum(int(batch["completion_mask"].sum()) for batch in batches) == trained


async def test_tokens_that_come_side_by_side_are_all_counted() -> None:
    async def ask(index: int, name: str) -> int:
        await asyncio.sleep(0)
        return index

    requests = [(index, f"bare-{index}") for index in range(100)]
    assert await count_tokens(ask, requests, 8) == sum(range(100))
