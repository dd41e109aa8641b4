"""vLLM's server: its token-in-token-out route and its routes for reinforcement learning.

The first needs ``--enable-scale-out``, the others ``VLLM_SERVER_DEV_MODE=1``. They are not protected by ``--api-key``,
so such a server belongs in a private network; a launched one is on a unix socket. Weights come as a file that the
server reads with our loader, which vLLM finds if Tidemill is installed beside it.
"""

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from producers.engines.base import Ability, EngineSettings
from producers.engines.http.client import Body, Refused, ServerClient
from producers.engines.http.dialect import LACKS, has_gpu, missing_options, options
from producers.engines.http.server import PrivatePlace
from producers.engines.http.streamed_sample import UNREADABLE, StreamedSample
from producers.engines.request_gate import SampleCall
from producers.engines.vllm.arguments import OURS
from producers.engines.vllm.before_import import vllm_variables
from producers.engines.vllm.plugin import BACKEND
from schemas.errors import ConfigError, InfraError

_OURS = {
    **OURS,
    "host": "a launched server listens on a unix socket",
    "port": "a launched server listens on a unix socket",
    "uds": "a launched server listens on a unix socket of its own",
    "generation_config": "set sampling instead",
    "enable_scale_out": "it is always on",
    "enable_lora": "the engine http loads whole models only",
}
_GENERATE = "/inference/v1/generate"
_PREFIX = "generate-tokens-"
"""The prefix that the server adds to the id of a request."""


