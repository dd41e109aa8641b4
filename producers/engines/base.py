"""The protocol of engines. An engine is one copy of the policy in one generator process.

Life cycle::

    engine = VllmEngine(settings)
    await engine.start()                       # loads settings.model_path as version settings.version
    completions = await engine.generate(ids, sampling, n=8)
    await engine.load(FileSource(path), version=7)   # requests in flight continue; their spans show it
    await engine.close()
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from schemas.config import HttpEngineConfig, LoraConfig
from schemas.images import ImageSettings
from schemas.messages import FinishReason, Sampling, Span, WeightSource, add_spans


@dataclass(frozen=True)
class PromptImage:
    """An image that the tokens [start, end) of a prompt stand for. data: a PNG file, prepared for the model."""

    digest: str
    start: int
    end: int
    data: bytes


@dataclass(frozen=True)
class EngineSettings:
    """The arguments that an engine is built from.

    dtype: torch's name without prefix. max_length: tokens of prompt and completion together. max_samples: the most
    samples in flight. args: passed to the engine library. recompute: after an update, requests in flight recompute
    their keys and values instead of keeping them. report_every: ``generate`` reports a growing sample to ``progress``
    after so many tokens; None: never. lora: set if loaded files hold an adapter instead of the model; a new engine has
    no adapter. http: the server of the engine http. images: how images are cut into patches; None for a text model.
    frozen_vision: loaded files lack the vision tower, which keeps its weights. routed_experts: completions report the
    experts of each token. sleeps: ``sleep`` will be called. output_tokens: ids of the only tokens that are sampled, and
    among which log-probabilities are computed; None: all. exact: compute a token the same, to the last bit, whatever is
    in flight with it.
    """

    model_path: str
    dtype: str
    max_length: int
    max_samples: int
    version: int = 0
    seed: int = 0
    trust_remote_code: bool = False
    recompute: bool = False
    report_every: int | None = None
    args: dict[str, Any] = field(default_factory=dict)
    lora: LoraConfig | None = None
    http: HttpEngineConfig | None = None
    images: ImageSettings | None = None
    frozen_vision: bool = False
    routed_experts: bool = False
    sleeps: bool = False
    output_tokens: Sequence[int] | None = None
    exact: bool = False


Ability = Literal[
    "training", "weights", "seeds", "stop", "recompute", "lora", "growing_versions", "cache_usage", "routed_experts",
    "output_tokens",
]  # fmt: skip
ABILITIES: Mapping[Ability, str] = {
    "training": "every sampled token comes with its log-probability and version, and weights can be loaded",
    "weights": "log-probabilities are those of a model, whose weights load replaces and the probe checks",
    "seeds": "a seed gives the same samples again, independent of other requests",
    "stop": "sampling.stop ends a sample, and its ids hold the stop string",
    "recompute": "settings.recompute: requests in flight recompute keys and values after an update",
    "lora": "settings.lora: loaded files are adapters",
    "growing_versions": "progress is also called with a growing sample that an update interrupted",
    "cache_usage": "cache_usage reports how full the cache is",
    "routed_experts": "settings.routed_experts: completions of a mixture name the experts of each token",
    "output_tokens": "settings.output_tokens: only these tokens are sampled",
}
"""Abilities that an engine may lack; ``Engine.lacks`` names those."""


@dataclass(frozen=True)
class Completion:
    """A sampled completion of G tokens.

    tokens: G ids, with the end-of-sequence token if it was sampled. logprobs: float32 [G], natural log, of the
    distribution that was sampled from (after temperature). spans: weight versions over [0, G), in order, without gaps.
    finish: ``abort`` if ``abort_all`` ended it early; tokens are those sampled by then. routed_experts: uint8 or uint16
    [P + G - 1, L, k], the k experts in each of L layers, for the prompt's P tokens and all sampled tokens but the last,
    which no layer read; None without ``settings.routed_experts``.
    """

    tokens: list[int]
    logprobs: npt.NDArray[np.float32]
    spans: list[Span]
    finish: FinishReason
    routed_experts: npt.NDArray[Any] | None = None


FINISH: Mapping[str, FinishReason] = {"stop": "stop", "length": "length", "abort": "abort"}
"""Finish reasons by the words with which vLLM and servers end a sample."""


@dataclass(kw_only=True)
class GrowingSample:
    """A completion that is being sampled. reported: how many tokens it had at the last call of ``completion``."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    spans: list[Span] = field(default_factory=list)
    finish: FinishReason | None = None
    reported: int = 0
    routed_experts: npt.NDArray[Any] | None = None

    def add(self, tokens: Sequence[int], logprobs: Sequence[float], version: int) -> None:
        """Add new tokens and their log-probabilities, all of this weight version."""
        start = len(self.tokens)
        self.tokens += tokens
        self.logprobs += logprobs
        add_spans(self.spans, [Span(version, start, len(self.tokens))] if tokens else [])

    def is_due(self, every: int | None) -> bool:
        """Tell whether it grows, and by ``every`` tokens or more since the last report; False if ``every`` is None."""
        return every is not None and self.finish is None and len(self.tokens) - self.reported >= every

    def completion(self) -> Completion:
        """Return the tokens so far; ``finish`` is ``abort`` while it grows."""
        self.reported = len(self.tokens)
        logprobs = np.asarray(self.logprobs, dtype=np.float32)
        return Completion(list(self.tokens), logprobs, list(self.spans), self.finish or "abort", self.routed_experts)


