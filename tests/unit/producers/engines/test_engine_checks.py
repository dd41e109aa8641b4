"""What engines refuse before they start or before they touch their weights."""

import importlib.util
import json
import os
import struct
from dataclasses import replace
from pathlib import Path

import pytest

from producers.engines.base import EngineSettings
from producers.engines.factory import engine_name, make_engine
from producers.engines.sampling import check_sampling, max_new_tokens
from producers.engines.vllm import before_import
from producers.engines.vllm.arguments import read_names
from producers.engines.vllm.before_import import check_batch_invariance
from producers.engines.vllm.boot import routed_experts_arguments
from schemas.errors import ConfigError, DataError
from schemas.messages import Sampling
from schemas.model_folder import resolve_folder
from schemas.weight_files import check_fits, read_shapes

MODEL = {"embed": (4, 2), "lm_head.weight": (4, 2)}


def write(file: Path, shapes: dict[str, tuple[int, ...]], cut: int = 0) -> Path:
    """A safetensors file of float32 zeros."""
    header, at = {}, 0
    for name, shape in shapes.items():
        size = 4
        for extent in shape:
            size *= extent
        header[name] = {"dtype": "F32", "shape": list(shape), "data_offsets": [at, at + size]}
        at += size
    text = json.dumps(header).encode()
    file.write_bytes(struct.pack("<Q", len(text)) + text + bytes(at - cut))
    return file


def test_shapes_are_read_from_a_file_or_from_all_shards_of_a_folder(tmp_path: Path):
    write(tmp_path / "model-1.safetensors", {"embed": (4, 2)})
    one = write(tmp_path / "model-2.safetensors", {"lm_head.weight": (4, 2)})
    assert read_shapes(tmp_path) == MODEL
    assert read_shapes(one) == {"lm_head.weight": (4, 2)}


def test_files_that_are_cut_short_or_something_else_are_refused(tmp_path: Path):
    with pytest.raises(DataError, match="cut short"):
        read_shapes(write(tmp_path / "short.safetensors", MODEL, cut=4))
    other = tmp_path / "other.safetensors"
    other.write_bytes(b"\x05\0\0\0\0\0\0\0hello")
    with pytest.raises(DataError, match="not a safetensors file"):
        read_shapes(other)
    with pytest.raises(DataError, match="can't be read"):
        read_shapes(tmp_path / "absent.safetensors")


@pytest.mark.parametrize(
    ("new", "reason"),
    [
        ({"lm_head.weight": (4, 2)}, "lacks embed"),
        ({**MODEL, "extra": (1,)}, "has unknown extra"),
        ({**MODEL, "embed": (4, 3)}, r"embed has shape \[4, 3\], not \[4, 2\]"),
        ({"embed": (4, 2)}, r"lacks lm_head\.weight"),
    ],
)
def test_weights_must_be_exactly_those_of_the_model(new: dict[str, tuple[int, ...]], reason: str):
    with pytest.raises(DataError, match=reason):
        check_fits(Path("w"), new, MODEL, tied=False)


def test_a_tied_head_may_be_left_out():
    check_fits(Path("w"), {"embed": (4, 2)}, MODEL, tied=True)
    check_fits(Path("w"), MODEL, {"embed": (4, 2)}, tied=True)


def test_a_missing_model_folder_is_named():
    with pytest.raises(ConfigError, match="no such folder"):
        resolve_folder("/nowhere/model")


def test_truncated_sampling_is_refused_for_training_unless_accepted():
    check_sampling(Sampling())
    for sampling, name in ((Sampling(top_p=0.9), "top_p"), (Sampling(top_k=20), "top_k")):
        with pytest.raises(ConfigError, match=f"sampling.{name}"):
            check_sampling(sampling)
        check_sampling(sampling, allow_truncated=True)
    with pytest.raises(ConfigError, match="greedy"):
        check_sampling(Sampling(temperature=0))


def test_engine_arguments_that_change_what_is_sampled_are_refused_unless_accepted():
    check_sampling(Sampling(), args={"gpu_memory_utilization": 0.8, "logits_processors": None})
    for name in ("logits_processors", "reasoning_config", "watermark_config"):
        with pytest.raises(ConfigError, match=rf"generator\.args\.{name} changes what is sampled"):
            check_sampling(Sampling(), args={name: ["x"]})
        check_sampling(Sampling(), allow_truncated=True, args={name: ["x"]})


