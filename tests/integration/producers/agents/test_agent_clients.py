"""The client that agents are given, against a server that answers as the policy's endpoint does."""

import asyncio
from pathlib import Path

import pytest

from producers.agents.workers.pool import AgentWorkers
from producers.agents.workers.protocol import AgentJob, AgentResult
from producers.agents.workers.start import AgentProgram
from schemas.config import AgentsConfig
from schemas.errors import ConfigError
from tests.support.servers.scripted_server import Answer, Request, serving

pytest.importorskip("openai")

AGENT = """
import asyncio

async def run(task, client, base_url, api_key):
    for _ in range(3):
        answer = await client.chat.completions.create(model="policy", messages=task["messages"])
        await asyncio.sleep(0.05)
    await client.close()
    return {"data": {"said": answer.choices[0].message.content, "key": api_key, "url": base_url}}

def plain(task, client):
    with client:
        answer = client.chat.completions.create(model="policy", messages=task["messages"])
    return {"data": {"said": answer.choices[0].message.content}}
"""


def policy(request: Request) -> Answer:
    """Answers with the path and the key that it was asked with."""
    message = {"role": "assistant", "content": f"{request.path} {request.headers['Authorization']}"}
    choice = {"index": 0, "finish_reason": "stop", "message": message}
    return 200, {"id": "chatcmpl-1", "object": "chat.completion", "created": 1, "model": "policy", "choices": [choice]}


@pytest.mark.parametrize(("run", "calls"), [("agent.py:run", 3), ("agent.py:plain", 1)])
async def test_each_episode_has_its_client_on_shared_connections(tmp_path: Path, run: str, calls: int):
    (tmp_path / "agent.py").write_text(AGENT)

    async def play() -> list[AgentResult]:
        workers = AgentWorkers(AgentProgram(run, None, {}, tmp_path, AgentsConfig()))
        await workers.start()
        try:
            found = []
            for wave in range(3):
                jobs = [
                    AgentJob(f"{wave}-{k}", {"messages": []}, f"{server.url}/s/t{wave}{k}/v1", f"t{wave}{k}", 30.0)
                    for k in range(4)
                ]
                found += await asyncio.gather(*(workers.run(job) for job in jobs))
            return found
        finally:
            await workers.close()

    with serving(policy) as server:
        results = await play()
    assert [result.error for result in results] == [""] * 12
    tokens = [f"t{wave}{k}" for wave in range(3) for k in range(4)]
    assert [result.data["said"] for result in results] == [
        f"/s/{token}/v1/chat/completions Bearer {token}" for token in tokens
    ]
    assert len({request.client for request in server.asked}) <= 4


async def test_an_agent_that_asks_for_a_client_where_there_is_no_openai_is_told_so(tmp_path: Path):
    (tmp_path / "agent.py").write_text(AGENT)
    (tmp_path / "openai.py").write_text("raise ImportError('not installed')\n")
    with pytest.raises(
        ConfigError, match=r"agent\.py:run asks for client, and .* has no openai: ImportError: not inst"
    ):
        await AgentWorkers(AgentProgram("agent.py:run", None, {}, tmp_path, AgentsConfig())).start()
