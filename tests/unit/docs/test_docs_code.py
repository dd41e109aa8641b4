"""The code in the documentation runs, and does what the text around it says."""

import json
import os
import subprocess
import sys
import threading
import time
from http.server import ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import yaml

from benchmarks.rewards.server import FlakyJudge
from consumers.reward.rewards.programs.score import read_cases
from consumers.reward.rewards.terms import RewardInput, resolve
from consumers.reward.scorer import check_reward
from deploy.launchers.factory import build_launcher
from deploy.services.main import command
from producers.datasets.loading import build_dataset
from producers.datasets.mixture import build_mixture
from schemas.config import DatasetConfig, RewardConfig, RewardTerm, TidemillConfig, parse_config
from schemas.plugins import load
from tests.support.user_code.docs_code import ROOT, SMALLEST, own_code_yaml, trajectory, write_code
from tests.support.user_code.sandboxes import sandbox


def test_a_run_from_python(snippets: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """It is the command's run, of the configuration with the override; the order goes to the run's control plane."""
    file = tmp_path / "mine.yaml"
    file.write_text(yaml.safe_dump(SMALLEST))
    monkeypatch.chdir(tmp_path)
    launched: list[TidemillConfig] = []
    exits = iter([0, 6])

    def launch(config: TidemillConfig, fresh: bool) -> int:
        launched.append(config)
        return next(exits)

    monkeypatch.setattr("deploy.checks.names.check_names", lambda config: None)
    monkeypatch.setattr("deploy.launchers.factory.build_launcher", lambda config: SimpleNamespace(launch=launch))
    train = load("from_python.py:train", "snippet", snippets)
    assert train(str(file)) == launched[0].folder / "model"
    assert launched[0].trainer.steps == 100
    with pytest.raises(SystemExit, match="6"):
        train(str(file))

    sent: list[tuple[str, str, object]] = []
    client = SimpleNamespace(send=lambda *request: sent.append(request) or {"done": True})
    monkeypatch.setattr("deploy.client.client.connect", lambda run, url: client)
    assert load("from_python.py:pause", "snippet", snippets)("mine") == {"done": True}
    assert sent == [("POST", "/v1/pause", {"mode": "freeze"})]


def test_the_loss_is_clipped(snippets: Path) -> None:
    torch = pytest.importorskip("torch")
    from consumers.trainer.algorithms.losses import LossInputs

    tight = load("losses.py:tight", "loss", snippets)
    inputs = LossInputs(
        logprobs=torch.tensor([[0.0, -1.0]]),
        rollout_logprobs=torch.tensor([[-1.0, -1.0]]),
        advantages=torch.tensor([[1.0, 1.0]]),
        mask=torch.tensor([[True, True]]),
    )
    output = tight(inputs, width=0.05)
    assert output.loss.tolist()[0] == pytest.approx([-1.05, -1.0])
    assert output.metrics["clipped"].tolist() == [[True, False]]


def test_the_advantage_compares_groups(snippets: Path) -> None:
    over_median = load("advantages.py:over_median", "advantage", snippets)
    advantages = over_median(np.array([0.0, 1.0, 5.0, 2.0, 2.0]), np.array([0, 0, 0, 1, 1]))
    assert advantages.tolist() == [-1.0, 0.0, 4.0, 0.0, 0.0]


def test_the_aggregation_weighs_by_the_root_of_the_length(snippets: Path) -> None:
    pytest.importorskip("torch")
    from consumers.trainer.algorithms.advantages import Totals

    root_mean = load("aggregations.py:root_mean", "aggregation", snippets)
    weights = root_mean(np.array([4, 9]), np.array([0, 0]), Totals(tokens=13, sequences=2, groups=1, max_tokens=9))
    assert weights.tolist() == pytest.approx([1 / 10, 1 / 15])


def test_the_launcher_starts_generators_elsewhere_and_the_rest_here(snippets: Path) -> None:
    program = snippets / "bin" / "tidemill"
    program.parent.mkdir()
    program.write_text('#!/bin/sh\necho there: "$@"\n')
    program.chmod(0o755)
    args = {
        "hosts": ["one", "two"],
        "setup": f"PATH={program.parent}:$PATH",
        # Instead of a way to a host: its name, and then what should run there.
        "ssh": ["sh", "-c", 'echo "host $0"; eval "$1"'],
    }
    config = parse_config({**SMALLEST, "launcher": {"name": "ssh.py:Ssh", "args": args}}, snippets)
    starter: Any = build_launcher(config)

    def ran(role: str, name: str) -> list[str]:
        """What a service said that was started and has ended."""
        argv = command(role, "my.yaml", "--name", name)
        if role != "generator":
            # In the place of a service that runs long.
            argv[argv.index("-m") :] = ["-c", "print('here')", role]
        log = snippets / f"{name}.log"
        process = starter.start(argv, name, role, log, {}, "")
        deadline = time.monotonic() + 30.0
        while process.poll() is None:
            assert time.monotonic() < deadline, f"{name} did not end"
            time.sleep(0.02)
        return log.read_text().splitlines()

    assert ran("generator", "generator-1") == ["host two", "there: generator my.yaml --name generator-1"]
    assert ran("trainer", "trainer") == ["here"]


def test_the_program_of_the_sandbox_page_runs(tmp_path: Path) -> None:
    sandbox("bwrap")
    assert write_code(ROOT / "docs" / "sandbox.md", tmp_path) == ["shout.py"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, tmp_path / "shout.py"]
    done = subprocess.run(command, capture_output=True, check=True, timeout=60, env=environment)
    assert done.stdout == b"exit 0 b'HELLO'\n"


def test_the_reward_functions_score(snippets: Path) -> None:
    terms = [
        RewardTerm(name="rewards.py:brevity", args={"target": 30}),
        RewardTerm(name="rewards.py:judged", weight=0.5),
    ]
    score = check_reward(terms, snippets, trajectory("the answer is 7", tokens=4, answer="7"), timeout_s=30.0)
    assert score is not None
    assert (score.status, score.reward) == ("ok", 1.5)


def test_the_judge_rates_as_the_page_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JUDGE_KEY", "secret")
    (term,) = reward_section("judge")["terms"]
    with FlakyJudge() as server:
        assert term["args"].pop("base_url").endswith("/v1")
        term["args"]["base_url"] = server.url
        score = check_reward([RewardTerm(**term)], tmp_path, trajectory("7", tokens=1, answer="7"), timeout_s=30.0)
    assert score is not None
    assert score.status == "ok"
    assert score.reward == pytest.approx(((4 + 8 + 6) / 3 - 1) / 9)
    assert server.requests[0]["messages"][0]["content"].endswith('End with "Score: N".\n')
    assert "Reference: 7" in server.requests[0]["messages"][0]["content"]


def test_the_server_that_scores_is_asked(snippets: Path) -> None:
    (term,) = reward_section("remote")["terms"]
    handler = load("scorer.py:Scorer", "scorer", snippets)
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=[0.02])
        thread.start()
        try:
            term["args"]["url"] = f"http://127.0.0.1:{server.server_port}"
            asked = trajectory("it is 7", tokens=3, answer="7")
            score = check_reward([RewardTerm(**term)], snippets, asked, timeout_s=30.0)
        finally:
            server.shutdown()
            thread.join(10)
    assert score is not None
    assert (score.status, score.reward) == ("ok", 1.0)


