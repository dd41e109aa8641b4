"""A server with OpenAI's protocol only: it serves evaluations, and can't be trained with.

The protocol reports neither the sampled ids nor their log-probabilities nor weight versions: ids are those of the text,
and log-probabilities are NaN.
"""

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

import numpy as np

from producers.engines.base import Ability, Completion, Engine, EngineSettings, ProgressCallback, PromptImage
from producers.engines.http.client import Body, Refused, ServerClient
from producers.engines.sampling import max_new_tokens
from producers.tokenizer import HfTokenizer
from schemas.config import HttpEngineConfig
from schemas.errors import ConfigError, DataError, InfraError
from schemas.messages import FinishReason, Sampling, Span

_ONLY = "a server that speaks OpenAI's protocol only serves evaluations and judges"
_REQUEST_S = 600.0
_FINISH: dict[str, FinishReason] = {"stop": "stop", "length": "length"}


class OpenAiEngine(Engine):
    """The ``http`` engine of the dialect ``openai``: only ``generate``, for evaluations."""

    lacks: Mapping[Ability, str] = {
        "output_tokens": "only the engines vllm and transformers do",
        "training": "OpenAI's protocol reports neither ids nor log-probabilities nor versions, and loads no weights",
        "weights": "the server's weights can't be replaced",
        "seeds": "a server may ignore them",
        "recompute": "no weights are loaded",
        "lora": "no weights are loaded",
        "routed_experts": "OpenAI's protocol does not report them",
        "growing_versions": "no weights are loaded",
        "cache_usage": "the server does not report how full its cache is",
    }

    def __init__(self, settings: EngineSettings, http: HttpEngineConfig, key: str | None) -> None:
        self._settings = settings
        self.version = settings.version
        self._client = ServerClient(http.url or "", key)
        self._tokenizer: HfTokenizer | None = None
        self._model = ""
        self._heard = 0
        self._active = 0

    def growth(self) -> int | None:
        """See Engine; the samples that the server has answered."""
        return self._heard if self._active else None

    async def start(self) -> None:
        """Ask which model is served. ConfigError if the server has none."""
        try:
            self._model = str((await self._client.get("/v1/models"))["data"][0]["id"])
        except (Refused, KeyError, IndexError, TypeError) as error:
            raise ConfigError(f"generator.http.url {self._client.shown} is not an OpenAI server: {error}") from error
        self._tokenizer = await asyncio.to_thread(
            HfTokenizer, self._settings.model_path, self._settings.trust_remote_code
        )

    async def generate(
        self,
        prompt_ids: Sequence[int],
        sampling: Sampling,
        n: int = 1,
        prefix: Sequence[int] = (),
        progress: ProgressCallback | None = None,
        images: Sequence[PromptImage] = (),
    ) -> list[Completion]:
        """See Engine, but log-probabilities are NaN, and ids are those of the text."""
        max_tokens = max_new_tokens(len(prompt_ids), len(prefix), sampling, self._settings.max_length)
        if sampling.top_k > 0:
            raise DataError(f"sampling.top_k {sampling.top_k} is not supported by OpenAI's protocol: set it to -1")
        body = {
            "model": self._model,
            "prompt": [*prompt_ids, *prefix],
            "max_tokens": max_tokens,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            **({"stop": list(sampling.stop)} if sampling.stop else {}),
        }
        self._active += 1
        try:
            return list(await asyncio.gather(*(self._sample(body, sampling, k, progress) for k in range(n))))
        finally:
            self._active -= 1

    async def _sample(
        self, body: Body, sampling: Sampling, index: int, progress: ProgressCallback | None
    ) -> Completion:
        seed = {} if sampling.seed is None else {"seed": sampling.seed + index}
        try:
            answer = await self._client.post("/v1/completions", {**body, **seed}, _REQUEST_S)
        except Refused as error:
            if error.status in (400, 422):
                raise DataError(f"the server rejects the request: {error.text}") from error
            raise InfraError(str(error)) from error
        if self._tokenizer is None:
            raise InfraError("the http engine is not running: it was not started")
        try:
            (choice,) = answer["choices"]
            text, finish = str(choice["text"]), _FINISH[choice["finish_reason"]]
        except (KeyError, TypeError, ValueError) as error:
            raise InfraError(
                f"the server {self._client.shown} sends an answer that can't be read: {error!r}"
            ) from error
        tokens = self._tokenizer.encode(text)
        spans = [Span(self.version, 0, len(tokens))] if tokens else []
        completion = Completion(tokens, np.full(len(tokens), np.nan, np.float32), spans, finish)
        self._heard += 1
        if progress is not None:
            progress(index, completion)
        return completion

    async def _refuse(self, *_: Any, **__: Any) -> NoReturn:
        raise ConfigError(f"generator.http.dialect openai: {_ONLY}")

    load = logprobs = pause = resume = abort_all = _refuse

    async def close(self) -> None:
        await self._client.close()
