"""SGLang's server: its native ``/generate`` and its routes for reinforcement learning.

Its pitfalls: an id outside the vocabulary ends the server; requests are aborted by the beginning of their id; a pause
is answered before it reaches the scheduler; if the cache can't be flushed after an update, the answer is an error
although the weights have changed; a request aborted during a pause ends only when it is back in the queue.
"""

import asyncio
import base64
import os
import shutil
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from producers.engines.base import Ability, EngineSettings
from producers.engines.http.client import Body, Refused, ServerClient
from producers.engines.http.dialect import LACKS, has_gpu, missing_options, options, read_config
from producers.engines.http.server import HOST, PrivatePlace
from producers.engines.http.streamed_sample import UNREADABLE, StreamedSample
from producers.engines.request_gate import SampleCall
from producers.engines.routed_experts import mixture_sizes
from schemas.errors import ConfigError, InfraError
from schemas.system.files import atomic_write

_OURS = {
    "model_path": "it is model.path",
    "model": "it is model.path",
    "host": "a launched server listens on this machine only",
    "port": "a launched server takes a free one",
    "api_key": "a launched server has a key of its own",
    "config": "Tidemill passes the server's key in it: give its settings here",
    "dtype": "it is model.dtype",
    "context_length": "it is model.max_length",
    "max_running_requests": "it is generator.max_samples",
    "trust_remote_code": "it is model.trust_remote_code",
    "weight_version": "weights come from the trainer",
    "skip_tokenizer_init": "stop strings need the tokenizer",
    "preferred_sampling_params": "set sampling instead",
    "incremental_streaming_output": "it is always on",
    "lora_paths": "the engine http loads whole models only",
    "enable_lora": "the engine http loads whole models only",
    "enable_return_routed_experts": "trainer.router_replay sets it",
}
_SLEEPS = ("--enable-memory-saver", "--enable-weights-cpu-backup")
_INFO = "/server_info"
_KEPT_BACK = 8
"""Tokens of the context that the server reserves: six at most so far."""


