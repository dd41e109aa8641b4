"""Muon takes the matrices of layers and nothing else, with torch's own steps, and resumes to the bit."""

import copy
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from consumers.trainer.checkpoint.compare import compare
from consumers.trainer.checkpoint.store import CheckpointStore
from consumers.trainer.distributed.offload import StateOffload
from consumers.trainer.distributed.parts import plain_parts
from consumers.trainer.model.policy import Policy, load_model
from consumers.trainer.step import gradient_update, optimizers
from consumers.trainer.step.build import build_critic, build_train_step
from consumers.trainer.step.gradient_update import LocalAdamW
from consumers.trainer.step.optimizers import build_optimizer
from consumers.trainer.step.train_step import TrainStep
from schemas.config import OptimizerConfig
from schemas.errors import ConfigError
from tests.support.configurations import minimal_config
from tests.support.models.tiny_mixture import build_mixture
from tests.support.runs.programs import environment_python
from tests.support.trainer.trajectories import make_groups

MUON = OptimizerConfig(name="muon", lr=0.01, weight_decay=0.1)


def give_gradients(model: nn.Module, seed: int) -> None:
    torch.manual_seed(seed)
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)


def groups_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[set[str]]:
    names = {id(p): name for name, p in model.named_parameters()}
    return [{names[id(p)] for p in group["params"]} for group in optimizer.param_groups]


def test_matrices_take_the_steps_of_torchs_muon_and_the_rest_those_of_adamw(model: Path) -> None:
    policy = Policy(load_model(model, "float32"))
    other = copy.deepcopy(policy)
    optimizer = build_optimizer(policy, MUON)
    matrices, embeddings, vectors = groups_of(policy, optimizer)
    assert matrices
    assert all(".layers." in name and name.endswith("_proj.weight") for name in matrices)
    assert all("embed" in name or "lm_head" in name for name in embeddings)
    assert all("norm" in name or name.endswith(".bias") for name in vectors)
    named = dict(other.named_parameters())
    muon = torch.optim.Muon(
        [named[name] for name in matrices], lr=0.01, weight_decay=0.1, momentum=0.95, adjust_lr_fn="match_rms_adamw"
    )
    rest = [{"params": [named[n] for n in embeddings]}, {"params": [named[n] for n in vectors], "weight_decay": 0.0}]
    adamw = torch.optim.AdamW(rest, lr=0.01, weight_decay=0.1, betas=MUON.betas, eps=MUON.eps, fused=True)
    for seed in range(3):
        for each in (policy, other):
            give_gradients(each, seed)
        for step in (optimizer, muon, adamw):
            step.step()
    assert all(torch.equal(p, named[name]) for name, p in policy.named_parameters())


def test_each_expert_of_a_mixture_is_a_matrix_of_its_own() -> None:
    policy = Policy(build_mixture(260))
    name, experts = next((n, p) for n, p in policy.named_parameters() if p.ndim == 3)
    optimizer = build_optimizer(policy, MUON)
    assert name in groups_of(policy, optimizer)[0]
    alone = nn.Parameter(experts[1].detach().clone())
    give_gradients(policy, 0)
    assert experts.grad is not None
    alone.grad = experts.grad[1].clone()
    optimizer.step()
    torch.optim.Muon([alone], lr=0.01, weight_decay=0.1, momentum=0.95, adjust_lr_fn="match_rms_adamw").step()
    assert torch.equal(experts[1], alone)