def test_room_is_bounded_by_max_tokens_and_by_the_model():
    assert max_new_tokens(10, 0, Sampling(max_tokens=5), 100) == 5
    assert max_new_tokens(10, 3, Sampling(max_tokens=5), 100) == 2
    assert max_new_tokens(98, 0, Sampling(max_tokens=5), 100) == 2
    assert max_new_tokens(90, 10, Sampling(max_tokens=50), 100) == 0
    with pytest.raises(DataError, match="no room"):
        max_new_tokens(100, 0, Sampling(max_tokens=5), 100)
    with pytest.raises(DataError, match="empty"):
        max_new_tokens(0, 0, Sampling(max_tokens=5), 100)


def test_vllm_arguments_are_checked_before_anything_starts():
    from producers.engines.vllm.arguments import checked_args

    known = ["block_size", "logprobs_mode"]
    assert checked_args({"block_size": 16}, known) == {"block_size": 16}
    with pytest.raises(ConfigError, match="did you mean block_size"):
        checked_args({"blocksize": 16}, known)
    for name, reason in (
        ("logprobs_mode", "the distribution that was sampled from"),
        ("max_num_seqs", r"it is generator\.max_samples"),
        ("override_generation_config", "set sampling instead"),
    ):
        with pytest.raises(ConfigError, match=f"generator.args.{name} can't be set: .*{reason}"):
            checked_args({name: 1}, known)


def test_vllm_tells_experts_on_gpus_only(tmp_path: Path):
    settings = EngineSettings(str(tmp_path), "float32", 64, 4, routed_experts=True)
    with pytest.raises(ConfigError, match=r"trainer\.router_replay: vLLM reports the experts of tokens on GPUs only"):
        routed_experts_arguments(settings, on_cpu=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("VLLM_USE_V2_MODEL_RUNNER", raising=False)
        assert routed_experts_arguments(settings, on_cpu=False) == {"enable_return_routed_experts": True}
        assert os.environ["VLLM_USE_V2_MODEL_RUNNER"] == "1"
    assert routed_experts_arguments(replace(settings, routed_experts=False), on_cpu=True) == {}


def test_auto_is_the_best_engine_that_is_installed(monkeypatch: pytest.MonkeyPatch):
    installed = {"vllm", "transformers"}
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name if name in installed else None)
    assert engine_name("auto") == "vllm"
    installed.remove("vllm")
    assert engine_name("auto") == "transformers"
    assert engine_name("mine.py:Engine") == "mine.py:Engine"
    installed.clear()
    with pytest.raises(ConfigError, match="neither vllm nor transformers is installed"):
        engine_name("auto")


def test_an_engine_that_is_a_dialect_is_sent_to_its_setting():
    with pytest.raises(
        ConfigError, match=r"generator\.engine 'sglang': set generator\.engine http, and dialect sglang"
    ):
        make_engine("sglang", EngineSettings("none", "float32", 10, 1), Path())


def test_the_cpu_key_value_cache_is_no_larger_than_the_samples_in_flight_need(tmp_path: Path):
    from producers.engines.vllm.boot import kv_cache_bytes
    from tests.support.models.tiny_model import make_tiny_model

    folder = make_tiny_model(tmp_path)
    small, large = (EngineSettings(str(folder), "float32", 512, n) for n in (64, 100_000))
    assert 16 * 2**20 <= kv_cache_bytes(folder, small) < 2**26
    assert kv_cache_bytes(folder, large) == 2**30


def test_names_of_arguments_come_from_the_source_of_vllm_and_none_from_a_source_of_another_kind(tmp_path: Path):
    source = tmp_path / "arg_utils.py"
    assert read_names(source) == []
    source.write_text(
        "class EngineArgs:\n    model: str = 'm'\n    seed: int | None = None\n    other = 3\n"
        "class AsyncEngineArgs(EngineArgs):\n    enable_log_requests: bool = False\n"
    )
    assert read_names(source) == ["model", "seed", "enable_log_requests"]
    source.write_text("class EngineArgs(:")
    assert read_names(source) == []


@pytest.mark.parametrize(
    ("cards", "lowest"), [("9.0", "9.0"), ("10.0\n9.0\n8.0", "8.0"), ("9.0\n7.5", None), ("", None)]
)
def test_batch_invariance_is_refused_where_a_card_is_too_old(
    cards: str, lowest: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    program = tmp_path / "nvidia-smi"
    program.write_text(f"#!/bin/sh\ncat <<'END'\n{cards}\nEND\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.setattr(before_import, "is_cpu_build", lambda: False)
    if lowest is not None:
        assert check_batch_invariance() == lowest
        return
    with pytest.raises(ConfigError, match=r"^generator.exact: .* 8.0 or higher, and here is (7.5|none): set"):
        check_batch_invariance()


def test_batch_invariance_is_refused_on_a_cpu(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(before_import, "is_cpu_build", lambda: True)
    with pytest.raises(ConfigError, match="or higher, and here "):
        check_batch_invariance()