@dataclass(frozen=True)
class KvCacheUsage:
    """How full an engine's cache of keys and values is, in tokens.

    tokens: capacity. used: by requests in flight, in whole blocks. waiting: samples that have no token yet. block:
    tokens in a block, the least that a sample uses.
    """

    tokens: int
    used: int
    waiting: int
    block: int = 1


ProgressCallback = Callable[[int, Completion], None]
"""Called in the event loop with k in [0, n) and the tokens of sample k; ``finish`` is ``abort`` while it grows."""


class Engine(Protocol):
    """Generation with weights that change during requests. All methods raise InfraError if the engine has failed.

    lacks: the abilities that it lacks, each with the reason; known before ``start``. version: the weight version with
    which new tokens are sampled.
    """

    lacks: Mapping[Ability, str]
    version: int

    async def start(self) -> None:
        """Load the model; returns when the engine can generate."""

    async def generate(
        self,
        prompt_ids: Sequence[int],
        sampling: Sampling,
        n: int = 1,
        prefix: Sequence[int] = (),
        progress: ProgressCallback | None = None,
        images: Sequence[PromptImage] = (),
    ) -> list[Completion]:
        """Sample n completions of one prompt. ``images`` is passed only if the prompt contains images.

        ``progress`` is called once for each sample when it is finished, even if others still run, and before that each
        time it has grown by ``settings.report_every`` tokens.

        ``prefix`` holds tokens that another generator sampled before it handed the sample over. They count towards
        ``sampling.max_tokens``; completions hold only new tokens. If the prefix has used up the limit, they are empty
        with finish ``length``. At temperature 0 log-probabilities are those at temperature 1. DataError if the prompt
        is too long.
        """

    async def load(self, source: WeightSource, version: int) -> None:
        """Replace all weights, or the adapter, by those of ``source`` while requests run; see ``settings.recompute``.

        No request that starts afterwards uses keys and values of older weights. Generation resumes by itself, unless
        ``pause`` was called before. After an error the old version is still in use, or InfraError says that it is not.
        """

    async def logprobs(self, token_ids: Sequence[int], images: Sequence[PromptImage] = ()) -> npt.NDArray[np.float32]:
        """Return the log-probability of each token after the first at temperature 1, float32 [T-1]: the probe."""

    def growth(self) -> int | None:
        """Return a number that changes when tokens are sampled; None while none can be: no requests, or paused.

        Called from another thread. If it stands still for ``generator.stall_s``, the process is restarted.
        """

    def cache_usage(self) -> KvCacheUsage | None:
        """Return how full the cache is; None if ``settings.max_samples`` is the only limit. Does not block."""
        return None

    async def pause(self) -> None:
        """Stop generating and keep the requests. No token is sampled after this returns."""

    async def resume(self) -> None:
        """Resume after ``pause``."""

    async def abort_all(self) -> None:
        """End every request now; its ``generate`` returns the tokens it has, with finish ``abort``."""

    async def close(self) -> None:
        """Free all memory and end all processes of the engine."""


@runtime_checkable
class SleepingEngine(Protocol):
    """What an Engine also has that gives its device to others and takes it back, for ``placement`` with shared GPUs."""

    async def sleep(self) -> None:
        """End every request as ``abort_all`` does, and free the device's memory; called while the engine is paused.

        Requests that come meanwhile wait until ``resume``. The weights stay, in main memory.
        """

    async def wake(self) -> None:
        """Use the device again. Until ``resume`` the engine samples nothing, but ``load`` and ``logprobs`` work."""
