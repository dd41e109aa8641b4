"""Files of weights: an adapter is checked before it loads, and tensors are read as safetensors reads them."""

import gc
import json
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from producers.engines.adapter_files import adapted_layers, write_adapter_folder
from producers.engines.tensor_file import DTYPES, iterate_tensors
from producers.engines.vllm.arguments import checked_args
from schemas.config import LoraConfig
from schemas.digests import SAMPLE, base_digest
from schemas.errors import ConfigError, DataError
from schemas.weight_files import Shapes, read_shapes
from tests.support.configurations import minimal_config

MODEL: Shapes = {"model.q_proj.weight": (6, 4), "model.norm.weight": (4,)}
A, B = "base_model.model.model.q_proj.lora_A.weight", "base_model.model.model.q_proj.lora_B.weight"
FITTING: Shapes = {A: (2, 4), B: (6, 2)}


def test_an_adapter_that_fits_names_its_layers() -> None:
    assert adapted_layers(Path("f"), FITTING, MODEL, rank=2) == ["model.q_proj"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({B: None}, "lora_B of model.q_proj is missing, not .6, 2."),
        ({A: (2, 5)}, "lora_A of model.q_proj is .2, 5., not .2, 4."),
        ({A: (3, 4)}, "lora_A of model.q_proj is .3, 4., not .2, 4."),
        ({"model.q_proj.weight": (6, 4)}, "not an adapter: it has a tensor model.q_proj.weight"),
        ({A.replace("q_proj", "norm"): (2, 4)}, "has no linear layer model.norm"),
        ({A.replace("q_proj", "x_proj"): (2, 4)}, "has no linear layer model.x_proj"),
        ({A: None, B: None}, "not an adapter: it is empty"),
    ],
)
def test_one_that_does_not_is_refused_with_the_reason(change: dict[str, Any], message: str) -> None:
    shapes = {name: shape for name, shape in {**FITTING, **change}.items() if shape is not None}
    with pytest.raises(DataError, match=message):
        adapted_layers(Path("f"), shapes, MODEL, rank=2)


def test_the_folder_is_as_peft_writes_it_and_does_not_copy(tmp_path: Path) -> None:
    file = tmp_path / "v7.safetensors"
    save_file({A: torch.ones(2, 4), B: torch.ones(6, 2)}, file)
    write_adapter_folder(tmp_path / "version-7", LoraConfig(rank=2, alpha=3.0), ["model.q_proj"], file)
    described = json.loads((tmp_path / "version-7/adapter_config.json").read_text())
    assert (described["r"], described["lora_alpha"], described["target_modules"]) == (2, 3.0, ["q_proj"])
    assert (tmp_path / "version-7/adapter_model.safetensors").resolve() == file
    assert read_shapes(tmp_path / "version-7/adapter_model.safetensors") == {A: (2, 4), B: (6, 2)}


def model(folder: Path, change: Callable[[dict[str, torch.Tensor]], None] = lambda _: None) -> Path:
    tensors = {name: torch.arange(2 * SAMPLE, dtype=torch.float32) for name in ("a", "b", "c")}
    change(tensors)
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors")
    return folder


def test_a_base_model_is_told_from_another_and_not_by_how_it_is_stored(tmp_path: Path) -> None:
    one = model(tmp_path / "one")
    tensors = load_file(one / "model.safetensors")
    shards = tmp_path / "shards"
    shards.mkdir()
    save_file({"c": tensors["c"], "a": tensors["a"]}, shards / "1.safetensors")
    save_file({"b": tensors["b"]}, shards / "2.safetensors")
    names = {"a": "1.safetensors", "b": "2.safetensors", "c": "1.safetensors"}
    (shards / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))
    save_file({"z": tensors["a"]}, shards / "the same in another layout.safetensors")
    assert base_digest(one) == base_digest(shards)
    others = [
        model(tmp_path / "value", lambda t: t["b"].__setitem__(5, 7.0)),
        model(tmp_path / "shape", lambda t: t.update(b=t["b"].reshape(2, -1))),
        model(tmp_path / "name", lambda t: t.update(d=t.pop("b"))),
        model(tmp_path / "type", lambda t: t.update(b=t["b"].double())),
    ]
    assert len({base_digest(folder) for folder in [one, *others]}) == 5


