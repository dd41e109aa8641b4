"""An engine without a model: tokens, lengths and delays follow from seeds. For chaos tests and dry runs.

It loads neither torch nor vLLM. The same prompt, sampling seed and index give the same tokens, independent of other
requests, so a test can tell a lost sample from a different one.
"""

import asyncio
import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from producers.engines.base import (
    Ability,
    Completion,
    Engine,
    EngineSettings,
    GrowingSample,
    ProgressCallback,
    PromptImage,
)
from producers.engines.request_gate import RequestGate
from producers.engines.sampling import max_new_tokens
from schemas.errors import ConfigError, DataError, InfraError
from schemas.messages import FinishReason, Sampling, WeightSource


@dataclass(frozen=True)
class SampleScript:
    """The fields of ``generator.args`` for this engine. tokens: ids are drawn from [first, first + tokens).

    min_length, max_length: completions end after so many tokens, drawn evenly, or at ``max_tokens`` (then finish is
    ``length``). token_s: seconds between two tokens. fail_every: every Nth request raises InfraError; 0: none.
    """

    tokens: int = 10
    first: int = 3
    min_length: int = 1
    max_length: int = 8
    token_s: float = 0.0
    fail_every: int = 0

    def __post_init__(self) -> None:
        if self.tokens < 1 or self.first < 0 or self.fail_every < 0 or self.token_s < 0:
            raise ConfigError("generator.args of the scripted engine must not be negative, tokens must be 1 or more")
        if not 1 <= self.min_length <= self.max_length:
            raise ConfigError(f"generator.args: min_length {self.min_length} must be in [1, {self.max_length}]")


@dataclass
class _Running(GrowingSample):
    """A sample that is being generated; it ends at ``until`` tokens, with the finish reason ``end``."""

    rng: np.random.Generator
    until: int
    end: FinishReason


class ScriptedEngine(Engine):
    """The ``scripted`` engine; ``settings.args`` are the fields of SampleScript. ``load`` reads no file."""

    lacks: Mapping[Ability, str] = {
        "weights": "there is no model, and load reads no file",
        "stop": "tokens have no text",
        "recompute": "there are no keys and values",
        "lora": "there is no model",
        "cache_usage": "there is no cache",
        "routed_experts": "there is no model",
        "output_tokens": "there is no model",
    }

    def __init__(self, settings: EngineSettings) -> None:
        try:
            self._script = SampleScript(**settings.args)
        except TypeError as error:
            raise ConfigError(f"generator.args of the scripted engine: {error}") from error
        self._settings = settings
        self.version = settings.version
        self._requests = 0
        self._active = 0
        self._rounds = 0
        self._closed = False
        self._gate = RequestGate()

    def growth(self) -> int | None:
        """See Engine; the rounds of tokens so far."""
        return self._rounds if self._active and not self._gate.holders else None

    async def start(self) -> None:
        """Return at once: there is nothing to load."""

    async def generate(
        self,
        prompt_ids: Sequence[int],
        sampling: Sampling,
        n: int = 1,
        prefix: Sequence[int] = (),
        progress: ProgressCallback | None = None,
        images: Sequence[PromptImage] = (),
    ) -> list[Completion]:
        self._check_open()
        limit = max_new_tokens(len(prompt_ids), len(prefix), sampling, self._settings.max_length)
        self._requests += 1
        if self._script.fail_every and self._requests % self._script.fail_every == 0:
            raise InfraError(f"scripted failure of request {self._requests}")
        samples = [self._sample(prompt_ids, prefix, sampling, index, limit) for index in range(n)]
        rejections = self._gate.rejections
        self._active += 1
        try:
            while any(sample.finish is None for sample in samples):
                await asyncio.sleep(self._script.token_s)
                continues = await self._gate.wait_open(rejections)
                self._check_open()
                if not continues:
                    break
                self._rounds += 1
                self._step(samples, progress)
        finally:
            self._active -= 1
        return [sample.completion() for sample in samples]

    def _step(self, samples: list[_Running], progress: ProgressCallback | None) -> None:
        for index, sample in enumerate(samples):
            if sample.finish is None:
                token = self._script.first + int(sample.rng.integers(self._script.tokens))
                sample.add([token], [-float(sample.rng.random())], self.version)
                sample.finish = sample.end if len(sample.tokens) == sample.until else None
                if progress and (sample.finish or sample.is_due(self._settings.report_every)):
                    progress(index, sample.completion())

    def _sample(
        self, prompt: Sequence[int], prefix: Sequence[int], sampling: Sampling, index: int, limit: int
    ) -> _Running:
        key = repr((self._settings.seed, list(prompt), list(prefix), sampling.seed, index))
        rng = np.random.default_rng(int.from_bytes(hashlib.blake2b(key.encode(), digest_size=8).digest(), "little"))
        wanted = int(rng.integers(self._script.min_length, self._script.max_length + 1))
        end: FinishReason = "stop" if wanted <= limit else "length"
        return _Running(rng, min(wanted, limit), end, finish=None if limit else end)

    async def load(self, source: WeightSource, version: int) -> None:
        """Switch to ``version``; no file is read."""
        self._check_open()
        self.version = version

    async def logprobs(self, token_ids: Sequence[int], images: Sequence[PromptImage] = ()) -> npt.NDArray[np.float32]:
        """Return zeros: there is no model whose weights a probe could check."""
        self._check_open()
        if len(token_ids) < 2:
            raise DataError(f"a probe of {len(token_ids)} tokens: must be 2 or more")
        return np.zeros(len(token_ids) - 1, dtype=np.float32)

    async def pause(self) -> None:
        self._check_open()
        self._gate.holders = 1

    async def resume(self) -> None:
        self._check_open()
        await self._gate.release(self._gate.holders)

    async def sleep(self) -> None:
        """See SleepingEngine; there is no device."""
        self._check_open()
        await self.abort_all()

    async def wake(self) -> None:
        self._check_open()

    async def abort_all(self) -> None:
        await self._gate.reject_waiting()

    async def close(self) -> None:
        self._closed = True
        await self.abort_all()

    def _check_open(self) -> None:
        if self._closed:
            raise InfraError("the scripted engine was closed")
