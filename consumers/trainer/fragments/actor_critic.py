"""The networks of model.kind mlp: an actor, which is published, and a critic, which only the trainer has."""

from __future__ import annotations

import math
from itertools import pairwise

import torch
from torch import Tensor, nn

from schemas.messages.fragments import probe_observations
from schemas.policy_shape import PolicyShape


def _perceptron(sizes: list[int], last_gain: float) -> nn.Sequential:
    """Return linear layers with tanh between; orthogonal weights as in PPO's implementations (arXiv:2005.12729)."""
    layers: list[nn.Module] = []
    for size, following in pairwise(sizes):
        linear = nn.Linear(size, following)
        nn.init.orthogonal_(linear.weight, math.sqrt(2) if len(layers) < 2 * len(sizes) - 4 else last_gain)
        nn.init.zeros_(linear.bias)
        layers += [linear, nn.Tanh()]
    return nn.Sequential(*layers[:-1])


class Actor(nn.Module):
    """A policy: a categorical distribution of actions, or a normal one whose deviations do not depend on what is seen.

    adapter, vision, router_replay: None, as a model of text has them without these.
    """

    adapter = vision = router_replay = None

    def __init__(self, shape: PolicyShape) -> None:
        super().__init__()
        self._shape = shape
        self.layers = _perceptron([shape.observations, *shape.hidden, shape.actions], 0.01)
        if shape.continuous:
            self.log_std = nn.Parameter(torch.zeros(shape.actions))

    @property
    def device(self) -> torch.device:
        """Device of the weights."""
        return next(self.parameters()).device

    def forward(self, observations: Tensor, actions: Tensor) -> tuple[Tensor, Tensor]:
        """Return log-probability (or density) of each action and entropy, float32 [M] both.

        observations: float32 [M, O]. actions: int64 [M], or float32 [M, A].
        """
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

    @torch.no_grad()
    def probe(self, tokens: list[int]) -> Tensor:
        """Return the log-probabilities of a probe's tokens, float32 [T - 1]; see ``probe_observations``."""
        observations = torch.from_numpy(probe_observations(tokens, self._shape.observations)).to(self.device)
        count = self._shape.actions
        following = torch.tensor(tokens[1:], device=self.device) % count
        actions = torch.zeros(len(following), count) if self._shape.continuous else following
        found: Tensor = self(observations, actions.to(self.device))[0]
        return found


class ValueNetwork(nn.Module):
    """A critic: the value of a state, by a perceptron of its own."""

    def __init__(self, shape: PolicyShape) -> None:
        super().__init__()
        self.layers = _perceptron([shape.observations, *shape.hidden, 1], 1.0)

    def forward(self, observations: Tensor) -> Tensor:
        """Return values, float32 [...], of observations, float32 [..., O]."""
        found: Tensor = self.layers(observations)[..., 0]
        return found
