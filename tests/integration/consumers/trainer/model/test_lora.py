"""Training an adapter: nothing else moves, nothing else is saved or published, and peft reads what comes out."""

import json
import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from torch.distributed.checkpoint import FileSystemReader
from transformers import AutoModelForCausalLM

from consumers.trainer.checkpoint.compare import compare
from consumers.trainer.checkpoint.convert import export_checkpoint
from consumers.trainer.checkpoint.store import CheckpointStore
from consumers.trainer.distributed.ranks import Ranks
from consumers.trainer.model.hf_weights import file_layout, save_adapter
from consumers.trainer.model.lora import make_policy
from consumers.trainer.model.policy import Policy, load_model
from consumers.trainer.model.probe import reference_logprobs
from consumers.trainer.rank_group import RankGroup
from consumers.trainer.step.build import build_train_step, reference_policy
from consumers.trainer.step.train_step import TrainStep
from schemas.config import TidemillConfig, parse_config
from schemas.errors import ConfigError
from tests.support.models.adapters import compute_logprobs, merge_adapter
from tests.support.models.tiny_model import make_tiny_model
from tests.support.models.weight_files import write_weights
from tests.support.trainer.trajectories import make_groups

PROBE = [5, 9, 40, 41, 80, 7]
LORA = {"rank": 4, "alpha": 8.0}