class VllmDialect:
    """vLLM 0.32's server."""

    lacks: Mapping[Ability, str] = {**LACKS, "routed_experts": "only the engine vllm supports them"}
    path = _GENERATE

    def command(self, settings: EngineSettings, folder: Path, place: PrivatePlace) -> list[str]:
        http = settings.http
        program = (http and http.command) or [sys.executable, "-m", "vllm.entrypoints.openai.api_server"]
        arguments = options(settings.args, _OURS, negative=True)
        defaults = {} if has_gpu() else _cpu_options(folder, settings)
        return [
            *program,
            *("--model", str(folder), "--uds", str(place.socket)),
            *("--dtype", settings.dtype, "--max-model-len", str(settings.max_length)),
            *("--max-num-seqs", str(settings.max_samples), "--seed", str(settings.seed)),
            *("--logprobs-mode", "processed_logprobs", "--generation-config", "vllm"),
            *("--weight-transfer-config", f'{{"backend":"{BACKEND}"}}', "--enable-scale-out"),
            *("--disable-uvicorn-access-log", "--disable-log-stats"),
            *(("--trust-remote-code",) if settings.trust_remote_code else ()),
            *arguments,
            *missing_options(arguments, defaults),
        ]

    def client(self, place: PrivatePlace, key: str | None) -> ServerClient:
        return ServerClient("http://localhost", key, place.socket)

    def environment(self) -> dict[str, str]:
        return vllm_variables(on_cpu=not has_gpu()) | {"VLLM_SERVER_DEV_MODE": "1"}

    async def check(self, client: ServerClient, settings: EngineSettings, folder: Path) -> str:
        try:
            version = (await client.get("/version"))["version"]
            served = (await client.get("/v1/models"))["data"][0]
        except (Refused, KeyError, IndexError, TypeError) as error:
            raise ConfigError(f"generator.http.url {client.shown} is not a vLLM server: {error}") from error
        name = f"vLLM {version}"
        lacking, remedy = "routes that pause it and load weights", "VLLM_SERVER_DEV_MODE=1"
        try:
            await client.get("/weight_info")
            lacking, remedy = _GENERATE, "--enable-scale-out"
            # The request is invalid: only the status tells whether the route exists.
            await client.post(_GENERATE, {"token_ids": []})
        except Refused as error:
            if lacking != _GENERATE or error.status in (403, 404):
                raise ConfigError(
                    f"{name} at {client.shown} has no {lacking}, so it can't be trained with: start it with {remedy};"
                    " as it is, it serves tidemill eval (dialect openai) and judges"
                ) from error
        length, backend = settings.max_length, f'\'{{"backend":"{BACKEND}"}}\''
        try:
            config = (await client.get("/server_info?config_format=json"))["vllm_config"]
            loader = (config.get("weight_transfer_config") or {}).get("backend")
            fulfilled = {
                f"--max-model-len {length}, as model.max_length, or more": (served.get("max_model_len") or 0) >= length,
                "--logprobs-mode processed_logprobs": config["model_config"]["logprobs_mode"] == "processed_logprobs",
                f"--weight-transfer-config {backend}, and Tidemill installed": loader == BACKEND,
            }
        except UNREADABLE as error:
            raise ConfigError(f"{name} at {client.shown} reports its settings in an unknown form: {error!r}") from error
        for option, right in fulfilled.items():
            if not right:
                raise ConfigError(f"{name} at {client.shown} must be started with {option}")
        return name

    def request(self, name: str, call: SampleCall[None], index: int, every: int, salt: str) -> Body:
        sampling = call.sampling
        return {
            "request_id": name,
            "token_ids": call.ids,
            "sampling_params": {
                "temperature": sampling.temperature,
                "top_p": sampling.top_p,
                "top_k": max(sampling.top_k, 0),
                "max_tokens": call.max_tokens,
                "seed": None if sampling.seed is None else sampling.seed + index,
                "stop": list(sampling.stop),
                "include_stop_str_in_output": True,
                "logprobs": 0,
                "detokenize": bool(sampling.stop),
                "stream_interval": every,
            },
            "stream": True,
            "cache_salt": salt,
        }

    def read(self, sample: StreamedSample, event: Body) -> None:
        try:
            (choice,) = event["choices"]
            tokens = choice["token_ids"] or []
            given = (choice["logprobs"] or {"content": []})["content"] or []
            if [one["token_id"] for one in given] != tokens:
                raise InfraError(f"the server sends log-probabilities of other tokens than {tokens[:5]}")
            sample.receive(tokens, [one["logprob"] for one in given])
            if choice["finish_reason"] is not None:
                sample.end(choice["finish_reason"], choice["weight_versions"])
        except UNREADABLE as error:
            raise InfraError(f"the server sends an event that can't be read: {error!r}") from error

    async def pause(self, client: ServerClient, recompute: bool) -> None:
        await client.post(f"/pause?mode=keep&clear_cache={str(recompute).lower()}")

    async def resume(self, client: ServerClient) -> None:
        await client.post("/resume")

    async def load(self, client: ServerClient, path: Path, version: int, recompute: bool, deadline_s: float) -> None:
        await client.post("/start_weight_update", None, deadline_s)
        await client.post("/update_weights", {"update_info": {"path": str(path.resolve())}}, deadline_s)
        await client.post("/finish_weight_update", {"weight_version": str(version)}, deadline_s)
        reported: Any = await client.get("/weight_info")
        if reported != {"weight_version": str(version)}:
            raise InfraError(f"after the update to version {version} the server reports {reported}")

    async def abort(self, client: ServerClient, names: Sequence[str], paused: bool) -> None:
        await client.post("/abort_requests", {"request_ids": [_PREFIX + name for name in names]})

    async def logprobs(self, client: ServerClient, ids: Sequence[int], salt: str) -> list[float]:
        sampling = {"temperature": 1.0, "max_tokens": 1, "prompt_logprobs": 0, "detokenize": False}
        body = {"token_ids": list(ids), "sampling_params": sampling, "cache_salt": salt}
        answer = await client.post(_GENERATE, body, deadline_s=120.0)
        try:
            given = list(zip(ids[1:], answer["prompt_logprobs"][1:], strict=True))
            return [float(position[str(token)]["logprob"]) for token, position in given]
        except UNREADABLE as error:
            raise InfraError(f"the server returns no log-probabilities for the probe: {error!r}") from error


def _cpu_options(folder: Path, settings: EngineSettings) -> dict[str, list[str]]:
    """Return options that suit vLLM's CPU build; see producers/engines/vllm/boot.py."""
    from producers.engines.vllm.boot import kv_cache_bytes

    return {
        "--enforce-eager": [],
        # By this name, because on a CPU vLLM starts another process for "uni".
        "--distributed-executor-backend": ["vllm.v1.executor.uniproc_executor.UniProcExecutor"],
        "--kv-cache-memory-bytes": [str(kv_cache_bytes(folder, settings))],
    }
