"""The networks of model.kind mlp: an actor, which is published, and a critic, which only the trainer has."""

import copy
import math
from itertools import pairwise
from typing import Literal, TypeAlias, cast

import torch
from torch import Tensor, nn

from consumers.trainer.fragments.moments import Moments
from schemas.messages.fragments import CLOSE_TO_1, LOG_STD_BOUNDS, probe_observations
from schemas.policy_shape import PolicyShape

Norm: TypeAlias = Literal["none", "layer", "batch"]
LEAST_LOG_STD, MOST_LOG_STD = LOG_STD_BOUNDS


def _perceptron(shape: PolicyShape, first: int, last: int, last_gain: float, norm: Norm = "none") -> nn.Sequential:
    """Return linear layers with orthogonal weights (arXiv:2005.12729) and activations between them.

    norm: "layer" adds a norm after each linear layer but the last, "batch" one before each linear layer.
    """
    layers: list[nn.Module] = []
    sizes = [first, *shape.hidden, last]
    for k, (size, following) in enumerate(pairwise(sizes), start=2):
        linear = nn.Linear(size, following)
        nn.init.orthogonal_(linear.weight, math.sqrt(2) if k < len(sizes) else last_gain)
        nn.init.zeros_(linear.bias)
        layers += [nn.BatchNorm1d(size, momentum=0.01)] if norm == "batch" else []
        layers.append(linear)
        if k < len(sizes):
            layers += [nn.LayerNorm(following)] if norm == "layer" else []
            layers.append(nn.ReLU() if shape.activation == "relu" else nn.Tanh())
    return nn.Sequential(*layers)


def _moments(shape: PolicyShape) -> Moments:
    return Moments(shape.size if shape.normalise else 0)


class Pixels(nn.Sequential):
    """The convolutions that a picture goes through; nothing where numbers are observed (doi:10.1038/nature14236)."""

    def __init__(self, shape: PolicyShape) -> None:
        layers: list[nn.Module] = []
        self._picture, self._features = shape.picture, shape.features
        if shape.picture is not None:
            channels = shape.picture[2]
            for following, side, stride in shape.filters:
                layers += [nn.Conv2d(channels, following, side, stride), nn.ReLU()]
                nn.init.orthogonal_(cast(Tensor, layers[-2].weight), math.sqrt(2))
                nn.init.zeros_(cast(Tensor, layers[-2].bias))
                channels = following
        super().__init__(*layers)

    def forward(self, observations: Tensor) -> Tensor:
        """Return float32 [..., features] of observations [..., O]: of bytes, or numbers up to 255, where a picture."""
        if self._picture is None:
            return observations
        values = observations.reshape(-1, *self._picture).permute(0, 3, 1, 2).float() / 255
        for layer in self:
            values = layer(values)
        return values.reshape(*observations.shape[:-1], self._features)


