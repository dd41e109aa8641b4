"""Commands that check: ``tidemill ready`` for containers, ``tidemill agent``, and ``tidemill doctor`` on an agent."""

import json
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import yaml

from broker.client import Broker
from schemas.codec import encode
from schemas.messages import Heartbeat
from tests.support.broker.trainer_sessions import take_over
from tests.support.models.tiny_model import make_tiny_model
from tests.support.runs.command_line import run_tidemill
from tests.support.runs.programs import free_port

pytestmark = pytest.mark.timeout(180)

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
CONFIG = """
run: {name: ready-run}
model: {path: m}
train: {name: arithmetic}
reward: {terms: [{name: exact}]}
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


@pytest.fixture
def no_libraries(monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch and vLLM are not looked at; test_doctor_computes_with_the_model_on_the_device does that."""
    monkeypatch.setattr("deploy.doctor.doctor.check_libraries", list)


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
    assert "agent: KeyError: 'no tool' (agent.py:" in done.stdout
    found = json.loads(run_tidemill("agent", str(write(tmp_path, "fails")), "--json").stdout)
    assert found["failed"] is True
    assert "KeyError: 'no tool'" in found["reason"]


def test_an_agents_branches_are_tried_with_answers_from_a_file(tmp_path: Path) -> None:
    config, answers = write(tmp_path, "run"), tmp_path / "answers.jsonl"
    answers.write_text('"first \\"quoted\\" line"\n\n"second"\n')
    done = run_tidemill("agent", str(config), "--answers", str(answers), "--json")
    found = [message["content"] for message in json.loads(done.stdout)["messages"] if message["role"] == "assistant"]
    assert found == ['first "quoted" line', "second"]
    for text, wrong in (("", "is empty"), ('"good"\nbad\n', "line 2: must be a JSON string")):
        answers.write_text(text)
        refused = run_tidemill("agent", str(config), "--answers", str(answers))
        assert (refused.returncode, wrong in refused.stderr) == (2, True), refused.stderr


@pytest.mark.usefixtures("no_libraries")
def test_doctor_plays_one_episode_and_says_how_turns_are_joined_and_whether_times_fit(tmp_path: Path) -> None:
    done = run_tidemill("doctor", str(write(tmp_path, "run")), "--json", "--step-s", "2")
    assert "2 calls, 1 row, reward 0.5, 2 sampling settings" in done.stdout
    assert "a replay reused all of them" in done.stdout
    found = {line["name"]: line for line in json.loads(done.stdout)}
    assert found["joined turns"]["level"] == "ok"
    assert "flow.staleness 4 allows 5 steps of 2 s (given)" in found["episode times"]["text"]


@pytest.mark.usefixtures("no_libraries")
def test_doctor_warns_of_an_agents_reward_that_no_term_uses(tmp_path: Path) -> None:
    done = run_tidemill("doctor", str(write(tmp_path, "run")), "reward.terms=[{name: exact}]", "--json")
    found = {line["name"]: line for line in json.loads(done.stdout)}["agent episode"]
    assert (found["level"], found["advice"]) == ("warn", "set reward.terms to [], or add the term episode to it")


@pytest.mark.usefixtures("no_libraries")
def test_doctor_lists_the_tools_of_servers_or_says_why_one_does_not_start(tmp_path: Path) -> None:
    file = write(tmp_path, "run")
    (tmp_path / "server.py").write_text("import nothing_of_this_name")
    tools = "generator.workflow={name: tools, args: {tools: [mcp: {command: ['{python}', server.py]}]}}"
    done = run_tidemill("doctor", str(file), tools, "reward.terms=[{name: exact}]", "--json")
    found = {line["name"]: line for line in json.loads(done.stdout)}
    assert (found["tools"]["level"], done.returncode) == ("fail", 2)
    assert "No module named 'nothing_of_this_name'" in found["tools"]["text"]


@pytest.mark.usefixtures("no_libraries")
def test_doctor_asks_for_a_model_that_is_not_there_once(tmp_path: Path) -> None:
    file = write(tmp_path, "run")
    done = run_tidemill("doctor", str(file), "model.path=nowhere/at-all", "--json")
    found = json.loads(done.stdout)
    assert [line["name"] for line in found if "nowhere/at-all" in line["text"]] == ["model"]
    assert "not checked" in {line["name"]: line["text"] for line in found}["prompts, model size"]


