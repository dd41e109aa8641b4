"""The dataset of reasoning-gym, whose problems are made in a process of their own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from producers.datasets.loading import build_dataset
from schemas.config import DatasetConfig
from schemas.errors import ConfigError

pytestmark = pytest.mark.integration


def build(dataset: str, folder: Path, limit: int | None = None, **args: object):
    return build_dataset(DatasetConfig(name=dataset, args=args, limit=limit), folder)


def test_reasoning_gym_makes_the_same_problem_in_every_process(tmp_path: Path):
    pytest.importorskip("reasoning_gym")
    # Made from sets: another problem under another hash seed, were it made in this process.
    code = (
        "from producers.datasets.reasoning_gym import ReasoningGym\n"
        "ds = ReasoningGym(task='ransom_note', size=5, seed=3)\n"
        "print([ds[i].data['reasoning_gym']['digest'] for i in (4, 0, 2)])"
    )
    outputs = {
        subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, "PYTHONHASHSEED": seed},
            stdout=subprocess.PIPE,
            text=True,
            check=True,
            timeout=120,
        ).stdout
        for seed in ("1", "2")
    }
    assert len(outputs) == 1


def test_problems_of_another_seed_are_others(tmp_path: Path):
    """To reasoning-gym itself a problem is seed + index: of seeds side by side it has nearly the same ones."""
    pytest.importorskip("reasoning_gym")
    questions = []
    for seed in (0, 1, 2):
        dataset = build("reasoning_gym", tmp_path, task="chain_sum", size=40, seed=seed)
        questions.append({str(dataset[index].messages) for index in range(40)})
        dataset.close()
    assert [len(each) for each in questions] == [40, 40, 40]
    assert not questions[0] & questions[1]
    assert not questions[1] & questions[2]
    with pytest.raises(ConfigError, match=r"size.*1048577.*1048576"):
        build("reasoning_gym", tmp_path, task="chain_sum", size=(1 << 20) + 1)


def test_reasoning_gym_prompts_and_mistakes(tmp_path: Path):
    pytest.importorskip("reasoning_gym")
    dataset = build("reasoning_gym", tmp_path, task="chain_sum", size=3, seed=1, params={"max_terms": 2}, chat=False)
    assert len(dataset) == 3
    assert dataset[2] == dataset[2]
    assert str(dataset[0].text).startswith("State the final answer")
    assert set(dataset[0].data["reasoning_gym"]) == {"task", "size", "seed", "params", "index", "digest"}
    dataset.close()
    assert dataset[1].data["reasoning_gym"]["index"] == 1, "a child that ended is replaced"
    dataset.close()
    with pytest.raises(ConfigError, match=r"unknown task 'chain_summ': did you mean 'chain_sum'"):
        build("reasoning_gym", tmp_path, task="chain_summ")
    with pytest.raises(ConfigError, match=r"no parameter 'terms': one of min_terms"):
        build("reasoning_gym", tmp_path, task="chain_sum", params={"terms": 2})
    with pytest.raises(ConfigError, match="refuses its parameters"):
        build("reasoning_gym", tmp_path, task="chain_sum", params={"min_terms": 9, "max_terms": 2})
