"""One training step of rank 0 of many, rehearsed on shapes: what it takes of a card's memory, and its FLOPs.

It is the step of the trainer, ``build_train_step``, with the trainer's own sharding, over a process group that answers
every collective at once. It leaves its process unusable for anything else: rehearsal_process.py forks one for each.
"""

import math
import os
from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict, replace
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException, FakeTensorMode
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import PreTrainedModel

from consumers.trainer.data.collate import MicroBatch
from consumers.trainer.data.patches import ImageBatch
from consumers.trainer.data.plan import StepBatch
from consumers.trainer.distributed.layout import Layout, check_model
from consumers.trainer.distributed.ranks import Ranks, local_part
from consumers.trainer.model import head, packing
from consumers.trainer.model.lora import adapt
from consumers.trainer.model.policy import DTYPES, Policy, load_model
from consumers.trainer.model.vision import VisionTower, image_settings_of
from consumers.trainer.step import optimizers
from consumers.trainer.step.build import build_train_step
from consumers.trainer.step.critic import Critic
from consumers.trainer.step.gradient_update import GradientUpdate, LocalAdamW
from consumers.trainer.step.train_step import TrainStep, laid_out
from deploy.planning.cards import MAIN_MEMORY
from deploy.planning.cluster import bytes_in_4_bits
from deploy.planning.shapes import MemoryLedger, SavedAway, ShapesOnly
from deploy.planning.step_size import StepSize, Traffic, cut_to, extrapolate, find_depths, try_small
from deploy.planning.work import WorkLedger
from schemas.config import TidemillConfig, parse_config
from schemas.config.trainer import CHECKPOINTED_FROM, CriticConfig
from schemas.errors import ConfigError
from schemas.model_folder import check_quantised


def rehearse(config: TidemillConfig, ranks: int, on_gpu: bool = True) -> StepSize:
    """Run the step of rank 0 of ``ranks`` on shapes; ConfigError names what cannot be computed so.

    on_gpu: with the kernels and chunks that a GPU has, otherwise those of a CPU. A model of many equal layers is
    computed with two small numbers of them, and the rest follows. The process can do nothing else later.
    """
    os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": str(ranks), "MASTER_ADDR": "localhost"}
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)
    joined = Ranks(parallel=config.trainer.parallel)
    # Fake tensors tell "cpu" from "cpu:0".
    joined.accelerator.state.device = torch.device("cpu")
    # The other ranks do not exist, so what is sent to them goes nowhere.
    joined.__dict__["channel"] = SimpleNamespace(send=lambda rank, data: None)
    if ranks == 1 and config.model.dtype == "float32":
        # Moving fake tensors to the device that they are on fails.
        joined.prepare = lambda model, *_: model  # type: ignore[method-assign]
    # A mesh asks tensors for values: make all that the step uses before there are none.
    _ = joined.mesh, joined._sharding_mesh, joined._data_group
    check_model(config.model.path, joined.layout, config.model.trust_remote_code)
    tried = try_small(config)
    if on_gpu:
        packing.KERNELS["each"] = packing.KERNELS["varlen"]
        head.CPU_LOGITS = head.CHUNK_LOGITS
        torch.autograd.graph.save_on_cpu = SavedAway  # type: ignore[assignment, misc]
    optimizers._build_8bit = _Sized8bit
    try:
        model, _ = _load_empty(config, None, "float32", adapted=True)
        critic = config.trainer.critic
        others = config.trainer.kl.model or (critic and critic.model)
        depths = None if others else find_depths(model)
        if depths is None:
            return _rehearse_whole(config, joined, tried, on_gpu)
        checkpointed = sum(p.numel() for p in model.parameters()) >= CHECKPOINTED_FROM
        found = []
        for layers in depths[:2]:
            with cut_to(config, layers, checkpointed) as cut:
                found.append(_rehearse_whole(cut, joined, tried, on_gpu))
        return extrapolate(found[0], found[1], (depths[2] - depths[0]) / (depths[1] - depths[0]))
    except (DataDependentOutputException, DynamicOutputShapeException, NotImplementedError) as error:
        raise ConfigError(
            f"model.path {config.model.path!r} with trainer.parallel ({config.trainer.parallel.sizes}) cannot be sized:"
            f" its step needs values, not only shapes ({str(error).splitlines()[0]})"
        ) from error


