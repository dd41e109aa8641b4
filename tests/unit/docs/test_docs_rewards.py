"""The reward functions in the documentation score as the text around them says."""

from __future__ import annotations

import threading
from http.server import ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from benchmarks.rewards.server import FlakyJudge
from consumers.reward.scorer import check_reward
from schemas.config import RewardConfig, RewardTerm
from schemas.plugins import load
from tests.support.user_code.docs_code import ROOT, own_code_yaml, trajectory, write_code


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
