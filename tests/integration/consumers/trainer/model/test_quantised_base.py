"""An adapter over a model in 4 bits: it trains, resumes, is served and merged as over one in 16 or 32 bits."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

from consumers.trainer.checkpoint.convert import export_checkpoint
from consumers.trainer.checkpoint.store import CheckpointStore
from consumers.trainer.distributed.offload import StateOffload
from consumers.trainer.distributed.precision import is_quantised
from consumers.trainer.model.hf_weights import save_model
from consumers.trainer.model.probe import reference_logprobs
from consumers.trainer.step.build import build_train_step
from consumers.trainer.step.train_step import TrainStep
from deploy.checks.preflight import check_models
from deploy.planning.changes import rehearse_apart
from deploy.planning.fit import size_engines
from producers.engines.base import EngineSettings
from producers.engines.transformers.engine import TransformersEngine
from schemas.config import TidemillConfig
from schemas.errors import ConfigError, DataError
from schemas.messages import FileSource
from tests.support.configurations import minimal_config
from tests.support.models.adapters import compute_logprobs, write_adapter
from tests.support.models.tiny_model import make_tiny_model
from tests.support.models.weight_files import write_weights
from tests.support.trainer.trajectories import make_groups

PROBE = [5, 9, 40, 41, 80, 7]
LORA = {"rank": 4, "alpha": 8.0}


@pytest.fixture(scope="module")
def full(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("full"), hidden=64, layers=2)


@pytest.fixture(scope="module")
def model(full: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model in 4 bits, with its tokenizer."""
    folder = tmp_path_factory.mktemp("nf4")
    four = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.float32)
    AutoModelForCausalLM.from_pretrained(full, dtype=torch.float32, quantization_config=four).save_pretrained(folder)
    for file in full.glob("tokenizer*"):
        (folder / file.name).write_bytes(file.read_bytes())
    return folder


def configuration(folder: Path, model: Path, dtype: str = "float32", **trainer: object) -> TidemillConfig:
    return minimal_config(
        run={"folder": str(folder)},
        model={"path": str(model), "dtype": dtype, "max_length": 64},
        sampling={"max_tokens": 8},
        trainer={"optimizer": {"lr": 1e-2}, "lora": LORA, **trainer},
    )


def train(step: TrainStep, first: int, last: int) -> TrainStep:
    for version in range(first, last):
        step.run(step.planner.plan(make_groups([3, 4], seed=version)).batch(), version)
    return step


