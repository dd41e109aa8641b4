"""Folders of models: of the Hub, beside the weights that a run writes, and as Hugging Face loads them."""

import functools
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from consumers.trainer.model import hf_weights
from consumers.trainer.model.hf_weights import copy_tokenizer, file_layout, save_model
from consumers.trainer.model.policy import Policy, load_model
from consumers.trainer.model.probe import reference_logprobs
from deploy.checks.model_files import check_hub_or_folder
from schemas.config import ModelConfig
from schemas.errors import CONFIG_EXIT, ConfigError
from schemas.model_folder import fetched_name, resolve_folder, split_revision
from schemas.weight_files import read_shapes
from tests.support.models.families import FAMILIES, OTHERS, make_family
from tests.support.models.tiny_model import make_tiny_model
from tests.support.models.weight_files import write_weights
from tests.support.servers.hub_server import Hub

OLD, NEW = "a" * 40, "b" * 40

MORE = functools.partial(pytest.param, marks=pytest.mark.matrix("the same conversions under other names"))

LOAD = """
from consumers.trainer.model.policy import load_model
from deploy.checks.model_files import check_hub_or_folder
from schemas.errors import ConfigError
from schemas.model_folder import resolve_folder

for path in ("me/tiny@first", "me/tiny"):
    check_hub_or_folder(path, "model.path")
    assert not list(resolve_folder(path, weights=False).glob("*.safetensors")), "no weights where none are needed"
    model = load_model(path, "float32")
    folder = resolve_folder(path)
    assert (folder / "model.safetensors").is_file()
    print(folder.name, next(model.parameters()).dtype, sum(each.numel() for each in model.parameters()))
for refuse in (lambda path: check_hub_or_folder(path, "model.path"), resolve_folder):
    try:
        refuse("me/tiny@second")
    except ConfigError as error:
        print(error)
"""


def files_of(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in folder.iterdir()}


