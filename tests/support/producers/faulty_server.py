"""A server that speaks as vLLM's does, and fails as the test says: for faults only, never as proof of compatibility.

As a program it takes vLLM's options, of which it uses only ``--port``, and samples a token every 10 ms.
"""

import argparse
import asyncio
import json
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import uvicorn
from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse, StreamingResponse

Spans = list[dict[str, Any]]


class FaultyServer:
    """What the test sets before each request.

    answers: what a path answers instead: status and body. raw: the same as a whole answer. spans: of a sample, instead
    of the right ones. change: fields of its last event. held: each sample waits for it before its first event.
    logprobs_short: how many log-probabilities are left out. breaks_after: events after which a stream ends.
    token_s: seconds that a token takes.
    """

    def __init__(self) -> None:
        self.version = "default"
        self.answers: dict[str, tuple[int, Any]] = {}
        self.raw: dict[str, Response] = {}
        self.spans: Spans | None = None
        self.change: dict[str, Any] = {}
        self.held: asyncio.Event | None = None
        self.logprobs_short = 0
        self.breaks_after: int | None = None
        self.asked: list[str] = []
        self.salts: list[str] = []
        self.healthy = True
        self.token_s = 0.0
        self.url = ""

    async def answer(self, request: Request) -> Response:
        path = request.url.path
        self.asked.append(path)
        if path in self.raw:
            return self.raw[path]
        if path in self.answers:
            status, body = self.answers[path]
            return JSONResponse(body, status)
        body = await request.json() if await request.body() else {}
        if path == "/health":
            return Response(status_code=200 if self.healthy else 503)
        if path == "/inference/v1/generate" and "prompt_logprobs" in body.get("sampling_params", {}):
            probe = [{str(token): {"logprob": 0.0}} for token in body["token_ids"][1:]]
            return JSONResponse({"prompt_logprobs": [None, *probe]})
        if path == "/inference/v1/generate" and body.get("token_ids"):
            self.salts.append(body["cache_salt"])
            return StreamingResponse(self._events(body["sampling_params"]["max_tokens"]))
        if path == "/inference/v1/generate":
            return JSONResponse({"error": {"message": "empty"}}, 400)
        if path == "/finish_weight_update":
            self.version = body["weight_version"]
        if path == "/update_weight_version":
            self.version = body["new_version"]
        return JSONResponse(
            {
                "/version": {"version": "0.0"},
                "/v1/models": {"data": [{"max_model_len": 4096}]},
                "/weight_info": {"weight_version": self.version},
                "/server_info": {
                    "vllm_config": {
                        "model_config": {"logprobs_mode": "processed_logprobs"},
                        "weight_transfer_config": {"backend": "tidemill"},
                    }
                },
            }.get(path, {})
        )

    async def _events(self, tokens: int) -> AsyncIterator[str]:
        if self.held is not None:
            await self.held.wait()
        for k in range(tokens):
            if k == self.breaks_after:
                return
            await asyncio.sleep(self.token_s)
            last = k == tokens - 1
            spans = self.spans if self.spans is not None else [{"version": self.version, "start": 0, "end": tokens}]
            content = [{"token_id": 5, "logprob": -1.0}] if k >= self.logprobs_short else []
            choice = {
                "token_ids": [5],
                "logprobs": {"content": content},
                "finish_reason": "length" if last else None,
                "weight_versions": spans if last else None,
            } | (self.change if last else {})
            event = {"text": "a\u2028b\x85c\x0bd", "choices": [choice]}  # as SGLang sends it, not escaped
            yield f"data: {json.dumps(event, ensure_ascii=False)}\n\n"
        yield "data: [DONE]\n\n"


@asynccontextmanager
async def served() -> AsyncIterator[FaultyServer]:
    """A faulty server on a free port of this machine."""
    faulty = FaultyServer()
    listener = socket.socket(proto=socket.IPPROTO_TCP)
    listener.bind(("127.0.0.1", 0))
    faulty.url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    server = uvicorn.Server(uvicorn.Config(make_app(faulty), log_level="critical", lifespan="off"))
    running = asyncio.create_task(server.serve([listener]))
    try:
        yield faulty
    finally:
        server.should_exit = True
        server.force_exit = True
        await running


def make_app(faulty: FaultyServer) -> FastAPI:
    """All paths are the server's to answer."""
    app = FastAPI()
    app.add_api_route("/{path:path}", faulty.answer, methods=["GET", "POST"])
    return app


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--uds")
    options, _ = parser.parse_known_args()
    slow = FaultyServer()
    slow.token_s = 0.01
    uvicorn.run(make_app(slow), uds=options.uds, log_level="critical", lifespan="off")