def test_a_processor_that_is_quick_in_bfloat16_does_not_change_how_weights_are_stored(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("bitsandbytes.nn.modules.has_avx512bf16", lambda: True)
    policy = build_train_step(configuration(tmp_path, model)).policy
    before = {name: p.detach().clone() for name, p in policy.named_parameters() if is_quantised(p)}
    policy.eval()
    reference_logprobs(policy, PROBE)
    after = dict(policy.named_parameters())
    assert before
    assert all(torch.equal(weight, after[name]) for name, weight in before.items())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_adapter_alone_moves_is_saved_and_resumed_to_the_bit(model: Path, tmp_path: Path, dtype: str) -> None:
    config = configuration(tmp_path, model, dtype)
    step = build_train_step(config)
    frozen = {name: p.detach().clone() for name, p in step.policy.named_parameters() if is_quantised(p)}
    assert len(frozen) == 2 * 7, "two layers of seven linear ones"
    store = CheckpointStore(tmp_path / "checkpoints")
    store.save(train(step, 0, 2), step=2, version=2, leader_term=1, extra={})
    away = StateOffload(torch.device("cpu"), [step.policy], [step.update.optimizer])
    away.offload()
    away.onload()
    train(step, 2, 4)
    resumed = build_train_step(config)
    assert store.load(store.at(), resumed).step == 2
    train(resumed, 2, 4)
    for (name, one), other in zip(step.policy.named_parameters(), resumed.policy.parameters(), strict=True):
        assert torch.equal(one, other), name
        assert name not in frozen or torch.equal(one, frozen[name]), name


@pytest.mark.parametrize(("dtype", "apart"), [("float32", 1e-4), ("bfloat16", 0.1)])
async def test_an_engine_computes_what_the_trainer_does(model: Path, tmp_path: Path, dtype: str, apart: float) -> None:
    config = configuration(tmp_path, model, dtype)
    step = build_train_step(config)
    before = reference_logprobs(step.policy, PROBE)
    train(step, 0, 3)
    wanted, file = reference_logprobs(step.policy, PROBE), tmp_path / "v1.safetensors"
    assert abs(wanted - before).max() > 0.02
    write_weights(step.policy, file, dtype)
    settings = EngineSettings(str(model), dtype, max_length=64, max_samples=4, lora=config.trainer.lora)
    engine = TransformersEngine(settings)
    await engine.start()
    try:
        np.testing.assert_allclose(await engine.logprobs(PROBE), before, atol=apart)
        with pytest.raises(DataError, match="doesn't fit this model"):
            await engine.load(FileSource(write_adapter(_wider(tmp_path), tmp_path / "wide", seed=1)), 1)
        await engine.load(FileSource(file), 1)
        np.testing.assert_allclose(await engine.logprobs(PROBE), wanted, atol=apart)
    finally:
        await engine.close()


def _wider(folder: Path) -> Path:
    return make_tiny_model(folder / "wider", hidden=128, layers=2)


@pytest.mark.parametrize(("dtype", "apart"), [("float32", 1e-4), ("bfloat16", 0.1)])
def test_an_exported_model_has_the_adapter_in_dequantised_weights(
    model: Path, tmp_path: Path, dtype: str, apart: float
) -> None:
    config = configuration(tmp_path, model, dtype)
    step = train(build_train_step(config), 0, 2)
    wanted = reference_logprobs(step.policy, PROBE)
    CheckpointStore(tmp_path / "checkpoints").save(step, step=2, version=2, leader_term=1, extra={})
    _, folder = export_checkpoint(config, None, None, lambda stage: None)
    save_model(step.policy, tmp_path / "end", dtype)
    for each in (folder, tmp_path / "end"):
        assert "quantization_config" not in json.loads((each / "config.json").read_text())
        assert (each / "model.safetensors").read_bytes() == (folder / "model.safetensors").read_bytes()
    merged = AutoModelForCausalLM.from_pretrained(folder)
    np.testing.assert_allclose(compute_logprobs(merged, PROBE), wanted, atol=apart)


def test_the_plan_counts_4_bits_and_their_scales(model: Path, tmp_path: Path) -> None:
    config = configuration(tmp_path, model)
    found, policy = rehearse_apart(config, 1, on_gpu=False), build_train_step(config).policy
    small = [p for p in policy.parameters() if is_quantised(p)]
    assert found["in_4_bits"] == sum(2 * p.numel() for p in small)
    scales = sum(p.quant_state.absmax.nbytes for p in small)  # type: ignore[attr-defined]
    # Buffers are counted too: the frequencies of the rotary embedding.
    assert 0 <= found["parameters"] - sum(p.nbytes for p in policy.parameters()) - scales < 1024
    engine = size_engines({"": config}, found["model_parameters"], 2**40, shared=False, in_4_bits=found["in_4_bits"])
    whole = size_engines({"": config}, found["model_parameters"], 2**40, shared=False)
    assert whole[""].weights - engine[""].weights == found["in_4_bits"] * (4 - 9 / 16)


def test_what_cannot_be_trained_is_rejected_before_it_is_loaded(model: Path, tmp_path: Path) -> None:
    whole = configuration(tmp_path, model, lora=None)
    for use in (check_models, build_train_step):
        with pytest.raises(ConfigError, match=r"nf4.*quantised \(bitsandbytes, 4 bits\), must have 16 or 32 bits, or"):
            use(whole)
    critic = configuration(tmp_path, model, critic={}, advantage={"name": "gae"})
    with pytest.raises(ConfigError, match=r"trainer\.critic\.model .*nf4.*quantised \(bitsandbytes, 4 bits\)"):
        build_train_step(critic)
    other = tmp_path / "gptq"
    other.mkdir()
    for file in model.iterdir():
        (other / file.name).write_bytes(file.read_bytes())
    content = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps(content | {"quantization_config": {"quant_method": "gptq"}}))
    with pytest.raises(ConfigError, match=r"quantised \(gptq\), must have"):
        check_models(configuration(tmp_path, other))
    assert "nf4" in check_models(configuration(tmp_path, model))
