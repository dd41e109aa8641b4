"""The code in the documentation runs, and does what the text around it says."""

from __future__ import annotations

import asyncio
import json
import os
import re
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

from consumers.reward.rewards.programs.score import read_cases
from consumers.reward.rewards.terms import RewardInput, resolve
from consumers.reward.scorer import check_reward
from deploy.bench.rewards.server import FlakyJudge
from deploy.launchers.factory import build_launcher
from producers.agents.workers.check import check_agent
from producers.datasets.loading import build_dataset
from producers.datasets.mixture import build_mixture
from producers.engines.base import EngineSettings
from producers.engines.scripted import ScriptedEngine
from producers.loops.environment import read_turn
from producers.loops.tool_functions import load_tools
from producers.loops.tool_sources import ToolBox
from producers.loops.tools import Tools
from producers.workflows.base import RolloutContext, find_workflow
from schemas.codec import Array
from schemas.config import AgentsConfig, DatasetConfig, RewardConfig, RewardTerm, TidemillConfig, parse_config
from schemas.messages import Sampling, Span, Task, Trajectory
from schemas.plugins import load
from tests.support.sandboxes import sandbox

ROOT = Path(__file__).resolve().parents[3]
SMALLEST = {"model": {"path": "m"}, "train": {"name": "arithmetic"}, "reward": {"terms": [{"name": "exact"}]}}
CODE = re.compile(r'^```python title="([^"]+)"\n(.*?)^```$', re.MULTILINE | re.DOTALL)


def write_code(page: Path, folder: Path) -> list[str]:
    """Write a page's titled Python blocks as files; returns their names."""
    blocks = CODE.findall(page.read_text(encoding="utf-8"))
    for title, text in blocks:
        (folder / title).write_text(text, encoding="utf-8")
    return [title for title, _ in blocks]