def test_a_folder_that_is_no_model_says_so(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="holds no safetensors file"):
        base_digest(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"not weights at all")
    with pytest.raises(DataError, match="is not a safetensors file"):
        base_digest(tmp_path)


def test_what_vllm_is_told_of_the_adapter_is_not_to_be_overruled() -> None:
    for name in ("enable_lora", "max_loras", "max_lora_rank"):
        with pytest.raises(ConfigError, match=rf"generator.args.{name} can't be set"):
            checked_args({name: 1}, [name])


def test_vllm_gets_the_next_rank_that_it_knows() -> None:
    pytest.importorskip("vllm")
    from producers.engines.vllm.lora import lora_arguments

    assert lora_arguments(None) == {}
    given = {rank: lora_arguments(LoraConfig(rank=rank))["max_lora_rank"] for rank in (1, 2, 8, 9, 100, 512)}
    assert given == {1: 1, 2: 8, 8: 8, 9: 16, 100: 128, 512: 512}
    with pytest.raises(ConfigError, match=r"trainer.lora.rank 513: vLLM takes at most 512"):
        lora_arguments(LoraConfig(rank=513))


def settings(trainer: dict[str, Any]) -> Any:
    return minimal_config(model={"path": "m"}, train={"name": "gsm8k"}, trainer=trainer).trainer


@pytest.mark.parametrize(
    ("trainer", "message"),
    [
        ({"lora": {"dropout": 0.1}}, "trainer.lora.dropout is always 0"),
        ({"lora": {"rank": 0}}, "trainer.lora.rank"),
        ({"lora": {"targets": []}}, "trainer.lora.targets"),
        ({"lora": {"r": 8}}, "trainer.lora.r: unknown key"),
        ({"kl": {"reference": "lora_off"}}, "trainer.lora is not set"),
        ({"lora": {}, "kl": {"reference": "lora_off", "model": "x"}}, "name two references"),
    ],
)
def test_settings_that_cannot_work_are_refused(trainer: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        settings(trainer)


def test_the_reference_is_the_policy_without_its_adapter_where_that_is_the_same() -> None:
    assert settings({"lora": {"dropout": 0}, "kl": {"coef": 0.1}}).lora_off
    assert not settings({"lora": {}}).lora_off, "without a penalty nothing is compared"
    assert not settings({"kl": {"coef": 0.1}}).lora_off
    assert not settings({"lora": {}, "kl": {"coef": 0.1, "model": "another"}}).lora_off
    assert not settings({"lora": {}, "kl": {"coef": 0.1, "reference": "model"}}).lora_off


def test_tensors_are_those_that_were_written(tmp_path: Path) -> None:
    file = tmp_path / "weights"
    generator = torch.Generator().manual_seed(0)
    written = {str(dtype): torch.randint(0, 2, (3, 5), generator=generator).to(dtype) for dtype in DTYPES.values()}
    written |= {"scalar": torch.tensor(3.5), "nothing": torch.zeros(0, 4), "apart": torch.arange(7.0)[1:]}
    save_file({name: tensor.contiguous() for name, tensor in written.items()}, file, metadata={"format": "pt"})
    found, wanted = dict(iterate_tensors(file)), load_file(file)
    assert found.keys() == wanted.keys() == written.keys()
    for name, tensor in wanted.items():
        assert (found[name].dtype, found[name].shape) == (tensor.dtype, tensor.shape), name
        assert torch.equal(found[name].double(), tensor.double()), name
    file.unlink()
    assert found["scalar"].item() == 3.5


def test_a_type_that_is_not_known_is_named(tmp_path: Path) -> None:
    file = tmp_path / "weights"
    save_file({"odd": torch.zeros(2, dtype=torch.uint16)}, file)
    with pytest.raises(DataError, match="tensor odd has type U16, allowed: F64, "):
        dict(iterate_tensors(file))


def test_reading_again_and_again_takes_no_memory(tmp_path: Path) -> None:
    file = tmp_path / "weights"
    save_file({f"layer.{index}": torch.full((4, 4), float(index)) for index in range(40)}, file)

    def read() -> float:
        return sum(float(tensor.sum()) for _, tensor in iterate_tensors(file))

    read()
    tracemalloc.start()
    try:
        read()
        gc.collect()
        before, _ = tracemalloc.get_traced_memory()
        for _ in range(50):
            read()
        gc.collect()
        grown = tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()
    # safetensors' own reader would leave 50 times 40 times 56 bytes.
    assert grown < 10_000
