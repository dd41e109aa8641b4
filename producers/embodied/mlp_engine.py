"""The engine ``mlp``: a multilayer perceptron that acts, computed by numpy. It loads no PyTorch.

A step of eight environments takes tens of microseconds. The workflow calls ``act`` in a thread of its own; ``load``,
``pause`` and ``abort_all`` come from the event loop, between two actions.
"""

import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Self

import numpy as np
import numpy.typing as npt
from numpy.lib.stride_tricks import sliding_window_view

from producers.engines.base import Ability, Completion, Engine, EngineSettings, PromptImage
from schemas.errors import ConfigError, DataError, InfraError
from schemas.messages import WeightSource
from schemas.messages.fragments import CLOSE_TO_1, LOG_STD_BOUNDS, NORMALISED_BOUND, NORMALISED_EPS, probe_observations
from schemas.policy_shape import PolicyShape

Floats = npt.NDArray[np.float32]
_MOMENTS = ("moments.mean", "moments.variance")
_ONE_THREAD = 1 << 18
"""Most multiplications of a product that numpy's OpenBLAS computes in one thread; further threads spin for 20 ms."""
_LOOK_S = 1.0
"""Seconds after which an action that waits for the end of a pause looks whether the engine was closed."""


@dataclass(frozen=True)
class Acted:
    """Actions of N environments: int32 [N] or [N, A], or float32 [N, A]; log-probabilities, float32 [N]; version."""

    actions: npt.NDArray[Any]
    logprobs: Floats
    version: int


