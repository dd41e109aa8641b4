"""Models of the hub, of a revision too; and what stands beside the weights that a run writes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM

from consumers.trainer.model.hf_weights import copy_tokenizer
from deploy.checks.model_files import check_hub_or_folder
from schemas.config import ModelConfig
from schemas.errors import ConfigError
from schemas.model_folder import resolve_folder, split_revision
from tests.support.models.tiny_model import make_tiny_model
from tests.support.runs.hub_server import Hub

pytestmark = pytest.mark.integration
OLD, NEW = "a" * 40, "b" * 40

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
