"""How evenly the routers of a mixture of experts spread tokens; an imbalance shows here before it shows in the loss.

transformers' experts have no capacity: none drops a token, however many are sent to it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from consumers.trainer.distributed.layout import number_of_experts
from consumers.trainer.distributed.precision import language_model_of
from consumers.trainer.model.router_replay import has_experts


def watch_experts(model: nn.Module) -> ExpertLoad | None:
    """Watch the experts of a model's language model; None if it has none."""
    language_model = language_model_of(model)
    experts = 0 if language_model is None else number_of_experts(language_model.config.get_text_config())
    return ExpertLoad(model, experts) if experts else None


class ExpertLoad:
    """Counts the tokens that forward passes with a gradient send to each expert, between one ``result`` and the next.

    A pass that is computed again for backward counts twice, for every expert alike.
    """

    def __init__(self, model: nn.Module, experts: int) -> None:
        layers = [m for m in model.modules() if has_experts(m)]
        self._experts = experts
        self._counts: list[Tensor | None] = [None] * len(layers)
        for number, layer in enumerate(layers):
            layer.register_forward_pre_hook(self._hook(number), with_kwargs=True)

    def _hook(self, layer: int) -> Callable[..., None]:
        def count(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            values = (value for value in (*args, *kwargs.values()) if isinstance(value, Tensor))
            chosen = next((value for value in values if value.dtype == torch.int64), None)
            if chosen is None or not torch.is_grad_enabled():
                return
            counts = self._counts[layer]
            if counts is None:
                # The last one is for places that a plan has marked as another rank's.
                counts = self._counts[layer] = torch.zeros(self._experts + 1, device=chosen.device)
            places = chosen.reshape(-1).clamp(0, self._experts)
            counts.scatter_add_(0, places, torch.ones_like(places, dtype=counts.dtype))

        return count

    def result(self, add: Callable[[list[float]], list[float]]) -> dict[str, float]:
        """Return the metrics since the last call; ``add`` is a sum over all ranks.

        expert_load_max: tokens of the fullest expert over the mean of its layer, in the worst layer, 1 if all are
        even. experts_unused: share of the experts that got none.
        """
        if not self._counts:
            return {}
        none = torch.zeros(self._experts)
        counted = [none if counts is None else counts[:-1].cpu() for counts in self._counts]
        total = torch.tensor(add(torch.cat(counted).tolist())).view(len(counted), self._experts)
        self._counts = [None] * len(counted)
        mean = total.mean(-1).clamp(min=1e-9)
        return {
            "expert_load_max": float((total.amax(-1) / mean).max()),
            "experts_unused": float((total == 0).float().mean()),
        }