def test_the_terms_of_reward_models_are_terms(tmp_path: Path) -> None:
    for name in ("reward_model", "reward_model_server"):
        settings = RewardConfig(**reward_section(name))
        assert check_reward(settings.terms, tmp_path) is None


def reward_section(name: str) -> Any:
    """The reward section of the page's YAML that has a term of this name."""
    found = [block.get("reward", {}) for block in own_code_yaml()]
    return next(one for one in found if any(term["name"] == name for term in one.get("terms", [])))


def test_the_reward_of_lists_and_the_one_from_verl_score(snippets: Path) -> None:
    terms = [RewardTerm(name="batch_rewards.py:rarity"), RewardTerm(name="from_verl.py:compute_score", weight=0.5)]
    score = check_reward(terms, snippets, trajectory("7", tokens=4, answer="7"), timeout_s=30.0)
    assert score is not None
    assert (score.status, score.reward) == ("ok", 1.5)
    rarity = load("batch_rewards.py:rarity", "reward", snippets)
    assert rarity(prompts=[""] * 3, completions=["7", "7", "8"], answer=["7", "7", "7"]) == [0.5, 0.5, 0.0]


def test_the_reward_function_of_the_readme_scores(tmp_path: Path) -> None:
    title, agent = write_code(ROOT / "README.md", tmp_path)
    assert agent == "my_agent.py"
    terms = [RewardTerm(name=f"{title}:brevity")]
    score = check_reward(terms, tmp_path, trajectory("it is 7", tokens=3, answer="7"), timeout_s=30.0)
    assert score is not None
    assert score.reward == pytest.approx(1 / 3)


