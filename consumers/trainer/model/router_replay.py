"""Router replay: a mixture's routers send tokens to the experts that they were sent to at rollout.

If engine and trainer round differently, a router may choose another expert, and the log-probability of the token and
of all after it changes by much more than rounding. Replay takes the choice from the rollout, and the weights of the
chosen experts from the trainer's own router, so that its gradient stays (rollout routing replay, arXiv:2510.11370).
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from consumers.trainer.distributed.layout import number_of_experts
from schemas.errors import ConfigError
from schemas.messages import RoutedExperts

if TYPE_CHECKING:  # importing it takes seconds, and model.kind mlp does not need it
    from transformers import PreTrainedModel

_LAYER = re.compile(r"\blayers\.(\d+)\.")


def has_experts(module: nn.Module) -> bool:
    """Return whether a module itself holds experts: weights of three dimensions that are no convolution's."""
    return not isinstance(module, nn.Conv1d) and any(p.ndim == 3 for p in module.parameters(recurse=False))


class RouterReplay:
    """The routers of a language model, each of which can be given its choice of experts.

    Choices hold from one ``set`` to the next, because backward may compute layers again.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        """Find the routers. ConfigError for a model without experts, or with one whose choice can't be given."""
        config = model.config.get_text_config()
        self.experts = number_of_experts(config)
        self.layers = int(config.num_hidden_layers)
        self.k = int(getattr(config, "num_experts_per_tok", None) or 0)
        self._chosen: Tensor | None = None
        self._counts: Tensor | None = None
        self._heard: set[int] = set()
        if not self.experts or not self.k:
            raise ConfigError(f"trainer.router_replay: {type(model).__name__} has no experts: leave it out")
        routed: set[int] = set()
        for name, module in model.named_modules():
            weight, layer = module._parameters.get("weight"), _LAYER.search(f"{name}.")
            if layer is not None and weight is not None and weight.shape == (self.experts, config.hidden_size):
                module.forward = self._replaying(int(layer[1]), module.forward)
                routed.add(int(layer[1]))
        self._routed = sorted(routed)
        self._check(model)

    def _replaying(self, layer: int, forward: Callable[..., Any]) -> Callable[..., Any]:
        def replaying(*args: Any, **kwargs: Any) -> Any:
            with _Chooser(self, layer):
                return forward(*args, **kwargs)

        return replaying

    @torch.no_grad()
    def _check(self, model: PreTrainedModel) -> None:
        """Try whether each layer that has experts asks for its choice: a router may be built otherwise."""
        if model.device.type == "meta":
            return
        mixtures = [name for name, module in model.named_modules() if has_experts(module)]
        layers = {int(found[1]) for name in mixtures if (found := _LAYER.search(f"{name}."))}
        ids = torch.arange(4, device=model.device)[None] % model.config.get_text_config().vocab_size
        model(input_ids=ids, use_cache=False)
        if missing := sorted(layers - self._heard):
            raise ConfigError(
                f"trainer.router_replay: the router of layer {missing[0]} of {type(model).__name__} can't be told its"
                " choice: leave it out"
            )

    def find_problem(self, routed: RoutedExperts) -> str | None:
        """Say why these choices can't be of this model; None if they can."""
        if (routed.layers, routed.k) != (self.layers, self.k):
            return (
                f"routed_experts of {routed.layers} layers and {routed.k} experts, the trainer's model has"
                f" {self.layers} and {self.k}"
            )
        chosen = routed.numpy()
        known = chosen != np.iinfo(chosen.dtype).max
        if (known.any(-1) != known.all(-1)).any():
            return f"routed_experts names fewer than {self.k} experts of a token"
        if (largest := int(chosen.max(where=known, initial=0))) >= self.experts:
            return f"routed_experts names expert {largest}, the model has {self.experts}"
        # Engines say anything of layers without a router.
        ordered = np.sort(chosen[:, self._routed], axis=-1)
        twice = (ordered[..., 1:] == ordered[..., :-1]) & (ordered[..., 1:] != np.iinfo(chosen.dtype).max)
        if twice.any():
            token, layer, place = np.argwhere(twice)[0].tolist()
            expert = int(ordered[token, layer, place])
            return f"routed_experts names expert {expert} twice for a token in layer {self._routed[layer]}"
        return None

    def set(self, chosen: Tensor | None) -> None:
        """Set the experts of the next pass, [N, L, k]; where they are -1, or if None, the router chooses by itself."""
        self._chosen = chosen

    def choose(self, layer: int, own: Tensor) -> Tensor:
        """Return the experts of each token in this layer, given the router's ``own`` choice: int64 [N, k]."""
        self._heard.add(layer)
        if self._chosen is None:
            return own
        given = self._chosen[:, layer].to(own.dtype)
        known = given[:, :1] >= 0
        if torch.is_grad_enabled():
            changed = known & (given[:, :, None] != own[:, None, :]).all(-1)
            counts = torch.stack([changed.sum(), known.expand_as(given).sum()])
            self._counts = counts if self._counts is None else self._counts + counts
        return torch.where(known, given, own)

    def result(self, add: Callable[[list[float]], list[float]]) -> dict[str, float]:
        """Return the metrics of passes with a gradient since the last call; ``add`` is a sum over all ranks.

        experts_changed: share of the replayed choices that the trainer's routers would not have made; left out if
        no choice was replayed.
        """
        changed, known = add([0.0, 0.0] if self._counts is None else self._counts.tolist())
        self._counts = None
        return {"experts_changed": changed / known} if known else {}


class _Chooser(TorchFunctionMode):
    """Within a router's forward: its top k of all experts are those that the replay says, with the router's values."""

    def __init__(self, replay: RouterReplay, layer: int) -> None:
        super().__init__()
        self._replay = replay
        self._layer = layer

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        if func not in (torch.topk, Tensor.topk):
            return found
        values: Tensor = args[0] if args else (kwargs or {})["input"]
        if values.ndim != 2 or values.shape[1] != self._replay.experts or found[1].shape[1] != self._replay.k:
            return found  # of groups of experts
        chosen = self._replay.choose(self._layer, found[1])
        return torch.return_types.topk((values.gather(1, chosen), chosen))
