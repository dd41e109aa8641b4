"""What ``tidemill up`` finds in a run's folder: deleted is only what is ours, and earlier attempts are kept aside."""

import errno
import fcntl
import json
import os
import re
from pathlib import Path
from typing import Any

import pytest

from deploy.run.broker_server import run_broker
from deploy.run.folder import forget_run, is_finished, keep_aside, refuse_foreign, settle_configuration, sole_user
from schemas.config import TidemillConfig
from schemas.errors import ConfigError, InfraError
from schemas.run_folder import FILES
from schemas.run_record import claim_folder
from tests.support.configurations import minimal_config

ROOT = Path(__file__).parents[4]


@pytest.fixture(autouse=True)
def no_server(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("REDIS_URL", raising=False)


def configuration(folder: Path, **trainer: Any) -> TidemillConfig:
    return minimal_config(
        run={"name": "tour", "folder": str(folder)},
        model={"path": "org/model"},
        trainer=trainer,
        broker={"deadline_s": 60},
    )


@pytest.mark.parametrize(
    ("reason", "done", "asked", "finished"),
    [("finished", 360, 360, True), ("finished", 360, 100, True), ("finished", 360, 361, False), ("asked", 9, 9, False)],
)
def test_a_run_is_finished_after_its_steps(tmp_path: Path, reason: str, done: int, asked: int, finished: bool) -> None:
    assert not is_finished(tmp_path, asked)
    (tmp_path / "summary.json").write_text(json.dumps({"exit_reason": reason, "steps": done}))
    assert is_finished(tmp_path, asked) is finished


def test_a_summary_that_was_cut_short_finishes_nothing(tmp_path: Path) -> None:
    (tmp_path / "summary.json").write_text("{")
    assert not is_finished(tmp_path, 1)


def test_fresh_deletes_what_is_a_runs_and_nothing_else(tmp_path: Path) -> None:
    run = tmp_path / "run"
    config = configuration(run)
    claim_folder(config)
    (run / "up.lock").touch()
    for name in ("logs", "src", ".git", "exports", "kubernetes"):
        (run / name).mkdir()
        (run / name / "file").touch()
    ours = ("config.yaml", "config.yaml.2", "summary.json.1", "metrics.jsonl", ".config.yaml.writing")
    for name in (*ours, "rewards.py"):
        (run / name).touch()
    refuse_foreign(config, fresh=True)
    forget_run(config)
    assert {path.name for path in run.iterdir()} == {"up.lock", "src", ".git", "rewards.py"}
    assert (run / "src" / "file").is_file()


def test_a_folder_in_use_is_refused_with_who_uses_it(tmp_path: Path) -> None:
    in_use = (
        rf"another `tidemill up` uses the folder {tmp_path} \(process {os.getpid()} on .* since 20.*\): stop it, or"
    )
    with sole_user(tmp_path), pytest.raises(InfraError, match=in_use), sole_user(tmp_path):
        pass
    with sole_user(tmp_path):
        assert (tmp_path / "up.lock").read_text().count("process") == 1


def test_a_file_system_without_locks_is_not_one_in_use(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_locks(*_: Any) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    (tmp_path / "broker").mkdir()
    (tmp_path / "broker" / "lock").touch()
    (tmp_path / "up.lock").touch()
    monkeypatch.setattr(fcntl, "flock", no_locks)
    config = configuration(tmp_path)
    for use in (
        lambda: sole_user(tmp_path).__enter__(),
        lambda: forget_run(config),
        lambda: run_broker(config, None, 0, None),
    ):
        with pytest.raises(ConfigError, match=r"^run\.folder must be on .* cannot be locked: No locks available$"):
            use()


def test_fresh_spares_the_data_of_a_server_that_runs(tmp_path: Path) -> None:
    (tmp_path / "broker").mkdir()
    (tmp_path / "metrics.jsonl").touch()
    with (tmp_path / "broker" / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(ConfigError, match="a `tidemill broker` uses"):
            forget_run(configuration(tmp_path))
        assert (tmp_path / "metrics.jsonl").exists()
    forget_run(configuration(tmp_path))
    assert not list(tmp_path.iterdir())


def test_fresh_unlinks_a_link_and_leaves_what_it_leads_to(tmp_path: Path) -> None:
    run, disk = tmp_path / "run", tmp_path / "disk"
    disk.mkdir()
    (disk / "precious").touch()
    run.mkdir()
    (run / "up.lock").touch()
    (run / "checkpoints").symlink_to(disk)
    forget_run(configuration(run))
    assert not (run / "checkpoints").exists()
    assert (disk / "precious").is_file()


def test_fresh_refuses_a_folder_that_is_no_runs(tmp_path: Path) -> None:
    config = configuration(tmp_path)
    refuse_foreign(config, fresh=True)
    (tmp_path / "src").mkdir()
    (tmp_path / "config.yaml").touch()
    with pytest.raises(ConfigError, match="it is not empty, and no folder of a run"):
        refuse_foreign(config, fresh=True)
    assert not (tmp_path / "up.lock").exists(), "refused before anything is written"


def test_fresh_refuses_to_delete_the_model_that_the_run_begins_with(tmp_path: Path) -> None:
    (tmp_path / "up.lock").touch()
    (tmp_path / "model").mkdir()
    config = configuration(tmp_path)
    config.model.path = str(tmp_path / "model")
    with pytest.raises(ConfigError, match=r"would delete model\.path"):
        refuse_foreign(config, fresh=True)


def test_another_attempt_with_other_settings_is_refused_or_told_and_the_old_files_stay(tmp_path: Path) -> None:
    first = configuration(tmp_path, steps=10)
    claim_folder(first)
    assert settle_configuration(first) == []
    (tmp_path / "summary.json").write_text("first")
    assert settle_configuration(first) == []
    assert not (tmp_path / "config.yaml.1").exists(), "the same once more is not kept twice"
    before = (tmp_path / "config.yaml").read_bytes()

    second = configuration(tmp_path, steps=20, optimizer={"lr": 1e-5})
    second.run.seed = 7
    with pytest.raises(ConfigError, match=r"run\.seed 0, which cannot become 7"):
        refuse_foreign(second, fresh=False)
    assert (tmp_path / "config.yaml").read_bytes() == before
    second.run.seed = 0
    refuse_foreign(second, fresh=False)
    changes = settle_configuration(second)
    assert changes == ["trainer.steps 10 -> 20", "trainer.optimizer.lr 1e-06 -> 1e-05"]
    assert (tmp_path / "config.yaml.1").read_bytes() == before
    assert (tmp_path / "summary.json.1").read_text() == "first"
    assert not (tmp_path / "summary.json").exists(), "a new attempt has no summary yet"
    (tmp_path / "summary.json").write_text("second")
    keep_aside(tmp_path / "summary.json")
    assert (tmp_path / "summary.json.2").read_text() == "second"


def test_passwords_are_not_told(tmp_path: Path) -> None:
    config = configuration(tmp_path)
    settle_configuration(config)
    config.broker.url = "redis://:secret@host"
    (change,) = settle_configuration(config)
    assert change == "broker.url none -> redis://***@host"
    config.generator = config.generator.model_copy(update={"args": {"api_key": "hush"}})
    changes = settle_configuration(config)
    assert "generator.args.api_key none -> ***" in changes
    assert not any("hush" in change for change in changes)


def test_the_documentation_lists_exactly_the_files_that_are_ours() -> None:
    text = (ROOT / "docs" / "operations.md").read_text(encoding="utf-8")
    table = text.split("## Files of a run")[1].split("\n## ")[0]
    cells = " ".join(re.findall(r"^\| (`.+?) \|", table, re.M))
    named = {name.partition("/")[0] for name in re.findall(r"`([^`]+)`", cells)}
    assert named == set(FILES) | {"config.yaml.N", "summary.json.N"}
