"""Agents' episodes under generators that are killed or asked to end again and again, and what that cost.

By hand: ``python -m tests.support.producers.killed_agents --episodes 64 --calls 6 --kills 20 --signal KILL``. The
engine is scripted; everything else is real: the broker, the generator processes, the endpoint, the agents' processes.
Engine and agents write a line for each call: when it begins, when the engine has its answer, and when the agent has it.
"""

import argparse
import asyncio
import json
import os
import signal
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import msgspec
import numpy as np

from broker.client import Broker
from broker.connection.connection import Connection
from broker.connection.embedded import EmbeddedServer
from broker.connection.keys import Keys
from producers.engines.base import Completion, EngineSettings, ProgressCallback, PromptImage
from producers.engines.scripted import ScriptedEngine
from schemas.config import BrokerConfig, save_config
from schemas.messages import Sampling, Trajectory
from tests.support.broker.trainer_sessions import take_over
from tests.support.configurations import minimal_config
from tests.support.models.tiny_model import make_tiny_model
from tests.support.producers.generator_service import make_task, publish_version, read_published
from tests.support.runs.light_service import start_service

LOG = "AGENT_REQUESTS"
DEADLINE_S = 600.0
AGENT = """
import json, os, time, urllib.request

def run(task, base_url, episode):
    messages = list(task["messages"])
    for turn in range({calls}):
        body = json.dumps({{"model": "policy", "messages": messages}}).encode()
        request = urllib.request.Request(base_url + "/chat/completions", body, {{"content-type": "application/json"}})
        with urllib.request.urlopen(request, timeout=300) as answer:
            content = json.load(answer)["choices"][0]["message"]["content"] or ""
        file = os.open("{log}", os.O_WRONLY | os.O_APPEND)
        os.write(file, f"answered {{episode.id}}-{{turn + 1}}\\n".encode())
        os.close(file)
        messages.append({{"role": "assistant", "content": content}})
        time.sleep({tool_s})
        messages.append({{"role": "user", "content": str(len(content))}})
    return float(sum(len(message["content"]) for message in messages))
"""


class LoggingEngine(ScriptedEngine):
    """The scripted engine, which writes down what it is asked. A call is known by its seed, see ``play``.

    All generators answer alike, whatever their names make of the engine's seed.
    """

    def __init__(self, settings: EngineSettings) -> None:
        super().__init__(replace(settings, seed=0))

    async def generate(
        self,
        prompt_ids: Sequence[int],
        sampling: Sampling,
        n: int = 1,
        prefix: Sequence[int] = (),
        progress: ProgressCallback | None = None,
        images: Sequence[PromptImage] = (),
    ) -> list[Completion]:
        seed = sampling.seed or 0
        call = f"{seed >> 24}-{seed >> 16 & 255}-{seed >> 4 & 4095}"
        _log(f"{'goes_on' if prefix else 'begin'} {call}")
        found = await super().generate(prompt_ids, sampling, n, prefix, progress)
        if all(completion.finish != "abort" for completion in found):
            _log(f"end {call}")
        return found


