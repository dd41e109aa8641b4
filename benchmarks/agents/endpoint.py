"""Requests per second through a generator's endpoint for agents, beside vLLM's own OpenAI server.

Both have the same tiny model in an engine core of their own with the same settings, and get the same requests from the
same client, in turns. Ours joins, parses and records what is sampled, log-probabilities included. A client of a few
lines is used, since those of libraries take longer than either server.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.request import urlopen

from benchmarks.agents.model import write_model
from benchmarks.harness.processes import RoleProcesses, cpu_s
from benchmarks.harness.report import ResultRow, Table
from benchmarks.harness.rounds import Advance, Figures, Round, compare, ratio, summarize
from producers.agents.capacity import EngineCapacity
from producers.agents.endpoint.server import EndpointServer
from producers.agents.session import PolicyHandle, Session
from producers.agents.sessions import Sessions
from producers.conversation.chat_template import ChatTemplate
from producers.conversation.conversation import Conversation
from producers.conversation.parsing.factory import AnswerParser
from producers.engines.base import EngineSettings
from producers.engines.vllm.boot import engine_arguments
from producers.engines.vllm.engine import VllmEngine
from producers.tokenizer import HfTokenizer
from schemas.config import AgentsConfig
from schemas.errors import ConfigError, InfraError
from schemas.messages import Sampling

MAX_LENGTH = 512
CALLS = 5
"""Requests of an episode."""
START_S, ROUND_S = 300.0, 600.0
PASSED_ON = ("max_model_len", "max_num_seqs", "seed", "dtype", "kv_cache_memory_bytes")
"""Arguments of our engine that vLLM's server also gets, if they are set."""


ENDPOINT = Table(
    "The agents' endpoint beside the server of vLLM",
    {
        "clients": "{clients}",
        "requests/s": "{by[ours][requests_per_s]:.0f}",
        "of vLLM": "{by[bare][requests_per_s]:.0f}, {vllm}",
        "ratio": "{ratio:.2f}",
        "processor ms a request": "{by[ours][cpu_ms_per_request].median:.2f}"
        ", of vLLM {by[bare][cpu_ms_per_request].median:.2f}",
        "ratio of processor time": "{cpu_ratio:.2f}",
    },
    part="endpoint",
)
"""Our endpoint (``ours``) beside vLLM's server (``bare``). cpu_ms_per_request: without the engine core's."""


def measure(requests: int, rounds: int, advance: Advance, clients: int = 16, tokens: int = 8) -> ResultRow:
    """Return one row: ``rounds`` of both in turns, after one round of each that does not count.

    requests: of one round. clients: requests at once. tokens: most sampled tokens of an answer.
    """
    try:
        import vllm
    except ImportError as error:
        raise ConfigError(f"bench agents measures vLLM's server, and vLLM is not installed: {error}") from error
    with tempfile.TemporaryDirectory(prefix="tidemill-bench-") as name:
        parameters = write_model(Path(name), MAX_LENGTH)
        settings = EngineSettings(name, "float32", MAX_LENGTH, clients)
        done = _run(settings, requests, tokens, rounds, advance)
    return ENDPOINT.row(
        requests=requests,
        clients=clients,
        tokens=tokens,
        parameters=parameters,
        rounds=rounds,
        by=summarize(done),
        ratio=ratio(done, "requests_per_s", "ours", "bare"),
        cpu_ratio=ratio(done, "cpu_ms_per_request", "ours", "bare"),
        vllm=vllm.__version__,
    )


