"""What ``tidemill doctor`` says: the memory that a run needs, and the server of the engine http."""

import asyncio
import json
import re
import runpy
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from deploy.checks.finding import Finding
from deploy.checks.preflight import check_packages
from deploy.doctor import doctor
from deploy.doctor.doctor import check_gpus
from deploy.doctor.gpu_memory import check_memory_fits, model_size, trainer_need
from deploy.doctor.inference_server import check_inference_server
from deploy.launchers.gpus import Gpu, plan_gpus
from deploy.launchers.local import Local
from schemas.config import PlacementConfig, TidemillConfig, load_config
from schemas.errors import ConfigError
from schemas.weight_files import read_shapes
from tests.support.configurations import minimal_config
from tests.support.models.tiny_model import make_tiny_model
from tests.support.producers.faulty_server import FaultyServer, served

QWEN_HALF_B = {
    "model_type": "qwen2",
    "hidden_size": 896,
    "intermediate_size": 4864,
    "num_attention_heads": 14,
    "num_hidden_layers": 24,
    "num_key_value_heads": 2,
    "tie_word_embeddings": True,
    "vocab_size": 151936,
}
QWEN_2_5 = {
    "Qwen/Qwen2.5-0.5B-Instruct": QWEN_HALF_B,
    "Qwen/Qwen2.5-1.5B-Instruct": QWEN_HALF_B
    | {"hidden_size": 1536, "intermediate_size": 8960, "num_attention_heads": 12, "num_hidden_layers": 28},
    "Qwen/Qwen2.5-7B-Instruct": QWEN_HALF_B
    | {
        "hidden_size": 3584,
        "intermediate_size": 18944,
        "num_attention_heads": 28,
        "num_hidden_layers": 28,
        "num_key_value_heads": 4,
        "tie_word_embeddings": False,
        "vocab_size": 152064,
    },
}
LLAMA_8B = {
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "tie_word_embeddings": False,
    "vocab_size": 128256,
}
GPT2 = {"model_type": "gpt2", "n_embd": 768, "n_head": 12, "n_layer": 12, "vocab_size": 50257}
MIXTRAL = LLAMA_8B | {"model_type": "mixtral", "num_local_experts": 8, "vocab_size": 32000}


@pytest.mark.parametrize(
    ("config", "billions"), [(QWEN_HALF_B, 0.494), (LLAMA_8B, 8.03), (GPT2, 0.124), (MIXTRAL, 46.7)]
)
def test_parameters_of_known_models_are_counted_from_configurations(config: dict[str, Any], billions: float) -> None:
    size = model_size(config)
    assert size is not None
    assert size.parameters / 1e9 == pytest.approx(billions, rel=0.01)


def test_the_count_is_that_of_the_weights_that_are_stored(tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path / "model", hidden=64)
    stored = 0
    for shape in read_shapes(folder).values():
        count = 1
        for length in shape:
            count *= length
        stored += count
    size = model_size(json.loads((folder / "config.json").read_text()))
    assert size is not None
    assert size.parameters == pytest.approx(stored, rel=0.02)


def test_a_configuration_of_an_unknown_kind_is_not_guessed() -> None:
    assert model_size({"model_type": "other"}) is None


def config(**trainer: Any) -> TidemillConfig:
    return minimal_config(
        model={"path": "m", "dtype": "bfloat16", "max_length": 4096},
        trainer={"micro_batch_tokens": 4096, **trainer},
        generator={"engine": "vllm"},
    )


