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
from deploy.checks.preflight import check, check_packages
from deploy.doctor import doctor
from deploy.doctor.doctor import check_gpus, print_findings
from deploy.doctor.inference_server import check_inference_server
from deploy.launchers import card_memory
from deploy.launchers.gpus import Gpu
from deploy.launchers.local import Local
from deploy.planning import changes
from deploy.planning.changes import rehearse_apart
from deploy.planning.fit import size_engines, total, trainer_room
from schemas.config import PlacementConfig, TidemillConfig, by_pool, load_config
from schemas.errors import ConfigError
from tests.support.configurations import minimal_config
from tests.support.models.tiny_model import make_tiny_model
from tests.support.producers.faulty_server import FaultyServer, served

QWEN_HALF_B = {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "hidden_size": 896,
    "intermediate_size": 4864,
    "max_position_embeddings": 32768,
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
SIZE = {"model_parameters": 494_000_000, "parameters": 2 << 30, "gradients": 2 << 30, "optimizer": 4 << 30}
SIZE |= {"activations": 1 << 30, "temporary": 1 << 30}


def config(**trainer: Any) -> TidemillConfig:
    return minimal_config(
        model={"path": "m", "dtype": "bfloat16", "max_length": 4096},
        trainer={"micro_batch_tokens": 4096, **trainer},
        generator={"engine": "vllm"},
    )


@pytest.mark.parametrize(("checkout", "advice"), [(True, "make setup"), (False, "pip install 'tidemill[train]'")])
def test_who_installed_a_package_is_advised_pip(tmp_path: Path, checkout: bool, advice: str) -> None:
    file = tmp_path / "deploy" / "doctor" / "doctor.py"
    file.parent.mkdir(parents=True)
    file.write_text(Path(doctor.__file__).read_text())
    if checkout:
        (tmp_path / "Makefile").touch()
    assert runpy.run_path(str(file))["TRAIN"] == advice


def findings(
    run: TidemillConfig, gpus: list[Gpu], monkeypatch: pytest.MonkeyPatch, **launcher: Any
) -> dict[str, Finding]:
    for module in ("deploy.doctor.doctor", "deploy.launchers.local"):
        monkeypatch.setattr(f"{module}.find_gpus", lambda: gpus)
    return {finding.name: finding for finding in check_gpus(run, Local(**launcher))}


def of_model(folder: Path, run: TidemillConfig) -> TidemillConfig:
    make_tiny_model(folder, hidden=128, layers=2)
    return run.model_copy(update={"model": run.model.model_copy(update={"path": str(folder)})})


def test_doctor_computes_the_step_for_the_gpus_that_there_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(card_memory, "LIMIT_S", 300.0)
    run, sizes = of_model(tmp_path, config()), []
    monkeypatch.setattr(changes, "rehearse_apart", lambda *a, **k: sizes.append(rehearse_apart(*a, **k)) or sizes[-1])
    found = findings(run, [Gpu("0", 24.0), Gpu("1", 24.0)], monkeypatch)
    assert (found["GPUs"].level, found["GPUs"].text) == ("ok", "GPUs: 0 trainer; 1 generator-0")
    assert found["trainer memory"].level == found["generator memory"].level == "ok"
    (size,) = sizes
    assert found["trainer memory"].text.startswith(f"{size['model_parameters'] / 1e6:,.0f}M parameters: ")
    assert f"= {total(size) / 1024**3:.1f} of the 22.1 GiB that tensors can have" in found["trainer memory"].text
    wide = run.model_copy(update={"trainer": run.trainer.model_copy(update={"processes": 2})})
    assert findings(wide, [Gpu("0", 24.0)], monkeypatch)["GPUs"].level == "fail"


@pytest.mark.parametrize(
    ("gpus", "update", "room", "levels"),
    [
        ([24.0, 24.0], {}, "22.1", ("ok", "ok")),
        ([8.0, 24.0], {}, "7.4", ("warn", "ok")),
        ([24.0], {}, "12.5", ("ok", "ok")),
        ([12.0], {}, "6.2", ("warn", "ok")),
        ([12.0], {"placement": PlacementConfig(trainer="0", generator="0")}, "11.0", ("ok", "ok")),
        ([24.0, 24.0], {"generator": {"args": {"gpu_memory_utilization": 0.1}}}, "22.1", ("ok", "warn")),
    ],
)
def test_each_side_has_what_the_other_leaves_and_in_turns_all(
    tmp_path: Path,
    gpus: list[float],
    update: dict[str, Any],
    room: str,
    levels: tuple[str, str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("deploy.planning.changes.rehearse_apart", lambda *_, **__: SIZE)
    run = of_model(tmp_path, config())
    if "generator" in update:
        update = {"generator": run.generator.model_copy(update=update["generator"])}
    cards = [Gpu(str(index), memory) for index, memory in enumerate(gpus)]
    found = findings(run.model_copy(update=update), cards, monkeypatch)
    trainer, generator = found["trainer memory"], found["generator memory"]
    assert (trainer.level, generator.level) == levels
    assert "2.0 parameters + 2.0 gradients + 4.0 optimizer + 1.0 activations" in trainer.text
    assert f"10.0 of the {room} GiB" in trainer.text
    assert ("plan --gpu" in trainer.advice, "tensor_parallel" in generator.advice) == tuple(x == "warn" for x in levels)


def test_a_step_that_is_not_computed_in_time_is_not_judged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(card_memory, "LIMIT_S", 0.01)
    found = findings(of_model(tmp_path, config()), [Gpu("0", 24.0)], monkeypatch)["trainer memory"]
    assert found.level == "ok"
    assert "not computed" in found.text
    assert "took more than 0 s" in found.text


def test_a_reference_in_main_memory_takes_none_of_a_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(card_memory, "LIMIT_S", 300.0)
    run = of_model(tmp_path, config(kl={"coef": 0.1, "device": "cpu"}))
    found = findings(run, [Gpu("0", 24.0), Gpu("1", 24.0)], monkeypatch)["trainer memory"]
    assert "of the 22.1 GiB" in found.text


def test_services_that_all_see_all_gpus_have_what_vllm_leaves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("deploy.planning.changes.rehearse_apart", lambda *_, **__: SIZE)
    run, gpus = of_model(tmp_path, config()), [Gpu("0", 24.0), Gpu("1", 24.0)]
    all_see = {"trainer_gpus": 0, "generator_gpus": 0}
    assert "of the 0.5 GiB" in findings(run, gpus, monkeypatch, **all_see)["trainer memory"].text
    third = run.generator.model_copy(update={"args": {"gpu_memory_utilization": 0.3}})
    found = findings(run.model_copy(update={"generator": third}), gpus, monkeypatch, **all_see)
    assert "of the 14.9 GiB" in found["trainer memory"].text


@pytest.mark.parametrize("gpus", [[], [Gpu("0", None)]])
def test_without_gpus_of_known_memory_nothing_is_computed(
    tmp_path: Path, gpus: list[Gpu], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("deploy.planning.changes.rehearse_apart", lambda *_, **__: pytest.fail("no card"))
    assert set(findings(of_model(tmp_path, config()), gpus, monkeypatch)) == {"GPUs"}


def test_up_warns_of_a_trainer_that_does_not_fit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("deploy.planning.changes.rehearse_apart", lambda *_, **__: SIZE)
    monkeypatch.setattr("deploy.launchers.local.find_gpus", lambda: [Gpu("0", 12.0)])
    monkeypatch.setattr("deploy.checks.preflight.inspect", lambda *_, **__: [])
    monkeypatch.setattr("deploy.launchers.local.run_up", lambda run, *_: check(run, cards=_[-1]) or 0)
    Local().launch(of_model(tmp_path, config()))
    told = capsys.readouterr().err
    assert "tidemill: warning: 494M parameters" in told
    assert "10.0 of the 6.2 GiB" in told


@pytest.mark.matrix("what plan computes for each row of a README's table")
def test_the_table_of_the_gsm8k_example_is_what_the_plan_says(tmp_path: Path) -> None:
    example = Path(__file__).resolve().parents[4] / "examples/gsm8k"
    rows = re.findall(
        r"^\| `(.+?)` \| (\d) of (\d+) GB \| (?:`(.+?)`)? ?\| ([\d.]+) GiB \| ([\d.]+) GiB \|$",
        (example / "README.md").read_text(encoding="utf-8"),
        re.MULTILINE,
    )
    assert len(rows) == 5
    for model, gpus, memory_gb, settings, trainer, generator in rows:
        folder = tmp_path / model
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.json").write_text(json.dumps(QWEN_2_5[model]))
        run = load_config(example / "config.yaml", [f"model.path={folder}", *settings.split()], {})
        size = rehearse_apart(run, run.trainer.processes)
        weights = 2 * size["model_parameters"] / 1024**3
        assert (f"{total(size) / 1024**3:.0f}", f"{weights:.1f}") == (trainer, generator), (model, settings)
        pools = by_pool(run)
        memory = int(memory_gb) * 10**9
        assert total(size) <= trainer_room(pools, memory, shared=int(gpus) == 1), (model, settings)
        assert size_engines(pools, size["model_parameters"], memory, int(gpus) == 1)[""].samples
        assert run.trainer.processes + run.generator.replicas == max(2, int(gpus))


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


def test_a_finding_is_printed_before_the_next_check_begins(capsys: pytest.CaptureFixture[str]) -> None:
    printed: list[str] = []

    def findings() -> Iterator[Finding]:
        yield Finding("memory", "ok", "24 GB")
        printed.append(capsys.readouterr().out)
        yield Finding("model", "fail", "no such folder", "correct it")

    assert [finding.name for finding in print_findings(findings())] == ["memory", "model"]
    assert [line.split() for line in printed] == [["ok", "memory", "24", "GB"]]
    assert "correct it" in capsys.readouterr().out