class SglangDialect:
    """SGLang 0.5.23's server."""

    lacks: Mapping[Ability, str] = {
        **LACKS,
        "seeds": "the server uses a seed only with generator.args.enable_deterministic_inference",
    }
    path = "/generate"

    def __init__(self) -> None:
        self._model = Path()
        self._mixture: tuple[int, int, np.dtype[Any]] | None = None
        self._vocabulary = 0

    def command(self, settings: EngineSettings, folder: Path, place: PrivatePlace) -> list[str]:
        http = settings.http
        # Every user of the machine can read command lines.
        secret = place.folder / "server.yaml"
        atomic_write(secret, f"api-key: {place.key}\n", private=True)
        program = (http and http.command) or [sys.executable, "-m", "sglang.launch_server"]
        arguments = options(settings.args, _OURS, negative=False)
        return [
            *program,
            *("--model-path", str(folder), "--host", HOST, "--port", str(place.port), "--config", str(secret)),
            *("--dtype", settings.dtype, "--context-length", str(_context_length(folder, settings.max_length))),
            *("--max-running-requests", str(settings.max_samples), "--random-seed", str(settings.seed)),
            *("--weight-version", str(settings.version), "--incremental-streaming-output"),
            *("--sampling-defaults", "openai", "--log-level", "error"),
            *(("--trust-remote-code",) if settings.trust_remote_code else ()),
            *(("--enable-return-routed-experts",) if settings.routed_experts else ()),
            *(_SLEEPS if settings.sleeps and has_gpu() else ()),
            *arguments,
            *missing_options(arguments, {} if has_gpu() else _cpu_options(settings)),
        ]

    def client(self, place: PrivatePlace, key: str | None) -> ServerClient:
        return ServerClient(f"http://{HOST}:{place.port}", place.key)

    def environment(self) -> dict[str, str]:
        if has_gpu():
            return {}
        return {
            "SGLANG_USE_CPU_ENGINE": "1",
            "OMP_NUM_THREADS": str(max(1, len(os.sched_getaffinity(0)) // 2)),
            "OMP_WAIT_POLICY": "PASSIVE",
        }

    async def check(self, client: ServerClient, settings: EngineSettings, folder: Path) -> str:
        self._model = folder
        config = read_config(folder)
        self._vocabulary = int(config.get("vocab_size", 0))
        if settings.routed_experts:
            self._mixture = mixture_sizes(config, str(folder))
        try:
            info = await client.get(_INFO)
            name = f"SGLang {info['version']}"
            length = info["context_length"]
        except (Refused, KeyError, TypeError) as error:
            raise ConfigError(
                f"generator.http.url {client.shown} is not an SGLang server, so it can't be trained with: {error}"
            ) from error
        if length is not None and length < settings.max_length:
            raise ConfigError(
                f"{name} at {client.shown} must be started with --context-length {settings.max_length}, as"
                f" model.max_length, or more, and has {length}"
            )
        if info.get("preferred_sampling_params") or info.get("skip_tokenizer_init"):
            raise ConfigError(
                f"{name} at {client.shown} must be started without --preferred-sampling-params and without"
                " --skip-tokenizer-init"
            )
        if settings.routed_experts and not info.get("enable_return_routed_experts"):
            raise ConfigError(
                f"trainer.router_replay: {name} at {client.shown} must be started with --enable-return-routed-experts"
            )
        return name

    def request(self, name: str, call: SampleCall[None], index: int, every: int, salt: str) -> Body:
        sampling = call.sampling
        return {
            "rid": name,
            "input_ids": call.ids,
            "sampling_params": {
                "temperature": sampling.temperature,
                "top_p": sampling.top_p,
                "top_k": sampling.top_k if sampling.top_k > 0 else -1,
                "max_new_tokens": call.max_tokens,
                "sampling_seed": None if sampling.seed is None else sampling.seed + index,
                "stop": list(sampling.stop) or None,
                "no_stop_trim": True,
                "stream_interval": every,
            },
            "return_logprob": True,
            "return_routed_experts": self._mixture is not None,
            "stream": True,
            "extra_key": salt,
        }

    def read(self, sample: StreamedSample, event: Body) -> None:
        try:
            meta = event["meta_info"]
            reason = meta["finish_reason"]
            if reason is not None and reason["type"] == "abort" and reason.get("status_code"):
                raise Refused(self.path, int(reason["status_code"]), str(reason.get("message")))
            # Events hold the new tokens, or all tokens; if a request is aborted in the queue, a token is repeated. The
            # count tells how many are new, and new tokens are at the end.
            new = meta["completion_tokens"] - len(sample.tokens)
            tokens = event["output_ids"][-new:] if new else []
            given = meta["output_token_logprobs"][-new:] if new else []
            if new < 0 or len(tokens) != new or [one[1] for one in given] != tokens:
                raise InfraError(
                    f"the server says that a sample has {meta['completion_tokens']} tokens, sends {len(tokens)} with"
                    f" {len(given)} log-probabilities, and has sent {len(sample.tokens)}"
                )
            sample.receive(tokens, [one[0] for one in given])
            if reason is not None:
                sample.end(reason["type"], meta.get("weight_versions"))
                sample.routed_experts = self._routed_experts(meta.get("routed_experts"))
        except UNREADABLE as error:
            raise InfraError(f"the server sends an event that can't be read: {error!r}") from error

    def _routed_experts(self, text: str | None) -> npt.NDArray[Any] | None:
        """Decode the experts of a sample's tokens, int32 in base64; None for a sample that was never started."""
        if self._mixture is None or not text:
            return None
        layers, k, dtype = self._mixture
        try:
            experts = np.frombuffer(base64.b64decode(text, validate=True), "<i4").reshape(-1, layers, k)
        except ValueError as error:
            raise InfraError(f"the server sends routed experts that can't be read: {error}") from error
        return experts.astype(dtype)

    async def pause(self, client: ServerClient, recompute: bool) -> None:
        await client.post("/pause_generation", {"mode": "retract" if recompute else "in_place"})
        # The scheduler answers this after earlier requests, so it has paused by then.
        await client.get(_INFO)

    async def resume(self, client: ServerClient) -> None:
        await client.post("/continue_generation", {})

    async def sleep(self, client: ServerClient) -> None:
        """Free the device's memory; the server is paused, and has no request."""
        await client.post("/release_memory_occupation", {})

    async def wake(self, client: ServerClient) -> None:
        """Use the device again, and resume."""
        await client.post("/resume_memory_occupation", {})
        await self.resume(client)

    async def load(self, client: ServerClient, path: Path, version: int, recompute: bool, deadline_s: float) -> None:
        with ExitStack() as made:
            if path.is_file():
                folder = made.enter_context(tempfile.TemporaryDirectory(prefix="sglang-", dir=path.parent))
                path = await asyncio.to_thread(_make_folder, Path(folder), self._model, path)
            body = {"model_path": str(path.resolve()), "weight_version": str(version), "flush_cache": recompute}
            answer: Any = await client.post("/update_weights_from_disk", body, deadline_s)
        if not isinstance(answer, dict) or answer.get("success") is not True:
            raise InfraError(f"the server answers the update to version {version} with {str(answer)[:300]}")

    async def abort(self, client: ServerClient, names: Sequence[str], paused: bool) -> None:
        if paused:
            await client.post("/pause_generation", {"mode": "retract"})
        await asyncio.gather(*(client.post("/abort_request", {"rid": name}) for name in names))

    async def logprobs(self, client: ServerClient, ids: Sequence[int], salt: str) -> list[float]:
        body = {
            "input_ids": list(ids),
            "sampling_params": {"max_new_tokens": 1, "temperature": 1.0},
            "return_logprob": True,
            "logprob_start_len": 0,
            "extra_key": salt,
        }
        answer = await client.post(self.path, body, deadline_s=120.0)
        try:
            given = answer["meta_info"]["input_token_logprobs"]
            # The last id of the vocabulary is reported as 0, with its own log-probability.
            if [one[1] for one in given] != [0 if token == self._vocabulary - 1 else token for token in ids]:
                raise InfraError("the server returns log-probabilities of other tokens than those of the probe")
            return [float(one[0]) for one in given[1:]]
        except UNREADABLE as error:
            raise InfraError(f"the server returns no log-probabilities for the probe: {error!r}") from error


def _context_length(folder: Path, max_length: int) -> int:
    """Return the context length to ask the server for, which reserves a few tokens of it.

    It is limited to the positions of the model, because the server would not start otherwise; the longest prompts are
    rejected in that case.
    """
    positions = read_config(folder).get("max_position_embeddings")
    return max_length + _KEPT_BACK if positions is None else max(max_length, min(max_length + _KEPT_BACK, positions))


def _make_folder(folder: Path, model: Path, file: Path) -> Path:
    """Build a model folder around a file of weights: small files are copied, the weights are linked."""
    for part in model.iterdir():
        if part.is_file() and not part.name.endswith((".safetensors", ".safetensors.index.json")):
            shutil.copyfile(part, folder / part.name)
    (folder / "model.safetensors").symlink_to(file.resolve())
    folder.chmod(0o755)
    return folder


def _cpu_options(settings: EngineSettings) -> dict[str, list[str]]:
    """Return options that SGLang needs on a CPU, with a cache only as large as all samples need."""
    return {
        "--device": ["cpu"],
        "--attention-backend": ["torch_native"],
        "--grammar-backend": ["none"],
        "--disable-overlap-schedule": [],
        "--skip-server-warmup": [],
        "--mem-fraction-static": ["0.1"],
        "--max-total-tokens": [str(min(settings.max_samples * settings.max_length, 65_536))],
    }
