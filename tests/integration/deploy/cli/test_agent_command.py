"""``tidemill agent`` and what ``tidemill doctor`` says of an agent, as their user sees them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from tests.support.models.tiny_model import make_tiny_model
from tests.support.runs.command_line import run_tidemill

pytestmark = [pytest.mark.integration, pytest.mark.timeout(180)]
AGENT = """
import json, urllib.request

def run(task, base_url):
    messages = list(task["messages"])
    for turn in range(2):
        body = json.dumps({"model": "policy", "messages": messages, "temperature": 0.2}).encode()
        request = urllib.request.Request(base_url + "/chat/completions", body, {"content-type": "application/json"})
        with urllib.request.urlopen(request) as answer:
            messages.append(json.load(answer)["choices"][0]["message"])
        messages.append({"role": "user", "content": "again"})
    return 0.5

def fails(task):
    raise KeyError("no tool")
"""


def write(folder: Path, function: str) -> Path:
    make_tiny_model(folder / "model")
    (folder / "agent.py").write_text(AGENT)
    config = {
        "run": {"name": "agents"},
        "model": {"path": str(folder / "model"), "max_length": 512},
        "train": {"name": "arithmetic"},
        "sampling": {"n": 2, "max_tokens": 20},
        "reward": {"terms": []},
        "generator": {"engine": "scripted", "workflow": {"name": "agent", "args": {"run": f"agent.py:{function}"}}},
    }
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    return folder / "config.yaml"


def test_an_agent_is_played_without_a_model_and_its_conversation_shown(tmp_path: Path) -> None:
    done = run_tidemill("agent", str(write(tmp_path, "run")))
    assert done.returncode == 0
    assert done.stdout.count("assistant: A test answer.") == 2
    assert "agent returned" in done.stdout
    assert '"ignored_settings": 2.0' in done.stdout
    assert "replayed: 2" in done.stdout
    found = json.loads(run_tidemill("agent", str(write(tmp_path, "run")), "--json").stdout)
    assert (found["failed"], found["reason"], found["replayed"]) == (False, "returned", 2)
    assert [message["content"] for message in found["messages"]].count("A test answer.") == 2


def test_an_agent_that_fails_says_why_and_the_exit_code_is_not_0(tmp_path: Path) -> None:
    done = run_tidemill("agent", str(write(tmp_path, "fails")))
    assert done.returncode == 1
    assert "agent: KeyError: 'no tool'" in done.stdout
    found = json.loads(run_tidemill("agent", str(write(tmp_path, "fails")), "--json").stdout)
    assert found["failed"] is True
    assert "KeyError: 'no tool'" in found["reason"]


def test_doctor_plays_one_episode(tmp_path: Path) -> None:
    done = run_tidemill("doctor", str(write(tmp_path, "run")), "--json")
    assert "2 calls, 1 row, reward 0.5, 2 sampling settings" in done.stdout
    assert "a replay reused all of them" in done.stdout


def test_doctor_says_how_turns_are_joined_and_whether_times_fit(tmp_path: Path) -> None:
    done = run_tidemill("doctor", str(write(tmp_path, "run")), "--json", "--step-s", "2")
    found = {line["name"]: line for line in json.loads(done.stdout)}
    assert found["joined turns"]["level"] == "ok"
    assert "flow.staleness 4 allows 5 steps of 2 s (given)" in found["episode times"]["text"]
