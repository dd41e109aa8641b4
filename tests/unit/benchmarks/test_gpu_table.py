"""The command that measures GPUs: its cases for a machine, and its table."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from benchmarks.gpu import __main__ as command
from benchmarks.gpu.__main__ import Case, list_cases, measure, newest
from benchmarks.gpu.table import table
from deploy.launchers.gpus import Gpu


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
    (recipe,) = [case for case in cases if case.name == "1.5B 8 GPUs"]
    assert {"trainer.processes=4", "generator.replicas=4"} <= set(recipe.command)


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