def moments(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [value for state in optimizer.state.values() for name, value in state.items() if name != "step"]


def learner(model: Path, folder: Path, name: str, **trainer: Any) -> TrainStep:
    config = minimal_config(
        run={"folder": str(folder)},
        model={"path": str(model), "dtype": "float32", "max_length": 64},
        sampling={"max_tokens": 8},
        trainer={"steps": 9, "optimizer": {"name": name, "lr": 1e-3}, **trainer},
    )
    return build_train_step(config, policy=Policy(load_model(model, "float32")), critic=build_critic(config))


def test_a_critic_has_muon_for_its_layers_and_adamw_for_its_value_head(model: Path, tmp_path: Path) -> None:
    critic = {"optimizer": {"name": "muon"}}
    step = learner(model, tmp_path, "muon", critic=critic, advantage={"name": "gae"})
    module, update = step.parts()["critic"]
    heads = {name for name, p in module.named_parameters() if p.shape[0] == 1 and p.ndim == 2}
    assert heads
    assert not heads & groups_of(module, update.optimizer)[0]


@pytest.fixture
def eager() -> Iterator[None]:
    """torchao compiles its update, which takes longer than all of its steps here."""
    with torch.compiler.set_stance("force_eager"):
        yield


def provide_package(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make torchao importable if the optimizer of this name needs it."""
    if name == "adamw_8bit" and find_spec("torchao") is None:
        (packages,) = environment_python("torchao").parents[1].glob("lib/python*/site-packages")
        monkeypatch.setattr(sys, "path", [*sys.path, str(packages)])


@pytest.mark.usefixtures("eager")
@pytest.mark.parametrize("name", ["muon", "adamw_8bit"])
def test_a_resumed_run_takes_the_same_steps_to_the_bit(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """From a checkpoint that was written while training continued, and after its state was in main memory."""
    provide_package(name, monkeypatch)
    store, weights = CheckpointStore(tmp_path / "checkpoints"), []
    for resumed in (False, True):
        step = learner(model, tmp_path, name)
        if resumed:
            assert store.load(store.at(), step).step == 2
            assert compare(step, store.at()).equal
            away = StateOffload(torch.device("cpu"), [step.policy], [step.update.optimizer])
            away.offload()
            parts = [part for each in moments(step.update.optimizer) for part in plain_parts(each).values()]
            assert not any(part.untyped_storage().nbytes() for part in parts)
            away.onload()
        for version in range(2 if resumed else 0, 4):
            if version == 2 and not resumed:
                taken = store.take(step, step=2, version=2, leader_term=1, extra={})
            step.run(step.planner.plan(make_groups([4, 3], seed=version)).batch(), version)
        if not resumed:
            assert not compare(step, store.write(taken)).equal
        weights.append([p.detach().clone() for p in step.policy.parameters()])
    assert all(map(torch.equal, *weights))


def settings_of(step: TrainStep) -> list[dict[str, Any]]:
    groups = [group for _, update in step.parts().values() for group in update.optimizer.param_groups]
    return [{name: value for name, value in group.items() if name != "params"} for group in groups]


@pytest.mark.parametrize("kind", [{"name": "adamw"}, {"name": "adamw", "offload": True}, {"name": "muon"}])
def test_a_resumed_run_has_the_settings_of_its_own_configuration(
    model: Path, tmp_path: Path, kind: dict[str, Any]
) -> None:
    def made(**settings: Any) -> TrainStep:
        optimizer = {**kind, **settings}
        critic = {"optimizer": optimizer}
        return learner(model, tmp_path, "", optimizer=optimizer, critic=critic, advantage={"name": "gae"})

    store, resumed = CheckpointStore(tmp_path / "checkpoints"), made()
    store.save(
        made(weight_decay=0.1, betas=(0.8, 0.9), eps=1e-6, momentum=0.5), step=2, version=2, leader_term=1, extra={}
    )
    wanted = settings_of(resumed)
    store.load(store.at(), resumed)
    assert settings_of(resumed) == wanted


def test_a_resumed_run_in_8_bits_has_its_own_settings(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    provide_package("adamw_8bit", monkeypatch)
    store, resumed = CheckpointStore(tmp_path / "checkpoints"), learner(model, tmp_path, "adamw_8bit")
    decayed = learner(model, tmp_path, "", optimizer={"name": "adamw_8bit", "weight_decay": 0.1, "eps": 1e-6})
    store.save(decayed, step=2, version=2, leader_term=1, extra={})
    wanted = settings_of(resumed)
    store.load(store.at(), resumed)
    assert settings_of(resumed) == wanted


def test_a_checkpoint_of_another_optimizer_is_refused_by_its_name(model: Path, tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path / "checkpoints")
    store.save(learner(model, tmp_path, "adamw"), step=2, version=2, leader_term=1, extra={})
    with pytest.raises(ConfigError, match=r"the state of LocalAdamW, and trainer\.optimizer\.name makes LocalMuon"):
        store.load(store.at(), learner(model, tmp_path, "muon"))


OFFLOADED: list[dict[str, Any]] = [
    {"optimizer": {"name": "adamw"}},
    {"optimizer": {"name": "muon"}},
    {"optimizer": {"name": "adamw"}, "lora": {"rank": 4, "alpha": 8.0}},
]


@pytest.mark.parametrize("trainer", OFFLOADED)
@pytest.mark.parametrize("bucket", [1, 3000, 1 << 26])
def test_weights_and_checkpoints_are_the_same_to_the_bit_with_the_state_in_main_memory(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, trainer: dict[str, Any], bucket: int
) -> None:
    monkeypatch.setattr(gradient_update, "BUCKET", bucket)
    steps = {}
    for offload in (False, True):
        settings = {**trainer, "optimizer": {**trainer["optimizer"], "lr": 1e-3, "offload": offload}}
        config = minimal_config(
            run={"folder": str(tmp_path)},
            model={"path": str(model), "dtype": "float32", "max_length": 64},
            sampling={"max_tokens": 8},
            trainer={"steps": 9, **settings},
        )
        steps[offload] = build_train_step(config), build_train_step(config)

    def train(step: TrainStep, versions: range) -> list[torch.Tensor]:
        for version in versions:
            step.run(step.planner.plan(make_groups([4, 3], seed=version)).batch(), version)
        return [each.detach().clone() for each in (*step.policy.parameters(), *moments(step.update.optimizer))]

    first = {offload: train(step, range(2)) for offload, (step, _) in steps.items()}
    assert all(map(torch.equal, first[False], first[True]))
    wanted = None
    for offload, (step, _) in steps.items():
        other = steps[not offload][1]
        held = [each.data_ptr() for each in moments(other.update.optimizer)]
        store = CheckpointStore(tmp_path / str(offload))
        store.save(step, step=2, version=2, leader_term=1, extra={})
        store.load(store.at(), other)
        found = train(other, range(2, 4))
        wanted = wanted or train(step, range(2, 4))
        assert all(map(torch.equal, found, wanted))
        assert offload or [each.data_ptr() for each in moments(other.update.optimizer)] == held, "it stays there"


def test_an_offloaded_state_comes_to_the_device_by_buckets(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gradient_update, "BUCKET", 3000)
    policy = Policy(load_model(model, "float32"))
    optimizer = build_optimizer(policy, OptimizerConfig(offload=True))
    held = {each.data_ptr() for each in moments(optimizer)}
    brought: list[int] = []
    update = LocalAdamW._update

    def watched(self: LocalAdamW, trained: list[nn.Parameter], group: dict[str, Any]) -> None:
        brought.append(sum(each.numel() for each in moments(self) if each.data_ptr() not in held))
        update(self, trained, group)

    monkeypatch.setattr(LocalAdamW, "_update", watched)
    give_gradients(policy, 0)
    optimizer.step()
    largest = max(p.numel() for p in policy.parameters())
    assert len(brought) > 3
    assert max(brought) <= 2 * (3000 + largest)
    assert sum(brought) == 2 * sum(p.numel() for p in policy.parameters())
    assert {each.data_ptr() for each in moments(optimizer)} == held


def test_moments_share_pinned_blocks_whose_sizes_are_not_rounded_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch rounds each block up to a power of two: for these parts alone by more than a third."""
    monkeypatch.setattr(optimizers, "PINNED", 1 << 12)
    parts = [torch.empty(1, 2500), *(torch.empty(70, 9) for _ in range(40)), torch.empty(9, 70).T, torch.empty(3)]
    made = optimizers.pin_zeros(parts, pin=False)
    assert [(each.shape, each.stride()) for each in made] == [(part.shape, part.stride()) for part in parts]
    for number, each in enumerate(made):
        assert not each.any()
        each.fill_(number + 1)
    assert all((each == number + 1).all() for number, each in enumerate(made)), "none overlaps another"
    assert all(each.data_ptr() % 64 == 0 for each in made)
    blocks = {each.untyped_storage().data_ptr(): each.untyped_storage().nbytes() for each in made}.values()
    assert all(size.bit_count() == 1 for size in blocks)
    alone = sum(4 << (part.numel() - 1).bit_length() for part in parts)
    assert sum(blocks) < 1.25 * sum(4 * part.numel() for part in parts) < alone


def test_an_offloaded_state_for_a_gpu_is_in_blocks(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    policies = [Policy(load_model(model, "float32")) for _ in range(2)]
    apart = build_optimizer(policies[0], OptimizerConfig(offload=True))
    # As on a GPU, but nothing is pinned here.
    zeros = optimizers.pin_zeros
    monkeypatch.setattr(torch, "zeros_like", lambda part, **_: pytest.fail("a moment of its own"))
    monkeypatch.setattr(optimizers, "is_pinned", lambda parts: True)
    monkeypatch.setattr(optimizers, "pin_zeros", lambda parts: zeros(parts, pin=False))
    shared = build_optimizer(policies[1], OptimizerConfig(offload=True))
    assert len({each.untyped_storage().data_ptr() for each in moments(shared)}) == 1
    for policy, optimizer in zip(policies, (apart, shared), strict=True):
        for seed in range(3):
            give_gradients(policy, seed)
            optimizer.step()
    assert all(torch.equal(*pair) for pair in zip(policies[0].parameters(), policies[1].parameters(), strict=True))
    assert all(torch.equal(*pair) for pair in zip(moments(apart), moments(shared), strict=True))


def test_8_bit_moments_stay_on_the_device() -> None:
    with pytest.raises(ConfigError, match=r"trainer\.optimizer.*offload true with name adamw_8bit.*set name adamw"):
        minimal_config(trainer={"optimizer": {"name": "adamw_8bit", "offload": True}})


def test_an_adapter_is_not_trained_by_muon() -> None:
    with pytest.raises(ConfigError, match=r"muon with trainer\.lora"):
        minimal_config(trainer={"optimizer": {"name": "muon"}, "lora": {}})


def test_adamw_in_8_bits_needs_torchao(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torchao.optim", None)
    with pytest.raises(ConfigError, match="adamw_8bit needs the package torchao: pip install torchao") as refused:
        build_optimizer(Policy(load_model(model, "float32")), OptimizerConfig(name="adamw_8bit"))
    assert "\n" not in str(refused.value)