def _run(settings: EngineSettings, requests: int, tokens: int, rounds: int, advance: Advance) -> list[Round]:
    count = -(-requests // CALLS)
    with (
        _vllm_server(settings) as (process, bare_url),
        RoleProcesses({"client": RequestClient}) as client,
        asyncio.Runner() as runner,
    ):

        async def play(pid: int, urls: list[str]) -> Figures:
            job = json.dumps({"urls": urls, "clients": settings.max_samples, "tokens": tokens})
            cpu = cpu_s(pid)
            used = (await asyncio.to_thread(client.run, job, CALLS, ROUND_S))["client"]
            sent = CALLS * len(urls)
            spent_ms = (cpu_s(pid) - cpu) * 1000
            return {"requests_per_s": sent / (used.ended - used.started), "cpu_ms_per_request": spent_ms / sent}

        async def play_ours(ours: _Ours) -> Figures:
            episodes = [ours.begin() for _ in range(count)]
            figures = await play(os.getpid(), [ours.url_of(session) for session in episodes])
            for session in episodes:
                ours.end(session)
            return figures

        server = _our_server(settings, tokens)
        ours = runner.run(server.__aenter__())
        try:
            _wait_until_ready(process, bare_url)
            bare = [f"{bare_url}/v1"] * count
            contenders = {
                "bare": lambda: runner.run(play(process.pid, bare)),
                "ours": lambda: runner.run(play_ours(ours)),
            }
            return compare(contenders, rounds, advance=advance)
        finally:
            runner.run(server.__aexit__(None, None, None))


@dataclass(frozen=True)
class _Ours:
    """Our endpoint over its own engine."""

    url: str
    sessions: Sessions
    policy: PolicyHandle
    template: ChatTemplate
    tokens: int

    def begin(self) -> Session:
        session = Session(self.policy, Conversation(self.template), Sampling(max_tokens=self.tokens))
        self.sessions.add(session)
        return session

    def url_of(self, session: Session) -> str:
        return f"{self.url}/s/{session.token}/v1"

    def end(self, session: Session) -> None:
        """End an episode; InfraError unless its sample has all calls."""
        calls = len(session.conversation.sample(0, "stop").calls)
        self.sessions.end(session)
        if calls != CALLS:
            raise InfraError(f"an episode of the benchmark has {calls} calls instead of {CALLS}")


@asynccontextmanager
async def _our_server(settings: EngineSettings, tokens: int) -> AsyncIterator[_Ours]:
    engine = VllmEngine(settings)
    await engine.start()
    tokenizer, sessions = HfTokenizer(settings.model_path), Sessions()
    parser = AnswerParser("hermes", None, tokenizer, vllm=True)
    places = EngineCapacity(settings.max_samples)
    policy = PolicyHandle(engine, parser, places, settings.max_length, CALLS, tokenizer)
    server = EndpointServer(sessions, AgentsConfig())
    gc.collect()
    gc.freeze()  # as the generator and vLLM's server do
    try:
        yield _Ours(await server.start(), sessions, policy, ChatTemplate(tokenizer), tokens)
    finally:
        await server.close()
        await engine.close()
        gc.unfreeze()


@contextmanager
def _vllm_server(settings: EngineSettings) -> Iterator[tuple[subprocess.Popen[bytes], str]]:
    """vLLM's server with the settings and the environment of our engine."""
    from vllm.platforms import current_platform

    on_cpu = current_platform.is_cpu()
    arguments = engine_arguments(Path(settings.model_path), settings, on_cpu, current_platform.device_count())
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    program = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--host", "127.0.0.1", "--port", str(port)]
    program += ["--model", settings.model_path, "--served-model-name", "policy", "--disable-log-stats"]
    program += ["--disable-uvicorn-access-log"]
    for name in PASSED_ON:
        if arguments.get(name) is not None:
            program += [f"--{name.replace('_', '-')}", str(arguments[name])]
    if on_cpu:
        program += ["--enforce-eager", "--distributed-executor-backend", "uni"]
    process = subprocess.Popen(program, stdout=subprocess.DEVNULL, start_new_session=True)
    try:
        yield process, f"http://127.0.0.1:{port}"
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGTERM)
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _wait_until_ready(process: subprocess.Popen[bytes], url: str) -> None:
    deadline = time.monotonic() + START_S
    while True:
        if process.poll() is not None:
            raise InfraError(f"vLLM's server ended with exit code {process.returncode}; its log is above")
        try:
            with urlopen(f"{url}/health", timeout=5):
                return
        except OSError as error:
            if time.monotonic() > deadline:
                raise InfraError(f"vLLM's server was not ready within {START_S:g} s: {error}") from error
        time.sleep(0.5)


class RequestClient:
    """Client threads that keep their connections; each sends a request when its last one was answered."""

    def run(self, job: str, amount: float) -> dict[str, Any]:
        """Send ``amount`` requests to each of the job's URLs, one at a time from each client."""
        asked = json.loads(job)
        asyncio.run(self._run(asked["urls"], int(amount), asked["clients"], asked["tokens"]))
        return {}

    async def _run(self, urls: list[str], amount: int, clients: int, tokens: int) -> None:
        numbered = iter(enumerate(urls))
        host, port = urls[0].split("/")[2].split(":")

        async def work() -> None:
            reader, writer = await asyncio.open_connection(host, int(port))
            for number, url in numbered:
                path = "/" + url.split("/", 3)[3] + "/chat/completions"
                for call in range(amount):
                    await _ask(reader, writer, path, _body(number, call, tokens))
            writer.close()

        async with asyncio.TaskGroup() as group:
            for _ in range(clients):
                group.create_task(work())


def _body(number: int, call: int, tokens: int) -> bytes:
    question = f"In turn {call} of conversation {number}: what is the number that we look for?"
    messages = [{"role": "system", "content": "You are brief."}, {"role": "user", "content": question}]
    return json.dumps({"model": "policy", "messages": messages, "max_tokens": tokens}).encode()


async def _ask(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, path: str, body: bytes) -> None:
    head = (
        f"POST {path} HTTP/1.1\r\nHost: bench\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    writer.write(head.encode() + body)
    status, *lines = (await reader.readuntil(b"\r\n\r\n")).decode().lower().splitlines()
    fields = dict(line.split(": ", 1) for line in lines if line)
    answer = await reader.readexactly(int(fields["content-length"]))
    if status.split()[1] != "200" or not json.loads(answer)["choices"]:
        raise InfraError(f"a request of the benchmark was answered with {status}: {answer[:200]!r}")
