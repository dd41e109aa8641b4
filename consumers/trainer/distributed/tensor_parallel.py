"""Tensor parallelism: each layer is cut over ranks by transformers' plan for the model, the vocabulary by rows.

The output layer gives each rank logits of its own rows of the vocabulary (model/head.py). The model must be wrapped by
``fully_shard`` afterwards, over a single rank if need be: transformers' hook for norms within heads (Qwen3) adds up
what is in ``grad``, and would count a first micro-batch again at the second; sharding takes it away in between.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, cast

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from schemas.errors import ConfigError

if TYPE_CHECKING:  # importing it takes seconds, and model.kind mlp does not need it
    from transformers import PreTrainedModel

# Of a weight that is cut and sharded it says that two gathers make it whole, and so it is.
logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)


def cut_layers(model: PreTrainedModel, mesh: DeviceMesh, experts_whole: bool = False) -> None:
    """Cut a loaded model over a mesh of one dimension; ConfigError if it has no plan.

    experts_whole: whether experts are dealt to the ranks, which send each other tokens, instead of being cut.
    """
    from transformers.distributed.tensor_parallel import apply_expert_parallelism, apply_tensor_parallelism

    plan = tensor_plan(model, mesh.size())
    experts = dict(model.ep_plan) if experts_whole else {}
    if experts_whole and not experts:
        raise ConfigError(
            f"transformers has no plan for experts of {type(model).__name__}: set trainer.parallel.expert to 1"
        )
    embeddings, head = model.get_input_embeddings(), model.get_output_embeddings()
    tied = head is not None and head.weight is embeddings.weight
    inside = tuple(f"{name}." for name in experts)
    dense = {name: how for name, how in plan.items() if name not in experts and not name.startswith(inside or "\0")}
    apply_tensor_parallelism(model, mesh, dense)
    if experts:
        apply_expert_parallelism(model, mesh, mesh, experts)
    if tied:
        # Cutting has made two parameters of one. A critic's head is not tied, whatever its configuration says.
        model.tie_weights()


def tensor_plan(model: PreTrainedModel, size: int) -> dict[str, str]:
    """Return the model's own plan, with embeddings and the output layer cut by rows of the vocabulary.

    A vocabulary that ``size`` does not divide stays whole, and so does an output layer of something else: a critic's.
    """
    plan = dict(model.tp_plan)
    if not any(name for name in plan if not name.startswith("lm_head")):
        raise ConfigError(
            f"transformers has no tensor-parallel plan for {type(model).__name__}: set trainer.parallel.tensor to 1"
        )
    embeddings, head = model.get_input_embeddings(), model.get_output_embeddings()
    words = cast(Tensor, embeddings.weight).shape[0]
    styles = {id(embeddings): "embedding_rowwise"}
    if isinstance(head, nn.Linear) and head.out_features == words:
        styles[id(head)] = "colwise_gather_output"
    for name, module in model.named_modules():
        if module is embeddings or module is head:
            plan.pop(name, None)
            if words % size == 0 and id(module) in styles:
                plan[name] = styles[id(module)]
    return plan
