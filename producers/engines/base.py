"""The protocol of engines. An engine is one copy of the policy in one generator process.

Life cycle::

    engine = VllmEngine(settings)
    await engine.start()                       # loads settings.model_path as version settings.version
    completions = await engine.generate(ids, sampling, n=8)
    await engine.load(FileSource(path), version=7)   # requests in flight go on, their spans say so
    await engine.close()
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import numpy as np
import numpy.typing as npt

from schemas.config import HttpEngineConfig, LoraConfig
from schemas.images import ImageSettings
from schemas.messages import FinishReason, Sampling, Span, WeightSource


@dataclass(frozen=True)
class PromptImage:
    """A picture that the tokens [start, end) of a prompt stand for. data: a PNG file, prepared for the model."""

    digest: str
    start: int
    end: int
    data: bytes


@dataclass(frozen=True)
class EngineSettings:
    """The arguments that an engine is built from.

    dtype: torch's name without prefix. max_length: tokens, prompt and completion.
    max_samples: most samples in flight. args: passed through to the engine library.
    recompute: new weights make keys and values of requests in flight anew, else these go on with what they have.
    report_every: tokens after which ``generate`` reports a growing sample to its ``progress``; None never.
    lora: where files that are loaded hold an adapter of the model and not the model; none at first.
    http: the server of the engine http. images: how images are made into patches; None for a model of text.
    frozen_vision: files that are loaded lack the vision tower, which stays as it is. routed_experts: completions say to
    which experts a mixture's routers sent each token.
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


Ability = Literal[
    "training", "weights", "seeds", "stop", "recompute", "lora", "growing_versions", "cache_usage", "routed_experts"
]
ABILITIES: Mapping[Ability, str] = {
    "training": "every sampled token comes with its log-probability and version, and weights can be loaded",
    "weights": "log-probabilities are those of a model, whose weights load replaces and the probe checks",
    "seeds": "a seed gives the same samples again, whatever runs beside them",
    "stop": "sampling.stop ends a sample, and its ids hold the stop string",
    "recompute": "settings.recompute makes keys and values of requests in flight anew after an update",
    "lora": "settings.lora: what is loaded is an adapter",
    "growing_versions": "progress is called with a growing sample also after an update came under it",
    "cache_usage": "cache_usage tells how full the cache is",
    "routed_experts": "settings.routed_experts: completions of a mixture name the experts of each token",
}
"""What an engine may be without, and still be one; ``Engine.lacks`` names it."""


@dataclass(frozen=True)
class Completion:
    """A sampled completion of G tokens.

    tokens: G ids, the end-of-sequence token included when it was sampled.
    logprobs: float32 [G], of the distribution that was sampled from (after temperature), natural log.
    spans: weight versions over [0, G), in order, without gaps.
    finish: ``abort`` when it was cut short by ``abort_all``; tokens are then what there was.
    routed_experts: uint8 or uint16 [P + G - 1, L, k], the experts of each token that was read, the prompt's P before
    those sampled, the last of which was not, in L layers; None without ``settings.routed_experts``.
    """

    tokens: list[int]
    logprobs: npt.NDArray[np.float32]
    spans: list[Span]
    finish: FinishReason
    routed_experts: npt.NDArray[Any] | None = None


@dataclass(frozen=True)
class KvCacheUsage:
    """How full an engine's cache of keys and values is, in tokens.

    tokens: room for so many. used: by requests in flight, whole blocks. waiting: samples that have no token yet.
    block: tokens in a block, the least that a sample takes for itself.
    """

    tokens: int
    used: int
    waiting: int
    block: int = 1


ProgressCallback = Callable[[int, Completion], None]
"""Called in the event loop with k in [0, n) and what sample k has; its ``finish`` is ``abort`` while it grows."""


class Engine(Protocol):
    """Generation with weights that change under way. All methods raise InfraError when the engine died."""

    @property
    def lacks(self) -> Mapping[Ability, str]:
        """The abilities that this engine is without, each with the reason; known before ``start``."""
        ...

    @property
    def version(self) -> int:
        """Weight version that new tokens are sampled with."""
        ...

    def growth(self) -> int | None:
        """A number that changes with the tokens sampled; None while no request can grow (there is none, or it paused).

        Called from another thread. When it stands still for ``generator.stall_s`` the process is restarted.
        """
        ...

    def cache_usage(self) -> KvCacheUsage | None:
        """How full the cache is; None where ``settings.max_samples`` is the only limit. Answers at once."""
        ...

    async def start(self) -> None:
        """Load the model; returns when it can generate."""
        ...

    async def generate(
        self,
        prompt_ids: Sequence[int],
        sampling: Sampling,
        n: int = 1,
        prefix: Sequence[int] = (),
        progress: ProgressCallback | None = None,
        images: Sequence[PromptImage] = (),
    ) -> list[Completion]:
        """Sample n completions of one prompt, in which ``images`` may stand; those that have some get the argument.

        ``progress`` is called once for each sample when it is finished, though others still run, and before
        that each time it has grown by ``settings.report_every`` tokens.

        ``prefix`` holds tokens that were generated before (a sample handed over by another
        generator) and counts towards ``sampling.max_tokens``; completions hold only what is new, so one
        that had used all up is empty with finish ``length``. At temperature 0 log-probabilities are those
        at temperature 1. DataError if the prompt is too long.
        """
        ...

    async def load(self, source: WeightSource, version: int) -> None:
        """Replace all weights, or the adapter, by those of ``source`` under requests in flight: ``settings.recompute``.

        No request that begins afterwards uses keys and values of older weights.

        Generation goes on by itself afterwards, unless ``pause`` was called before. After an error
        the old version is still the one in use, or InfraError says that it is not.
        """
        ...

    async def logprobs(self, token_ids: Sequence[int], images: Sequence[PromptImage] = ()) -> npt.NDArray[np.float32]:
        """Log-probability of each token after the first at temperature 1, float32 [T-1]: the probe."""
        ...

    async def pause(self) -> None:
        """Stop generating; requests are kept. No token is sampled after this returns."""
        ...

    async def resume(self) -> None:
        """Go on after ``pause``."""
        ...

    async def abort_all(self) -> None:
        """End every request now; its ``generate`` returns what it has with finish ``abort``."""
        ...

    async def close(self) -> None:
        """Free everything, leave no process behind."""
        ...
