"""The workflows, tools, environments and agents in the documentation make episodes as the text around them says."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from openai import AsyncOpenAI

from producers.agents.capacity import EngineCapacity
from producers.agents.endpoint.server import EndpointServer
from producers.agents.session import PolicyHandle as AskedPolicy
from producers.agents.session import Session
from producers.agents.sessions import Sessions
from producers.conversation.chat_template import ChatTemplate
from producers.conversation.conversation import Conversation
from producers.conversation.images import EpisodeImages, ImageLimits
from producers.conversation.parsing.factory import AnswerParser
from producers.engines.base import EngineSettings
from producers.engines.scripted import ScriptedEngine
from producers.episodes.environments.environment import read_turn
from producers.episodes.tools.sources import ToolBox
from producers.episodes.tools.tools import Tools
from producers.workflows.base import RolloutContext, find_workflow
from producers.workflows.trajectory_builder import SampledCompletion
from schemas.config import AgentsConfig
from schemas.messages import Sampling, Task, Trajectory
from schemas.plugins import load
from tests.support.models.pictures import PLACES, picture, user, vision_tokenizer
from tests.support.producers.played_episodes import SpeakingEngine, chat_task, loop_config, play
from tests.support.user_code.docs_code import ROOT, own_code_yaml, write_code
from tests.support.user_code.sandboxes import sandbox


async def test_the_workflow_makes_valid_trajectories(snippets: Path) -> None:
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

    made = await collect()
    assert sorted(trajectory.sample for trajectory in made) == [0, 1, 2]
    for trajectory in made:
        assert trajectory.oldest_version == 0
        assert [turn.role for turn in trajectory.turns] == ["prompt", "assistant", "user", "assistant"]
        sampled = [turn for turn in trajectory.turns if turn.role == "assistant"]
        assert trajectory.loss_mask.numpy().sum() == sum(turn.end - turn.start for turn in sampled)


class Letters:
    """A tokenizer with one token a letter."""

    def prompt_ids(self, task: Task) -> list[int]:
        return self.encode(task.text or "")

    def encode(self, text: str) -> list[int]:
        return [ord(letter) for letter in text]

    def decode(self, ids: Any) -> str:
        return "".join(map(chr, ids))


async def test_the_policy_calls_the_tools(snippets: Path) -> None:
    args = workflow_args("tools")
    assert args["tools"] == ["tools.py:calculator", "tools.py:look_up"]
    assert isinstance(find_workflow("tools", args, snippets)(), Tools)
    async with ToolBox(args["tools"], snippets).open() as tools:
        result = await tools["calculator"].call('{"left": 6, "right": 7, "sign": "*"}', timeout_s=30.0)
        assert result == "42.0"
        assert str(await tools["look_up"].call('{"word": "tide"}', timeout_s=30.0)).startswith('{"word": "tide"')


def test_the_tool_python_stands_beside_functions(snippets: Path) -> None:
    sandbox("bwrap")
    workflows = [block.get("generator", {}).get("workflow", {}) for block in own_code_yaml()]
    (args,) = [flow["args"] for flow in workflows if "{'python': {" in str(flow.get("args", {}).get("tools"))]
    assert list(ToolBox(args["tools"], snippets).schemas) == ["calculator", "python"]


async def test_the_environment_is_one(snippets: Path) -> None:
    args = workflow_args("environment")
    assert args["environment"] == "guess.py:Guess"
    find_workflow("environment", args, snippets)
    game = load(args["environment"], "environment", snippets)(**args["args"])

    assert "from 1 to 15" in await game.reset({"seed": 7})
    steps = [await game.step(str(guess)) for guess in ("none", *range(1, 16))]
    assert steps[0][1] == -0.1
    assert [reward for _, reward, done in steps if done] == [1.0]


def test_the_game_of_two_players_ends_with_a_reward_for_each(snippets: Path) -> None:
    game = load("nim.py:Nim", "environment", snippets)()
    turns = [game.reset({"seed": 7}), *(game.step(taken) for taken in ("2", "2", "1"))]
    assert [read_turn(turn, "step").player for turn in turns] == ["first", "second", "first", ""]
    assert turns[-1] == {"rewards": {"first": 1.0, "second": -1.0}, "done": True}


@pytest.mark.parametrize("page", ["README.md", "docs/agents/index.md"])
async def test_the_agent_calls_its_tools_until_the_model_answers(page: str, tmp_path: Path) -> None:
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
    assert await agent(task, client) == 1.0
    assert asked[1][-1] == {"role": "tool", "tool_call_id": "call-1", "content": "result of call-1"}
    assert len(task["messages"]) == 1


def workflow_args(name: str) -> Any:
    """The arguments of a built-in workflow in the YAML of the pages."""
    found = [block.get("generator", {}).get("workflow", {}) for block in own_code_yaml()]
    return next(workflow["args"] for workflow in found if workflow.get("name") == name)


async def test_the_agent_shows_a_picture_after_the_first_answer(tmp_path: Path) -> None:
    write_code(ROOT / "docs" / "vision.md", tmp_path)
    (tmp_path / "closer.png").write_bytes(picture("blue"))
    agent, tokenizer = load(f"{tmp_path}/looker.py:run", "agent"), vision_tokenizer(tmp_path)
    engine = SpeakingEngine(tokenizer, lambda prompt: "Seven, I see" if prompt.count("<|im_start|>") > 3 else "?")
    images = EpisodeImages(PLACES, ImageLimits(8, 1 << 20, 1 << 20))
    parser = AnswerParser("hermes", None, tokenizer, vllm=False)
    policy = AskedPolicy(engine, parser, EngineCapacity(8), 4096, 9, tokenizer)
    session = Session(policy, Conversation(ChatTemplate(tokenizer), images=images), Sampling())

    sessions = Sessions()
    sessions.add(session)
    server = EndpointServer(sessions, AgentsConfig())
    base_url = f"{await server.start()}/s/{session.token}/v1"
    task = {
        "messages": [user("how many?", picture())],
        "data": {"closer": f"{tmp_path}/closer.png", "answer": "Sev"},
    }
    try:
        async with AsyncOpenAI(base_url=base_url, api_key="none", max_retries=0) as client:
            reward: float = await agent(task, client)
    finally:
        await server.close()
    assert reward == 1.0
    sample = session.conversation.sample(0, "stop")
    assert len(sample.images) == len(sample.files) == 2
    assert len(sample.segments) == 1


async def test_the_tool_and_the_environment_show_pictures(tmp_path: Path) -> None:
    write_code(ROOT / "docs" / "vision.md", tmp_path)
    tokenizer = vision_tokenizer(tmp_path)
    call = '<tool_call>{"name": "zoom", "arguments": {"left": 90, "top": 90}}</tool_call>'
    for name, args, answers in (
        ("tools", {"tools": ["gallery.py:zoom"]}, [call, "done"]),
        ("environment", {"environment": "gallery.py:Gallery"}, ["red"]),
    ):
        remaining = iter(answers)
        engine = SpeakingEngine(tokenizer, lambda prompt, remaining=remaining: next(remaining))
        task = msgspec.structs.replace(chat_task("See."), data={"answer": "red"})
        (sample,) = await play(loop_config(tmp_path, name, args), engine, tokenizer, task, placeholders=PLACES)
        assert isinstance(sample, SampledCompletion)
        assert len(sample.images) == len(sample.files) == 1
        assert sample.reward == (1.0 if name == "environment" else None)