def _rehearse_whole(config: TidemillConfig, joined: Ranks, tried: dict[str, bool], on_gpu: bool) -> StepSize:
    fake, ledger = FakeTensorMode(allow_non_fake_inputs=True), MemoryLedger()
    shapes = ShapesOnly(fake, ledger)
    policy = _empty_policy(config, tried, fake)
    number = sum(p.numel() for p in policy.parameters())
    reference = None
    if config.trainer.has_second_model and not _reference_on_host(config):
        reference = _empty_policy(config, tried, fake, reference=True)
    critic = None if config.trainer.critic is None else _empty_critic(config, config.trainer.critic, tried, fake)
    with shapes:
        if reference is not None:
            reference = joined.prepare(reference, DTYPES[config.model.dtype])
        given = policy if _reference_on_host(config) else reference
        step = build_train_step(config, joined, policy=policy, reference=given, critic=critic)
    if _reference_on_host(config) and step.preparation is not None:
        # It computes before the micro-batches leave the host, and leaves the device alone.
        step = replace(step, preparation=replace(step.preparation, reference=None))
    return _measure(config, step, reference, shapes, ledger, number, on_gpu)


def _reference_on_host(config: TidemillConfig) -> bool:
    return config.trainer.has_second_model and config.trainer.kl.device == "cpu"


def _empty_policy(
    config: TidemillConfig, tried: dict[str, bool], fake: FakeTensorMode, reference: bool = False
) -> Policy:
    settings = None if reference else config.trainer.lora
    dtype = config.model.dtype if reference or settings is not None else "float32"
    path = config.trainer.kl.model if reference else None
    causal_lm, tower = _load_empty(config, path, dtype, adapted=settings is not None)
    adapter = None if settings is None else adapt(causal_lm, settings, "", config.run.seed)
    # It tries nothing on a model without weights.
    policy = Policy(causal_lm, adapter, tower)
    policy.adopt(tried)
    trained = {name: p.requires_grad for name, p in causal_lm.named_parameters()}
    _empty(causal_lm, fake)
    for name, parameter in causal_lm.named_parameters():
        parameter.requires_grad_(trained[name] and not reference)
    return policy


def _empty_critic(
    config: TidemillConfig, settings: CriticConfig, tried: dict[str, bool], fake: FakeTensorMode
) -> Critic:
    causal_lm, tower = _load_empty(config, settings.model, "float32", max_length=config.model.max_length)
    critic = Critic(causal_lm, tower)
    critic.adopt(tried)
    _empty(causal_lm, fake)
    return critic


def _load_empty(
    config: TidemillConfig, path: str | None, dtype: str, **more: Any
) -> tuple[PreTrainedModel, VisionTower | None]:
    model, vision = config.model, config.model.kind == "vision"
    causal_lm = load_model(path or model.path, dtype, model.trust_remote_code, vision, empty=True, **more)
    return causal_lm, VisionTower(causal_lm, image_settings_of(model), model.freeze_vision) if vision else None


def _empty(model: PreTrainedModel, fake: FakeTensorMode) -> None:
    with fake:
        model.to_empty(device="cpu")
    model.tie_weights()


