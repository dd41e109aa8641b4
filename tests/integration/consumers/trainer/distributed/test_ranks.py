"""Two ranks with FSDP2 on gloo: parameters are really sharded, and training is that of one rank, images included."""

import copy
import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM

from consumers.trainer.distributed.ranks import Ranks
from consumers.trainer.model.policy import Policy, load_model
from deploy.offline.tiny_vision_model import Family, write_tiny_vision_model
from tests.support.models.families import make_family
from tests.support.models.tiny_mixture import build_mixture
from tests.support.models.tiny_model import make_tiny_model
from tests.support.trainer.forked_ranks import run_in_ranks
from tests.support.trainer.sharded_steps import run_steps
from tests.support.trainer.vision_steps import run_vision_steps

TOLERANCE = {"rel": 1e-4, "abs": 1e-5}
"""Gradients are summed in another order; AdamW's first steps make the most of it."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("tiny"), hidden=32, layers=2)


def launch(
    world: int,
    model: Path,
    folder: Path,
    first: int,
    last: int,
    sizes: Sequence[int] = (4, 1, 5, 2, 3),
    dtype: str = "float32",
    **trainer: Any,
) -> dict[str, Any]:
    """Train steps ``first`` to ``last`` on ``world`` ranks; what rank 0 reported."""
    arguments = (model, folder, first, last, sizes, dtype, trainer)
    if world == 1 and dtype == "float32":
        run_steps(*arguments)
    else:
        run_in_ranks(world, run_steps, *arguments, output=folder.with_suffix(".txt"))
    result: dict[str, Any] = json.loads((folder / f"report-{first}-{world}.json").read_text())
    return result


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("runs")


@pytest.fixture(scope="module")
def one(model: Path, folders: Path) -> dict[str, Any]:
    """Two steps on one rank."""
    return launch(1, model, folders / "one", 0, 2)


@pytest.fixture(scope="module")
def two(model: Path, folders: Path) -> dict[str, Any]:
    """The same on two."""
    return launch(2, model, folders / "two", 0, 2)


@pytest.fixture(scope="module")
def whole(model: Path, folders: Path, one: dict[str, Any]) -> dict[str, Any]:
    """A third step on one rank."""
    shutil.copytree(folders / "one", folders / "one-one")
    return launch(1, model, folders / "one-one", 2, 3)


def same(found: dict[str, Any], wanted: dict[str, Any]) -> None:
    for a, b in zip(wanted["metrics"], found["metrics"], strict=True):
        for name in ("loss", "tokens", "entropy", "grad_norm", "kl", "ess", "ratio_max", "staleness_mean", "samples"):
            assert b[name] == pytest.approx(a[name], rel=1e-4, abs=1e-6), name
    assert found["staleness"] == wanted["staleness"]
    assert found["weights"] == pytest.approx(wanted["weights"], **TOLERANCE)
    assert found["logprobs"] == pytest.approx(wanted["logprobs"], **TOLERANCE)


def test_two_ranks_train_like_one(one: dict[str, Any], two: dict[str, Any]) -> None:
    same(two, one)


@pytest.mark.parametrize(
    ("world", "dtype", "settings"),
    [
        (2, "float32", {}),
        (1, "bfloat16", {}),
        (2, "float32", {"advantage": {"name": "gae"}, "critic": {}, "kl": {"coef": 0.1}}),
        (2, "bfloat16", {"lora": {"rank": 4, "alpha": 8.0}}),
    ],
    ids=["sharded", "one rank in half precision", "critic and reference", "adapter"],
)
def test_training_is_the_same_to_the_bit_if_the_state_was_in_main_memory_before_each_step(
    model: Path, folders: Path, world: int, dtype: str, settings: dict[str, Any], request: pytest.FixtureRequest
) -> None:
    name = request.node.callspec.id.replace(" ", "-")
    away = launch(world, model, folders / f"{name}-away", 0, 3, dtype=dtype, away=True, **settings)
    stayed = launch(world, model, folders / f"{name}-stayed", 0, 3, dtype=dtype, **settings)
    assert (folders / f"{name}-away.txt").read_text().count("freed") == 3 * world
    for report in (away, stayed):
        for metrics in report["metrics"]:
            metrics.pop("tokens_per_s", None)
    assert away == stayed
    files = [f for f in (folders / f"{name}-stayed").rglob("*") if f.suffix in (".safetensors", ".distcp")]
    assert files
    for file in files:
        assert (
            folders / f"{name}-away" / file.relative_to(folders / f"{name}-stayed")
        ).read_bytes() == file.read_bytes()


def test_a_rank_without_samples_takes_part(model: Path, folders: Path) -> None:
    """Three ranks, two samples."""
    small, alone = (launch(world, model, folders / f"few-{world}", 0, 1, [2]) for world in (3, 1))
    same(small, alone)


def test_computing_in_half_precision_keeps_float32_weights(model: Path, folders: Path, one: dict[str, Any]) -> None:
    """Many small updates would be lost in bfloat16. One rank computes what two do, and takes their checkpoint over."""
    alone = launch(1, model, folders / "half-1", 0, 2, dtype="bfloat16")
    both = launch(2, model, folders / "half-2", 0, 2, dtype="bfloat16")
    for found in (alone, both):
        assert found["dtypes"] == ["torch.float32"]
        assert found["sharded"]
        for a, b in zip(one["metrics"], found["metrics"], strict=True):
            assert b["entropy"] == pytest.approx(a["entropy"], rel=0.05)
        assert found["logprobs"] == pytest.approx(one["logprobs"], abs=0.1)
    assert alone["late"] == one["late"] == [True, True], "copied while the next step computes, to the bit"
    assert alone["bytes"] == one["bytes"]
    for a, b in zip(alone["metrics"], both["metrics"], strict=True):
        assert b["entropy"] == pytest.approx(a["entropy"], rel=0.01)
    launch(1, model, folders / "half-2", 2, 3, dtype="bfloat16")
    written = AutoModelForCausalLM.from_pretrained(folders / "half-2" / "model", dtype="auto")
    assert written.dtype == torch.bfloat16


def test_each_rank_holds_its_share_of_every_parameter(one: dict[str, Any], two: dict[str, Any]) -> None:
    assert two["sharded"]
    assert not one["sharded"]
    # A parameter whose first dimension is odd is a little longer on rank 0.
    assert two["bytes"] == pytest.approx(one["bytes"] / 2, rel=0.02)


def test_the_written_model_is_the_policy(two: dict[str, Any], folders: Path) -> None:
    written = AutoModelForCausalLM.from_pretrained(folders / "two" / "model")
    ids = torch.tensor([[5, 6, 7, 8]])
    with torch.no_grad():
        logprobs = torch.log_softmax(written(ids).logits[0, :-1], -1).gather(1, ids[0, 1:, None])[:, 0]
    assert logprobs.tolist() == pytest.approx(two["logprobs"], abs=1e-5)


@pytest.mark.parametrize(("before", "after"), [("two", 1), ("one", 2), ("two", 2)])
def test_a_checkpoint_goes_on_with_another_number_of_ranks(
    model: Path, folders: Path, two: dict[str, Any], whole: dict[str, Any], before: str, after: int
) -> None:
    folder = folders / f"{before}-{after}"
    shutil.copytree(folders / before, folder)
    same(launch(after, model, folder, 2, 3), whole)


LORA = {"lora": {"rank": 4, "alpha": 8.0}, "kl": {"coef": 0.1, "reference": "lora_off"}}


def test_an_adapter_is_sharded_and_trained_like_on_one_rank(model: Path, folders: Path) -> None:
    """Its reference is the sharded policy with the adapter off; one rank resumes a checkpoint of two."""
    alone, both = (launch(world, model, folders / f"lora-{world}", 0, 2, **LORA) for world in (1, 2))
    same(both, alone)
    assert both["sharded"]
    assert both["bytes"] == pytest.approx(alone["bytes"] / 2, rel=0.02)
    for a, b in zip(alone["metrics"], both["metrics"], strict=True):
        assert b["reference_kl"] == pytest.approx(a["reference_kl"], rel=1e-4, abs=1e-7)
    assert alone["metrics"][1]["reference_kl"] > 0
    shutil.copytree(folders / "lora-2", folders / "lora-2-1")
    same(launch(1, model, folders / "lora-2-1", 2, 3, **LORA), launch(1, model, folders / "lora-1", 2, 3, **LORA))


def test_an_adapter_in_half_precision_stays_float32_over_a_model_that_is_not(model: Path, folders: Path) -> None:
    both = launch(2, model, folders / "lora-half", 0, 2, dtype="bfloat16", **LORA)
    alone = launch(1, model, folders / "lora-half-1", 0, 2, dtype="bfloat16", **LORA)
    for found in (alone, both):
        assert found["dtypes"] == ["torch.bfloat16", "torch.float32"]
        assert found["sharded"]
    assert alone["late"] == [True, True]
    for a, b in zip(alone["metrics"], both["metrics"], strict=True):
        assert b["entropy"] == pytest.approx(a["entropy"], rel=0.01)
    assert both["logprobs"] == pytest.approx(alone["logprobs"], abs=0.05)


def test_a_model_that_is_sharded_is_never_whole_on_its_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that a GPU could not hold; sharding takes it there layer by layer."""
    policy = Policy(build_mixture())

    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("moved at once")

    monkeypatch.setattr(nn.Module, "to", refuse)
    sharded = Ranks().prepare(policy, torch.bfloat16)
    assert all(isinstance(parameter, DTensor) for parameter in sharded.parameters())