@pytest.fixture(scope="module", params=[False, True], ids=["untied", "tied"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("tiny"), hidden=32, layers=2, tied=request.param)


def configuration(folder: Path, model: Path, dtype: str = "float32", **trainer: Any) -> TidemillConfig:
    return parse_config(
        {
            "run": {"folder": str(folder)},
            "model": {"path": str(model), "dtype": dtype, "max_length": 64},
            "train": {"name": "arithmetic"},
            "reward": {"terms": [{"name": "exact"}]},
            "sampling": {"max_tokens": 8},
            "trainer": {"optimizer": {"lr": 1e-2}, "lora": LORA, **trainer},
        }
    )


def trained(config: TidemillConfig, steps: int = 2, first: int = 0) -> TrainStep:
    step = build_train_step(config)
    for number in range(first, steps):
        step.run(step.planner.plan(make_groups([3, 4], seed=number)).batch(), number)
    return step


@pytest.fixture(scope="module")
def saved(model: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[TrainStep, Path]:
    """A trained step, which no test changes, and the folder of a run with its checkpoint."""
    folder = tmp_path_factory.mktemp("saved")
    step = trained(configuration(folder, model))
    CheckpointStore(folder / "checkpoints").save(step, step=2, version=2, leader_term=1, extra={})
    return step, folder


def test_a_fresh_adapter_changes_nothing_and_training_changes_nothing_else(model: Path, tmp_path: Path) -> None:
    config = configuration(tmp_path, model)
    plain = reference_logprobs(Policy(load_model(model, "float32")), PROBE)
    assert reference_logprobs(make_policy(config), PROBE).tolist() == plain.tolist()
    step = trained(config)
    assert abs(reference_logprobs(step.policy, PROBE) - plain).max() > 0.01
    base = AutoModelForCausalLM.from_pretrained(model).state_dict()
    moved = {name for name, tensor in step.policy.causal_lm.named_parameters() if tensor.requires_grad}
    assert {name.split(".")[-3] for name in moved} == {"lora_A", "lora_B"}
    assert len(moved) == 2 * 7 * 2, "two layers of seven linear ones"
    for name, tensor in step.policy.causal_lm.named_parameters():
        if name not in moved:
            assert torch.equal(tensor, base[name.replace(".base_layer", "")]), name
    assert {id(p) for group in step.update.optimizer.param_groups for p in group["params"]} == {
        id(p) for p in step.policy.parameters() if p.requires_grad
    }


def test_the_frozen_model_is_held_in_its_own_type_and_the_adapter_in_float32(model: Path, tmp_path: Path) -> None:
    policy = make_policy(configuration(tmp_path, model, "bfloat16"))
    assert {(p.requires_grad, p.dtype) for p in policy.parameters()} == {
        (False, torch.bfloat16),
        (True, torch.float32),
    }


def test_recomputed_activations_give_equal_adapters(model: Path, tmp_path: Path, saved: tuple[TrainStep, Path]) -> None:
    """The input of the first layer wants no gradient, as no embedding is trained."""
    again = trained(configuration(tmp_path, model, activation_checkpointing=True))
    files = [tmp_path / "kept", tmp_path / "again"]
    for step, file in zip((saved[0], again), files, strict=True):
        write_weights(step.policy, file, "float32")
    ends = [load_file(file) for file in files]
    for name, tensor in ends[0].items():
        assert torch.allclose(tensor, ends[1][name], atol=1e-6), name


def test_the_same_seed_gives_the_same_adapter_whatever_was_drawn_before(model: Path, tmp_path: Path) -> None:
    files = []
    for name in ("one", "two"):
        torch.rand(3)
        files.append(tmp_path / name)
        write_weights(make_policy(configuration(tmp_path, model)), files[-1], "float32")
    assert files[0].read_bytes() == files[1].read_bytes()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_adapter_has_pefts_names(model: Path, tmp_path: Path, saved: tuple[TrainStep, Path], dtype: str) -> None:
    policy = saved[0].policy
    specs = write_weights(policy, tmp_path / "file", dtype)
    written = load_file(tmp_path / "file")
    assert specs == file_layout(policy, dtype).specs
    assert written["base_model.model.model.layers.1.mlp.down_proj.lora_A.weight"].shape == (4, 128)
    assert len(written) == 28
    assert {str(tensor.dtype) for tensor in written.values()} == {f"torch.{dtype}"}
    if dtype == "float32":
        want = compute_logprobs(merge_adapter(model, tmp_path / "file"), PROBE)
        assert reference_logprobs(policy, PROBE).tolist() == pytest.approx(want.tolist(), abs=1e-4)


def test_half_precision_computes_with_what_is_published(model: Path, tmp_path: Path) -> None:
    """The optimizer's float32 and the bfloat16 on the wire differ; the probe is of the latter."""
    step = trained(configuration(tmp_path, model, "bfloat16"))
    probe = reference_logprobs(step.policy, PROBE)
    write_weights(step.policy, tmp_path / "file", "bfloat16")
    want = compute_logprobs(merge_adapter(model, tmp_path / "file"), PROBE)
    assert probe.tolist() == pytest.approx(want.tolist(), abs=0.15)


@pytest.mark.parametrize("micro_batch_tokens", [16384, 20])
def test_the_reference_without_adapter_is_another_model(model: Path, tmp_path: Path, micro_batch_tokens: int) -> None:
    ends = []
    for reference in ("model", "auto"):
        kl = {"coef": 0.5, "reference": reference}
        config = configuration(tmp_path, model, kl=kl, micro_batch_tokens=micro_batch_tokens)
        assert (reference_policy(config, Ranks()) is None) == (reference == "auto")
        step = trained(config, steps=1)
        result = step.run(step.planner.plan(make_groups([3, 4], seed=9)).batch(), 1)
        write_weights(step.policy, tmp_path / reference, "float32")
        ends.append((result.metrics["reference_kl"], (tmp_path / reference).read_bytes()))
    assert ends[0][0] > 0
    assert ends[0] == ends[1]


def test_a_checkpoint_holds_the_adapter_alone_and_training_goes_on_from_it(model: Path, tmp_path: Path) -> None:
    config = configuration(tmp_path, model)
    checkpoints, step = CheckpointStore(tmp_path / "checkpoints"), trained(config, 2)
    path = checkpoints.save(step, step=2, version=2, leader_term=1, extra={})
    tensors = FileSystemReader(path / "tensors").read_metadata().state_dict_metadata
    parts = Counter(name.partition(".")[0] for name in tensors if ".lora_" in name)
    assert parts == {"model": 28, "optimizer": 28 * 3}, "the adapter, its two moments and its count of steps"
    assert not [name for name in tensors if ".lora_" not in name and "param_groups" not in name]
    other = build_train_step(config)
    checkpoints.load(path, other)
    assert compare(other, path).equal
    for going in (step, other):
        going.run(going.planner.plan(make_groups([3, 4], seed=2)).batch(), 2)
    last = checkpoints.save(step, step=3, version=3, leader_term=1, extra={})
    assert compare(other, last).equal


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"lora": {"rank": 8, "alpha": 8.0}}, "of another adapter: trainer.lora.rank is 8, the checkpoint's 4"),
        ({"lora": {**LORA, "targets": ["q_proj"]}}, r"trainer.lora.targets is \['q_proj'\], the checkpoint's \['down"),
        ({"lora": None}, r"is of an adapter \(rank 4\), and trainer.lora makes this run train a whole model"),
    ],
)
def test_a_checkpoint_of_another_adapter_is_refused(
    model: Path, tmp_path: Path, saved: tuple[TrainStep, Path], change: dict[str, Any], message: str
) -> None:
    checkpoints = CheckpointStore(saved[1] / "checkpoints")
    config = configuration(tmp_path, model, **change)
    with pytest.raises(ConfigError, match=message):
        checkpoints.load(checkpoints.at(2), build_train_step(config))