class Actor(nn.Module):
    """A policy: a categorical distribution of each part of an action, a normal one, or one that tanh squashes.

    The deviations of a normal distribution do not depend on the observation. Like a model of text without them, it has
    None for adapter, vision, router_replay and output_tokens.
    """

    adapter = vision = router_replay = output_tokens = None

    def __init__(self, shape: PolicyShape) -> None:
        super().__init__()
        self._shape = shape
        self.pixels, self.moments = Pixels(shape), _moments(shape)
        self.layers = _perceptron(shape, shape.features, shape.outputs, 0.01)
        if shape.continuous and not shape.squashed:
            self.log_std = nn.Parameter(torch.zeros(shape.counts))

    @property
    def device(self) -> torch.device:
        """The device of its parameters."""
        return next(self.parameters()).device

    def forward(self, observations: Tensor, actions: Tensor) -> tuple[Tensor, Tensor]:
        """Return log-probability (or density) of each action and entropy, float32 [M] both.

        observations: float32 [M, O], or bytes of pictures. actions: int64 [M] or [M, A], or float32 [M, A].
        """
        if self._shape.squashed:
            means, deviations = self._normal(observations)
            drawn = torch.atanh(actions.clamp(-CLOSE_TO_1, CLOSE_TO_1))
            return _squashed_logprobs(drawn, means, deviations), deviations.log().sum(-1)
        outputs = self.layers(self.moments(self.pixels(observations)))
        if actions.is_floating_point():
            deviations = self.log_std.exp()
            scaled = (actions - outputs) / deviations
            logprobs = (-0.5 * scaled.square() - self.log_std - 0.5 * math.log(2 * math.pi)).sum(-1)
            entropy = (self.log_std + 0.5 + 0.5 * math.log(2 * math.pi)).sum()
            return logprobs, entropy.expand(len(outputs))
        parts = [torch.log_softmax(part, -1) for part in outputs.split(self._shape.counts, -1)]
        chosen = actions.reshape(len(outputs), -1, 1).unbind(1)
        logprobs = sum(part.gather(-1, one)[:, 0] for part, one in zip(parts, chosen, strict=True))
        return cast(Tensor, logprobs), cast(Tensor, sum(-(part.exp() * part).sum(-1) for part in parts))

    def sample(self, observations: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
        """Return actions of a squashed policy, float32 [M, A] in [-1, 1], and their log-densities, float32 [M].

        noise: float32 [M, A], of a standard normal distribution; gradients go through the actions.
        """
        means, deviations = self._normal(observations)
        drawn = means + noise * deviations
        return torch.tanh(drawn), _squashed_logprobs(drawn, means, deviations)

    def _normal(self, observations: Tensor) -> tuple[Tensor, Tensor]:
        """Return means and deviations before tanh, float32 [M, A] both."""
        means, log_std = self.layers(self.moments(observations)).chunk(2, -1)
        return means, log_std.clamp(LEAST_LOG_STD, MOST_LOG_STD).exp()

    @torch.no_grad()
    def probe(self, tokens: list[int]) -> Tensor:
        """Return the log-probabilities of a probe's tokens, float32 [T - 1]; see ``probe_observations``."""
        observations = torch.from_numpy(probe_observations(tokens, self._shape.size, self._shape.picture is not None))
        observations = observations.to(self.device)
        counts = torch.tensor(self._shape.counts, device=self.device)
        following = torch.tensor(tokens[1:], device=self.device)[:, None] % counts
        actions = torch.zeros(len(following), *self._shape.counts) if self._shape.continuous else following
        found: Tensor = self(observations, actions.to(self.device))[0]
        return found


def _squashed_logprobs(drawn: Tensor, means: Tensor, deviations: Tensor) -> Tensor:
    """Return the log-density of tanh(drawn), float32 [M]; log(1 - tanh(x)^2) is written so that it stays finite."""
    normal = -0.5 * ((drawn - means) / deviations).square() - deviations.log() - 0.5 * math.log(2 * math.pi)
    return (normal - 2 * (math.log(2) - drawn - nn.functional.softplus(-2 * drawn))).sum(-1)


class TwinCritic(nn.Module):
    """Two or more Q networks, and the targets that follow them slowly. returns: as in ValueNetwork.

    With the norm ``batch`` there are no targets: one pass over the transitions of both steps has the same statistics
    for both, and values of the next step have no gradient (CrossQ, arXiv:1902.05605). Elsewhere running means are used.
    """

    def __init__(self, shape: PolicyShape, count: int = 2, norm: Norm = "none", scale_rewards: bool = False) -> None:
        super().__init__()
        self.moments, self.returns = _moments(shape), Moments(int(scale_rewards))
        size = shape.size + sum(shape.counts)
        self.q = nn.ModuleList(_perceptron(shape, size, 1, 1.0, norm) for _ in range(count))
        self.target = nn.ModuleList() if norm == "batch" else copy.deepcopy(self.q).requires_grad_(False)
        self.eval()

    def forward(self, observations: Tensor, actions: Tensor, target: bool = False) -> Tensor:
        """Return the values of all networks, float32 [Q, M], of observations [M, O] and actions [M, A]."""
        joined = torch.cat([self.moments(observations), actions], -1)
        return torch.stack([network(joined)[:, 0] for network in (self.target if target else self.q)])

    def of_both_steps(self, now: tuple[Tensor, Tensor], following: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """Return the values, float32 [Q, M], of observations and actions, and of the next step's without gradient."""
        if self.target:
            with torch.no_grad():
                values = self(*following, target=True)
            return self(*now), values
        self.train()
        found, values = self(*(torch.cat(pair) for pair in zip(now, following, strict=True))).chunk(2, -1)
        self.eval()
        return found, values.detach()

    @torch.no_grad()
    def follow(self, tau: float) -> None:
        """Move the targets by this share of their distance to the Q networks."""
        if not self.target:
            return
        targets: list[Tensor] = list(self.target.parameters())
        sources: list[Tensor] = list(self.q.parameters())
        torch._foreach_lerp_(targets, sources, tau)


class ValueNetwork(nn.Module):
    """A critic: the value of a state, by a perceptron. returns: moments of discounted returns, which scale rewards."""

    def __init__(self, shape: PolicyShape, scale_rewards: bool = False) -> None:
        super().__init__()
        self.pixels, self.moments, self.returns = Pixels(shape), _moments(shape), Moments(int(scale_rewards))
        self.layers = _perceptron(shape, shape.features, 1, 1.0)

    def forward(self, observations: Tensor) -> Tensor:
        """Return values, float32 [...], of observations, [..., O]."""
        found: Tensor = self.layers(self.moments(self.pixels(observations)))[..., 0]
        return found