def test_a_revision_of_a_model_of_the_hub_is_trained(tmp_path: Path) -> None:
    first, newest = make_tiny_model(tmp_path / "first", layers=1), make_tiny_model(tmp_path / "newest", layers=2)
    sizes = [AutoModelForCausalLM.from_pretrained(each).num_parameters() for each in (first, newest)]
    with Hub() as hub:
        hub.revisions["me/tiny", "first"] = (OLD, files_of(first))
        hub.revisions["me/tiny", "main"] = (NEW, files_of(newest))
        variables = {**os.environ, "HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path / "cache"), "HF_HUB_OFFLINE": "0"}
        done = subprocess.run([sys.executable, "-c", LOAD], env=variables, capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stderr
        first_line, second_line, asked, missing = done.stdout.splitlines()
        assert first_line.split() == [OLD, "torch.float32", str(sizes[0])]
        assert second_line.split() == [NEW, "torch.float32", str(sizes[1])]
        for line in (asked, missing):
            assert line.startswith("model.path me/tiny@second: no such folder, and the Hub answered: ")
            assert "404" in line
        assert {commit: names.count("model.safetensors") for commit, names in hub.fetched.items()} == {OLD: 1, NEW: 1}


def test_a_model_of_the_hub_is_fetched_whole_before_generators_start(tmp_path: Path) -> None:
    """They wait for a file: all would download it at once."""
    config = {"model": {"path": "me/tiny"}, "train": {"name": "arithmetic"}, "reward": {"terms": [{"name": "exact"}]}}
    file, cache = tmp_path / "my.yaml", tmp_path / "cache"
    file.write_text(json.dumps(config))
    marker = cache / fetched_name("me/tiny")
    with Hub() as hub:
        variables = {**os.environ, "HF_ENDPOINT": hub.url, "HF_HOME": str(cache), "HF_HUB_OFFLINE": "0"}

        def prepare() -> int:
            command = [sys.executable, "-m", "deploy.cli", "prepare", str(file), "--fetch"]
            return subprocess.run(command, env=variables, capture_output=True, timeout=120, check=False).returncode

        assert (prepare(), marker.exists()) == (CONFIG_EXIT, False), "no such model yet"
        hub.revisions["me/tiny", "main"] = (NEW, files_of(make_tiny_model(tmp_path / "tiny", layers=1)))
        assert (prepare(), marker.exists()) == (0, True)
        assert hub.fetched[NEW].count("model.safetensors") == 1
        variables["HF_HUB_OFFLINE"] = "1"
        assert prepare() == 0
        assert hub.fetched[NEW].count("model.safetensors") == 1, "once"


def test_a_folder_may_have_any_name_and_a_path_is_no_revision(tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path / "tiny@home")
    assert resolve_folder(folder) == check_hub_or_folder(str(folder), "model.path") == folder
    assert split_revision("org/name") == ("org/name", None)
    assert split_revision("org/name@refs/pr/1") == ("org/name", "refs/pr/1")
    for wrong in ("./tiny@home", "a/b/c@d", str(tmp_path / "none@here")):
        with pytest.raises(ConfigError, match="no such folder"):
            resolve_folder(wrong)


def test_the_list_of_a_models_weight_files_does_not_stand_beside_new_weights_in_one_file(tmp_path: Path) -> None:
    """VLLM reads the files that such a list names and no other."""
    model = make_tiny_model(tmp_path / "model")
    whole = AutoModelForCausalLM.from_pretrained(model)
    (model / "model.safetensors").unlink()
    whole.save_pretrained(model, max_shard_size="100KB")
    listed = json.loads((model / "model.safetensors.index.json").read_text())["weight_map"]
    assert len(set(listed.values())) > 1
    out = tmp_path / "out"
    out.mkdir()
    copy_tokenizer(ModelConfig(path=str(model)), out)
    names = {file.name for file in out.iterdir()}
    assert {"tokenizer.json", "config.json"} <= names
    assert not any("safetensors" in name for name in names)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("tied", [False, True])
def test_the_file_holds_the_policy_under_its_hugging_face_names(tmp_path: Path, dtype: str, tied: bool) -> None:
    folder = make_tiny_model(tmp_path / "model", tied=tied)
    policy = Policy(load_model(folder, "float32"))
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.add_(0.01)
    specs = write_weights(policy, tmp_path / "v1.safetensors", dtype)
    written = load_file(tmp_path / "v1.safetensors")
    assert specs == file_layout(policy, dtype).specs
    assert {s.name: (s.dtype, s.shape) for s in specs} == {
        name: (str(t.dtype).removeprefix("torch."), list(t.shape)) for name, t in written.items()
    }
    fresh = AutoModelForCausalLM.from_pretrained(folder)
    missing, unexpected = fresh.load_state_dict(written, strict=False)
    assert unexpected == []
    assert missing == (["lm_head.weight"] if tied else [])
    for (name, want), got in zip(policy.causal_lm.named_parameters(), fresh.parameters(), strict=True):
        assert torch.equal(want.to(getattr(torch, dtype)), got.to(getattr(torch, dtype))), name
    assert [p.name for p in tmp_path.iterdir() if p.is_file()] == ["v1.safetensors"]


def test_probe_is_the_plain_forward_at_temperature_one(tmp_path: Path) -> None:
    model = load_model(make_tiny_model(tmp_path / "m"), "float32")
    tokens = [5, 17, 200, 44, 3]
    got = reference_logprobs(Policy(model), tokens)
    distribution = torch.log_softmax(model(torch.tensor([tokens])).logits[0, :-1].float(), -1)
    want = distribution.gather(1, torch.tensor(tokens)[1:, None])[:, 0]
    assert got.dtype == "float32"
    assert got.tolist() == pytest.approx(want.tolist(), abs=1e-5)


@pytest.mark.parametrize(
    "family", [*sorted(FAMILIES), "deepseek_v4", *map(MORE, sorted(OTHERS.keys() - {"deepseek_v4"}))]
)
def test_the_file_holds_what_a_folder_of_the_model_holds(tmp_path: Path, family: str) -> None:
    """Mixtures, whose experts are one tensor in memory, and models whose tensors have another name there."""
    folder = make_family(tmp_path / "model", family)
    policy = Policy(load_model(folder, "float32"))
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.add_(0.01 * torch.randn_like(parameter))
    specs = write_weights(policy, tmp_path / "v1.safetensors", "bfloat16")
    written = load_file(tmp_path / "v1.safetensors")
    assert {spec.name: tuple(spec.shape) for spec in specs} == read_shapes(folder)
    save_model(policy, tmp_path / "saved", "bfloat16")
    saved = load_file(tmp_path / "saved" / "model.safetensors")
    assert saved.keys() == written.keys()
    for name, tensor in saved.items():
        assert torch.equal(tensor, written[name]), name
        assert tensor.dtype == written[name].dtype, name


def test_what_routes_to_experts_keeps_its_precision(tmp_path: Path) -> None:
    """Biases some units in size and hundredths apart, which bfloat16 would round to the same number."""
    policy = Policy(load_model(make_family(tmp_path / "model", "deepseek_v3"), "float32"))
    bias = dict(policy.causal_lm.named_buffers())["model.layers.1.mlp.gate.e_score_correction_bias"]
    bias.copy_(4 + 0.02 * torch.randn_like(bias))
    write_weights(policy, tmp_path / "v1.safetensors", "bfloat16")
    save_model(policy, tmp_path / "saved", "bfloat16")
    for file in (tmp_path / "v1.safetensors", tmp_path / "saved" / "model.safetensors"):
        tensors = load_file(file)
        assert torch.equal(tensors["model.layers.1.mlp.gate.e_score_correction_bias"], bias)
        assert tensors["lm_head.weight"].dtype == torch.bfloat16


def test_a_large_model_is_saved_in_several_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    policy = Policy(load_model(make_tiny_model(tmp_path / "model", layers=2), "float32"))
    monkeypatch.setattr(hf_weights, "FILE_BYTES", 20_000)
    save_model(policy, tmp_path / "saved", "float32")
    assert len(list((tmp_path / "saved").glob("model-*.safetensors"))) > 2
    found = AutoModelForCausalLM.from_pretrained(tmp_path / "saved", dtype=torch.float32)
    wanted = dict(policy.causal_lm.named_parameters())
    assert all(torch.equal(tensor, wanted[name]) for name, tensor in found.named_parameters())
