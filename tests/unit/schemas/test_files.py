"""Files, folders and lines appear whole or not at all; a run's folder refuses what the run cannot change."""

import errno
import json
import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from schemas.config import TidemillConfig, parse_config
from schemas.errors import ConfigError, InfraError
from schemas.run_record import JoinedRun, check_record, claim_folder, read_record, record_file
from schemas.system import files
from schemas.system.files import LineFile, atomic_folder, atomic_write, commit_folder, cut_log


@pytest.mark.parametrize("durable", [False, True])
@pytest.mark.parametrize("content", ["für Ölöfen", b"\x00\xff"])
def test_a_file_gets_its_content_and_nothing_else_is_left(tmp_path: Path, content: str | bytes, durable: bool) -> None:
    file = tmp_path / "new" / "state.json"
    atomic_write(file, "before")
    atomic_write(file, content, durable=durable)
    assert file.read_bytes() == (content.encode() if isinstance(content, str) else content)
    assert os.listdir(file.parent) == ["state.json"]


def test_a_private_file_is_its_owners_also_where_a_public_one_was_left_half_written(tmp_path: Path) -> None:
    (tmp_path / ".secret.writing").write_text("half")
    atomic_write(tmp_path / "secret", "password", private=True)
    assert (tmp_path / "secret").stat().st_mode & 0o777 == 0o600


def test_a_log_beyond_its_bound_is_emptied_under_who_appends_to_it(tmp_path: Path) -> None:
    log = tmp_path / "generator-0.log"
    with log.open("a", buffering=1) as stream:
        for number in range(100):
            stream.write(f"line {number}\n")
        assert not cut_log(log, 10_000)
        assert cut_log(log, 400)
        stream.write("line 100\n")
    assert log.read_text() == "line 100\n"
    kept = (tmp_path / "generator-0.log.1").read_text().splitlines()
    assert 0 < len(kept) < 20
    assert kept == [f"line {number}" for number in range(100 - len(kept), 100)]
    assert not cut_log(tmp_path / "missing.log", 1)


def test_a_file_that_cannot_be_written_stays_as_it_was(tmp_path: Path) -> None:
    file = tmp_path / "state.json"
    atomic_write(file, "before")
    (tmp_path / ".state.json.writing").mkdir()
    with pytest.raises((IsADirectoryError, PermissionError)):
        atomic_write(file, "after")
    assert file.read_text() == "before"


def test_a_folder_appears_when_its_block_ends(tmp_path: Path) -> None:
    out = tmp_path / "models" / "tiny"
    with atomic_folder(out) as folder:
        (folder / "part").mkdir()
        (folder / "part" / "weights").write_text("1")
        assert not out.exists()
    assert (out / "part" / "weights").read_text() == "1"
    assert out.stat().st_mode & 0o777 == 0o755
    assert os.listdir(out.parent) == ["tiny"]


def test_a_folder_that_failed_leaves_nothing(tmp_path: Path) -> None:
    def fail() -> None:
        with atomic_folder(tmp_path / "model") as folder:
            (folder / "weights").write_text("1")
            raise ValueError("boom")

    with pytest.raises(ValueError, match="boom"):
        fail()
    assert not os.listdir(tmp_path)


def test_a_folder_that_exists_is_not_touched(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    with pytest.raises(FileExistsError, match="model exists already"), atomic_folder(tmp_path / "model"):
        pytest.fail("the block was entered")


def test_a_committed_folder_takes_the_place_of_the_one_before(tmp_path: Path) -> None:
    for content in ("old", "new"):
        aside = tmp_path / "aside"
        aside.mkdir()
        (aside / "file").write_text(content)
        commit_folder(aside, tmp_path / "step-1")
    assert (tmp_path / "step-1" / "file").read_text() == "new"
    assert os.listdir(tmp_path) == ["step-1"]


@contextmanager
def room_for(size: int) -> Iterator[None]:
    """Files cannot grow beyond ``size`` bytes in the block, as on a disk that is full: a write is cut off there."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_line_that_finds_no_room_leaves_nothing_and_can_be_written_again(tmp_path: Path) -> None:
    lines = LineFile(tmp_path / "new" / "lines.jsonl")
    lines.append("first")
    with room_for(9), pytest.raises(OSError, match="File too large"):
        lines.append("second")
    assert lines.path.read_text() == "first\n"
    lines.append("second")
    lines.close()
    assert lines.path.read_text() == "first\nsecond\n"


def test_a_line_that_was_cut_off_swallows_none(tmp_path: Path) -> None:
    file = tmp_path / "lines.jsonl"
    file.write_text('{"step": 35, "sam')
    lines = LineFile(file)
    lines.append("resumed")
    lines.append("more")
    assert file.read_text() == '{"step": 35, "sam\nresumed\nmore\n'


def test_what_another_process_wrote_behind_a_cut_line_is_not_taken_back(tmp_path: Path) -> None:
    ours, theirs = LineFile(tmp_path / "lines.jsonl"), LineFile(tmp_path / "lines.jsonl")
    ours.append("ours")
    theirs.append("theirs")
    real = os.write

    def write(handle: int, data: bytes) -> int:
        if data.startswith(b"second"):
            return real(handle, data[:3])
        os.write = real
        theirs.append("theirs")
        raise OSError(errno.ENOSPC, "No space left on device")

    os.write = write  # type: ignore[assignment]
    try:
        with pytest.raises(OSError, match="No space"):
            ours.append("second")
    finally:
        os.write = real
    ours.append("second")
    assert ours.path.read_text() == "ours\ntheirs\nsectheirs\n\nsecond\n"


def test_a_durable_write_flushes_the_names_of_new_folders_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    flushed: list[Path] = []
    monkeypatch.setattr(files, "fsync", flushed.append)
    atomic_write(tmp_path / "a" / "b" / "file", "content", durable=True)
    assert flushed == [tmp_path, tmp_path / "a", tmp_path / "a" / "b"]


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
def test_what_a_run_cannot_change_is_named_and_unwritten(tmp_path: Path, changes: dict[str, Any], named: str) -> None:
    make_model(tmp_path / "model")
    claim_folder(configuration(tmp_path))
    before = record_file(tmp_path / "run").read_bytes()
    for claim in (check_record, claim_folder):
        with pytest.raises(ConfigError, match=f"run 'tour' in .* began with {named}.*run.name, or use") as refused:
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


def test_a_folder_in_place_of_a_hub_model_is_named_with_advice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