def test_full_training_takes_sixteen_bytes_a_parameter_over_all_ranks_and_an_adapter_much_less() -> None:
    size = model_size(LLAMA_8B)
    assert size is not None
    full = trainer_need(config(processes=8, activation_checkpointing=False), size, 80.0)
    states = sum(full.parts[name] for name in ("weights", "gradients", "optimizer"))
    assert states * 8 * 1024**3 == pytest.approx(16 * size.parameters)
    assert full.fits
    assert not trainer_need(config(), size, 80.0).fits
    adapter = trainer_need(config(lora={"rank": 16}), size, 80.0)
    assert adapter.parts["weights"] == pytest.approx(15, abs=1)
    assert adapter.parts["optimizer"] < 1
    less = trainer_need(config(activation_checkpointing=True), size, 80.0)
    assert less.parts["activations, roughly"] < full.parts["activations, roughly"] / 8
    assert trainer_need(config(), size, 80.0).parts == less.parts, "it is on by itself for a model of this size"
    small = model_size(QWEN_HALF_B)
    assert small is not None
    assert (
        trainer_need(config(), small, 80.0).parts
        == trainer_need(config(activation_checkpointing=False), small, 80.0).parts
    )
    selective, offloaded = (
        trainer_need(config(**{"activation_checkpointing": True, **more}), size, 80.0)
        for more in ({"activation_checkpointing": "selective"}, {"activation_offload": True})
    )
    sums = [need.parts["activations, roughly"] for need in (offloaded, less, selective)]
    assert sums == sorted(sums)
    assert sums[0] < sums[1] / 2


def test_two_gpus_tell_what_each_side_has_left() -> None:
    size, gpus = model_size(QWEN_HALF_B), [Gpu("0", 24.0), Gpu("1", 24.0)]
    assert size is not None
    trainer, generator = check_memory_fits(config(), size, gpus, plan_gpus(config(), gpus))
    assert trainer[:2] == ("trainer memory", True)
    assert "494M parameters: 1.8 weights + 1.8 gradients + 3.7 optimizer" in trainer[2]
    assert "of 24 GB on each GPU" in trainer[2]
    assert generator[:2] == ("generator memory", True)
    assert "0.9 weights, of 0.9 of 24 GB" in generator[2]


def test_one_gpu_that_is_too_small_for_both_is_said_before_anything_runs() -> None:
    size, gpus = model_size(LLAMA_8B), [Gpu("0", 24.0)]
    assert size is not None
    trainer, generator = check_memory_fits(config(), size, gpus, plan_gpus(config(), gpus))
    assert not trainer[1]
    assert "of 14 GB" in trainer[2]
    assert not generator[1]
    assert "the KV cache cannot hold one sample of model.max_length 4096" in generator[2]


def test_in_turns_each_side_has_all_of_its_gpu() -> None:
    size, gpus = model_size(QWEN_HALF_B), [Gpu("0", 24.0)]
    assert size is not None
    turns = config().model_copy(update={"placement": PlacementConfig(trainer="0", generator="0")})
    trainer, generator = check_memory_fits(turns, size, gpus, plan_gpus(turns, gpus))
    assert "of 24 GB on each GPU" in trainer[2]
    assert "of 0.9 of 24 GB" in generator[2]


@pytest.mark.parametrize(("checkout", "advice"), [(True, "make setup"), (False, "pip install 'tidemill[train]'")])
def test_who_installed_a_package_is_advised_pip(tmp_path: Path, checkout: bool, advice: str) -> None:
    file = tmp_path / "deploy" / "doctor" / "doctor.py"
    file.parent.mkdir(parents=True)
    file.write_text(Path(doctor.__file__).read_text())
    if checkout:
        (tmp_path / "Makefile").touch()
    assert runpy.run_path(str(file))["TRAIN"] == advice


def test_without_gpus_only_what_would_be_needed_is_told() -> None:
    size = model_size(QWEN_HALF_B)
    assert size is not None
    (trainer,) = check_memory_fits(config(), size, [], plan_gpus(config(), []))
    assert trainer[1]
    assert trainer[2].endswith("GB on each GPU")


def test_doctor_tells_which_gpus_each_side_has_and_their_use(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_8B))
    run = config().model_copy(update={"model": config().model.model_copy(update={"path": str(tmp_path)})})
    for module in ("deploy.doctor.doctor", "deploy.launchers.local"):
        monkeypatch.setattr(f"{module}.find_gpus", lambda: [Gpu("0", 24.0), Gpu("1", 24.0)])
    found = {finding.name: finding for finding in check_gpus(run, Local())}
    assert (found["GPUs"].level, found["GPUs"].text) == ("ok", "GPUs: 0 trainer; 1 generator-0")
    assert found["trainer memory"].level == "warn"
    assert "trainer.processes" in found["trainer memory"].advice
    assert found["generator memory"].level == "ok"
    monkeypatch.setattr("deploy.launchers.local.find_gpus", lambda: [Gpu("0", 24.0)])
    wide = run.model_copy(update={"trainer": run.trainer.model_copy(update={"processes": 2})})
    assert [finding.level for finding in check_gpus(wide, Local())] == ["fail"]


