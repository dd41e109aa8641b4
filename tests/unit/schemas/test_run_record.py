"""The record of a run in its folder: what a run cannot change is refused by its name, and nothing is written then."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from schemas.config import TidemillConfig, parse_config
from schemas.errors import ConfigError, InfraError
from schemas.run_record import JoinedRun, check_record, claim_folder, read_record, record_file


def make_model(folder: Path, **config: Any) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps({"hidden_size": 8, "transformers_version": "5.1", **config}))
    (folder / "tokenizer.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(b"weights of this model")
    return folder


def configuration(folder: Path, changes: dict[str, Any] | None = None) -> TidemillConfig:
    data: dict[str, Any] = {
        "run": {"name": "tour", "folder": str(folder / "run")},
        "model": {"path": str(folder / "model")},
        "train": {"name": "arithmetic", "args": {"size": 8}},
        "reward": {"terms": [{"name": "exact"}]},
    }
    for section, values in (changes or {}).items():
        data[section] = {**data.get(section, {}), **values}
    return parse_config(data)


def test_a_run_keeps_its_identity_and_another_folder_has_another(tmp_path: Path) -> None:
    make_model(tmp_path / "model")
    first = claim_folder(configuration(tmp_path))
    assert claim_folder(configuration(tmp_path)) == first == read_record(tmp_path / "run")
    other = claim_folder(configuration(tmp_path, {"run": {"folder": str(tmp_path / "other")}}))
    assert other.id != first.id


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"model": {"dtype": "float32"}}, r"model\.dtype bfloat16, which cannot become float32"),
        ({"model": {"path": "org/other"}}, r"model\.path .*model, which cannot become org/other"),
        ({"trainer": {"lora": {"rank": 4}}}, r"trainer\.lora none"),
        ({"train": {"name": "gsm8k"}}, r"train\.name arithmetic, which cannot become gsm8k"),
        ({"train": {"args": {"size": 9}}}, r'train\.args \{"size": 8\}'),
        ({"train": {"limit": 3}}, r"train\.limit none, which cannot become 3"),
        ({"train": {"shuffle": False}}, r"train\.shuffle true, which cannot become false"),
        ({"run": {"seed": 1}}, r"run\.seed 0, which cannot become 1"),
        ({"sampling": {"n": 4}}, r"sampling\.n 8, which cannot become 4"),
    ],
)
def test_what_a_run_cannot_change_is_named_and_nothing_is_written(
    tmp_path: Path, changes: dict[str, Any], named: str
) -> None:
    make_model(tmp_path / "model")
    claim_folder(configuration(tmp_path))
    before = record_file(tmp_path / "run").read_bytes()
    for claim in (check_record, claim_folder):
        with pytest.raises(ConfigError, match=f"run 'tour' in .* began with {named}.*run.name, or --fresh") as refused:
            claim(configuration(tmp_path, changes))
        assert "\n" not in str(refused.value)
    assert record_file(tmp_path / "run").read_bytes() == before


def test_another_model_or_tokenizer_at_the_same_path_is_refused(tmp_path: Path) -> None:
    make_model(tmp_path / "model")
    claim_folder(configuration(tmp_path))
    make_model(tmp_path / "model", transformers_version="5.2")
    check_record(configuration(tmp_path))
    make_model(tmp_path / "model", hidden_size=16)
    with pytest.raises(ConfigError, match=r"the config\.json in model\.path .* has changed"):
        check_record(configuration(tmp_path))
    make_model(tmp_path / "model")
    (tmp_path / "model" / "tokenizer.json").write_text('{"other": 1}')
    with pytest.raises(ConfigError, match=r"the tokenizer in model\.path"):
        check_record(configuration(tmp_path))


def test_a_run_and_its_model_may_be_moved_but_no_other_weights_put_in_place(tmp_path: Path) -> None:
    make_model(tmp_path / "model")
    record = claim_folder(configuration(tmp_path))
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    for name in ("run", "model"):
        (tmp_path / name).rename(elsewhere / name)
    assert claim_folder(configuration(elsewhere)) == record
    (elsewhere / "model" / "model.safetensors").write_bytes(b"weights of another one")
    with pytest.raises(ConfigError, match=r"model\.path .*, which cannot become .*elsewhere"):
        claim_folder(configuration(elsewhere))


def test_a_folder_in_place_of_a_model_of_the_hub_is_named_with_what_can_be_done(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    hub = {"model": {"path": "org/model"}}
    claim_folder(configuration(tmp_path, hub))
    (tmp_path / "org").mkdir()
    make_model(tmp_path / "org" / "model")
    with pytest.raises(ConfigError) as refused:
        check_record(configuration(tmp_path, hub))
    folder = tmp_path / "org" / "model"
    assert f"began with model.path org/model of the hub, which is now the folder {folder}: move it" in str(
        refused.value
    )


def test_harmless_settings_may_change(tmp_path: Path) -> None:
    make_model(tmp_path / "model")
    record = claim_folder(configuration(tmp_path))
    trainer = {"steps": 7, "optimizer": {"lr": 1e-4}}
    harmless = {"trainer": trainer, "flow": {"staleness": 1}, "sampling": {"stop": ["x"]}}
    assert claim_folder(configuration(tmp_path, harmless)) == record


def test_a_model_that_a_warm_start_makes_is_noted_when_it_is_there(tmp_path: Path) -> None:
    warm = {"warm_start": {"model": "m:f", "dataset": {"name": "arithmetic"}, "eval": {"name": "arithmetic"}}}
    record = claim_folder(configuration(tmp_path, warm))
    assert record.fixed["model"] is None
    make_model(tmp_path / "model")
    noted = claim_folder(configuration(tmp_path, warm))
    assert (noted.id, noted.fixed["model"] is None) == (record.id, False)
    make_model(tmp_path / "model", hidden_size=16)
    with pytest.raises(ConfigError, match=r"config\.json"):
        check_record(configuration(tmp_path, warm))


def test_a_record_that_cannot_be_read_begins_no_new_run(tmp_path: Path) -> None:
    make_model(tmp_path / "model")
    claim_folder(configuration(tmp_path))
    record_file(tmp_path / "run").write_text("{")
    with pytest.raises(ConfigError, match=r"RUN\.json.*cannot be read"):
        claim_folder(configuration(tmp_path))


def test_a_service_works_for_the_run_in_its_folder_or_the_first_it_meets(tmp_path: Path) -> None:
    make_model(tmp_path / "model")
    record = claim_folder(configuration(tmp_path))
    own = JoinedRun(tmp_path / "run")
    own.check("")
    own.check(record.id)
    with pytest.raises(ConfigError, match="another run of this name"):
        own.check("other")
    guest = JoinedRun(tmp_path / "nothing")
    guest.check("first")
    guest.check("first")
    with pytest.raises(InfraError):
        guest.check("second")