def make_batch(config: TidemillConfig, layout: Layout) -> list[MicroBatch]:
    """Make full micro-batches of the longest samples, which share no prefix; those of a vision model have an image."""
    budget, longest = config.trainer.micro_batch_tokens * layout.context, config.model.max_length
    rows = [longest] * max(1, budget // longest)
    rest = budget - sum(rows)
    lengths = torch.tensor([*rows, rest] if rest >= 2 else rows)
    width = int(lengths.max())
    # Rows that begin differently share nothing.
    tokens = (torch.arange(width) + torch.arange(len(lengths))[:, None]) % 2
    tokens[:, 0] = torch.arange(len(lengths)) % 128
    place = torch.arange(1, width)
    mask = (place < lengths[:, None]) & (place >= lengths[:, None] - config.sampling.max_tokens)
    zeros = torch.zeros(mask.shape)
    index = torch.arange(len(lengths))
    micro = MicroBatch(
        tokens=tokens,
        targets=tokens[:, 1:].contiguous(),
        mask=mask,
        rollout_logprobs=zeros,
        advantages=zeros,
        weights=zeros,
        versions=torch.where(mask, 0, -1),
        reference_logprobs=zeros if _reference_on_host(config) else None,
        sequence=index,
        sample=index,
        group=index // config.sampling.n,
        lengths=lengths - 1,
        temperatures=[config.sampling.temperature],
        images=_images(config, lengths, width) if config.model.kind == "vision" else None,
    )
    return [micro] * min(2, micro_batches(config, int(lengths.sum()), layout.dp_size))


def _images(config: TidemillConfig, lengths: Tensor, width: int) -> ImageBatch | None:
    """Make an image for each row that has room for one in its prompt. lengths: of the rows. width: of the longest."""
    settings = image_settings_of(config.model)
    sides = [
        math.isqrt(max(0, min(settings.most // settings.unit**2, length - config.sampling.max_tokens - 1)))
        for length in lengths.tolist()
    ]
    marks = torch.zeros(len(sides), width, dtype=torch.bool)
    for row, side in enumerate(sides):
        marks[row, 1 : 1 + side * side] = True
    grids = [settings.grid(side * settings.unit, side * settings.unit) for side in sides if side]
    if not grids:
        return None
    # A system gives memory for zeros once it is written.
    patches = torch.zeros(sum(math.prod(grid) for grid in grids), 3 * settings.temporal * settings.patch**2)
    positions = torch.arange(width).expand(3, len(sides), width).contiguous()
    return ImageBatch(patches, np.array(grids), marks, positions)


def micro_batches(config: TidemillConfig, tokens: int, parts: int) -> int:
    """Return how many micro-batches of ``tokens`` each of ``parts`` has in a step of the longest samples."""
    of_step = config.trainer.batch_groups * config.sampling.n * config.model.max_length
    return max(1, math.ceil(of_step / (tokens * parts)))


def _measure(
    config: TidemillConfig,
    step: TrainStep,
    reference: nn.Module | None,
    shapes: ShapesOnly,
    ledger: MemoryLedger,
    number: int,
    on_gpu: bool,
) -> StepSize:
    updates = [update for _, update in step.parts().values()]
    models = [*(model for model, _ in step.parts().values()), *([] if reference is None else [reference])]
    weights = [local_part(p) for model in models for p in model.parameters()]
    buffers = [buffer for model in models for buffer in model.buffers()]
    states, away = _states(updates, on_gpu)
    ledger.leave_out(away)
    parameters, optimizer = (_bytes(tensors) for tensors in ([*weights, *buffers], states))
    small = _weights_in_4_bits(config, step.policy)
    in_4_bits = sum(weight.numel() for weight in small)
    parameters += bytes_in_4_bits(in_4_bits) - _bytes(small)
    batch = _batch_of(config, step)
    ledger.add([*weights, *buffers, *states])
    base = ledger.live
    images = [] if batch[0].images is None else batch[0].images.tensors
    ledger.add([*vars(batch[0]).values(), *images])
    ledger.restart()
    shapes.work = WorkLedger()
    watch = _Watch(step, shapes, ledger, base)
    with ledger.watch_resizes(), shapes.watch_reads(), shapes:
        shapes.waits.clear()
        step.run(StepBatch(batch), 0)
    temporary = max(0, ledger.peak - base - watch.gradients - watch.kept)
    tokens = int((batch[0].lengths + 1).sum())
    count = micro_batches(config, tokens, step.ranks.dp_size)
    if on_gpu:
        # A step begins by moving all of its micro-batches.
        temporary += (count - 1) * _bytes(images)
    # Of a step's many micro-batches few were computed, and of its updates one an epoch.
    parts = ((shapes.work, count, len(batch)), (watch.changed, config.trainer.minibatches, 1))
    operators, traffic = _scaled(parts, step.ranks)
    if away:
        each_way = _bytes(away) * config.trainer.minibatches * config.trainer.epochs
        traffic[Traffic(MAIN_MEMORY, "optimizer state", 1, 1, False, 0)] += each_way
    return StepSize(
        model_parameters=number,
        parameters=parameters,
        gradients=watch.gradients,
        optimizer=optimizer,
        activations=watch.kept,
        temporary=temporary,
        tokens=tokens,
        micro_batches=count,
        flops=WorkLedger(operators).flops,
        operators=[(*key, calls) for key, calls in operators.items()],
        traffic=[replace(each, sent=sent) for each, sent in traffic.items()],
        waits=sorted(watch.waits),
        step_waits=sorted((shapes.waits | watch.between) - watch.waits),
        main_memory=_bytes(away),
        in_4_bits=in_4_bits,
    )


def _batch_of(config: TidemillConfig, step: TrainStep) -> list[MicroBatch]:
    """The batch as a step gets it, on the host, before anything is on a device."""
    batch = make_batch(config, step.ranks.layout)
    if (replay := step.policy.router_replay) is not None:
        shape = (*batch[0].tokens.shape, replay.layers, replay.k)
        experts = torch.arange(replay.k, dtype=torch.int16).expand(shape).contiguous()
        batch[0] = replace(batch[0], routed_experts=experts)
    return [laid_out(batch[0], step.policy)] * len(batch)


def _scaled(
    parts: Iterable[tuple[WorkLedger, int, int]], ranks: Ranks
) -> tuple[Counter[tuple[int, int]], Counter[Traffic]]:
    """Sum work up, each part with how often a step has it and how often it was computed."""
    operators, traffic = Counter[tuple[int, int]](), Counter[Traffic]()
    for work, times, computed in parts:
        for key, calls in work.operators.items():
            operators[key] += calls * times // computed
        for each in _traffic(work, ranks):
            traffic[replace(each, sent=0)] += each.sent * times // computed
    return operators, traffic


def _weights_in_4_bits(config: TidemillConfig, policy: Policy) -> list[Tensor]:
    """Return the weights that would have 4 bits if they had data: those of all frozen layers but the output layer."""
    if not check_quantised(config.model.path, adapted=config.trainer.lora is not None):
        return []
    model = policy.causal_lm
    layers = [m for m in model.modules() if isinstance(m, nn.Linear) and m is not model.get_output_embeddings()]
    return [local_part(layer.weight) for layer in layers if not layer.weight.requires_grad]


def _states(updates: list[GradientUpdate], on_gpu: bool) -> tuple[list[Tensor], list[Tensor]]:
    """Return this rank's parts of the optimizers' state on its device, and those that a GPU's host keeps."""
    found: tuple[list[Tensor], list[Tensor]] = ([], [])
    for update in updates:
        offloaded = on_gpu and getattr(update.optimizer, "offloaded", False)
        for state in update.optimizer.state.values():
            for name, value in state.items():
                found[offloaded and name != "step"].append(local_part(value))
    return found


class _Sized8bit(LocalAdamW):
    """Stands for torchao's AdamW8bit, whose compiled update needs values: it has a state of the same bytes.

    A moment whose elements are a multiple of 256, and 4,096 or more, has a byte for each, a scale for 256 of them, and
    a table of 256 numbers. Others are in float32.
    """

    def __init__(self, groups: list[dict[str, Any]], values: dict[str, Any]) -> None:
        super().__init__(groups, **values, fused=True)
        for group in groups:
            for parameter in group["params"]:
                part = local_part(parameter)
                packed = part.numel() >= 4096 and part.numel() % 256 == 0
                size = part.numel() + part.numel() // 64 + 1024 if packed else 4 * part.numel()
                moments = {name: part.new_empty(size, dtype=torch.uint8) for name in ("exp_avg", "exp_avg_sq")}
                self.state[parameter] = {"step": torch.tensor(0.0), **moments}

    def _update(self, trained: list[nn.Parameter], group: dict[str, Any]) -> None:
        for parameter in trained:
            # Reads and writes them as its one kernel does.
            local_part(parameter).add_(local_part(cast(Tensor, parameter.grad)))
            for moment in ("exp_avg", "exp_avg_sq"):
                self.state[parameter][moment].add_(1)


class _Watch:
    """What is in memory when a backward pass begins and ends, and the work of optimizers.

    kept: bytes for backward, at the most. gradients: their bytes. changed: the work of updates, that ``shapes`` lacks.
    waits: functions that wait for the device in micro-batches. between: those that wait after one model's last
    backward pass and before another's first.
    """

    def __init__(self, step: TrainStep, shapes: ShapesOnly, ledger: MemoryLedger, base: int) -> None:
        self._step, self._shapes, self._ledger, self._base = step, shapes, ledger, base
        self.kept = self.gradients = 0
        self.changed = WorkLedger()
        self.waits: set[str] = set()
        self.between: set[str] = set()
        self._current: GradientUpdate | None = None
        for _, update in step.parts().values():
            self._follow(update)

    def _follow(self, update: GradientUpdate) -> None:
        backward, change = update.backward, update.optimizer.step

        def watched(loss: Tensor) -> None:
            self.kept = max(self.kept, self._ledger.live - self._base - _gradient_bytes(self._step))
            if self._current not in (None, update):
                self.between.update(self._shapes.waits)
                self._shapes.waits.clear()
            self._current = update
            backward(loss)
            self.gradients = max(self.gradients, _gradient_bytes(self._step))
            self.waits.update(self._shapes.waits)
            self._shapes.waits.clear()

        def watched_change() -> None:
            others, self._shapes.work = self._shapes.work, self.changed
            change()
            self._shapes.work = others

        update.backward = watched  # type: ignore[method-assign]
        update.optimizer.step = watched_change  # type: ignore[assignment, method-assign]


def _traffic(work: WorkLedger, ranks: Ranks) -> list[Traffic]:
    """Name the dimension of the mesh for what each group of ranks sent."""
    sharding = ranks._sharding_mesh
    meshes = {name: ranks.mesh[name] for name in ("tensor", "context")}
    meshes |= {name: sharding[name] if sharding.ndim > 1 else sharding for name in sharding.mesh_dim_names or ()}
    names = {tuple(dist.get_process_group_ranks(mesh.get_group())): name for name, mesh in meshes.items()}
    return [
        Traffic(
            dimension=(name := names.get(each.ranks, "world")),
            kind=each.kind,
            size=len(each.ranks),
            span=each.ranks[-1] - each.ranks[0] + 1,
            overlaps=name not in ("tensor", "context") and each.kind != "all-to-all",
            sent=each.sent(message),
        )
        for each, message in work.messages.items()
    ]


def _gradient_bytes(step: TrainStep) -> int:
    parameters = (p for model, _ in step.parts().values() for p in model.parameters())
    return _bytes([local_part(p.grad) for p in parameters if p.grad is not None])


def _bytes(tensors: list[Tensor]) -> int:
    return sum({t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in tensors}.values())


def answer(question: dict[str, Any]) -> dict[str, Any]:
    """Return the StepSize of a question's configuration as JSON has it, or what is wrong with that as ``error``."""
    try:
        return asdict(rehearse(parse_config(question["config"]), question["ranks"], question["on_gpu"]))
    except ConfigError as error:
        return {"error": str(error)}