def _log(line: str) -> None:
    file = os.open(os.environ[LOG], os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    try:
        os.write(file, f"{line}\n".encode())
    finally:
        os.close(file)


@dataclass(frozen=True)
class Outcome:
    """What was published, and what the ends of generators cost.

    calls: different ones that were made. made_again: how often the engine began one that it had begun before.
    in_flight: calls that the engine had begun and whose agent had no answer when their generator ended, over all ends.
    ended_again, answered_again: calls begun a second time though the engine, or the agent, had the answer before.
    slowest_end_s: from the signal to the end of the process.
    """

    published: list[Trajectory]
    ends: int
    calls: int
    made_again: int
    in_flight: int
    ended_again: int
    answered_again: int
    slowest_end_s: float
    seconds: float

    @property
    def answers(self) -> dict[tuple[int, int], tuple[list[int], float | None]]:
        """Tokens and reward of each sample, to compare runs."""
        return {(t.task_id, t.sample): (t.tokens.numpy().tolist(), t.reward) for t in self.published}


def play(
    folder: Path,
    broker: Broker,
    url: str,
    *,
    episodes: int,
    calls: int,
    ends: int,
    tool_s: float = 0.3,
    sign: signal.Signals = signal.SIGKILL,
) -> Outcome:
    """Play episodes of so many calls to their end, ending the generator with ``sign`` at even distances in between."""
    folder.mkdir(parents=True, exist_ok=True)
    model, log = make_tiny_model(folder / "model", max_length=4096), folder / "requests.log"
    (folder / "agent.py").write_text(AGENT.format(calls=calls, tool_s=tool_s, log=log))
    config = minimal_config(
        run={"name": broker.connection.keys.run, "folder": str(folder / "run")},
        model={"path": str(model), "dtype": "float32", "max_length": 4000},
        sampling={"n": 2, "max_tokens": 40},
        broker={"max_deliveries": ends + 20},
        generator={
            "engine": "tests.support.producers.killed_agents:LoggingEngine",
            "args": {"min_length": 6, "max_length": 14, "token_s": 0.03, "tokens": 9, "first": 100},
            "lease_s": 1.5,
            "workflow": {"name": "agent", "args": {"run": f"{folder}/agent.py:run"}},
            "agents": {"processes": 2, "episodes": episodes, "grace_s": 0.2},
        },
    )
    save_config(config, folder / "config.yaml")
    publish_version(broker, take_over(broker, staleness=max(7, episodes)), folder, 1)
    for task_id in range(episodes // 2):
        # A seed of its own for each call: that of the task, the sample, and the number of the request.
        task = make_task(task_id)
        broker.ledger.admit(msgspec.structs.replace(task, sampling=Sampling(max_tokens=40, seed=task_id << 24)))
    started = time.monotonic()
    log.touch()
    in_flight, slowest = 0, 0.0
    for end in range(ends + 1):
        name = f"generator-{end}"
        before = len(_lines(log))
        process = start_service("generator", folder / "config.yaml", name, url, **{LOG: str(log)})
        try:
            if end < ends:
                _wait_for_requests(log, (end + 1) * episodes * calls // (ends + 1))
                signalled = time.monotonic()
                process.send_signal(sign)
                process.wait(DEADLINE_S)
                slowest = max(slowest, time.monotonic() - signalled)
                lines = _lines(log)
                answered = {call for word, call in lines if word == "answered"}
                in_flight += len({call for word, call in lines[before:] if word != "answered"} - answered)
            else:
                published = asyncio.run(_read(broker, episodes))
        finally:
            process.kill()
            process.wait(30)
    lines = _lines(log)
    begun = [call for word, call in lines if word == "begin"]
    return Outcome(
        published,
        ends,
        calls=len(set(begun)),
        made_again=len(begun) - len(set(begun)),
        in_flight=in_flight,
        ended_again=_begun_after(lines, "end"),
        answered_again=_begun_after(lines, "answered"),
        slowest_end_s=slowest,
        seconds=time.monotonic() - started,
    )


def _lines(log: Path) -> list[tuple[str, str]]:
    return [(word, call) for word, call in (line.split() for line in log.read_text().splitlines())]


def _begun_after(lines: Sequence[tuple[str, str]], sign: str) -> int:
    """How many calls were begun, or resumed, though a line before says that it had come to this sign."""
    seen: set[str] = set()
    found = 0
    for word, call in lines:
        found += word in ("begin", "goes_on") and call in seen
        if word == sign:
            seen.add(call)
    return found


def _wait_for_requests(log: Path, count: int) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while (ended := len({call for word, call in _lines(log) if word == "end"})) < count:
        if time.monotonic() > deadline:
            raise TimeoutError(f"{ended} of {count} requests had ended after {DEADLINE_S:.0f} s")
        time.sleep(0.02)


async def _read(broker: Broker, episodes: int) -> list[Trajectory]:
    deadline = time.monotonic() + DEADLINE_S
    while broker.connection.client.xlen(broker.connection.keys.trajectories) < episodes:
        if time.monotonic() > deadline:
            raise TimeoutError(f"not all of {episodes} episodes were published after {DEADLINE_S:.0f} s")
        await asyncio.sleep(0.1)
    return await read_published(broker, episodes)


def main(arguments: Sequence[str] | None = None) -> None:
    """Play with and without ends of generators, and print what was lost, twice, different and generated again."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--episodes", type=int, default=64)
    parser.add_argument("--calls", type=int, default=6)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--signal", choices=["KILL", "TERM"], default="KILL")
    given = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as temporary:
        server = EmbeddedServer(Path(temporary) / "broker")
        server.start()

        def run(ends: int) -> Outcome:
            settings = BrokerConfig()
            broker = Broker(
                Connection(server.url, Keys(settings.prefix, f"ends-{ends}"), settings.deadline_s), settings
            )
            folder = Path(temporary) / str(ends)
            sign = signal.Signals[f"SIG{given.signal}"]
            return play(folder, broker, server.url, episodes=given.episodes, calls=given.calls, ends=ends, sign=sign)

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
                "published_calls": sum(t.calls for t in killed.published),
                "replayed": sum(t.metrics["replayed"] for t in killed.published),
                "rows": float(np.mean([len(t.rows()) for t in killed.published])),
                "seconds_without_ends": quiet.seconds,
            },
            indent=2,
        )
    )


if __name__ == "__main__":
    main()