def test_a_router_that_transformers_keeps_in_float32_computes_so_in_a_sharded_model(tmp_path: Path) -> None:
    """Rounded to bfloat16, it would send tokens to other experts than the engines' does."""
    plain = load_model(make_family(tmp_path / "model", "ernie4_5_moe"), "float32")
    wanted = {name: tensor for name, tensor in plain.named_parameters() if name.endswith("mlp.gate.weight")}
    for tensor in wanted.values():
        nn.init.normal_(tensor)
    sharded = Ranks().prepare(Policy(copy.deepcopy(plain)), torch.bfloat16)
    seen: dict[str, Tensor] = {}

    def look(name: str) -> None:
        router: Any = sharded.causal_lm.get_submodule(name.removesuffix(".weight"))
        router.register_forward_pre_hook(lambda module, _: seen.update({name: module.weight.detach().clone()}))

    for name in wanted:
        look(name)
    tokens = torch.arange(5, 13)[None]
    sharded(tokens, tokens[:, 1:], torch.ones(1, 7, dtype=torch.bool)).logprobs.sum().backward()
    assert seen.keys() == wanted.keys() != set()
    for name, tensor in sharded.causal_lm.named_parameters():
        if name in wanted:
            assert seen[name].dtype == torch.float32
            assert torch.equal(seen[name], wanted[name])
            assert tensor.grad is not None


@pytest.mark.parametrize(("family", "freeze", "critic"), [("qwen2_5_vl", True, False), ("qwen3_vl", False, True)])
def test_two_ranks_train_images_and_text_as_one(tmp_path: Path, family: Family, freeze: bool, critic: bool) -> None:
    model = tmp_path / "model"
    write_tiny_vision_model(model, family)
    for world in (1, 2):
        output = tmp_path / f"output-{world}"
        run_in_ranks(world, run_vision_steps, model, tmp_path / str(world), freeze, critic, output=output)
    one, two = (load_file(tmp_path / str(world) / "weights") for world in (1, 2))
    assert one.keys() == two.keys()
    assert any(name.startswith("model.visual.") for name in one) != freeze
    for name, tensor in one.items():
        # Adam makes much of the last digits where a gradient is nearly none.
        assert torch.allclose(tensor, two[name], atol=2e-4), name
    probes = [np.load(tmp_path / str(world) / "probe.npy") for world in (1, 2)]
    assert np.abs(probes[0] - probes[1]).max() < 1e-3
