"""What tests run on every rank of a trainer: rank 0 leads some steps of uneven batches, the others follow.

It resumes the newest checkpoint of the run's folder, and saves one at the end.
"""

import json
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch.distributed.tensor import DTensor

from consumers.trainer.data.groups import Group
from consumers.trainer.distributed.device_turns import DeviceTurns
from consumers.trainer.distributed.ranks import Ranks
from consumers.trainer.model.hf_weights import wire_weights
from consumers.trainer.rank_group import RankGroup
from consumers.trainer.step.build import build_train_step
from schemas.system.device_lock import DeviceLock, SharedGpus
from tests.support.configurations import minimal_config
from tests.support.trainer.trajectories import make_episode, make_groups


def run_steps(
    model: Path, folder: Path, first: int, last: int, sizes: Sequence[int], dtype: str, trainer: Mapping[str, Any]
) -> None:
    """Train steps ``first`` to ``last`` of groups of these ``sizes``, and report to a file in ``folder``.

    trainer: more settings of the configuration's trainer. With ``away`` among them, a generator has the devices
    for a moment before each step.
    """
    settings = dict(trainer)
    away = settings.pop("away", False)
    config = minimal_config(
        run={"folder": str(folder)},
        model={"path": str(model), "dtype": dtype, "max_length": 64},
        sampling={"max_tokens": 8},
        trainer={"steps": 9, "micro_batch_tokens": 60, "optimizer": {"lr": 1e-3}, **settings},
    )
    ranks = Ranks(timeout_s=100.0, parallel=config.trainer.parallel)
    with ranks.watchdog():
        step = build_train_step(config, ranks)
        devices = folder.with_suffix(".devices")
        turns = None
        if away:
            turns = DeviceTurns(SharedGpus(str(devices), ["generator-0"]), ranks.is_main, deadline_s=100.0)
            turns.hold()
        rank_group = RankGroup(config, step, turns)
        if turns is not None:
            check_freed(rank_group)
        if ranks.is_main:
            generator = devices / "generator-0.lock" if turns is not None else None
            lead(rank_group, folder, first, last, sizes, dtype, generator)
        else:
            rank_group.follow()


def check_freed(rank_group: RankGroup) -> None:
    """Have this rank check, each time its state is offloaded, that the memory is gone."""
    step, offload = rank_group.step, rank_group.state.offload

    def offload_and_check() -> None:
        offload()
        states = [value for values in step.update.optimizer.state.values() for value in values.values()]
        for tensor in [*states, *step.policy.parameters()]:
            assert (tensor.to_local() if isinstance(tensor, DTensor) else tensor).untyped_storage().nbytes() == 0
        print("freed", flush=True)

    rank_group.state.offload = offload_and_check  # type: ignore[method-assign]


def wake(generator: DeviceLock) -> None:
    """Generate for a moment, once every rank has given the devices."""
    end = time.monotonic() + 60
    while not generator.try_hold():
        assert time.monotonic() < end, "a rank still holds the generator's lock"
        time.sleep(0.005)
    generator.release()


def local(tensor: torch.Tensor) -> torch.Tensor:
    """A copy of this rank's part, which is all of it when there is one rank."""
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).clone()


def episodes(seed: int) -> Group:
    """Samples of several rows, which may be on different ranks."""
    return Group(99, [(make_episode(99, s, 9, seed), float(s % 2)) for s in range(3)])


def lead(
    rank_group: RankGroup,
    folder: Path,
    first: int,
    last: int,
    sizes: Sequence[int],
    dtype: str,
    generator: Path | None = None,
) -> None:
    newest = rank_group.checkpoint_store.newest()[0]
    assert (newest is not None) == (first > 0)
    if newest is not None:
        assert rank_group.load(newest).step == first
    folder.mkdir(exist_ok=True)
    file = folder / "weights"
    results, late = [], []
    for version in range(first, last):
        rank_group.gather([5, 6], folder / "never")
        snapshot, _ = rank_group.gather([5, 6], file)
        weights = wire_weights(rank_group.step.policy) if rank_group.ranks.world == 1 else ()
        before = {name: local(tensor).to(getattr(torch, dtype)) for name, tensor in weights}
        # As late as can be: when the optimizer is about to change the weights.
        snapshot.wait = snapshot.fill  # type: ignore[method-assign]
        if generator is not None:
            rank_group.give_if_due()
            wake(DeviceLock(generator))
        results.append(rank_group.train([*make_groups(sizes, seed=version), episodes(version)], version))
        written = load_file(file)
        # Experts have other names in a file.
        same = [torch.equal(tensor.cpu(), written[name]) for name, tensor in before.items() if name in written]
        assert bool(same) == bool(before)
        late.append(all(same))
    snapshot, logprobs = rank_group.gather([5, 6, 7, 8], file)
    snapshot.fill()
    rank_group.save(step=last, version=last, leader_term=1, extra={})
    rank_group.export(folder / "model")
    rank_group.wait_saved()
    rank_group.dismiss()
    parameters = list(rank_group.step.policy.parameters())
    content = {
        "sharded": all(isinstance(p, DTensor) for p in parameters),
        "bytes": sum(p.to_local().nbytes if isinstance(p, DTensor) else p.nbytes for p in parameters),
        "metrics": [r.metrics for r in results],
        "staleness": [r.staleness for r in results],
        "weights": torch.frombuffer(bytearray(file.read_bytes()[-4000:]), dtype=getattr(torch, dtype)).tolist(),
        "dtypes": sorted({str(p.dtype) for p in parameters}),
        "logprobs": logprobs.tolist(),
        "late": late,
    }
    (folder / f"report-{first}-{rank_group.ranks.world}.json").write_text(json.dumps(content))
