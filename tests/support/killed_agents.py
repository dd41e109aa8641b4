"""Agents' episodes under generators that are killed again and again, and what that cost.

By hand: ``python -m tests.support.killed_agents --episodes 64 --calls 6 --kills 20``. The engine is scripted and logs
each request; everything else is real: the broker, the generator processes, the endpoint, the agents' processes.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import string
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from broker.client import Broker
from broker.connection.connection import Connection
from broker.connection.embedded import EmbeddedServer
from broker.connection.keys import Keys
from producers.engines.base import Completion
from producers.engines.scripted import ScriptedEngine
from schemas.config import BrokerConfig, parse_config, save_config
from schemas.messages import Trajectory
from tests.support.generator_service import make_task, publish_version, read_published
from tests.support.light_service import start_service
from tests.support.tiny_model import make_tiny_model
from tests.support.trainer_sessions import take_over

LOG = "AGENT_REQUESTS"
DEADLINE_S = 600.0
AGENT = """
import json, time, urllib.request

def run(task, base_url):
    messages = list(task["messages"])
    for turn in range({calls}):
        body = json.dumps({{"model": "policy", "messages": messages}}).encode()
        request = urllib.request.Request(base_url + "/chat/completions", body, {{"content-type": "application/json"}})
        with urllib.request.urlopen(request, timeout=300) as answer:
            content = json.load(answer)["choices"][0]["message"]["content"] or ""
        messages.append({{"role": "assistant", "content": content}})
        time.sleep({tool_s})
        messages.append({{"role": "user", "content": str(len(content))}})
    return float(sum(len(message["content"]) for message in messages))
"""


class LoggingEngine(ScriptedEngine):
    """The scripted engine; each request writes a line when it begins and one when it has its answer."""

    async def generate(self, *arguments: object, **settings: object) -> list[Completion]:
        _log("begin")
        found = await super().generate(*arguments, **settings)  # type: ignore[arg-type]
        if all(completion.finish != "abort" for completion in found):
            _log("end")
        return found


def _log(word: str) -> None:
    file = os.open(os.environ[LOG], os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    try:
        os.write(file, f"{word}\n".encode())
    finally:
        os.close(file)


@dataclass(frozen=True)
class Outcome:
    """What was published, and what the kills cost. begun_again: requests more than the episodes have calls.

    in_flight: requests that were under way when their generator was killed, over all kills. answers: tokens of each
    sample, to compare runs.
    """

    published: list[Trajectory]
    kills: int
    begun_again: int
    in_flight: int
    seconds: float

    @property
    def answers(self) -> dict[tuple[int, int], tuple[list[int], float | None]]:
        return {(t.task_id, t.sample): (t.tokens.numpy().tolist(), t.reward) for t in self.published}


def play(
    folder: Path, broker: Broker, url: str, *, episodes: int, calls: int, kills: int, tool_s: float = 0.3
) -> Outcome:
    """Play episodes of so many calls to their end, killing the generator at even distances in between."""
    folder.mkdir(parents=True, exist_ok=True)
    model = make_tiny_model(folder / "model", max_length=4096)
    (folder / "agent.py").write_text(AGENT.format(calls=calls, tool_s=tool_s))
    config = parse_config(
        {
            "run": {"name": broker.connection.keys.run, "folder": str(folder / "run")},
            "model": {"path": str(model), "dtype": "float32", "max_length": 4000},
            "train": {"name": "arithmetic"},
            "sampling": {"n": 2, "max_tokens": 40},
            "reward": {"terms": [{"name": "exact"}]},
            "broker": {"max_deliveries": kills + 20},
            "generator": {
                "engine": "tests.support.killed_agents:LoggingEngine",
                "args": {"min_length": 6, "max_length": 14, "token_s": 0.03, "tokens": 9, "first": 100},
                "lease_s": 1.5,
                "workflow": {"name": "agent", "args": {"run": f"{folder}/agent.py:run"}},
                "agents": {"processes": 2, "episodes": episodes},
            },
        }
    )
    save_config(config, folder / "config.yaml")
    publish_version(broker, take_over(broker, staleness=max(7, episodes)), folder, 1)
    for task_id in range(episodes // 2):
        broker.ledger.admit(make_task(task_id, max_tokens=40))
    log, started = folder / "requests.log", time.monotonic()
    log.touch()
    in_flight = 0
    for kill in range(kills + 1):
        name = "g-" + "".join(string.ascii_lowercase[int(digit)] for digit in str(kill))
        process = start_service("generator", folder / "config.yaml", name, url, **{LOG: str(log)})
        try:
            if kill < kills:
                _wait_for_requests(log, (kill + 1) * episodes * calls // (kills + 1))
            else:
                published = asyncio.run(_read(broker, episodes))
        finally:
            process.kill()
            process.wait(30)
        begun, ended = _count(log)
        in_flight = in_flight + (begun - ended) if kill < kills else in_flight
        if kill < kills:
            # The rest of the killed one's requests never ends: from here on they count as ended.
            with log.open("a") as file:
                file.write("end\n" * (begun - ended))
    needed = sum(found.calls for found in published)
    return Outcome(published, kills, _count(log)[0] - needed, in_flight, time.monotonic() - started)


def _count(log: Path) -> tuple[int, int]:
    words = log.read_text().split()
    return words.count("begin"), words.count("end")


def _wait_for_requests(log: Path, count: int) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while _count(log)[1] < count:
        if time.monotonic() > deadline:
            raise TimeoutError(f"{_count(log)[1]} of {count} requests had ended after {DEADLINE_S:.0f} s")
        time.sleep(0.02)


async def _read(broker: Broker, episodes: int) -> list[Trajectory]:
    deadline = time.monotonic() + DEADLINE_S
    while broker.connection.client.xlen(broker.connection.keys.trajectories) < episodes:
        if time.monotonic() > deadline:
            raise TimeoutError(f"not all of {episodes} episodes were published after {DEADLINE_S:.0f} s")
        await asyncio.sleep(0.1)
    return await read_published(broker, episodes)


def main(arguments: Sequence[str] | None = None) -> None:
    """Play with and without kills, and print what was lost, twice, different and generated again."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--episodes", type=int, default=64)
    parser.add_argument("--calls", type=int, default=6)
    parser.add_argument("--kills", type=int, default=20)
    given = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as temporary:
        server = EmbeddedServer(Path(temporary) / "broker")
        server.start()

        def run(kills: int) -> Outcome:
            settings = BrokerConfig()
            broker = Broker(
                Connection(server.url, Keys(settings.prefix, f"kills-{kills}"), settings.deadline_s), settings
            )
            folder = Path(temporary) / str(kills)
            return play(folder, broker, server.url, episodes=given.episodes, calls=given.calls, kills=kills)

        try:
            killed, quiet = run(given.kills), run(0)
        finally:
            server.stop()
    pairs = [(t.task_id, t.sample) for t in killed.published]
    print(
        json.dumps(
            {
                **asdict(killed, dict_factory=lambda items: {k: v for k, v in items if k != "published"}),
                "episodes": len(pairs),
                "lost": given.episodes - len(set(pairs)),
                "twice": len(pairs) - len(set(pairs)),
                "different": sum(killed.answers[key] != quiet.answers[key] for key in quiet.answers),
                "calls": sum(t.calls for t in killed.published),
                "replayed": sum(t.metrics["replayed"] for t in killed.published),
                "rows": float(np.mean([len(t.rows()) for t in killed.published])),
                "seconds_without_kills": quiet.seconds,
            },
            indent=2,
        )
    )


if __name__ == "__main__":
    main()