def test_a_service_is_ready_from_its_first_heartbeat_until_it_falls_silent(
    make_broker: Callable[..., Broker], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    broker = make_broker("ready-run")
    take_over(broker)
    (tmp_path / "config.yaml").write_text(CONFIG)
    (tmp_path / "redis_url").write_text(f"{broker.connection.url}\n")
    monkeypatch.delenv("REDIS_URL", raising=False)
    monkeypatch.setenv("REDIS_URL_FILE", "redis_url")
    ready = partial(run_tidemill, "ready", "config.yaml", cwd=tmp_path)
    done = ready("feeder")
    assert (done.returncode, done.stderr) == (1, "tidemill: feeder has not come up\n")
    answer = json.loads(ready("feeder", "--json").stdout)
    assert answer == {"service": "feeder", "ready": False, "problem": "feeder has not come up"}
    beat = Heartbeat(service="feeder", role="feeder", host="h", pid=1, state="running")
    broker.heartbeats.send(beat)
    done = ready("feeder")
    assert (done.returncode, done.stderr) == (0, "")
    assert ready("reward", "--name", "reward-7").returncode == 1
    beat.time -= 100
    broker.connection.client.hset(broker.connection.keys.services, "feeder", encode(beat))
    done = ready("feeder")
    assert done.returncode == 1
    assert "feeder has been silent for 1" in done.stderr


def test_doctor_meets_the_ranks_of_two_machines_and_names_one_that_sees_another_folder(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text(CONFIG)
    meet = f"127.0.0.1:{free_port()}"

    def machine(rank: int, folder: str) -> subprocess.Popen[str]:
        command = [
            sys.executable,
            "-m",
            "tidemill",
            "doctor",
            "config.yaml",
            f"run.folder={folder}",
            "--ranks",
            "--json",
        ]
        options = ["--nodes", "2", "--node-rank", str(rank), "--meet", meet]
        return subprocess.Popen([*command, *options], cwd=tmp_path, stdout=subprocess.PIPE, text=True)

    machines = [machine(0, "shared"), machine(1, "own")]
    (found, _), (nothing, _) = [one.communicate(timeout=150) for one in machines]
    assert [one.returncode for one in machines] == [2, 0]
    assert nothing == ""
    levels = {finding["name"]: finding["level"] for finding in json.loads(found)}
    assert levels.pop("run.folder") == "fail"
    assert set(levels.values()) == {"ok"}
    assert "sum over ranks" in levels
    assert not list((tmp_path / "shared").glob(".ranks-*"))


@pytest.mark.timeout(600)
def test_doctor_computes_with_the_model_on_the_device(tmp_path: Path) -> None:
    config = {
        "run": {"name": "device", "folder": str(tmp_path / "run")},
        "model": {"path": str(make_tiny_model(tmp_path / "model")), "max_length": 512, "dtype": "float32"},
        "train": {"name": "arithmetic"},
        "reward": {"terms": [{"name": "exact"}]},
        "generator": {"engine": "transformers"},
        "trainer": {"processes": 2},
    }
    file = tmp_path / "config.yaml"
    file.write_text(yaml.safe_dump(config))
    found = {each["name"]: each for each in json.loads(run_tidemill("doctor", str(file), "--gpu", "--json").stdout)}
    names = ["products", "speed", "device memory", "sum over ranks", "attention", "engine", "probe", "sleep"]
    assert [name for name in found if name in names] == names
    assert found["sum over ranks"]["text"].endswith("GB/s of each rank over gloo")
    assert {each["level"] for each in found.values()} == {"ok"}
    # Float32 on both sides: the same model, to rounding.
    assert float(found["probe"]["text"].split()[2]) < 1e-4
    refused = run_tidemill("doctor", "--gpu")
    assert (refused.returncode, refused.stderr) == (
        2,
        "tidemill: --gpu needs a configuration, and goes without --ranks\n",
    )
