"""The chaos suite's judge of evaluations: every promise can be seen to break."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.unit.tools.chaos.test_oracle import log
from tools.chaos.judging.evaluations import judge_evaluations
from tools.chaos.judging.oracle import Judgement
from tools.chaos.settings import EVALUATED

OPENED = log("feeder.1", (5.0, "evaluation", {"v": 25}))
SAMPLED = log("generator-0.2", (6.0, "held out", {"x": [[25, 0, 0.75], [25, 0, 0.5]]}))


def result(version: int = 25, **other: int) -> dict[str, Any]:
    return {"version": version, "n": EVALUATED, "scored": EVALUATED - 1, "failed": 1, **other}


def broken(
    folder: Path, *results: dict[str, Any], reward: float | None = 0.5, forgotten: tuple[float, float] = (9.0, 9.5)
) -> list[str]:
    (folder / "samples").mkdir()
    (folder / "evaluations.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in results))
    sample = {"version": 25, "index": 0, "samples": [{"reward": reward}]}
    (folder / "samples" / "eval-00000025.jsonl").write_text(json.dumps(sample) + "\n")
    judgement = Judgement()
    judge_evaluations(folder, [OPENED, SAMPLED], [forgotten], 10.0, 0.0, judgement)
    return [violation.promise for violation in judgement.violations]


def test_a_complete_evaluation_breaks_nothing(tmp_path: Path) -> None:
    assert broken(tmp_path, result()) == []


def test_an_evaluation_that_was_opened_must_have_a_result_unless_it_was_forgotten(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    assert broken(tmp_path / "a") == ["evaluation"]
    assert broken(tmp_path / "b", forgotten=(4.0, 6.0)) == []


@pytest.mark.parametrize("results", [[result(), result()], [result(failed=0)], [result(n=EVALUATED + 1, failed=2)]])
def test_a_second_result_or_one_of_other_samples_is_seen(tmp_path: Path, results: list[dict[str, Any]]) -> None:
    assert broken(tmp_path, *results) == ["evaluation"]


def test_a_reward_of_another_completion_is_seen(tmp_path: Path) -> None:
    assert broken(tmp_path, result(), reward=0.25) == ["wrong reward"]