class Perceptron:
    """The weights of one version. layers: of weight [out, in] and bias. log_std: float32 [A] of a normal policy.

    filters: weight [out, in, side, side] and bias of the convolutions that a picture goes through. moments: mean and
    variance of what was observed, float32 [O] both, by which observations are normalised.
    """

    def __init__(
        self,
        shape: PolicyShape,
        layers: Sequence[tuple[Floats, Floats]],
        log_std: Floats | None = None,
        filters: Sequence[tuple[Floats, Floats]] = (),
        moments: tuple[Floats, Floats] | None = None,
    ) -> None:
        self._shape, self._layers, self._log_std, self._filters = shape, layers, log_std, filters
        self._moments = moments and (moments[0], np.sqrt(moments[1] + np.float32(NORMALISED_EPS)))

    @classmethod
    def of(cls, tensors: Mapping[str, Floats], shape: PolicyShape) -> Self:
        """Take the weights of a published file; DataError if they are not of this shape."""
        sizes = [shape.features, *shape.hidden, shape.outputs]
        normal = shape.continuous and not shape.squashed
        expected: dict[str, tuple[int, ...]] = {"log_std": shape.counts} if normal else {}
        if shape.normalise:
            expected |= dict.fromkeys(_MOMENTS, (shape.size,))
        for k, (size, following) in enumerate(pairwise(sizes)):
            expected |= {f"layers.{2 * k}.weight": (following, size), f"layers.{2 * k}.bias": (following,)}
        filters = shape.filters if shape.picture is not None else ()
        channels = shape.picture[2] if shape.picture is not None else 0
        for k, (count, side, _) in enumerate(filters):
            expected |= {f"pixels.{2 * k}.weight": (count, channels, side, side), f"pixels.{2 * k}.bias": (count,)}
            channels = count
        found = {name: tensor.shape for name, tensor in tensors.items()}
        if found != expected:
            raise DataError(f"weights of shapes {found} are not those of model.path, {expected}")
        layers, pixels = (
            [(tensors[f"{name}.{2 * k}.weight"], tensors[f"{name}.{2 * k}.bias"]) for k in range(number)]
            for name, number in (("layers", len(sizes) - 1), ("pixels", len(filters)))
        )
        moments = (tensors[_MOMENTS[0]], tensors[_MOMENTS[1]]) if shape.normalise else None
        return cls(shape, layers, tensors.get("log_std"), pixels, moments)

    def outputs(self, observations: Floats) -> Floats:
        """Return logits or means, float32 [N, A], of observations [N, O]; if squashed also log-deviations, [N, 2 A].

        Pictures are bytes, or numbers up to 255.
        """
        values, act = self._look(observations), np.tanh if self._shape.activation == "tanh" else _relu
        for k, (weight, bias) in enumerate(self._layers):
            values = (act(values) if k else values) @ weight.T + bias
        return values

    def _look(self, observations: npt.NDArray[Any]) -> Floats:
        """Return what the linear layers read, float32 [N, features]: what the convolutions make of a picture."""
        if self._moments is not None:
            mean, deviation = self._moments
            normalised = np.clip((observations - mean) / deviation, -NORMALISED_BOUND, NORMALISED_BOUND)
            return np.asarray(normalised, dtype=np.float32)
        if self._shape.picture is None:
            return observations
        values = np.asarray(observations, dtype=np.float32).reshape(-1, *self._shape.picture) / np.float32(255)
        for (weight, bias), (_, side, stride) in zip(self._filters, self._shape.filters, strict=True):
            # Its types know no pair of axes.
            windows = sliding_window_view(values, (side, side), (1, 2))  # type: ignore[call-overload]
            windows = windows[:, ::stride, ::stride]
            values = _relu(np.tensordot(windows, weight, ((3, 4, 5), (1, 2, 3))) + bias)
        return np.asarray(values.transpose(0, 3, 1, 2).reshape(len(values), -1), dtype=np.float32)

    def sample(self, outputs: Floats, rng: np.random.Generator, greedy: bool) -> tuple[npt.NDArray[Any], Floats]:
        """Draw an action for each row of outputs, the most probable one if ``greedy``; with ``logprobs`` of them."""
        if self._shape.continuous:
            means, log_std = self._normal(outputs)
            noise = 0.0 if greedy else rng.standard_normal(means.shape, dtype=np.float32) * np.exp(log_std)
            actions = np.asarray(means + noise, dtype=np.float32)
            actions = np.tanh(actions) if self._shape.squashed else actions
            return actions, self.logprobs(outputs, actions)
        parts = [_log_softmax(part) for part in self._parts(outputs)]
        chosen = [part.argmax(-1) if greedy else _draw(part, rng) for part in parts]
        found = np.stack(chosen, -1) if isinstance(self._shape.actions, tuple) else chosen[0]
        return found.astype(np.int32), _of_chosen(parts, chosen)

    def logprobs(self, outputs: Floats, actions: npt.NDArray[Any]) -> Floats:
        """Return the log-probability, or log-density, of each action, float32 [N]."""
        if not self._shape.continuous:
            chosen = actions.reshape(len(outputs), -1).T
            return _of_chosen([_log_softmax(part) for part in self._parts(outputs)], list(chosen))
        means, log_std = self._normal(outputs)
        drawn = np.arctanh(np.clip(actions, -CLOSE_TO_1, CLOSE_TO_1)) if self._shape.squashed else actions
        found = -0.5 * ((drawn - means) / np.exp(log_std)) ** 2 - log_std - 0.5 * np.log(2 * np.pi)
        if self._shape.squashed:
            found = found - 2 * (np.log(2) - drawn - np.logaddexp(0, -2 * drawn))
        return np.asarray(found.sum(-1), dtype=np.float32)

    def _parts(self, outputs: Floats) -> list[Floats]:
        """Return the logits of each part of an action of a discrete space."""
        counts = self._shape.counts
        return [outputs] if len(counts) == 1 else np.split(outputs, np.cumsum(counts)[:-1], -1)

    def _normal(self, outputs: Floats) -> tuple[Floats, Floats]:
        """Return means and logarithms of deviations, float32 [N, A] or [A], before tanh."""
        if self._log_std is not None:
            return outputs, self._log_std
        means, log_std = np.split(outputs, 2, -1)
        return means, np.clip(log_std, *LOG_STD_BOUNDS)

    def probe(self, tokens: Sequence[int]) -> Floats:
        """Return the log-probabilities of a probe; see ``probe_observations``."""
        observations = probe_observations(tokens, self._shape.size, self._shape.picture is not None)
        rows = max(1, _ONE_THREAD // max(weight.size for weight, _ in self._layers))
        parts = [self.outputs(observations[first : first + rows]) for first in range(0, len(observations), rows)]
        outputs = np.concatenate(parts)
        if self._shape.continuous:
            return self.logprobs(outputs, np.zeros((len(outputs), *self._shape.counts), np.float32))
        return self.logprobs(outputs, np.asarray(tokens[1:])[:, None] % self._shape.counts)


class MlpEngine(Engine):
    """The engine ``mlp``; see Engine for its methods. It samples actions, by ``act``, in the place of tokens."""

    lacks: Mapping[Ability, str] = {
        "stop": "actions have no text",
        "recompute": "there are no keys and values",
        "lora": "the policy is small and trained whole",
        "cache_usage": "there is no cache",
        "routed_experts": "there are no experts",
        "output_tokens": "it samples actions, no tokens",
    }

    def __init__(self, settings: EngineSettings) -> None:
        if settings.args:
            raise ConfigError(f"generator.args {', '.join(settings.args)}: the engine mlp takes no arguments")
        self._shape = PolicyShape.read(settings.model_path)
        self._policy: Perceptron | None = None
        self.version = settings.version
        self._acted = self._playing = self._aborts = 0
        self._paused = self._closed = False
        self._changed = threading.Condition()

    def growth(self) -> int | None:
        """See Engine; the number of actions so far."""
        return self._acted if self._playing and not self._paused else None

    async def start(self) -> None:
        """Return at once: the first weights are those that the trainer publishes."""

    @contextmanager
    def playing(self) -> Iterator[int]:
        """Mark that environments are played in the block; yields the argument ``begun`` of ``act``."""
        with self._changed:
            self._playing += 1
            begun = self._aborts
        try:
            yield begun
        finally:
            with self._changed:
                self._playing -= 1

    def act(
        self, observations: npt.NDArray[Any], rng: np.random.Generator, begun: int, greedy: bool = False
    ) -> Acted | None:
        """Sample an action for each observation, [N, O], after the end of a pause; None if aborted."""
        with self._changed:
            while self._paused and not self._closed and self._aborts == begun:
                self._changed.wait(_LOOK_S)
            if self._aborts != begun or self._closed:
                return None
            policy, version = self._policy, self.version
            if policy is None:
                raise InfraError("the engine mlp has no weights yet")
            self._acted += 1
            return Acted(*policy.sample(policy.outputs(observations), rng, greedy), version)

    async def generate(self, *_: Any, **__: Any) -> list[Completion]:
        raise DataError("the engine mlp samples actions, no tokens: set generator.workflow.name to fragments")

    async def load(self, source: WeightSource, version: int) -> None:
        """Replace all weights; the next action is of the new version."""
        from safetensors.numpy import load_file

        try:
            policy = Perceptron.of(load_file(source.path), self._shape)
        except OSError as error:
            raise InfraError(f"weights version {version} cannot be read: {error}") from error
        with self._changed:
            self._policy, self.version = policy, version

    async def logprobs(self, token_ids: Sequence[int], images: Sequence[PromptImage] = ()) -> Floats:
        """Return the log-probabilities of the probe, float32 [T - 1]; NaN before the first weights are loaded."""
        if self._policy is None:
            return np.full(len(token_ids) - 1, np.nan, dtype=np.float32)
        return self._policy.probe(token_ids)

    async def pause(self) -> None:
        with self._changed:
            self._paused = True

    async def resume(self) -> None:
        with self._changed:
            self._paused = False
            self._changed.notify_all()

    async def abort_all(self) -> None:
        with self._changed:
            self._aborts += 1
            self._changed.notify_all()

    async def close(self) -> None:
        self._closed = True
        await self.abort_all()


def _relu(values: Floats) -> Floats:
    return np.maximum(values, np.float32(0))


def _draw(logprobs: Floats, rng: np.random.Generator) -> npt.NDArray[np.int64]:
    below = np.exp(logprobs).cumsum(-1) < rng.random((len(logprobs), 1))
    return np.asarray(np.minimum(below.sum(-1), logprobs.shape[1] - 1))


def _of_chosen(parts: Sequence[Floats], chosen: Sequence[npt.NDArray[Any]]) -> Floats:
    """Return the log-probability of actions whose parts are independent, float32 [N]. parts: float32 [N, A] each."""
    each = [part[np.arange(len(part)), k] for part, k in zip(parts, chosen, strict=True)]
    return np.asarray(sum(each[1:], each[0]), dtype=np.float32)


def _log_softmax(values: Floats) -> Floats:
    shifted = values - values.max(-1, keepdims=True)
    return np.asarray(shifted - np.log(np.exp(shifted).sum(-1, keepdims=True)), dtype=np.float32)