def test_a_checkpoint_of_another_model_is_refused(model: Path, tmp_path: Path) -> None:
    checkpoints = CheckpointStore(tmp_path / "checkpoints")
    path = checkpoints.save(trained(configuration(tmp_path, model), 0), step=0, version=0, leader_term=1, extra={})
    config = configuration(tmp_path, make_tiny_model(tmp_path / "other", seed=3, hidden=32, layers=2))
    with pytest.raises(ConfigError, match=r"of another adapter: .* is another model"):
        checkpoints.load(path, build_train_step(config))
    with pytest.raises(ConfigError, match="is another model"):
        export_checkpoint(config, None, tmp_path / "out", lambda _: None)


@pytest.mark.parametrize(
    ("targets", "message"),
    [
        (
            ["q_proj", "query"],
            "'query' is no linear layer of Qwen2ForCausalLM that can be adapted, there is down_proj, ",
        ),
        (["lm_head"], "'lm_head' is no linear layer .* that can be adapted"),
        (["embed_tokens"], "'embed_tokens' is no linear layer"),
    ],
)
def test_targets_must_match_something(model: Path, tmp_path: Path, targets: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make_policy(configuration(tmp_path, model, lora={**LORA, "targets": targets}))


def export(config: TidemillConfig, adapter: bool) -> Path:
    return export_checkpoint(config, None, None, lambda _: None, adapter)[1]


def test_the_merged_export_and_the_adapter_in_peft_are_the_policy(model: Path, saved: tuple[TrainStep, Path]) -> None:
    step, run = saved
    config = configuration(run, model)
    want = reference_logprobs(step.policy, PROBE).tolist()
    whole = AutoModelForCausalLM.from_pretrained(export(config, adapter=False))
    assert compute_logprobs(whole, PROBE).tolist() == pytest.approx(want, abs=1e-4)
    assert {name for name, _ in whole.named_parameters()} == {
        name for name, _ in AutoModelForCausalLM.from_pretrained(model).named_parameters()
    }
    folder = export(config, adapter=True)
    assert folder.name == "step-00000002-t0001-adapter"
    assert json.loads((folder / "adapter_config.json").read_text())["base_model_name_or_path"] == str(model)
    adapted = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(model), str(folder))
    assert compute_logprobs(adapted, PROBE).tolist() == pytest.approx(want, abs=1e-5)
    assert (folder / "tokenizer.json").is_file()


def test_the_model_at_the_end_of_a_run_is_merged(model: Path, tmp_path: Path, saved: tuple[TrainStep, Path]) -> None:
    step, run = saved
    RankGroup(configuration(run, model), step).export(tmp_path / "model")
    whole = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    want = reference_logprobs(step.policy, PROBE).tolist()
    assert compute_logprobs(whole, PROBE).tolist() == pytest.approx(want, abs=1e-4)


def test_without_lora_there_is_no_adapter_to_export(model: Path, saved: tuple[TrainStep, Path]) -> None:
    with pytest.raises(ConfigError, match="there is no adapter to export"):
        export(configuration(saved[1], model, lora=None), adapter=True)


def test_training_starts_from_an_adapter_of_pefts(model: Path, tmp_path: Path, saved: tuple[TrainStep, Path]) -> None:
    start = tmp_path / "adapter"
    start.mkdir()
    save_adapter(saved[0].policy, start, "float32", str(model))
    config = configuration(tmp_path, model, lora={**LORA, "start": str(start)})
    policy = make_policy(config)
    want = reference_logprobs(saved[0].policy, PROBE)
    assert reference_logprobs(policy, PROBE).tolist() == want.tolist()
    assert all(p.requires_grad == ("lora_" in name) for name, p in policy.named_parameters())


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"rank": 2}, "its r is 4, must be 2"),
        ({"alpha": 3.0}, "its lora_alpha is 8, must be 3.0"),
        ({"targets": ["q_proj"]}, "is not adapted by this run: set trainer.lora.targets"),
    ],
)
def test_an_adapter_of_another_kind_is_refused_as_a_start(
    model: Path, tmp_path: Path, saved: tuple[TrainStep, Path], change: dict[str, Any], problem: str
) -> None:
    start = tmp_path / "adapter"
    start.mkdir()
    save_adapter(saved[0].policy, start, "float32", str(model))
    with pytest.raises(ConfigError, match=re.escape(problem)):
        make_policy(configuration(tmp_path, model, lora={**LORA, **change, "start": str(start)}))


def test_a_folder_without_an_adapter_is_refused_as_a_start(model: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="there is no adapter in peft's format"):
        make_policy(configuration(tmp_path, model, lora={**LORA, "start": str(tmp_path)}))