@pytest.fixture
def snippets(tmp_path: Path) -> Path:
    """A folder with the titled code blocks of docs/bring-your-own.md as files."""
    write_code(ROOT / "docs" / "bring-your-own.md", tmp_path)
    return tmp_path


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
    text = (ROOT / "docs" / "bring-your-own.md").read_text(encoding="utf-8")
    blocks = [yaml.safe_load(block) for block in re.findall(r"^```yaml\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)]
    found = [block.get("reward", {}) for block in blocks]
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


def test_the_program_of_the_sandbox_page_runs(tmp_path: Path) -> None:
    sandbox("bwrap")
    assert write_code(ROOT / "docs" / "sandbox.md", tmp_path) == ["shout.py"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, tmp_path / "shout.py"]
    done = subprocess.run(command, capture_output=True, check=True, timeout=60, env=environment)
    assert done.stdout == b"exit 0 b'HELLO'\n"


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

    monkeypatch.setattr("deploy.run.names.check_names", lambda config: None)
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


def test_the_dataset_is_one(snippets: Path) -> None:
    dataset = build_dataset(DatasetConfig(name="countdown.py:Countdown", args={"largest": 50}), snippets)
    assert len(dataset) == 50
    assert dataset[2].data["answer"] == "3 2 1 0"


def test_the_mixture_mixes_its_datasets(snippets: Path) -> None:
    text = (ROOT / "docs" / "bring-your-own.md").read_text(encoding="utf-8")
    (block,) = re.findall(r'^```yaml title="mixture.yaml"\n(.*?)^```$', text, re.MULTILINE | re.DOTALL)
    (snippets / "facts.jsonl").write_text('{"prompt": "capital of France?", "answer": "Paris"}\n')
    config = parse_config({**SMALLEST, **yaml.safe_load(block)}, base=snippets)
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
    text = (ROOT / "docs" / "bring-your-own.md").read_text(encoding="utf-8")
    (block,) = re.findall(r'^```yaml title="collections.yaml"\n(.*?)^```$', text, re.MULTILINE | re.DOTALL)
    for name, rows in ROWS.items():
        (snippets / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = parse_config({**SMALLEST, **yaml.safe_load(block)}, base=snippets)
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
    text = (ROOT / "docs" / "bring-your-own.md").read_text(encoding="utf-8")
    (block,) = re.findall(rf'^```yaml title="{title}"\n(.*?)^```$', text, re.MULTILINE | re.DOTALL)
    config = parse_config({**SMALLEST, **yaml.safe_load(block)}, base=snippets)
    mixture = build_mixture(config.train, config.base, seed=0)
    assert mixture.parts[0].statistics == pytest.approx(statistics, rel=0.01)
    assert mixture.parts[0].curriculum.name != "uniform"


def test_the_workflow_makes_valid_trajectories(snippets: Path) -> None:
    workflow = load("two_tries.py:TwoTries", "workflow", snippets)(hint="??")

    async def collect() -> list[Trajectory]:
        engine = ScriptedEngine(EngineSettings("m", "float32", max_length=64, max_samples=8))
        await engine.start()
        task = Task(task_id=0, kind="train", n=3, sampling=Sampling(max_tokens=8), text="ab")
        try:
            rollout = RolloutContext(engine, Letters(), task, range(3))
            return [sample.to_trajectory(task, run="docs", generator="g") async for sample in workflow.run(rollout)]
        finally:
            await engine.close()

    made = asyncio.run(collect())
    assert sorted(trajectory.sample for trajectory in made) == [0, 1, 2]
    for trajectory in made:
        assert trajectory.oldest_version == 0
        assert [turn.role for turn in trajectory.turns] == ["prompt", "assistant", "user", "assistant"]
        sampled = [turn for turn in trajectory.turns if turn.role == "assistant"]
        assert trajectory.loss_mask.numpy().sum() == sum(turn.end - turn.start for turn in sampled)


def test_the_policy_calls_the_tools(snippets: Path) -> None:
    args = workflow_args("tools")
    assert args["tools"] == ["tools.py:calculator", "tools.py:look_up"]
    assert isinstance(find_workflow("tools", args, snippets)(), Tools)
    tools = load_tools(args["tools"], snippets)
    result = asyncio.run(tools["calculator"].call('{"left": 6, "right": 7, "sign": "*"}', timeout_s=30.0))
    assert result == "42.0"
    assert asyncio.run(tools["look_up"].call('{"word": "tide"}', timeout_s=30.0)).startswith('{"word": "tide"')


def test_the_tool_python_stands_beside_functions(snippets: Path) -> None:
    sandbox("bwrap")
    workflows = [block.get("generator", {}).get("workflow", {}) for block in yaml_of("bring-your-own.md")]
    (args,) = [flow["args"] for flow in workflows if "{'python': {" in str(flow.get("args", {}).get("tools"))]
    assert list(ToolBox(args["tools"], snippets).schemas) == ["calculator", "python"]


def test_the_environment_is_one(snippets: Path) -> None:
    args = workflow_args("environment")
    assert args["environment"] == "guess.py:Guess"
    find_workflow("environment", args, snippets)
    game = load(args["environment"], "environment", snippets)(**args["args"])

    async def play() -> list[tuple[str, float, bool]]:
        assert "from 1 to 15" in await game.reset({"seed": 7})
        return [await game.step(str(guess)) for guess in ("none", *range(1, 16))]

    steps = asyncio.run(play())
    assert steps[0][1] == -0.1
    assert [reward for _, reward, done in steps if done] == [1.0]


def test_the_game_of_two_players_ends_with_a_reward_for_each(snippets: Path) -> None:
    game = load("nim.py:Nim", "environment", snippets)()
    turns = [game.reset({"seed": 7}), *(game.step(taken) for taken in ("2", "2", "1"))]
    assert [read_turn(turn, "step").player for turn in turns] == ["first", "second", "first", ""]
    assert turns[-1] == {"rewards": {"first": 1.0, "second": -1.0}, "done": True}


def test_the_agent_asks_until_it_is_right(snippets: Path) -> None:
    args = workflow_args("agent")
    assert args["run"] == "solver.py:run"
    find_workflow("agent", args, snippets)
    check_agent(args["run"], None, {}, snippets, AgentsConfig())
    asked: list[list[dict[str, str]]] = []

    async def create(model: str, messages: list[dict[str, str]]) -> Any:
        asked.append(list(messages))
        message = SimpleNamespace(content=["6?", None, "It is 7."][len(asked) - 1])
        return SimpleNamespace(choices=[SimpleNamespace(message=message)])

    client = SimpleNamespace(chat=SimpleNamespace(completions=SimpleNamespace(create=create)))
    episode = SimpleNamespace(metrics=lambda wrong: None)
    task = {"messages": [{"role": "user", "content": "3+4"}], "data": {"answer": "7"}}
    assert asyncio.run(load(args["run"], "agent", snippets)(task, client, episode)) == pytest.approx(0.6)
    assert [message["content"] for message in asked[2]] == ["3+4", "6?", "No. Once more.", "", "No. Once more."]


def workflow_args(name: str) -> Any:
    """The arguments of a built-in workflow in the YAML of the page."""
    found = [block.get("generator", {}).get("workflow", {}) for block in yaml_of("bring-your-own.md")]
    return next(workflow["args"] for workflow in found if workflow.get("name") == name)


def yaml_of(page: str) -> list[dict[str, Any]]:
    """The YAML blocks of a page."""
    text = (ROOT / "docs" / page).read_text(encoding="utf-8")
    return [yaml.safe_load(block) for block in re.findall(r"^```yaml\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)]


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
    from consumers.trainer.algorithms.aggregation import Totals

    root_mean = load("aggregations.py:root_mean", "aggregation", snippets)
    weights = root_mean(np.array([4, 9]), np.array([0, 0]), Totals(tokens=13, sequences=2, groups=1, max_tokens=9))
    assert weights.tolist() == pytest.approx([1 / 10, 1 / 15])


class Letters:
    """A tokenizer with one token a letter."""

    def prompt_ids(self, task: Task) -> list[int]:
        return self.encode(task.text or "")

    def encode(self, text: str) -> list[int]:
        return [ord(letter) for letter in text]

    def decode(self, ids: Any) -> str:
        return "".join(map(chr, ids))


def trajectory(completion: str, tokens: int, **data: Any) -> Trajectory:
    """A prompt of one token and a completion of ``tokens``."""
    return Trajectory(
        run="docs",
        task_id=0,
        sample=0,
        kind="train",
        tokens=Array.of(range(tokens + 1), "i4"),
        loss_mask=Array.of([0] + [1] * tokens, "u1"),
        logprobs=Array.of([0.0] + [-1.0] * tokens, "f4"),
        spans=[Span(0, 1, tokens + 1)],
        turns=[],
        finish="stop",
        prompt="p",
        completion=completion,
        generator="g",
        data=data,
    )


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
        argv = [sys.executable, "-c", "print('here')", role, "my.yaml", "--name", name]
        log = snippets / f"{name}.log"
        process = starter.start(argv, name, role, log, {}, "")
        deadline = time.monotonic() + 30.0
        while process.poll() is None:
            assert time.monotonic() < deadline, f"{name} did not end"
            time.sleep(0.02)
        return log.read_text().splitlines()

    assert ran("generator", "generator-1") == ["host two", "there: generator my.yaml --name generator-1"]
    assert ran("trainer", "trainer") == ["here"]


@pytest.mark.parametrize("page", ["README.md", "docs/agents/index.md"])
def test_the_agent_calls_its_tools_until_the_model_answers(page: str, tmp_path: Path) -> None:
    write_code(ROOT / page, tmp_path)
    agent = load(f"{tmp_path}/my_agent.py:run", "agent")
    asked: list[list[Any]] = []

    class Message(SimpleNamespace):
        def model_dump(self, exclude_none: bool) -> dict[str, Any]:
            return {"role": "assistant", **vars(self)}

    async def create(model: str, messages: list[Any], tools: object) -> SimpleNamespace:
        asked.append(list(messages))
        call = SimpleNamespace(id="call-1")
        message = Message(content="", tool_calls=[call]) if len(asked) == 1 else Message(content="56", tool_calls=None)
        return SimpleNamespace(choices=[SimpleNamespace(message=message)])

    agent.__globals__.update(TOOLS=[], use=lambda call: f"result of {call.id}")
    client = SimpleNamespace(chat=SimpleNamespace(completions=SimpleNamespace(create=create)))
    task = {"messages": [{"role": "user", "content": "7*8=?"}], "data": {"answer": "56"}}
    assert asyncio.run(agent(task, client)) == 1.0
    assert asked[1][-1] == {"role": "tool", "tool_call_id": "call-1", "content": "result of call-1"}
    assert len(task["messages"]) == 1