def test_the_table_of_the_gsm8k_example_is_what_the_estimate_says() -> None:
    example = Path(__file__).resolve().parents[4] / "examples/gsm8k"
    rows = re.findall(
        r"^\| `(.+?)` \| (\d) of (\d+) GB \| (?:`(.+?)`)? ?\| ([\d.]+) GB \| ([\d.]+) GB \|$",
        (example / "README.md").read_text(encoding="utf-8"),
        re.MULTILINE,
    )
    assert len(rows) == 5
    for model, gpus, memory_gb, settings, trainer, generator in rows:
        config = load_config(example / "config.yaml", [f"model.path={model}", *settings.split()], {})
        size = model_size(QWEN_2_5[model])
        assert size is not None
        need = trainer_need(config, size, None).total
        weights = 2 * size.parameters / 1024**3
        assert (f"{need:.0f}", f"{weights:.1f}") == (trainer, generator), (model, settings)
        share = config.generator.args["gpu_memory_utilization"]
        room = float(memory_gb) * (1 - share if int(gpus) == 1 else 1)
        assert need < room, (model, settings)
        assert config.trainer.processes + config.generator.replicas == max(2, int(gpus))


@pytest.fixture
def server() -> Iterator[FaultyServer]:
    """A server in a thread of its own, so that what looks at it may wait."""
    ready, over = threading.Event(), threading.Event()
    found: list[FaultyServer] = []

    async def serve() -> None:
        async with served() as faulty:
            found.append(faulty)
            ready.set()
            await asyncio.to_thread(over.wait)

    thread = threading.Thread(target=lambda: asyncio.run(serve()))
    thread.start()
    assert ready.wait(10)
    yield found[0]
    over.set()
    thread.join(10)


def http_config(**http: Any) -> TidemillConfig:
    return minimal_config(
        model={"path": "m", "max_length": 2048}, generator={"engine": "http", "http": {"dialect": "vllm", **http}}
    )


def look(**http: Any) -> Finding:
    (finding,) = check_inference_server(http_config(**http))
    return finding


def test_a_server_that_is_there_is_named_with_its_release(server: FaultyServer) -> None:
    server.answers["/version"] = (200, {"version": "0.32.0"})
    assert look(url=server.url) == Finding("inference server", "ok", f"vLLM 0.32.0 at {server.url}")
    server.answers["/version"] = (200, {"version": "0.99.0"})
    other = look(url=server.url)
    assert (other.level, other.advice) == (
        "warn",
        "vllm 0.32.0 is the release that Tidemill is tested with: the protocol may differ",
    )
    assert "/update_weights" not in server.asked


def test_what_a_server_lacks_is_told(server: FaultyServer) -> None:
    server.answers["/v1/models"] = (200, {"data": [{"max_model_len": 1024}]})
    short = look(url=server.url)
    assert short.level == "fail"
    assert "must be started with --max-model-len 2048, as model.max_length, or more" in short.text
    absent = look(url="http://127.0.0.1:9", start_s=30)
    assert absent.level == "warn"
    assert absent.advice == "a generator waits 30 s for it (generator.http.start_s)"


def test_how_a_server_is_launched_is_told() -> None:
    assert look(command=["srun", "serve"]).text.startswith("launched with srun serve; vllm 0.32.0 is the release")
    missing = look(dialect="sglang")
    assert (missing.level, missing.text) == ("fail", "sglang is not installed")
    assert "generator.http.command" in missing.advice
    assert check_inference_server(http_config(dialect="openai", url="http://a")) == []


def test_a_run_is_refused_before_it_starts_where_its_server_can_not_be() -> None:
    for http, said in (
        ({"dialect": "openai", "url": "http://a"}, "generator.http.dialect openai cannot be used for training"),
        ({"command": ["/nowhere/python"]}, "generator.http.command /nowhere/python: program not found"),
        ({"dialect": "sglang"}, r"needs the package sglang: pip install 'tidemill\[sglang\]'"),
    ):
        with pytest.raises(ConfigError, match=said):
            check_packages(http_config(**http))