def test_the_dataset_is_one(snippets: Path) -> None:
    dataset = build_dataset(DatasetConfig(name="countdown.py:Countdown", args={"largest": 50}), snippets)
    assert len(dataset) == 50
    assert dataset[2].data["answer"] == "3 2 1 0"


def test_the_mixture_mixes_its_datasets(snippets: Path) -> None:
    (block,) = own_code_yaml("mixture.yaml")
    (snippets / "facts.jsonl").write_text('{"prompt": "capital of France?", "answer": "Paris"}\n')
    config = parse_config({**SMALLEST, **block}, base=snippets)
    mixture = build_mixture(config.train, config.base, seed=0)
    labels = [mixture.parts[mixture.at(position).part].label for position in range(8)]
    assert sorted(labels) == ["arithmetic"] * 6 + ["facts"] * 2
    assert config.eval is not None
    assert [len(build_dataset(one, config.base)) for one in config.eval.dataset] == [100, 1]
    check_reward(config.reward.terms, config.base)


ROWS = {
    "math.jsonl": [
        {"problem": "1+1", "level": "Level 1", "answer": "2"},
        {"problem": "half of 1", "level": "Level 5", "answer": "\\frac{1}{2}"},
    ],
    "aime.jsonl": [{"ID": "1", "Problem": "Find x.", "Answer": 25, "Solution": "..."}],
    "mbpp.jsonl": [
        {"text": "Write add.", "test_list": ["assert add(1, 2) == 3"], "test_setup_code": "", "code": "def add ..."}
    ],
    "humaneval.jsonl": [
        {
            "prompt": "def add(a, b):\n",
            "test": "def check(candidate):\n    assert candidate(1, 2) == 3",
            "entry_point": "add",
        }
    ],
    "hotpot.jsonl": [{"question": "Who?", "answer": "Ada", "supporting_facts": {"title": ["Ada"]}, "level": "hard"}],
}
"""A row or two of each collection, with the columns that it is published with."""


def test_the_collections_are_read_by_a_line_each(snippets: Path) -> None:
    (block,) = own_code_yaml("collections.yaml")
    for name, rows in ROWS.items():
        (snippets / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = parse_config({**SMALLEST, **block}, base=snippets)
    examples = {one.label: build_dataset(one, snippets)[0] for one in config.train}
    assert (examples["math"].text, examples["math"].data["answer"]) == ("half of 1", "\\frac{1}{2}")
    assert (examples["aime"].text, examples["aime"].data) == ("Find x.", {"answer": 25})
    assert read_cases(examples["mbpp"].data) == [{"test": "assert add(1, 2) == 3"}]
    (case,) = read_cases(examples["humaneval"].data)
    assert case["test"].endswith("check(add)")
    assert examples["humaneval"].data["prefix"] == examples["humaneval"].text
    assert examples["hotpotqa"].data == {"answer": "Ada", "facts": {"title": ["Ada"]}}
    scored = {name: resolve([term], snippets)[0] for term in config.reward.terms for name in term.datasets or []}
    for label, completion, value in (
        ("math", "It is \\boxed{0.5}", 1.0),
        ("aime", "\\boxed{025}", 1.0),
        ("aime", "26", 0.0),
    ):
        sample = RewardInput("", completion, [], [], examples[label].data)
        assert scored[label].call(sample).value == value


@pytest.mark.parametrize(("title", "statistics"), [("curriculum.yaml", 9000), ("levels.yaml", 3)])
def test_the_curricula_are_ones(snippets: Path, title: str, statistics: int) -> None:
    (block,) = own_code_yaml(title)
    config = parse_config({**SMALLEST, **block}, base=snippets)
    mixture = build_mixture(config.train, config.base, seed=0)
    levels = mixture.parts[0].levels
    assert (len(levels) if len(levels) > 1 else len(levels[0])) == pytest.approx(statistics, rel=0.01)
    assert mixture.parts[0].curriculum.name != "uniform"
