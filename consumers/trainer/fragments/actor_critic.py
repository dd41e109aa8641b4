"""The networks of model.kind mlp: an actor, which is published, and a critic, which only the trainer has."""

from __future__ import annotations

import copy
import math
from itertools import pairwise

import torch
from torch import Tensor, nn

from schemas.messages.fragments import CLOSE_TO_1, LOG_STD_BOUNDS, probe_observations
from schemas.policy_shape import PolicyShape

LEAST_LOG_STD, MOST_LOG_STD = LOG_STD_BOUNDS


def _perceptron(shape: PolicyShape, first: int, last: int, last_gain: float) -> nn.Sequential:
    """Return linear layers with activations between, from ``first`` numbers to ``last``.

    Weights are orthogonal, as in PPO's implementations (arXiv:2005.12729).
    """
    sizes = [first, *shape.hidden, last]
    layers: list[nn.Module] = []
    for size, following in pairwise(sizes):
        linear = nn.Linear(size, following)
        nn.init.orthogonal_(linear.weight, math.sqrt(2) if len(layers) < 2 * len(sizes) - 4 else last_gain)
        nn.init.zeros_(linear.bias)
        layers += [linear, nn.ReLU() if shape.activation == "relu" else nn.Tanh()]
    return nn.Sequential(*layers[:-1])


class Actor(nn.Module):
    """A policy: a categorical distribution of actions, a normal one, or a normal one that tanh squashes.

    The deviations of the second do not depend on what is seen.

    adapter, vision, router_replay, output_tokens: None, as a model of text has them without these.
    """

    adapter = vision = router_replay = output_tokens = None

    def __init__(self, shape: PolicyShape) -> None:
        super().__init__()
        self._shape = shape
        self.layers = _perceptron(shape, shape.observations, shape.outputs, 0.01)
        if shape.continuous and not shape.squashed:
            self.log_std = nn.Parameter(torch.zeros(shape.actions))

    @property
    def device(self) -> torch.device:
        """Device of the weights."""
        return next(self.parameters()).device

    def forward(self, observations: Tensor, actions: Tensor) -> tuple[Tensor, Tensor]:
        """Return log-probability (or density) of each action and entropy, float32 [M] both.

        observations: float32 [M, O]. actions: int64 [M], or float32 [M, A].
        """
        if self._shape.squashed:
            means, deviations = self._normal(observations)
            drawn = torch.atanh(actions.clamp(-CLOSE_TO_1, CLOSE_TO_1))
            return _squashed_logprobs(drawn, means, deviations), deviations.log().sum(-1)
        outputs = self.layers(observations)
        if actions.is_floating_point():
            deviations = self.log_std.exp()
            scaled = (actions - outputs) / deviations
            logprobs = (-0.5 * scaled.square() - self.log_std - 0.5 * math.log(2 * math.pi)).sum(-1)
            entropy = (self.log_std + 0.5 + 0.5 * math.log(2 * math.pi)).sum()
            return logprobs, entropy.expand(len(outputs))
        distribution = torch.log_softmax(outputs, -1)
        logprobs = distribution.gather(-1, actions[:, None])[:, 0]
        return logprobs, -(distribution.exp() * distribution).sum(-1)

    def sample(self, observations: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
        """Return actions of a squashed policy, float32 [M, A] in [-1, 1], and their log-densities, float32 [M].

        noise: float32 [M, A], of a standard normal distribution; gradients go through the actions.
        """
        means, deviations = self._normal(observations)
        drawn = means + noise * deviations
        return torch.tanh(drawn), _squashed_logprobs(drawn, means, deviations)

    def _normal(self, observations: Tensor) -> tuple[Tensor, Tensor]:
        """Return means and deviations before tanh, float32 [M, A] both."""
        means, log_std = self.layers(observations).chunk(2, -1)
        return means, log_std.clamp(LEAST_LOG_STD, MOST_LOG_STD).exp()

    @torch.no_grad()
    def probe(self, tokens: list[int]) -> Tensor:
        """Return the log-probabilities of a probe's tokens, float32 [T - 1]; see ``probe_observations``."""
        observations = torch.from_numpy(probe_observations(tokens, self._shape.observations)).to(self.device)
        count = self._shape.actions
        following = torch.tensor(tokens[1:], device=self.device) % count
        actions = torch.zeros(len(following), count) if self._shape.continuous else following
        found: Tensor = self(observations, actions.to(self.device))[0]
        return found


def _squashed_logprobs(drawn: Tensor, means: Tensor, deviations: Tensor) -> Tensor:
    """Return the log-density of tanh(drawn), float32 [M]; log(1 - tanh(x)^2) is written so that it stays finite."""
    normal = -0.5 * ((drawn - means) / deviations).square() - deviations.log() - 0.5 * math.log(2 * math.pi)
    return (normal - 2 * (math.log(2) - drawn - nn.functional.softplus(-2 * drawn))).sum(-1)


class TwinCritic(nn.Module):
    """Two Q networks, and the targets that follow them slowly."""

    def __init__(self, shape: PolicyShape) -> None:
        super().__init__()
        self.q = nn.ModuleList(_perceptron(shape, shape.observations + shape.actions, 1, 1.0) for _ in range(2))
        self.target = copy.deepcopy(self.q).requires_grad_(False)

    def forward(self, observations: Tensor, actions: Tensor, target: bool = False) -> Tensor:
        """Return both values, float32 [2, M], of observations [M, O] and actions [M, A]."""
        joined = torch.cat([observations, actions], -1)
        return torch.stack([network(joined)[:, 0] for network in (self.target if target else self.q)])

    @torch.no_grad()
    def follow(self, tau: float) -> None:
        """Move the targets by this share of their distance to the Q networks."""
        targets: list[Tensor] = list(self.target.parameters())
        sources: list[Tensor] = list(self.q.parameters())
        torch._foreach_lerp_(targets, sources, tau)


class ValueNetwork(nn.Module):
    """A critic: the value of a state, by a perceptron of its own."""

    def __init__(self, shape: PolicyShape) -> None:
        super().__init__()
        self.layers = _perceptron(shape, shape.observations, 1, 1.0)

    def forward(self, observations: Tensor) -> Tensor:
        """Return values, float32 [...], of observations, float32 [..., O]."""
        found: Tensor = self.layers(observations)[..., 0]
        return found
